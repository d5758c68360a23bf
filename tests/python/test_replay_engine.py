"""Replays with real bytes, judged by what they count."""

from __future__ import annotations

import json

import pytest

import kvmem
from kvmem.replay.device_cache import Lane
from kvmem.replay.engine import run_replay
from kvmem.replay.flight import Ledger
from kvmem.replay.options import HitRule, ReplayError, ReplayOptions
from kvmem.replay.result import ReplayResult
from kvmem.replay.trace import Request
from kvmem.replay.workload import generate_chat
from test_replay_index import lru_hits

BLOCK_BYTES = 4096
CHATS = generate_chat(1, 150)


def run(requests: list[Request] = CHATS, **options: object) -> ReplayResult:
    return run_replay(requests, ReplayOptions(block_bytes=BLOCK_BYTES, **options))  # type: ignore[arg-type]


def expect_conserved(result: ReplayResult) -> None:
    assert result.leaked_blocks == 0
    assert result.end_slots["free"] == result.end_slots["capacity"]
    run_slots = result.run_slots
    states = ("free", "held", "quarantined", "poisoned")
    assert sum(run_slots[state] for state in states) == run_slots["capacity"]
    assert result.transfers["ended"] == result.transfers["submitted"]
    assert result.transfers["ended_twice"] == 0


@pytest.mark.parametrize("hit", ["prefix", "blocks"])
@pytest.mark.parametrize("concurrency", [1, 4, 13])
@pytest.mark.parametrize("host_blocks", [1, 5, 50, 400, None])
def test_hits_are_those_of_a_plain_lru_cache_however_many_requests_run(
    hit: HitRule, concurrency: int, host_blocks: int | None
) -> None:
    """Public failure 55: blocks were freed twice and hits sank to zero.
    Public failure 173: a working set larger than the pool was undefined.
    """
    result = run(hit=hit, concurrency=concurrency, host_blocks=host_blocks)
    hits = lru_hits([request.keys for request in CHATS], host_blocks or 1 << 30)
    blocks = sum(map(len, hits))
    prefix = sum(([*found, False]).index(False) for found in hits)
    assert result.block_hit_rate == sum(map(sum, hits)) / blocks
    assert result.prefix_hit_rate == prefix / blocks
    assert result.counts.verified == (prefix if hit == "prefix" else sum(map(sum, hits)))
    assert result.bytes_restored == result.counts.verified * BLOCK_BYTES
    assert result.faults() == []
    expect_conserved(result)


def test_without_a_bound_every_distinct_block_is_offloaded_once() -> None:
    result = run(host_blocks=None)
    distinct = len({key for request in CHATS for key in request.keys})
    assert result.bytes_offloaded == distinct * BLOCK_BYTES
    assert result.end_slots["capacity"] == distinct
    assert result.reoffloaded_blocks == 0


def test_a_key_that_stands_twice_in_a_request_is_replayed() -> None:
    twice = [Request(0, 1536, 1, (1, 1, 2)), Request(0, 1536, 1, (1, 1, 2))]
    result = run(twice, hit="blocks")
    assert result.counts.present == 4
    assert result.faults() == []


@pytest.mark.parametrize("count", [1, 7])
def test_each_damaged_block_is_caught_once(count: int) -> None:
    result = run(corrupt=count, hit="blocks", host_blocks=60)
    assert result.counts.corrupted == count
    assert result.counts.mismatches == count
    assert result.faults() == [f"{count} restored blocks differ"]
    expect_conserved(result)


def test_damage_to_a_source_that_the_same_request_evicts_does_not_stop_the_replay() -> None:
    """Public failure 178: what a lookup had promised was gone at the load."""
    requests = [Request(0, 512, 1, (key,)) for key in range(3)]
    requests.append(Request(0, 2048, 1, (0, 7, 8, 9)))
    result = run(requests, corrupt=1, host_blocks=3)
    assert result.counts.mismatches == 1
    expect_conserved(result)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("rate", [0.2, 1.0])
@pytest.mark.parametrize("host_blocks", [3, 200, None])
def test_cancelled_requests_leak_nothing_and_every_transfer_ends_once(
    rate: float, seed: int, host_blocks: int | None
) -> None:
    """Public failure 21: each aborted prefetch kept some slots of the host pool."""
    result = run(abort_rate=rate, seed=seed, host_blocks=host_blocks, concurrency=3)
    assert result.faults() == []
    assert result.failed == 0
    assert 0 < result.counts.aborted_requests <= len(CHATS)
    expect_conserved(result)


def test_equal_seeds_give_equal_hits_although_cancels_race_with_copies() -> None:
    first, second = (run(abort_rate=0.5, seed=9, host_blocks=100) for _ in range(2))
    assert first.counts.present == second.counts.present
    assert first.counts.aborted_requests == second.counts.aborted_requests
    assert first.reoffloaded_blocks == second.reoffloaded_blocks


def test_a_restore_that_brings_nothing_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was in the target before never passes for the restored block, not even a stale copy.

    Public failure 102: a restore that brought nothing was reported as good.
    """
    real = kvmem.Manager.restore

    def elsewhere(manager: kvmem.Manager, copy: kvmem.HostCopy, blocks: object, **rest: object):  # type: ignore[no-untyped-def]
        del blocks
        return real(manager, copy, range(8 - len(copy), 8), **rest)  # type: ignore[arg-type]

    # One lane: the second request's blocks are the ones that the first one computed.
    requests = [Request(0, 1024, 1, (1, 2)), Request(0, 1024, 1, (1, 2))]
    spare = Request(0, 8 * 512, 1, tuple(range(10, 18)))
    monkeypatch.setattr(kvmem.Manager, "restore", elsewhere)
    result = run([*requests, spare], concurrency=1)
    assert result.counts.mismatches == 2


def test_lanes_are_never_left_to_an_unfinished_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = Lane.device_blocks
    manager: list[kvmem.Manager] = []
    init = kvmem.Manager.__init__

    def note(self: kvmem.Manager, *arguments: object, **rest: object) -> None:
        init(self, *arguments, **rest)  # type: ignore[arg-type]
        manager.append(self)

    def check(lane: Lane, positions: list[int]):  # type: ignore[no-untyped-def]
        blocks = real(lane, positions)
        seen.append(manager[0].busy(blocks))
        return blocks

    monkeypatch.setattr(kvmem.Manager, "__init__", note)
    monkeypatch.setattr(Lane, "device_blocks", check)
    run(abort_rate=1.0)
    assert seen
    assert not any(seen)


def test_the_json_object_has_the_promised_fields() -> None:
    found = json.loads(json.dumps(run().to_json()))
    rates = {"block_hit_rate", "prefix_hit_rate", "bytes_offloaded", "bytes_restored"}
    counts = {"requests", "mismatches", "leaked_blocks", "reoffloaded_blocks"}
    assert rates | counts | {"cancelled", "failed"} <= set(found)
    assert {"p50", "p99", "queue_p50", "copy_p50", "observe_p50"} <= set(found["restore_us"])
    assert set(found["host_blocks"]) == {"free", "held", "quarantined", "poisoned", "capacity"}
    assert all(value >= 0 for value in found["restore_us"].values())


def test_without_a_restore_there_is_no_latency() -> None:
    result = run([Request(0, 512, 1, (1,))])
    assert set(result.restore_us.values()) == {None}


def test_a_ledger_notices_ends_too_many_and_too_few() -> None:
    class Report:
        kind, state, error, id = "offload", "done", "", 1

        def __init__(self, tag: int | str) -> None:
            self.tag = tag

    ledger = Ledger(10)
    for blocks in (1, 2, 3):
        ledger.add(blocks)
    ledger.close([Report(0), Report(2), Report(2), Report(3), Report("x")])  # type: ignore[list-item]
    assert (ledger.submitted, ledger.unended, ledger.ended_twice) == (3, 1, 3)
    assert ledger.bytes == {"offload": 40, "restore": 0}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"host_blocks": 0}, "--host-blocks: 0 is below 1"),
        ({"block_bytes": 255}, "--block-bytes: 255 is below 256"),
        ({"block_bytes": 300}, "--block-bytes: 300 is not a multiple of 256"),
        ({"block_bytes": 1 << 40}, "--block-bytes: .* is above"),
        ({"hit": "all"}, "--hit: 'all'"),
        ({"abort_rate": -0.1}, "--abort-rate: -0.1 is outside 0 to 1"),
        ({"abort_rate": 1.01}, "--abort-rate"),
        ({"abort_rate": float("nan")}, "--abort-rate"),
        ({"corrupt": -1}, "--corrupt: -1 is below 0"),
        ({"concurrency": 0}, "--concurrency: 0 is below 1"),
        ({"concurrency": 257}, "--concurrency: 257 is above 256"),
        ({"seed": -1}, "--seed"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    options: dict[str, object], expected: str
) -> None:
    with pytest.raises(ReplayError, match=expected):
        ReplayOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("host_blocks", [10**9, 10**12, 10**20])
def test_a_host_tier_beyond_the_memory_is_refused_before_it_is_touched(host_blocks: int) -> None:
    with pytest.raises(ReplayError, match=f"--host-blocks.* {host_blocks} host blocks"):
        run(host_blocks=host_blocks)


def test_more_damage_than_blocks_is_refused() -> None:
    with pytest.raises(ReplayError, match="--corrupt: 9 is above 1"):
        run([Request(0, 512, 1, (1,))], corrupt=9)


@pytest.mark.parametrize("name", ["cuda", "nonsense", ""])
def test_a_device_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ReplayError, match="--device"):
        run(device=name)
