"""The timeline, and its export."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvmem import READY
from kvmem.timeline import to_perfetto
from support import PATIENCE, Cache, clock, in_thread, until

MakeCache = Callable[..., Cache]


def exported(cache: Cache, path: Path) -> list[dict[str, Any]]:
    to_perfetto(cache.manager.timeline(), path)
    trace = json.loads(path.read_text())
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


@pytest.mark.parametrize("measured", [False, True])
def test_a_record_has_its_stages_in_order_on_the_devices_clock(
    make_cache: MakeCache, measured: bool
) -> None:
    cache = make_cache(timeline=measured)
    before = clock(cache.device)
    copy = cache.stored(0, 1, 2, priority="demand")
    after = clock(cache.device)
    (record,) = cache.manager.timeline()
    assert (record.id, record.kind, record.priority, record.state) == (
        1,
        "offload",
        "demand",
        "done",
    )
    assert (record.blocks, record.bytes, record.staged) == (3, copy.nbytes, False)
    stages = [record.requested, record.submitted, record.observed]
    if measured:
        stages[2:2] = [record.started, record.completed]
    else:
        assert record.started is None
        assert record.completed is None
    assert None not in stages
    assert [before, *stages, after] == sorted([before, *stages, after])  # type: ignore[type-var]
    assert record.first_use is None


@pytest.mark.host_only("a thread that waits moves the clock")
def test_a_transfer_is_requested_when_the_call_is_made_not_when_it_is_accepted(
    make_cache: MakeCache,
) -> None:
    cache = make_cache()
    pool = cache.manager.pool
    everything = pool.acquire(pool.capacity)
    waiting = in_thread(cache.manager.offload, [0], after=READY)
    until(lambda: pool.stats()["waiters"] == 1)
    between = clock(cache.device)
    everything.release()
    waiting.result(PATIENCE).wait(PATIENCE)
    (record,) = cache.manager.timeline()
    assert record.submitted is not None
    assert record.requested < between < record.submitted


def test_the_queue_delay_is_measured(make_cache: MakeCache) -> None:
    cache = make_cache(timeline=True)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    with pytest.raises(TimeoutError):
        transfer.wait(0.05)
    gate.open()
    transfer.wait(PATIENCE)
    (record,) = cache.manager.timeline()
    assert record.started is not None
    assert record.requested is not None
    assert record.started - record.requested >= 0.05


@pytest.mark.parametrize("when", ["before the end", "after the end"])
def test_the_first_use_is_when_the_consumer_comes_to_it(make_cache: MakeCache, when: str) -> None:
    cache = make_cache(timeline=True)
    copy = cache.stored(0)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.restore(copy, [5], after=stream)
    consumer = cache.device.stream()
    if when == "after the end":
        gate.open()
        transfer.wait(PATIENCE)
    transfer.wait_on(consumer)
    transfer.wait_on(consumer)  # only the first one counts
    gate.open()
    transfer.wait(PATIENCE)
    consumer.synchronize(PATIENCE)
    until(lambda: cache.manager.timeline()[-1].first_use is not None)
    record = cache.manager.timeline()[-1]
    assert record.first_use is not None
    assert record.completed is not None
    assert record.first_use >= record.completed


def test_a_transfer_that_was_never_submitted_has_no_later_stages(make_cache: MakeCache) -> None:
    cache = make_cache(blocks=64, slots=64, segment_bytes=65536, window_bytes=65536, timeline=True)
    stream, gate = cache.stalled_stream()
    waiting = [cache.manager.offload([i], after=stream) for i in range(12)]
    assert waiting[-1].state == "queued"
    waiting[-1].cancel()
    (record,) = cache.manager.timeline()
    assert (record.id, record.state) == (waiting[-1].id, "cancelled")
    assert record.submitted is record.started is record.completed is None
    gate.open()


def test_records_come_in_the_order_of_the_ends_and_stay(cache: Cache) -> None:
    for block in range(3):
        cache.stored(block)
    ids = [record.id for record in cache.manager.timeline()]
    assert ids == [1, 2, 3]
    assert [record.id for record in cache.manager.timeline()] == ids


# ---- the export


def test_nothing_is_an_empty_trace(cache: Cache, tmp_path: Path) -> None:
    assert exported(cache, tmp_path / "trace.json") == []


@pytest.mark.parametrize(
    ("measured", "spans"), [(True, ["queue", "copy", "observe"]), (False, ["queue", "guard"])]
)
def test_each_stage_is_a_span_in_microseconds(
    make_cache: MakeCache, tmp_path: Path, measured: bool, spans: list[str]
) -> None:
    cache = make_cache(timeline=measured)
    cache.stored(0, 1)
    (record,) = cache.manager.timeline()
    events = exported(cache, tmp_path / "trace.json")
    assert [(each["name"], each["ph"]) for each in events] == [
        (name, phase) for name in spans for phase in "be"
    ]
    assert record.requested is not None
    assert record.observed is not None
    assert events[0]["ts"] == pytest.approx(record.requested * 1e6)
    assert events[-1]["ts"] == pytest.approx(record.observed * 1e6)
    assert {(each["pid"], each["cat"], each["id"]) for each in events} == {
        ("offload", "background", record.id)
    }
    facts = {"id": record.id, "state": "done", "blocks": 2, "bytes": 2 * cache.block_bytes}
    assert all(each["args"] == facts for each in events if each["ph"] == "b")


def test_begins_and_ends_pair_up_over_many_transfers(make_cache: MakeCache, tmp_path: Path) -> None:
    cache = make_cache(timeline=True)
    for _ in range(5):
        copy = cache.stored(0)
        cache.manager.restore(copy, [5], after=READY).wait(PATIENCE)
        copy.release()
    open_spans: dict[tuple[str, int, str], float] = {}
    closed = 0
    for event in exported(cache, tmp_path / "trace.json"):
        key = (event["pid"], event["id"], event["name"])
        if event["ph"] == "b":
            assert key not in open_spans
            open_spans[key] = event["ts"]
        else:
            assert event["ts"] >= open_spans.pop(key)
            closed += 1
    assert not open_spans
    assert closed == 10 * 3


def test_a_first_use_is_an_instant(make_cache: MakeCache, tmp_path: Path) -> None:
    cache = make_cache(timeline=True)
    transfer = cache.manager.restore(cache.stored(0), [5], after=READY)
    consumer = cache.device.stream()
    transfer.wait_on(consumer)
    transfer.wait(PATIENCE)
    consumer.synchronize(PATIENCE)
    until(lambda: cache.manager.timeline()[-1].first_use is not None)
    instants = [e for e in exported(cache, tmp_path / "trace.json") if e["ph"] == "i"]
    assert [each["name"] for each in instants] == ["first use"]
    assert instants[0]["ts"] == pytest.approx(cache.manager.timeline()[-1].first_use * 1e6)  # type: ignore[operator]


def test_a_transfer_that_was_never_submitted_is_left_out(
    make_cache: MakeCache, tmp_path: Path
) -> None:
    cache = make_cache(blocks=64, slots=64, segment_bytes=65536, window_bytes=65536)
    stream, gate = cache.stalled_stream()
    waiting = [cache.manager.offload([i], after=stream) for i in range(12)]
    waiting[-1].cancel()
    assert exported(cache, tmp_path / "trace.json") == []
    gate.open()


def test_a_path_may_be_a_string(cache: Cache, tmp_path: Path) -> None:
    to_perfetto([], str(tmp_path / "trace.json"))
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
