"""Replays in virtual time: the same seed gives the same table, and the decisions are the host's."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

from typer.testing import CliRunner

from kvmem.cli import make_app
from kvmem.replay.engine import run_replay
from kvmem.replay.options import ReplayError, ReplayOptions
from kvmem.replay.result import ReplayResult
from kvmem.replay.workload import generate_chat
from test_replay_engine import expect_conserved
from test_replay_shared import golden_hits, shared_file, trace

CHATS = generate_chat(1, 150)
MIB = 1 << 20


def run(**options: object) -> ReplayResult:
    options = {"device": "virtual", "block_bytes": 4096, **options}
    return run_replay(CHATS, ReplayOptions(**options))  # type: ignore[arg-type]


def counted(result: ReplayResult) -> dict[str, object]:
    """What a replay decides, without times and without what a race decides on the host device."""
    counts = result.counts
    found = {"present": counts.present, "prefix": counts.prefix, "verified": counts.verified}
    return {
        **found,
        "aborted": counts.aborted_requests,
        "reoffloaded": result.reoffloaded_blocks,
        "submitted": result.transfers["submitted"],
    }


@pytest.mark.parametrize("as_json", [False, True], ids=["table", "json"])
@pytest.mark.parametrize("bytes_move", ["--move-bytes", "--no-move-bytes"])
def test_equal_seeds_give_equal_output_byte_for_byte(as_json: bool, bytes_move: str) -> None:
    """In processes of their own, so that nothing of this one is the same by accident."""
    command = [sys.executable, "-m", "kvmem.cli", "replay", "--device", "virtual", bytes_move]
    command += ["--limit", "150", "--block-bytes", "4096", "--abort-rate", "0.3", "--seed", "5"]
    command += ["--host-blocks", "200"] + (["--json"] if as_json else [])
    outputs = set()
    for _ in range(2):
        done = subprocess.run(command, check=True, capture_output=True, timeout=60)
        outputs.add(done.stdout)
        assert done.stderr == b""
    assert len(outputs) == 1
    assert outputs.pop().strip()


def test_another_seed_aborts_elsewhere() -> None:
    first, second = (run(abort_rate=0.3, seed=seed).to_json() for seed in (5, 6))
    assert first["seconds"] != second["seconds"]


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("host_blocks", [5, 100, None])
def test_what_is_decided_is_what_the_host_device_decides(
    host_blocks: int | None, rate: float
) -> None:
    options: dict[str, object] = {"host_blocks": host_blocks, "abort_rate": rate, "seed": 3}
    virtual, host = run(**options), run(**options, device="host")
    expected = counted(host)
    if rate:  # whether a cancelled restore was done before, and verified, is a race there
        expected["verified"] = virtual.counts.verified
    assert counted(virtual) == expected
    assert virtual.faults() == []
    assert virtual.counts.mismatches == 0
    expect_conserved(virtual)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_bytes_that_move_change_nothing_but_what_is_verified(rate: float) -> None:
    moved = run(host_blocks=100, abort_rate=rate)
    unmoved = run(host_blocks=100, abort_rate=rate, move_bytes=False)
    assert moved.counts.verified > 0
    assert unmoved.counts.verified == unmoved.counts.mismatches == 0
    found, without = moved.to_json(), unmoved.to_json()
    for each in (found, without):
        del each["options"], each["verified_blocks"]
    assert found == without
    expect_conserved(unmoved)


@pytest.mark.parametrize("count", [1, 7])
def test_each_damaged_block_is_caught_once(count: int) -> None:
    result = run(corrupt=count, hit="blocks", host_blocks=60)
    assert (result.counts.corrupted, result.counts.mismatches) == (count, count)
    expect_conserved(result)


def test_times_are_those_of_the_modelled_link() -> None:
    """One request after the other, each alone on its link."""
    request = CHATS[0]
    blocks = len(request.keys)
    options = ReplayOptions(
        device="virtual", block_bytes=MIB, concurrency=1, gbps=1.0, latency_us=100.0
    )
    result = run_replay([request, request], options)
    offload = blocks * MIB / 1e9 + 100e-6
    restore = blocks * MIB / 1e9 + 4 * 100e-6  # the layers follow one another
    assert result.counts.seconds == pytest.approx(offload + restore, abs=1e-6)
    assert result.restore_us["p50"] == pytest.approx(restore * 1e6, abs=1)
    assert result.restore_us["observe_p99"] == 0


def test_a_faster_link_takes_less_virtual_time() -> None:
    slow, fast = (run(gbps=gbps, move_bytes=False, block_bytes=MIB) for gbps in (1.0, 100.0))
    assert slow.counts.seconds > 10 * fast.counts.seconds
    assert slow.block_hit_rate == fast.block_hit_rate


def test_terabytes_are_replayed_where_no_bytes_move() -> None:
    result = run(move_bytes=False, block_bytes=1 << 30, host_blocks=4000)
    assert result.faults() == []
    distinct = len({key for request in CHATS for key in request.keys})
    assert result.bytes_offloaded == distinct << 30
    assert result.end_slots["capacity"] == 4000
    expect_conserved(result)


def test_the_table_says_that_no_bytes_were_moved() -> None:
    arguments = ["replay", "--device", "virtual", "--limit", "20", "--block-bytes", "2MiB"]
    app, environment = make_app(), {"COLUMNS": "100"}
    without = CliRunner().invoke(app, [*arguments, "--no-move-bytes"], env=environment)
    assert without.exit_code == 0, without.output
    assert "no bytes were moved" in without.stdout
    assert "run time, virtual" in without.stdout
    assert "every block as it was" not in without.stdout
    with_bytes = CliRunner().invoke(
        app, [*arguments[:-1], "4096", "--gbps", "1", "--latency-us", "0"], env=environment
    )
    assert with_bytes.exit_code == 0, with_bytes.output
    assert "every block as it was" in with_bytes.stdout


def test_options_of_the_virtual_device_are_in_the_json() -> None:
    options = json.loads(json.dumps(run(gbps=2.5, latency_us=1.0).to_json()))["options"]
    assert (options["device"], options["gbps"], options["latency_us"]) == ("virtual", 2.5, 1.0)
    assert options["move_bytes"] is True


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--gbps", "1"], "--gbps: only with --device virtual"),
        (["--latency-us", "1"], "--latency-us: only with --device virtual"),
        (["--no-move-bytes"], "--no-move-bytes: only with --device virtual"),
        (["--device", "virtual", "--gbps", "0"], "--gbps: 0.0 is outside 1e-06 to 1e+06"),
        (["--device", "virtual", "--latency-us", "nan"], "--latency-us: nan is outside 0 to 1e+09"),
        (
            ["--device", "virtual", "--seed", str(1 << 64)],
            "--seed: 18446744073709551616 is above 18446744073709551615",
        ),
        (["--device", "virtual", "--no-move-bytes", "--corrupt", "1"], "--corrupt: "),
    ],
    ids=" ".join,
)
def test_options_that_do_not_fit_end_with_2_and_are_named(
    arguments: list[str], expected: str
) -> None:
    result = CliRunner().invoke(make_app(), ["replay", "--limit", "2", *arguments])
    assert result.exit_code == 2
    assert expected in result.stderr


def test_more_than_there_are_addresses_is_refused() -> None:
    with pytest.raises(ReplayError, match=r"--host-blocks.*: cannot allocate device memory"):
        run(move_bytes=False, block_bytes=1 << 30, host_blocks=1 << 20)


@pytest.mark.shared
@pytest.mark.slow
def test_a_whole_trace_of_large_blocks_replays_within_a_minute() -> None:
    """288,500 blocks of 2 MiB: 357 GiB offloaded, in a fraction of the memory and the time."""
    requests = trace("conversation_trace")
    options = ReplayOptions(
        device="virtual", block_bytes=2 * MIB, hit="blocks", host_blocks=10_000, move_bytes=False
    )
    began = time.monotonic()
    result = run_replay(requests, options)
    assert time.monotonic() - began < 60
    assert result.counts.present == golden_hits("conversation_trace")[10_000]
    assert result.counts.seconds > result.bytes_restored / 25e9
    assert result.faults() == []
    expect_conserved(result)


@pytest.mark.shared
def test_the_start_of_a_trace_replays_with_bytes_in_virtual_time(tmp_path: Path) -> None:
    source = shared_file("traces/mooncake/conversation_trace.jsonl")
    few = tmp_path / "few.jsonl"
    few.write_text("".join(source.read_text().splitlines(keepends=True)[:300]))
    arguments = ["replay", str(few), "--device", "virtual", "--block-bytes", "4096", "--json"]
    found = json.loads(CliRunner().invoke(make_app(), arguments).stdout)
    assert (found["requests"], found["mismatches"], found["leaked_blocks"]) == (300, 0, 0)
    assert found["verified_blocks"] > 0


@pytest.mark.parametrize("option", ["--gbps=1e-6", "--latency-us=1e9"])
def test_the_slowest_link_that_may_be_is_not_taken_for_a_hang(option: str) -> None:
    arguments = ["replay", "--device", "virtual", "--limit", "5", "--block-bytes", "64KiB"]
    result = CliRunner().invoke(make_app(), [*arguments, option, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["restore_us"]["p50"] > 120e6


def test_a_seed_beyond_64_bits_is_fine_where_no_virtual_device_draws_from_it() -> None:
    options = ReplayOptions(block_bytes=4096, seed=1 << 64)
    assert run_replay(CHATS[:2], options).faults() == []


def test_more_slots_than_their_bookkeeping_has_memory_for_are_refused_by_name() -> None:
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (free_kib,) = (int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    blocks = 2 * free_kib * 1024 // 32
    if blocks >= 1 << 32:
        pytest.skip("this machine has memory for the largest pool that may be")
    arguments = ["replay", "--device", "virtual", "--no-move-bytes", "--limit", "2"]
    arguments += ["--block-bytes", "4096", "--host-blocks", str(blocks)]
    result = CliRunner().invoke(make_app(), arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("kvmem replay: --host-blocks, ")
    assert f"{blocks} host blocks" in line
    assert re.search(r"wanted \d+, free \d+", line)


def test_memory_that_is_out_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr("kvmem.replay.engine.run_replay", refuse)
    result = CliRunner().invoke(make_app(), ["replay", "--limit", "2"])
    assert (result.exit_code, result.stderr) == (2, "kvmem replay: not enough memory\n")
