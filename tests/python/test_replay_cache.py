"""Replays on a cache: delivered blocks are the right ones, and every counter agrees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvmem
from kvmem.replay.cache_engine import run_cache_replay
from kvmem.replay.cache_options import CacheReplayOptions, parse_groups
from kvmem.replay.cache_result import CacheReplayResult, file_order_prefix
from kvmem.replay.options import ReplayError, ReplayOptions
from kvmem.replay.policies import block_seconds
from kvmem.replay.trace import Request
from kvmem.replay.workload import generate_chat
from test_replay_shared import TRACES, golden_hits, trace

BLOCK_BYTES = 4096
CHATS = generate_chat(1, 120)
BLOCKS = sum(len(request.keys) for request in CHATS)
CACHE = {"policy", "disk_bytes", "disk_path", "disk_write", "admit_after", "thrash", "groups"}
CACHE |= {"prefill_tokens_per_s"}


def run(requests: list[Request] = CHATS, **options: Any) -> CacheReplayResult:
    """Options of either kind; whatever was delivered must be right."""
    on_cache = {name: options.pop(name) for name in CACHE & options.keys()}
    replay = ReplayOptions(**{"block_bytes": BLOCK_BYTES} | options)
    result = run_cache_replay(requests, CacheReplayOptions(replay, **on_cache))
    if not replay.corrupt:
        assert result.faults() == []
    assert result.leaked_blocks == 0
    return result


def one_block(*keys: int) -> list[Request]:
    return [Request(0, 512, 1, (key,)) for key in keys]


def everything_again(requests: list[Request]) -> int:
    """What is delivered where nothing is ever evicted."""
    seen: set[int] = set()
    hits = 0
    for request in requests:
        present = [key in seen for key in request.keys]
        hits += ([*present, False]).index(False)
        seen.update(request.keys)
    return hits


@pytest.mark.parametrize("kind", ["host", "virtual"])
@pytest.mark.parametrize("concurrency", [1, 5])
def test_with_room_for_everything_each_prefix_is_delivered(kind: str, concurrency: int) -> None:
    result = run(device=kind, concurrency=concurrency)
    expected = everything_again(CHATS)
    assert result.counts.delivered_keys == result.counts.verified == expected
    assert result.stats["blocks_from_host"] == expected
    assert result.file_order_prefix == expected
    assert result.stats["owners"]["offloaded_again"] == 0
    assert result.stats["owners"]["tokens"] == sum(request.output_length for request in CHATS)
    assert result.unused_bytes == 0


@pytest.mark.parametrize("policy", ["lru", "arc", "gdsf"])
@pytest.mark.parametrize("kind", ["host", "virtual"])
def test_in_a_small_tier_what_is_delivered_is_right(kind: str, policy: str) -> None:
    result = run(device=kind, policy=policy, host_blocks=150)
    assert 0 < result.counts.verified < everything_again(CHATS)
    slots = result.occupancy()["full"]["host"]
    assert slots["slots"] == 150
    assert slots["ready"] + slots["free"] == 150
    assert result.to_json()["reoffloaded_blocks"]


def test_each_policy_delivers_another_number() -> None:
    options: dict[str, Any] = {"device": "virtual", "host_blocks": 60, "concurrency": 1}
    found = {run(policy=name, **options).counts.delivered_keys for name in ("lru", "arc", "gdsf")}
    assert len(found) == 3


def test_blocks_are_worth_the_mean_prefill_of_their_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    real, values = kvmem.Cache.try_store, []

    def note(cache: kvmem.Cache, *arguments: Any, **rest: Any) -> Any:
        values.append(rest["value"])
        return real(cache, *arguments, **rest)

    monkeypatch.setattr(kvmem.Cache, "try_store", note)
    rate = 1000.0
    prompts = [Request(0, 512, 1, (1,)), Request(0, 3 * 512, 1, (2, 3, 4))]
    run(prompts, policy="gdsf", prefill_tokens_per_s=rate)
    first, second, third = (block_seconds(position, rate) for position in range(3))
    assert values == pytest.approx([first, (first + second + third) / 3])


@pytest.mark.parametrize("host_blocks", [1, 3, 20])
def test_a_tier_smaller_than_a_prompt_is_fine(host_blocks: int) -> None:
    run(host_blocks=host_blocks, concurrency=3)
    run(host_blocks=host_blocks, concurrency=3, device="virtual", groups="full+state")


def test_tail_first_keeps_the_head_of_a_prompt_that_file_order_pushes_out() -> None:
    """Two prompts of three blocks take turns in four slots."""
    prompts = [Request(0, 3 * 512, 1, keys) for keys in ((1, 2, 3), (4, 5, 6)) * 5]
    result = run(prompts, host_blocks=4, concurrency=1, device="virtual")
    assert result.file_order_prefix == file_order_prefix(prompts, 4) == 0
    assert result.counts.delivered_keys > 0
    found = result.to_json()
    assert found["file_order_prefix_hit_rate"] == 0
    assert found["beside_file_order"] == found["prefix_hit_rate"]


def test_a_block_that_another_request_is_still_storing_is_attached_to() -> None:
    twice = [Request(0, 3 * 512, 1, (1, 2, 3))] * 2
    result = run(twice, device="virtual", concurrency=2)
    assert result.counts.delivered_keys == 3
    assert result.stats["blocks_stored"] == 3


def test_a_key_that_stands_twice_in_a_prompt_is_one_block() -> None:
    result = run([Request(0, 1536, 1, (1, 1, 2))] * 2, host_blocks=5)
    assert result.counts.delivered_keys == 3
    assert result.stats["blocks_stored"] == 2


@pytest.mark.parametrize("kind", ["host", "virtual"])
@pytest.mark.parametrize("groups", ["full+window:3", "full+state", "full+window:2+state"])
def test_groups_deliver_what_of_them_a_hit_needs(kind: str, groups: str) -> None:
    result = run(device=kind, groups=groups, host_blocks=200)
    delivered, needs = result.counts.delivered_blocks, parse_groups(groups)
    assert result.counts.verified == delivered > result.counts.delivered_keys
    most = sum(1 if group.need == "state" else 3 for group in needs[1:])
    assert delivered <= result.counts.delivered_keys + most * result.counts.loads
    assert set(result.occupancy()) == {group.name for group in needs}


def test_a_group_with_the_bytes_of_another_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvmem.replay.pattern import BlockPattern

    real = BlockPattern.fill_segment

    def as_in_the_first(self: BlockPattern, *arguments: Any) -> None:
        self._apart = self._apart * 0
        real(self, *arguments)

    monkeypatch.setattr(BlockPattern, "fill_segment", as_in_the_first)
    with pytest.raises(AssertionError, match="restored blocks differ"):
        run(CHATS[:20], device="virtual", groups="full+state")


# ---- the options of the cache ----


def test_the_second_sighting_is_stored_and_the_third_is_a_hit() -> None:
    result = run(one_block(*[7] * 5), admit_after=2, concurrency=1)
    assert result.stats["blocks_stored"] == 1
    assert result.counts.delivered_keys == 3
    assert result.stats["keys_not_admitted"] == 1


def test_a_budget_refuses_stores_until_tokens_make_up_for_them() -> None:
    """One token a block of 4 KiB, then many: refused at first, then stored again."""
    poor = one_block(*range(100))
    rich = [Request(0, 512, 100_000, (key,)) for key in range(1000, 1100)]
    result = run([*poor, *rich], thrash=1000, concurrency=1)
    refused = result.stats["keys_refused"]
    assert refused > 0
    assert result.stats["blocks_stored"] == 200 - refused
    assert result.stats["blocks_stored"] > 100
    assert result.unused_bytes is None
    assert run(poor, thrash=1e6).stats["keys_refused"] == 0


@pytest.mark.parametrize("kind", ["host", "virtual"])
@pytest.mark.parametrize("write", ["through", "back"])
def test_what_left_host_memory_comes_back_from_disk(tmp_path: Path, write: str, kind: str) -> None:
    disk = {"disk_bytes": 1 << 24, "disk_path": tmp_path / "tier", "disk_write": write}
    result = run(host_blocks=60, device=kind, **disk)
    assert result.stats["blocks_from_disk"] > 0
    assert result.counts.delivered_keys > run(host_blocks=60, device=kind).counts.delivered_keys
    again = run(CHATS[:10], device=kind, **disk)
    assert again.stats["disk"]["recovered"] > 0
    assert again.counts.delivered_keys > everything_again(CHATS[:10])


def test_writing_back_writes_less_than_writing_through() -> None:
    options: dict[str, Any] = {"device": "virtual", "host_blocks": 60, "disk_bytes": 1 << 24}
    through, back = (run(disk_write=way, **options).stats["disk"] for way in ("through", "back"))
    assert 0 < back["blocks_written"] < through["blocks_written"]


def test_groups_have_a_disk_too(tmp_path: Path) -> None:
    result = run(host_blocks=80, disk_bytes=1 << 25, disk_path=tmp_path, groups="full+state")
    assert result.stats["blocks_from_disk"] > 0


def test_a_disk_of_its_own_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run(CHATS[:20], host_blocks=30, disk_bytes=1 << 22)
    assert result.stats["disk"]["blocks_written"] > 0
    assert list(tmp_path.iterdir()) == []


# ---- trouble ----


@pytest.mark.parametrize("kind", ["host", "virtual"])
@pytest.mark.parametrize("count", [1, 7])
def test_each_damaged_block_is_caught_once(kind: str, count: int) -> None:
    result = run(corrupt=count, device=kind, host_blocks=200)
    assert result.counts.corrupted == count
    assert result.faults() == [f"{count} restored blocks differ"]


@pytest.mark.parametrize("kind", ["host", "virtual"])
@pytest.mark.parametrize("rate", [0.3, 1.0])
@pytest.mark.parametrize("groups", ["full", "full+window:2"])
def test_cancelled_requests_leak_nothing_and_counters_agree(
    kind: str, rate: float, groups: str
) -> None:
    for seed in range(3):
        result = run(
            device=kind, abort_rate=rate, host_blocks=150, seed=seed, groups=groups, concurrency=3
        )
        assert 0 < result.counts.aborted_requests <= len(CHATS)
        assert result.to_json()["file_order_prefix_hit_rate"] is None


def test_what_is_restored_for_an_aborted_request_is_unused() -> None:
    result = run(device="virtual", abort_rate=0.5, seed=2)
    assert result.unused_bytes
    assert result.unused_bytes < result.stats["owners"]["restored_bytes"]


def test_cancels_with_a_disk_leak_nothing(tmp_path: Path) -> None:
    run(abort_rate=0.5, host_blocks=60, disk_bytes=1 << 24, disk_path=tmp_path, seed=4)


@pytest.mark.parametrize("which", ["keys_loaded", "blocks_from_host", "stores", "keys_asked"])
def test_a_counter_that_differs_is_a_fault(monkeypatch: pytest.MonkeyPatch, which: str) -> None:
    real = kvmem.Cache.stats

    def one_more(cache: kvmem.Cache) -> dict[str, Any]:
        stats = real(cache)
        return stats | {which: stats[which] + 1}

    monkeypatch.setattr(kvmem.Cache, "stats", one_more)
    with pytest.raises(AssertionError, match="and the cache says"):
        run(CHATS[:20])


def test_a_load_that_brings_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was in the target before never passes for the restored block."""
    real = kvmem.Cache.load

    def elsewhere(cache: kvmem.Cache, hit: kvmem.CacheHit, _: object, **rest: Any) -> Any:
        return real(cache, hit, {"full": range(8 - len(hit), 8)}, **rest)

    # One lane: the second request's blocks are the ones that the first one computed.
    requests = [Request(0, 1024, 1, (1, 2)), Request(0, 1024, 1, (1, 2))]
    spare = Request(0, 8 * 512, 1, tuple(range(10, 18)))
    monkeypatch.setattr(kvmem.Cache, "load", elsewhere)
    with pytest.raises(AssertionError, match="2 restored blocks differ"):
        run([*requests, spare], concurrency=1)


def test_a_hit_that_nobody_lets_go_of_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    real, kept = kvmem.Cache.reserve, []

    def keep(cache: kvmem.Cache, *arguments: Any, **rest: Any) -> kvmem.CacheHit:
        kept.append(real(cache, *arguments, **(rest | {"owner": "nobody"})))
        return real(cache, *arguments, **rest)

    monkeypatch.setattr(kvmem.Cache, "reserve", keep)
    with pytest.raises(AssertionError, match="hits were never let go"):
        run(CHATS[:20], host_blocks=400)


def test_saved_seconds_are_those_of_the_delivered_blocks() -> None:
    prompts = [Request(0, 3 * 512, 1, (1, 2, 3)), Request(0, 5 * 512, 1, (1, 2, 3, 4, 5))]
    result = run(prompts, concurrency=1)
    rate = result.options.prefill_tokens_per_s
    expected = sum(block_seconds(position, rate) for position in range(3))
    assert result.counts.saved_seconds == pytest.approx(expected)


# ---- the command ----


def command(*arguments: str) -> Any:
    pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
    from typer.testing import CliRunner

    from kvmem.cli import make_app

    return CliRunner().invoke(make_app(), ["replay", *arguments], env={"COLUMNS": "100"})


SMALL = ["--limit", "40", "--block-bytes", "4096", "--host-blocks", "60"]


def test_equal_seeds_give_equal_output_byte_for_byte() -> None:
    pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
    arguments = [*SMALL, "--policy", "arc", "--device", "virtual", "--no-move-bytes", "--json"]
    arguments += ["--abort-rate", "0.3", "--seed", "5", "--groups", "full+window:2"]
    line = [sys.executable, "-m", "kvmem.cli", "replay", *arguments]
    outputs = {
        subprocess.run(line, check=True, capture_output=True, timeout=60).stdout for _ in range(2)
    }
    assert len(outputs) == 1
    assert json.loads(outputs.pop())["verified_blocks"] == 0


def test_without_bytes_the_same_is_delivered() -> None:
    options: dict[str, Any] = {"device": "virtual", "host_blocks": 150, "abort_rate": 0.2}
    moved, unmoved = run(**options).to_json(), run(**options, move_bytes=False).to_json()
    assert moved["verified_blocks"] == moved["blocks_from_host"]
    for each in (moved, unmoved):
        del each["options"], each["verified_blocks"]
    assert moved == unmoved


@pytest.mark.parametrize(
    "options",
    [
        ["--policy", "gdsf"],
        ["--admit-after", "2", "--device", "virtual"],
        ["--thrash", "1e5"],
        ["--groups", "full+window:2"],
        ["--disk", "4MiB", "--disk-write", "back"],
    ],
    ids=" ".join,
)
def test_each_option_runs_on_the_cache(options: list[str]) -> None:
    done = command(*SMALL, *options, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["verified_blocks"] == found["blocks_from_host"] + found["blocks_from_disk"] > 0
    assert found["options"]["host_blocks"] == 60
    assert (found["disk"] is not None) == ("--disk" in options)
    assert found["faults"] == []


def test_the_table_says_what_was_found() -> None:
    done = command(*SMALL, "--policy", "lru", "--disk", "8MiB")
    assert done.exit_code == 0, done.output
    for said in ("prefix hit rate", "of plain LRU in file order", "blocks from host, from disk"):
        assert said in done.stdout
    assert "every block as it was" in done.stdout
    without = command(*SMALL, "--policy", "lru", "--device", "virtual", "--no-move-bytes")
    assert "no bytes were moved" in without.stdout
    assert "run time, virtual" in without.stdout


def test_damage_ends_with_1_and_too_little_of_it_with_2() -> None:
    assert command(*SMALL, "--policy", "lru", "--corrupt", "2").exit_code == 1
    done = command("--limit", "1", "--policy", "lru", "--corrupt", "2")
    assert done.exit_code == 2
    assert "only 0 could be damaged" in done.stderr


def test_without_the_options_of_the_cache_the_plain_replay_runs() -> None:
    found = json.loads(command(*SMALL, "--hit", "blocks", "--json").stdout)
    assert "block_hit_rate" in found
    assert "keys_asked" not in found


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--policy", "fifo"], "--policy: 'fifo' is none of lru, arc, gdsf"),
        (["--policy", "lru", "--hit", "blocks"], "--hit: not 'blocks' on a cache"),
        (["--policy", "lru", "--plot", "x.html"], "--plot: not on a cache"),
        (["--policy", "lru", "--capacities", "5"], "--capacities: only with --policies"),
        (["--admit-after", "0"], "--admit-after: 0 is not 1 to 255"),
        (["--admit-after", "256"], "--admit-after: 256 is not"),
        (["--thrash", "0"], "--thrash: 0.0 is not above 0"),
        (["--thrash", "nan"], "--thrash: nan"),
        (["--groups", "window:3"], "--groups: 'window:3' does not begin with full"),
        (["--groups", "full+window:0"], "--groups: 'window:0' is neither"),
        (["--groups", "full+window"], "--groups: 'window' is neither"),
        (["--groups", "full+state:2"], "--groups: 'state:2' is neither"),
        (["--groups", "full+state+state"], "has two groups of one kind"),
        (["--groups", "full+window:" + "9" * 5000], "is neither"),
        (["--disk", "many"], "--disk is 'many'"),
        (["--disk", "0"], "--disk"),
        (["--disk", "1MiB", "--disk-write", "up"], "--disk-write: 'up' is neither"),
        (["--disk", "1MiB", "--device", "virtual", "--no-move-bytes"], "--disk: not with --no-"),
        (["--disk", "1MiB", "--corrupt", "1"], "--corrupt: not with --disk"),
        (["--disk", "1MiB", "--disk-path", "/dev/null"], "--disk, --disk-path: "),
        (["--disk", "4096"], "--disk, --disk-path: "),
        (["--disk-path", "x"], "--disk-path: only with --disk"),
        (["--disk-write", "back"], "--disk-write: only with --disk"),
        (["--policy", "lru", "--prefill-tokens-per-s", "0"], "--prefill-tokens-per-s: 0.0 is"),
        (["--prefill-tokens-per-s", "5"], "only with --policies or --policy"),
        (["--policy", "lru", "--host-blocks", "10000000000"], "--host-blocks, --block-bytes"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, list) else None,
)
def test_options_that_do_not_fit_end_with_2_and_are_named(
    arguments: list[str], expected: str
) -> None:
    done = command("--limit", "2", *arguments)
    assert done.exit_code == 2, done.output
    assert expected in done.stderr
    assert "Traceback" not in done.output


@pytest.mark.parametrize(
    "option",
    [
        ["--corrupt", "1"],
        ["--host-blocks", "5"],
        ["--hit", "blocks"],
        ["--hit", "prefix"],
        ["--gbps", "1"],
        ["--latency-us", "1"],
        ["--no-move-bytes"],
        ["--move-bytes"],
        ["--block-bytes", "4096"],
        ["--abort-rate", "0.1"],
        ["--concurrency", "2"],
        ["--policy", "lru"],
        ["--disk", "1MiB"],
        ["--disk-path", "x"],
        ["--disk-write", "back"],
        ["--admit-after", "2"],
        ["--thrash", "5"],
        ["--groups", "full"],
    ],
    ids=" ".join,
)
def test_comparing_policies_refuses_what_it_would_ignore(option: list[str]) -> None:
    done = command("--policies", "lru", "--limit", "2", *option)
    assert done.exit_code == 2
    name = option[0].replace("--no-", "--")
    assert f"{name}: not with --policies" in done.stderr


def test_damage_beyond_the_trace_is_refused() -> None:
    with pytest.raises(ReplayError, match="--corrupt: 9 is above 1"):
        run(one_block(1), corrupt=9)


# ---- published numbers ----


@pytest.mark.shared
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("capacity", [1000, 10_000])
def test_an_index_driven_key_by_key_has_the_published_hits(name: str, capacity: int) -> None:
    accesses = [key for request in trace(name) for key in request.keys]
    index, hits = kvmem.Index(capacity), 0
    for key in accesses:
        one = [key.to_bytes(16, "little")]
        hit = index.reserve(one)
        hits += len(hit)
        if len(hit):
            hit.release()
        else:
            index.finish(index.plan_store(one))
    assert abs(hits - golden_hits(name)[capacity]) <= 0.005 * len(accesses)
