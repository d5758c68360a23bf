"""The virtual device: modelled time, hostile copies, faults on request, and no thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvmem
from kvmem import READY, testing
from support import PATIENCE, Cache, free_slots, native_threads, run_forked

SEGMENT_BYTES = 500_000
GBPS = 1.0
LATENCY_US = 5.0
COPY_SECONDS = 2 * SEGMENT_BYTES / (GBPS * 1e9) + LATENCY_US * 1e-6
"""Of one block of a Cache below: two segments in one batch."""


def exactly(seconds: float) -> Any:
    """To the nanosecond of the clock."""
    return pytest.approx(seconds, abs=2e-9)


@pytest.fixture
def make_virtual() -> Callable[..., Cache]:
    """Caches on a slow virtual device, of 8 blocks in one stage."""

    def make(link: dict[str, Any] | None = None, **options: Any) -> Cache:
        speed: dict[str, Any] = {"gbps": GBPS, "latency_us": LATENCY_US}
        device = kvmem.open_device("virtual", **{**speed, **(link or {})})
        cache = Cache(device, segment_bytes=SEGMENT_BYTES, **options)
        for block in range(8):
            cache.fill(block, 10 * block + 1)
        return cache

    return make


@pytest.fixture
def cache(make_virtual: Callable[..., Cache]) -> Iterator[Cache]:
    """One that ends quiet."""
    made = make_virtual()
    yield made
    made.finish()


def slots(cache: Cache) -> dict[str, int]:
    """The slots of the pool that are not free, by state."""
    stats = cache.pool.stats()
    states = ("held", "quarantined", "poisoned")
    return {state: stats[f"{state}_slots"] for state in states if stats[f"{state}_slots"]}


# ---- opening


def test_a_virtual_device_says_what_it_is() -> None:
    device = kvmem.open_device("virtual", seed=3, gbps=12, latency_us=0, shared_link=True)
    info = device.info
    assert (device.kind, device.name) == (info["kind"], info["name"]) == ("virtual", "virtual")
    assert (info["seed"], info["gbps"], info["latency_us"]) == (3, 12.0, 0.0)
    assert (info["shared_link"], info["copy_engines"]) == (True, 1)
    assert (info["virtual_time"], info["has_bytes"], info["needs_pinned_host"]) == (1, 1, 0)
    info = kvmem.open_device("virtual", seed=2**64 - 1, move_bytes=False).info
    assert (info["has_bytes"], info["gbps"], info["latency_us"]) == (False, 25.0, 10.0)
    assert info["memory_bytes"] >= 1 << 45
    assert info["shared_link"] is False
    assert kvmem.open_device("host").info["virtual_time"] is False


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("host", {"seed": 7}),
        ("host", {"gbps": 25.0}),
        ("auto", {"latency_us": 1}),
        ("host", {"shared_link": False}),
        ("auto", {"move_bytes": True}),
        ("virtual", {"workers": 0}),
    ],
    ids=str,
)
def test_an_option_of_another_kind_is_refused_by_name(name: str, option: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=f"{next(iter(option))} is no option .*{name}"):
        kvmem.open_device(name, **option)


def test_an_option_that_nobody_has_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="'speed'"):
        kvmem.open_device("virtual", speed=3)  # type: ignore[call-arg]


NO_NUMBERS = [True, "25", None, [1.0], 1j]


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        *(("seed", bad) for bad in [-1, 2**64, True, 1.0, "7", None]),
        *(("gbps", bad) for bad in [0, -1, float("nan"), float("inf"), 10**400, *NO_NUMBERS]),
        *(("latency_us", bad) for bad in [-1, float("nan"), float("inf"), *NO_NUMBERS]),
        *(("shared_link", bad) for bad in [0, 1, None, "yes"]),
        *(("move_bytes", bad) for bad in [0, 1, None, "no"]),
    ],
    ids=repr,
)
def test_a_value_that_is_none_is_refused_by_name(option: str, bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=f"^{option} is "):
        kvmem.open_device("virtual", **{option: bad})


# ---- time


def test_a_copy_takes_its_bytes_over_the_bandwidth_and_the_latency(cache: Cache) -> None:
    began = testing.now(cache.device)
    assert began == 0.0
    transfer = cache.manager.offload([2], after=READY)
    transfer.wait(PATIENCE)
    assert testing.now(cache.device) == exactly(COPY_SECONDS)
    assert (transfer.result().blocks[0] == cache.expected(21)).all()


@pytest.mark.parametrize("shared_link", [False, True], ids=["a link each", "one link"])
def test_both_directions_at_once_share_a_link_only_where_there_is_one(
    make_virtual: Callable[..., Cache], shared_link: bool
) -> None:
    cache = make_virtual({"shared_link": shared_link}, layers=1)
    copy = cache.stored(0)
    began = testing.now(cache.device)
    restored = cache.manager.restore(copy, [1], after=READY)
    stored = cache.manager.offload([2], after=READY)
    assert (restored.state, stored.state) == ("in_flight", "in_flight")
    assert cache.manager.drain(PATIENCE).quiet
    on_the_link = SEGMENT_BYTES / (GBPS * 1e9) * (2 if shared_link else 1)
    assert testing.now(cache.device) - began == exactly(on_the_link + LATENCY_US * 1e-6)
    assert cache.holds(1, 1)
    cache.finish()


def test_advance_ends_what_ends_by_then_and_nothing_more(cache: Cache) -> None:
    transfer = cache.manager.offload([0], after=READY)
    testing.advance(cache.device, COPY_SECONDS - 1e-6)
    assert transfer.state == "in_flight"
    testing.advance(cache.device, 1e-6)
    assert transfer.state == "done"
    testing.advance(cache.device, 0)
    testing.advance(cache.device, np.float32(2.0))
    assert testing.now(cache.device) == exactly(COPY_SECONDS + 2)


def test_one_advance_submits_each_slice_when_the_one_before_has_ended(
    make_virtual: Callable[..., Cache],
) -> None:
    cache = make_virtual(layers=1, window_bytes=SEGMENT_BYTES, timeline=True)
    transfer = cache.manager.offload([0, 2, 4, 6], after=READY)
    testing.advance(cache.device, 10)
    assert transfer.state == "done"
    (record,) = cache.manager.timeline()
    slices = 16  # of a quarter of the window each
    on_the_link = 4 * SEGMENT_BYTES / (GBPS * 1e9)
    assert record.completed == exactly(on_the_link + slices * LATENCY_US * 1e-6)
    assert record.observed == record.completed
    cache.finish()


def test_step_goes_to_the_next_end_and_says_when_there_is_none(cache: Cache) -> None:
    assert testing.step(cache.device) is False
    transfer = cache.manager.offload([0], after=READY)
    stream, gate = cache.stalled_stream()
    stalled = cache.manager.offload([1], after=stream)
    assert testing.step(cache.device) is True
    assert (transfer.state, testing.now(cache.device)) == ("done", exactly(COPY_SECONDS))
    assert testing.step(cache.device) is False
    assert testing.now(cache.device) == exactly(COPY_SECONDS)
    gate.open()
    assert testing.step(cache.device) is True
    assert stalled.state == "done"


def test_timeouts_pass_in_virtual_time(cache: Cache) -> None:
    stream, _ = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    began, wall = testing.now(cache.device), time.monotonic()
    with pytest.raises(kvmem.TimedOut, match="10 s"):
        transfer.wait(10)
    with pytest.raises(kvmem.TimedOut):
        stream.synchronize(2.5)
    with pytest.raises(kvmem.PoolExhausted):
        cache.pool.acquire(cache.pool.capacity, timeout=1.5)
    assert testing.now(cache.device) - began == exactly(14)
    assert time.monotonic() - wall < 14


def test_no_thread_exists_and_windows_are_driven_all_the_same() -> None:
    before = native_threads(), threading.active_count()
    device = kvmem.open_device("virtual")
    cache = Cache(device, segment_bytes=32768, window_bytes=65536, reaper=True)
    transfer = cache.manager.offload([0, 2, 4, 6], after=READY, tag="t")
    assert 0 < cache.manager.stats()["offload"]["window_bytes"] <= 65536  # the rest waits in kvmem
    assert cache.manager.poll() == []
    assert (native_threads(), threading.active_count()) == before
    while testing.step(device):
        pass
    assert [report.tag for report in cache.manager.poll()] == ["t"]
    assert transfer.done()
    assert (native_threads(), threading.active_count()) == before
    cache.finish()


def test_a_task_awaits_while_another_moves_the_clock(cache: Cache) -> None:
    async def run() -> None:
        transfer = await cache.manager.offload_async([3], after=READY)
        waiting = asyncio.ensure_future(transfer)
        await asyncio.sleep(0)
        assert not waiting.done()
        testing.advance(cache.device, COPY_SECONDS)
        await asyncio.wait_for(waiting, PATIENCE)

    asyncio.run(run())


def history(seed: int) -> list[tuple[Any, ...]]:
    """Four streams with a copy each in one direction: only the link decides their order."""
    device = kvmem.open_device("virtual", seed=seed)
    target = np.zeros((4, 4096), np.uint8)
    streams = [device.stream() for _ in range(4)]
    for stream, row in zip(streams, target, strict=True):
        stream.copy(row, np.ones_like(row))
    events = [stream.record() for stream in streams]
    seen = []
    while testing.step(device):
        seen.append((testing.now(device), *(event.done() for event in events)))
    return seen


def test_equal_seeds_give_equal_histories_and_others_another_order() -> None:
    histories = [history(seed) for seed in range(12)]
    assert histories == [history(seed) for seed in range(12)]
    assert len({tuple(each) for each in histories}) > 4
    for each in histories:
        assert [time for time, *_ in each] == [time for time, *_ in histories[0]]
        assert [sum(done) for _, *done in each] == [1, 2, 3, 4]


# ---- bytes


def test_arrays_of_device_memory_and_numpy_arrays_can_be_copied() -> None:
    device = kvmem.open_device("virtual", seed=1)
    buffer = device.alloc(10_000)
    numbers = np.arange(10_000).astype(np.uint8)
    back = np.zeros_like(numbers)
    stream = device.stream()
    stream.copy(buffer.array, numbers)
    stream.copy(back, buffer.array)
    assert not back.all()
    stream.synchronize(PATIENCE)
    assert (back == numbers).all()


def test_whoever_changes_a_source_before_the_copy_has_ended_gets_other_bytes(
    cache: Cache,
) -> None:
    """A copy reads its source until its end, so that early reuse shows."""
    transfer = cache.manager.offload([0], after=READY)
    cache.fill(0, 99)
    transfer.wait(PATIENCE)
    stored = transfer.result().blocks[0]
    assert not (stored == cache.expected(1)).all()


# ---- faults


def test_held_copies_keep_their_blocks_quarantined_until_released(cache: Cache) -> None:
    before = cache.stored(1)
    testing.hold_copies(cache.device, 1)
    transfer = cache.manager.offload([0], after=READY)
    address = cache.layout.regions[0].address
    assert transfer.cancel() is kvmem.CancelOutcome.draining
    testing.advance(cache.device, 100)
    assert transfer.state == "in_flight"
    assert slots(cache) == {"held": 1, "quarantined": 1}
    assert cache.manager.busy([0, 1]) == [0]
    assert testing.may_touch(cache.device, address, 1)
    assert not testing.may_touch(cache.device, address + SEGMENT_BYTES, 1)
    cache.manager.restore(before, [5], after=READY).wait(PATIENCE)  # one was to be held, no more
    testing.release_copies(cache.device)
    testing.advance(cache.device, COPY_SECONDS)
    assert transfer.state == "cancelled"
    assert slots(cache) == {"held": 1}
    assert not testing.may_touch(cache.device, address, SEGMENT_BYTES)


@pytest.mark.parametrize("how", ["refused", "in_flight"])
def test_the_nth_copy_fails_typed_and_the_manager_works_on(cache: Cache, how: Any) -> None:
    testing.fail_nth(cache.device, "copy", 2, how)
    cache.stored(0)
    transfer = cache.manager.offload([1], after=READY)
    array = cache.layout.regions[0].address, 8 * SEGMENT_BYTES
    assert testing.may_touch(cache.device, *array) is (how == "in_flight")
    with pytest.raises(kvmem.CopyFailed):
        transfer.wait(PATIENCE)
    assert transfer.state == "failed"
    assert free_slots(cache.pool) == 8
    assert not testing.may_touch(cache.device, *array)
    assert (cache.stored(2).blocks[0] == cache.expected(21)).all()


def test_as_many_calls_fail_as_were_asked_for(cache: Cache) -> None:
    testing.fail_nth(cache.device, "copy", 1, times=3)
    for block in range(3):
        with pytest.raises(kvmem.CopyFailed):
            cache.stored(block)
    cache.stored(3)


def test_faults_that_were_called_off_never_come(cache: Cache) -> None:
    testing.fail_nth(cache.device, "copy", 2, times=100)
    cache.stored(0)
    testing.forget_faults(cache.device)
    cache.stored(1)


def test_a_query_that_learns_nothing_is_no_end(cache: Cache) -> None:
    testing.fail_nth(cache.device, "query", 1, times=5)
    assert (cache.stored(4).blocks[0] == cache.expected(41)).all()


def test_memory_that_is_refused_is_a_capacity_error(cache: Cache) -> None:
    testing.fail_nth(cache.device, "allocate", 1)
    with pytest.raises(kvmem.CapacityError):
        cache.device.alloc(4096)
    cache.device.alloc(4096)


@pytest.mark.parametrize("way", ["lose", "fail_nth"])
def test_a_lost_device_poisons_what_was_in_flight_and_says_so(
    make_virtual: Callable[..., Cache], way: str
) -> None:
    cache = make_virtual()
    safe = cache.stored(0)
    transfer = cache.manager.offload([1, 2], after=READY)
    if way == "lose":
        testing.lose(cache.device)
    else:
        testing.fail_nth(cache.device, "any", 1, "lost")
    with pytest.raises(kvmem.DeviceLost):
        transfer.wait(PATIENCE)
    assert transfer.state == "failed"
    assert slots(cache) == {"held": 1, "poisoned": 2}
    assert (safe.blocks[0] == cache.expected(1)).all()  # its end was observed
    with pytest.raises(kvmem.DeviceLost):
        cache.manager.offload([3], after=READY).wait(PATIENCE)
    with pytest.raises(kvmem.DeviceLost):
        cache.device.alloc(4096)
    cache.manager.close(1)


# ---- who may use the controls


CONTROLS: dict[str, Callable[[kvmem.Device], object]] = {
    "advance": lambda device: testing.advance(device, 1.0),
    "step": testing.step,
    "fail_nth": lambda device: testing.fail_nth(device, "copy", 1),
    "forget_faults": testing.forget_faults,
    "lose": testing.lose,
    "hold_copies": lambda device: testing.hold_copies(device, 1),
    "release_copies": testing.release_copies,
    "may_touch": lambda device: testing.may_touch(device, 4096, 1),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_of_virtual_devices_refuses_another_kind(name: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=rf"{name}\(\) .*virtual device, not .*host"):
        CONTROLS[name](kvmem.open_device("host"))


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), 1e10, True, "1", None], ids=repr)
def test_a_time_that_is_none_is_refused(bad: Any) -> None:
    device = kvmem.open_device("virtual")
    with pytest.raises(kvmem.InvalidArgument, match=r"^seconds is "):
        testing.advance(device, bad)
    assert testing.now(device) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("copies", 1), "^call is 'copies', one of 'allocate'.* 'any'"),
        (("copy", 0), "^nth is 0"),
        (("copy", 1, "late"), "^how is 'late'"),
        (("copy", 1, "lost", 0), "^times is 0"),
    ],
    ids=str,
)
def test_a_fault_that_is_none_is_refused_by_name(arguments: Any, expected: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=expected):
        testing.fail_nth(kvmem.open_device("virtual"), *arguments)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((5, 1), "^call is 5, one of 'allocate'"),
        ((None, 1), "^call is None, one of"),
        (("\ud800", 1), "^call is '.ud800', one of"),
        (("copy", 1, 5), "^how is 5, one of 'refused'"),
        (("copy", 1.0), r"^nth is 1\.0"),
        (("copy", 1, "lost", "2"), "^times is '2'"),
    ],
    ids=ascii,
)
def test_a_fault_of_another_type_is_refused_by_name(arguments: Any, expected: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=expected):
        testing.fail_nth(kvmem.open_device("virtual"), *arguments)


ALL_CONTROLS: dict[str, Callable[[Any], object]] = {
    **CONTROLS,
    "now": testing.now,
    "stall": lambda device: testing.stall(device, kvmem.open_device("host").stream()),
}


@pytest.mark.parametrize("name", ALL_CONTROLS)
@pytest.mark.parametrize("bad", [None, 5, "virtual", kvmem.Device], ids=str)
def test_what_is_no_device_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=r"^device is .*, not a Device$"):
        ALL_CONTROLS[name](bad)


@pytest.mark.parametrize("bad", [None, 7, "stream"], ids=repr)
def test_only_a_stream_is_stalled(bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=r"^stream is .*, not a Stream$"):
        testing.stall(kvmem.open_device("virtual"), bad)


def test_the_clock_has_an_end_and_nothing_moves_beyond_it() -> None:
    device = kvmem.open_device("virtual", gbps=GBPS)
    stream = device.stream()
    for _ in range(8):
        testing.advance(device, 1e9)
    testing.advance(device, 1e9 - 0.5)
    gate = testing.stall(device, stream)
    target = np.zeros(8, np.uint8)
    stream.copy(target, np.ones(8, np.uint8))
    gate.open()
    with pytest.raises(
        kvmem.InvalidArgument, match=r"^seconds is 1: .* at 9e\+09 .* ends at 9e\+09"
    ):
        testing.advance(device, 1)
    assert testing.now(device) == 9e9 - 0.5
    assert not target.all()
    testing.advance(device, 0.5)
    assert testing.now(device) == 9e9
    assert target.all()
    with pytest.raises(kvmem.InvalidArgument, match=r"^seconds is 1e\+09: "):
        testing.advance(device, 1e9)
    testing.advance(device, 0)


def test_a_later_hold_replaces_an_earlier_one() -> None:
    device = kvmem.open_device("virtual")
    testing.hold_copies(device, 5)
    testing.hold_copies(device, 1)
    target = np.zeros((2, 8), np.uint8)
    for row in target:
        device.stream().copy(row, np.ones(8, np.uint8))
    testing.advance(device, 1)
    assert [bool(row.all()) for row in target] == [False, True]
    testing.release_copies(device)
    testing.advance(device, 1)
    assert target.all()


HUGE = [10**400, 10**5000]
"""Of the second not even repr() can be had."""


@pytest.mark.parametrize("option", ["seed", "gbps", "latency_us", "shared_link", "move_bytes"])
@pytest.mark.parametrize("bad", [*HUGE, [0] * 1000, "0" * 1000], ids=["400", "5000", "[]", "str"])
def test_a_value_that_is_long_is_refused_in_short(option: str, bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=f"^{option} is ") as refusal:
        kvmem.open_device("virtual", **{option: bad})
    assert len(str(refusal.value)) < 120


@pytest.mark.parametrize("kind", ["host", "virtual"])
def test_the_controls_say_forked_in_a_child(kind: str) -> None:
    device = kvmem.open_device(kind)
    stream = device.stream()
    controls = {"stall": lambda device: testing.stall(device, stream), "now": testing.now}
    if kind == "virtual":
        controls = {**CONTROLS, **controls}

    def child() -> None:
        for name, control in controls.items():
            try:
                found = control(device)
            except kvmem.Forked:
                continue
            raise AssertionError(f"{name}: {found}")

    assert run_forked(child) == ""
    assert testing.now(device) >= 0
