"""Manager: making one, round trips, bounds, reports, statistics, closing."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmem
from kvmem import READY
from support import PATIENCE, Cache, free_slots, in_thread, until

MakeCache = Callable[..., Cache]

NOT_SIZES = [0, -1, True, 1.5, float("nan"), 2**63, 2**64, None, []]


# ---- making one


@pytest.mark.parametrize("bad", [*NOT_SIZES, "x", "8XB"], ids=repr)
@pytest.mark.parametrize(
    "name", ["max_queued_bytes", "window_bytes", "window_descriptors", "max_reports"]
)
def test_a_bound_that_is_none_is_refused_by_name_and_value(
    cache: Cache, name: str, bad: Any
) -> None:
    """Public failure 174: a size of zero was accepted."""
    with pytest.raises(kvmem.InvalidArgument, match=name) as refusal:
        kvmem.Manager(cache.device, cache.layout, cache.pool, **{name: bad})
    assert str(bad) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "least"), [("max_queued_bytes", 4096), ("window_bytes", 65536), ("max_reports", None)]
)
def test_a_bound_out_of_range_is_refused_with_the_limit(
    cache: Cache, name: str, least: int | None
) -> None:
    bad, limit = (least - 1, least) if least else (2**20 + 1, 2**20)
    with pytest.raises(kvmem.InvalidArgument, match=rf"{name}.*{bad}, at (least|most) {limit}"):
        kvmem.Manager(cache.device, cache.layout, cache.pool, **{name: bad})
    kvmem.Manager(cache.device, cache.layout, cache.pool, **{name: limit}).close()


def test_bounds_may_be_strings_with_units(cache: Cache) -> None:
    bounds: dict[str, Any] = {"max_queued_bytes": "1GB", "window_bytes": "64 KiB"}
    kvmem.Manager(cache.device, cache.layout, cache.pool, **bounds).close()


def test_a_manager_takes_either_a_pool_or_host_bytes(cache: Cache) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="pool or host_bytes"):
        kvmem.Manager(cache.device, cache.layout)
    with pytest.raises(kvmem.InvalidArgument, match="pool or host_bytes"):
        kvmem.Manager(cache.device, cache.layout, cache.pool, host_bytes="1MiB")
    with kvmem.Manager(cache.device, cache.layout, host_bytes="18KiB") as manager:
        assert (manager.pool.capacity, manager.pool.block_bytes) == (4, cache.block_bytes)


@pytest.mark.parametrize("bad", [*NOT_SIZES[:-2], "x"], ids=repr)
def test_host_bytes_that_are_none_are_refused(cache: Cache, bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument):
        kvmem.Manager(cache.device, cache.layout, host_bytes=bad)


def test_a_pool_of_another_block_size_is_refused_with_both_sizes(cache: Cache) -> None:
    pool = kvmem.BlockPool(cache.device, block_bytes=64, capacity_bytes=4096)
    with pytest.raises(kvmem.InvalidArgument, match="pool has 64, the layout 4096"):
        kvmem.Manager(cache.device, cache.layout, pool)


def test_a_pool_of_another_device_is_refused(cache: Cache) -> None:
    other = kvmem.open_device(cache.device.kind)
    with pytest.raises(kvmem.InvalidArgument, match="another device"):
        kvmem.Manager(other, cache.layout, cache.pool)


def test_a_layout_in_another_memory_is_refused_with_both_names(cache: Cache) -> None:
    layout = kvmem.KVLayout([kvmem.Region(4096, 4096, 4096, 4, memory="cuda:1")])
    names = f"in cuda:1 memory, the device is {cache.device.name}"
    with pytest.raises(kvmem.InvalidArgument, match=names):
        kvmem.Manager(cache.device, layout, cache.pool)


@pytest.mark.parametrize("name", ["device", "layout", "pool", "reaper", "timeline"])
def test_an_argument_of_a_wrong_type_is_a_type_error(cache: Cache, name: str) -> None:
    arguments = {"device": cache.device, "layout": cache.layout, "pool": cache.pool, name: "x"}
    with pytest.raises(TypeError):
        kvmem.Manager(**arguments)


# ---- round trips


def shapes() -> dict[str, tuple[Callable[[], list[np.ndarray[Any, Any]]], int]]:
    """Device arrays of 8 blocks, and their block axis."""
    return {
        "one layer": (lambda: [np.zeros((8, 4096), np.uint8)], 0),
        "many small layers": (lambda: [np.zeros((8, 7), np.uint8) for _ in range(40)], 0),
        "K and V first": (lambda: [np.zeros((2, 8, 16, 3), np.float32) for _ in range(3)], 1),
        "layers of two sizes": (
            lambda: [np.zeros((8, 640), np.uint8), np.zeros((8, 24), np.uint16)],
            0,
        ),
        "rows with padding": (lambda: [np.zeros((8, 1024), np.uint8)[:, :576]], 0),
        "K and V interleaved": (
            lambda: list(np.zeros((8, 2, 48), np.uint8).swapaxes(0, 1)),
            0,
        ),
        "larger than a piece": (lambda: [np.zeros((8, 700_001), np.uint8)], 0),
    }


@pytest.mark.parametrize("reaper", [True, False], ids=["reaper", "no reaper"])
@pytest.mark.parametrize("shape", shapes())
def test_what_was_offloaded_comes_back_elsewhere(
    device: kvmem.Device, random: np.random.Generator, shape: str, reaper: bool
) -> None:
    """Public failure 86: bytes of a block came from a page size that not every layer had."""
    make, axis = shapes()[shape]
    arrays = make()
    layout = kvmem.KVLayout.from_arrays(arrays, block_axis=axis, memory=device.name)
    blocks = [np.moveaxis(array, axis, 0) for array in arrays]  # views, blocks first
    for each in blocks:
        each[:] = random.integers(0, 256, each.shape)
    before = [each.copy() for each in blocks]
    with kvmem.Manager(device, layout, host_bytes="32MiB", reaper=reaper) as manager:
        stored = manager.offload([6, 1, 3], after=READY)
        stored.wait(PATIENCE)
        copy = stored.result()
        restored = manager.restore(copy, [0, 7, 2], after=READY)
        restored.wait(PATIENCE)
        for now, then in zip(blocks, before, strict=True):
            assert (now[[0, 7, 2]] == then[[6, 1, 3]]).all()
            assert (now[[1, 3, 4, 5, 6]] == then[[1, 3, 4, 5, 6]]).all()
        assert copy.nbytes == 3 * layout.block_bytes


def test_padding_between_the_rows_is_never_touched(device: kvmem.Device) -> None:
    """Public failure 87: with padded pages the arithmetic assumed rows without gaps."""
    memory = np.full((8, 1024), 0xEE, np.uint8)
    rows = memory[:, :576]
    rows[:] = 1
    layout = kvmem.KVLayout.from_arrays([rows], memory=device.name)
    with kvmem.Manager(device, layout, host_bytes="64KiB") as manager:
        stored = manager.offload([0, 1], after=READY)
        stored.wait(PATIENCE)
        rows[:] = 2
        manager.restore(stored.result(), [6, 7], after=READY).wait(PATIENCE)
    assert (rows[6:] == 1).all()
    assert (rows[:6] == 2).all()
    assert (memory[:, 576:] == 0xEE).all()


def test_the_payload_of_a_host_block_is_its_segments_in_order(cache: Cache) -> None:
    cache.fill(5, 10)
    copy = cache.stored(5)
    assert (copy.blocks[0] == cache.expected(10)).all()


def test_a_block_may_be_offloaded_twice_in_one_transfer(cache: Cache) -> None:
    """Public failure 29: some finished requests were never retired."""
    cache.fill(2, 30)
    copy = cache.stored(2, 2)
    assert (copy.blocks.gather() == cache.expected(30)).all()


def test_transfers_larger_than_the_window_are_sliced(
    make_cache: MakeCache, random: np.random.Generator
) -> None:
    cache = make_cache(
        blocks=64, slots=64, segment_bytes=40_000, window_bytes=65536, window_descriptors=3
    )
    for array in cache.arrays:
        array[:] = random.integers(0, 256, array.shape)
    before = [array.copy() for array in cache.arrays]
    copy = cache.stored(*range(64))
    for array in cache.arrays:
        array[:] = 0
    cache.manager.restore(copy, list(range(64)), after=READY).wait(PATIENCE)
    for now, then in zip(cache.arrays, before, strict=True):
        assert (now == then).all()


# ---- block ids


@pytest.mark.parametrize(
    "ids",
    [
        [1, 2],
        (1, 2),
        range(1, 3),
        [np.int16(1), np.uint64(2)],
        *(np.array([1, 2], kind) for kind in "bBhHiIqQ"),
        np.array([1, 2], ">i4"),
        np.arange(5)[1:3],
        np.array([1, 9, 2, 9])[::2],
    ],
    ids=repr,
)
def test_block_ids_are_any_sequence_of_integers(cache: Cache, ids: Any) -> None:
    cache.fill(1, 20)
    cache.fill(2, 40)
    transfer = cache.manager.offload(ids, after=READY)
    transfer.wait(PATIENCE)
    copy = transfer.result()
    assert (copy.blocks[0] == cache.expected(20)).all()
    assert (copy.blocks[1] == cache.expected(40)).all()
    cache.manager.restore(copy, ids, after=READY).wait(PATIENCE)
    assert cache.manager.busy(ids) == []


NOT_IDS = [
    [8],
    [-1],
    [0, 99],
    [2**63],
    [2**70],
    [-(2**63) - 1],
    [True],
    [np.True_],
    [1.0],
    ["1"],
    [None],
    [[1]],
    "12",
    b"12",
    bytearray(b"12"),
    3,
    None,
    {1},
    {1: 2},
    iter([1]),
    np.array([1.0]),
    np.array([True]),
    np.array([[1]]),
    np.array(1),
    np.array([1], object),
    np.array([2**64 - 1], np.uint64),
    np.array([8], np.uint8),
]


@pytest.mark.parametrize("bad", NOT_IDS, ids=lambda bad: repr(bad)[:30])
def test_what_is_no_block_id_is_refused(cache: Cache, bad: Any) -> None:
    """Public failure 86: bytes of a block came from a page size that not every layer had.
    Public failure 98: a host block of another rank did not exist here.
    """
    copy = cache.stored(0)
    for call in (
        lambda: cache.manager.offload(bad, after=READY),
        lambda: cache.manager.try_offload(bad, after=READY),
        lambda: cache.manager.restore(copy, bad, after=READY),
        lambda: cache.manager.try_restore(copy, bad, after=READY),
        lambda: cache.manager.busy(bad),
        lambda: cache.manager.offload([0], after=READY, into=bad if bad is not None else [99]),
    ):
        with pytest.raises(kvmem.InvalidArgument, match=r"blocks|block|into"):
            call()
    assert free_slots(cache.pool) == 7


@pytest.mark.parametrize("none", [[], (), np.array([], int)], ids=repr)
def test_a_transfer_of_nothing_is_refused(cache: Cache, none: Any) -> None:
    """Public failure 14: an empty list of blocks was handed on as a success."""
    copy = cache.stored(0)
    with pytest.raises(kvmem.InvalidArgument, match="at least one block"):
        cache.manager.offload(none, after=READY)
    with pytest.raises(kvmem.InvalidArgument, match="at least one block"):
        cache.manager.restore(copy, none, after=READY)
    with pytest.raises(kvmem.InvalidArgument, match="into is empty"):
        cache.manager.offload([0], after=READY, into=none)
    assert cache.manager.busy(none) == []


def test_a_restore_into_the_same_block_twice_is_refused_by_number(cache: Cache) -> None:
    copy = cache.stored(0, 1)
    with pytest.raises(kvmem.InvalidArgument, match="device block 3 stands twice"):
        cache.manager.restore(copy, [3, 3], after=READY)


def test_a_restore_of_another_number_of_blocks_is_refused_with_both(cache: Cache) -> None:
    copy = cache.stored(0, 1)
    with pytest.raises(kvmem.InvalidArgument, match="has 2 blocks, the restore names 1"):
        cache.manager.restore(copy, [3], after=READY)


@pytest.mark.parametrize("bad", [None, 3, "x", b"x", [], object()], ids=lambda bad: repr(bad)[:15])
def test_what_is_no_host_copy_is_refused(cache: Cache, bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="not a HostCopy"):
        cache.manager.restore(bad, [0], after=READY)
    with pytest.raises(kvmem.InvalidArgument, match="not a HostCopy"):
        cache.manager.try_restore(bad, [0], after=READY)


# ---- priority and tag


@pytest.mark.parametrize("bad", ["high", "", "Demand", "demand\0"])
def test_a_priority_that_is_none_is_refused(cache: Cache, bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="priority"):
        cache.manager.offload([0], after=READY, priority=bad)


@pytest.mark.parametrize("bad", [None, 3])
def test_a_priority_of_a_wrong_type_is_a_type_error(cache: Cache, bad: Any) -> None:
    with pytest.raises(TypeError):
        cache.manager.offload([0], after=READY, priority=bad)


def test_an_offload_is_background_and_a_restore_demand_unless_said(cache: Cache) -> None:
    copy = cache.stored(0)
    cache.stored(1, priority="demand")
    cache.manager.restore(copy, [2], after=READY).wait(PATIENCE)
    cache.manager.restore(copy, [3], after=READY, priority="background").wait(PATIENCE)
    said = [(each.kind, each.priority) for each in cache.manager.timeline()]
    assert said == [
        ("offload", "background"),
        ("offload", "demand"),
        ("restore", "demand"),
        ("restore", "background"),
    ]


@pytest.mark.parametrize("tag", [0, -5, 2**63 - 1, -(2**63), "", "req-17", "zwölf\0", np.int64(3)])
def test_a_tag_comes_back_in_the_report(cache: Cache, tag: Any) -> None:
    transfer = cache.manager.offload([0], after=READY, tag=tag)
    transfer.wait(PATIENCE)
    (report,) = cache.manager.poll()
    assert report.tag == tag
    assert type(report.tag) is (str if isinstance(tag, str) else int)
    assert (report.id, report.kind, report.state) == (transfer.id, "offload", "done")
    assert report.error == ""


@pytest.mark.parametrize("bad", [2**63, -(2**63) - 1, True, 1.5, b"x", [], (), "\ud800"], ids=ascii)
def test_a_tag_that_is_none_is_refused(cache: Cache, bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="tag"):
        cache.manager.offload([0], after=READY, tag=bad)
    assert cache.manager.stats()["reports_taken"] == 0


# ---- the bounds: None at once, or an error with numbers in time


def bounded(make_cache: MakeCache, bound: str) -> tuple[Cache, Callable[[], None]]:
    """A cache whose `bound` is all taken, and the call that lets it go."""
    options: dict[str, Any] = {
        "pool blocks": {"slots": 2},
        "max_queued_bytes": {"max_queued_bytes": 2 * 4096},
        "max_reports": {"max_reports": 1},
    }[bound]
    cache = make_cache(**options)
    if bound == "pool blocks":
        held = cache.pool.acquire(2)
        return cache, held.release
    stream, gate = cache.stalled_stream()
    tag = 1 if bound == "max_reports" else None
    transfer = cache.manager.offload([0, 1], after=stream, tag=tag)

    def let_go() -> None:
        gate.open()
        transfer.wait(PATIENCE)
        cache.manager.poll()

    return cache, let_go


BOUNDS = ["pool blocks", "max_queued_bytes", "max_reports"]


@pytest.mark.parametrize("bound", BOUNDS)
def test_try_offload_gives_none_at_a_bound(make_cache: MakeCache, bound: str) -> None:
    cache, let_go = bounded(make_cache, bound)
    free = free_slots(cache.pool)
    assert cache.manager.try_offload([2, 3], after=READY, tag=2) is None
    assert free_slots(cache.pool) == free
    let_go()
    transfer = cache.manager.try_offload([2, 3], after=READY, tag=2)
    assert transfer is not None
    transfer.wait(PATIENCE)


@pytest.mark.parametrize(
    ("bound", "wanted"), [("pool blocks", 2), ("max_queued_bytes", 8192), ("max_reports", 1)]
)
def test_offload_times_out_at_a_bound_with_its_numbers(
    make_cache: MakeCache, bound: str, wanted: int
) -> None:
    """Public failure 49: a put into a full store hung, and its key was left half-made."""
    cache, let_go = bounded(make_cache, bound)
    error = kvmem.PoolExhausted if bound == "pool blocks" else kvmem.TimedOut
    free = free_slots(cache.pool)
    for timeout in (0, 0.02):
        with pytest.raises(error, match=bound) as refusal:
            cache.manager.offload([2, 3], after=READY, tag=2, timeout=timeout)
        raised = refusal.value
        assert isinstance(raised, kvmem.AtBound)
        assert (raised.bound, raised.wanted, raised.free) == (bound, wanted, 0)
        assert raised.largest == wanted
    assert free_slots(cache.pool) == free
    assert cache.manager.stats()["waiters"] == cache.pool.stats()["waiters"] == 0
    let_go()
    cache.manager.offload([2, 3], after=READY, tag=2, timeout=PATIENCE).wait(PATIENCE)


@pytest.mark.parametrize("bound", BOUNDS)
def test_offload_waits_at_a_bound(make_cache: MakeCache, bound: str) -> None:
    """Public failure 150: nothing but the GIL held a producer back."""
    cache, let_go = bounded(make_cache, bound)
    cache.fill(2, 50)
    waiting = in_thread(cache.manager.offload, [2, 3], after=READY, tag=2)
    until(lambda: cache.manager.stats()["waiters"] + cache.pool.stats()["waiters"] == 1)
    assert cache.manager.try_offload([4], after=READY, tag=3) is None  # nobody overtakes
    let_go()
    transfer = waiting.result(PATIENCE)
    transfer.wait(PATIENCE)
    assert (transfer.result().blocks[0] == cache.expected(50)).all()


@pytest.mark.parametrize("bound", ["max_queued_bytes", "max_reports"])
def test_restore_meets_its_own_bounds(make_cache: MakeCache, bound: str) -> None:
    options: dict[str, Any] = {bound: 2 * 4096 if bound == "max_queued_bytes" else 1}
    cache = make_cache(**options)
    copy = cache.stored(0, 1)
    stream, gate = cache.stalled_stream()
    first = cache.manager.restore(copy, [4, 5], after=stream, tag=1)
    assert cache.manager.try_restore(copy[0], [6], after=READY, tag=2) is None
    with pytest.raises(kvmem.TimedOut, match=bound):
        cache.manager.restore(copy[0], [6], after=READY, tag=2, timeout=0)
    gate.open()
    first.wait(PATIENCE)
    assert len(cache.manager.poll()) == 1
    cache.manager.restore(copy[0], [6], after=READY, tag=2, timeout=PATIENCE).wait(PATIENCE)


def test_what_can_never_be_accepted_is_a_capacity_error_at_once(make_cache: MakeCache) -> None:
    """Public failure 49: a put into a full store hung, and its key was left half-made."""
    cache = make_cache(slots=2, max_queued_bytes=3 * 4096)
    with pytest.raises(kvmem.CapacityError, match="pool blocks wanted 3, free 2"):
        cache.manager.offload([0, 1, 2], after=READY)
    for call in (cache.manager.offload, cache.manager.try_offload):
        with pytest.raises(kvmem.CapacityError, match="max_queued_bytes wanted 16384") as refusal:
            call([0, 1, 2, 3], after=READY)
        assert (refusal.value.wanted, refusal.value.largest) == (4 * 4096, 3 * 4096)


@pytest.mark.parametrize(
    "bad", [-1, float("nan"), "1", True, [], 10**400], ids=lambda b: repr(b)[:9]
)
def test_a_timeout_that_is_none_is_refused_everywhere(cache: Cache, bad: Any) -> None:
    copy = cache.stored(0)
    transfer = cache.manager.offload([1], after=READY)
    for call in (
        lambda: cache.manager.offload([2], after=READY, timeout=bad),
        lambda: cache.manager.restore(copy, [3], after=READY, timeout=bad),
        lambda: transfer.wait(bad),
        lambda: cache.manager.drain(bad),
        lambda: cache.manager.close(bad),
        lambda: cache.device.stream().synchronize(bad),
    ):
        with pytest.raises(kvmem.InvalidArgument, match="timeout"):
            call()
    assert not cache.manager.closed


# ---- into


def test_into_blocks_that_the_caller_holds(cache: Cache) -> None:
    cache.fill(4, 60)
    with cache.pool.acquire(2) as mine:
        transfer = cache.manager.offload([4, 4], after=READY, into=mine)
        transfer.wait(PATIENCE)
        copy = transfer.result()
        assert (copy.blocks.indices == mine.indices).all()
        assert (mine.gather() == cache.expected(60)).all()
        copy.release()
        assert free_slots(cache.pool) == 6
    assert free_slots(cache.pool) == 8


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_into_indices_of_slots_that_somebody_holds(
    cache: Cache, kind: Callable[[list[int]], Any]
) -> None:
    cache.fill(4, 60)
    with cache.pool.acquire(2) as mine:
        slots = mine.indices.tolist()[::-1]
        transfer = cache.manager.offload([3, 4], after=READY, into=kind(slots))
        transfer.wait(PATIENCE)
        assert (mine[0] == cache.expected(60)).all()


def test_into_holds_the_slots_while_the_copy_is_in_flight(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    mine = cache.pool.acquire(2)
    slots = mine.indices.tolist()
    transfer = cache.manager.offload([3, 4], after=stream, into=slots)
    mine.release()
    assert free_slots(cache.pool) == 6
    del transfer
    gc.collect()
    assert cache.pool.stats()["quarantined_slots"] == 2
    gate.open()
    assert cache.manager.drain(PATIENCE).quiet
    assert free_slots(cache.pool) == 8


def test_into_slots_that_cannot_be_used_is_refused_by_number(cache: Cache) -> None:
    """Public failure 98: a host block of another rank did not exist here."""
    mine = cache.pool.acquire(1)
    slot = int(mine.indices[0])
    two = cache.pool.acquire(2)
    free = next(i for i in range(8) if i != slot and i not in two.indices)
    other = Cache(cache.device)
    for into, words in (
        ([free], f"slot {free} has no owner"),
        ([8], "slot 8 is out of range: the pool has 8"),
        ([-1], "slot -1 is out of range"),
        ([slot, slot], "into has 2 blocks, the transfer 1"),
        (two, "into has 2 blocks, the transfer 1"),
        (other.pool.acquire(1), "another pool"),
        ("x", "into"),
        (3, "into"),
    ):
        with pytest.raises(kvmem.InvalidArgument, match=words):
            cache.manager.offload([0], after=READY, into=into)
    mine.release()
    with pytest.raises(kvmem.AlreadyReleased):
        cache.manager.offload([0], after=READY, into=mine)
    other.finish()


# ---- Busy


def test_a_restore_into_a_block_in_use_is_busy_with_block_and_transfer(cache: Cache) -> None:
    """Public failure 54: a restore without a free device block stopped the engine."""
    copy = cache.stored(0)
    stream, gate = cache.stalled_stream()
    reading = cache.manager.offload([5, 6], after=stream)
    assert sorted(cache.manager.busy([4, 5, 6])) == [5, 6]
    with pytest.raises(kvmem.Busy, match=f"device block 6 .* transfer {reading.id}") as refusal:
        cache.manager.restore(copy, [6], after=READY)
    assert (refusal.value.block, refusal.value.transfer) == (6, reading.id)
    gate.open()
    reading.wait(PATIENCE)
    assert cache.manager.busy([5, 6]) == []
    cache.manager.restore(copy, [6], after=READY).wait(PATIENCE)


def test_an_offload_of_a_block_that_is_being_written_is_busy(cache: Cache) -> None:
    copy = cache.stored(0)
    stream, gate = cache.stalled_stream()
    writing = cache.manager.restore(copy, [5], after=stream)
    assert cache.manager.stats()["restoration_slots"] == 1
    for call in (cache.manager.offload, cache.manager.try_offload):
        with pytest.raises(kvmem.Busy) as refusal:
            call([4, 5], after=READY)
        assert (refusal.value.block, refusal.value.transfer) == (5, writing.id)
    assert free_slots(cache.pool) == 7
    gate.open()
    writing.wait(PATIENCE)
    assert cache.manager.stats()["restoration_slots"] == 0


def test_offloads_of_the_same_block_are_not_busy(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    first = cache.manager.offload([5], after=stream)
    second = cache.manager.offload([5], after=READY)
    second.wait(PATIENCE)
    gate.open()
    first.wait(PATIENCE)


def test_a_transfer_named_in_after_is_not_in_the_way(cache: Cache) -> None:
    cache.fill(0, 70)
    copy = cache.stored(0)
    cache.fill(5, 90)
    stream, gate = cache.stalled_stream()
    reading = cache.manager.offload([5], after=stream)
    writing = cache.manager.restore(copy, [5], after=reading)
    again = cache.manager.offload([5], after=[writing], priority="demand")
    gate.open()
    again.wait(PATIENCE)
    assert (reading.result().blocks[0] == cache.expected(90)).all()
    assert (again.result().blocks[0] == cache.expected(70)).all()


# ---- poll


def test_only_tagged_transfers_are_reported_and_each_once(cache: Cache) -> None:
    copy = cache.stored(0)
    cache.stored(1, tag="a")
    cache.manager.restore(copy, [2], after=READY, tag=7).wait(PATIENCE)
    reports = cache.manager.poll()
    assert [(each.tag, each.kind, each.state) for each in reports] == [
        ("a", "offload", "done"),
        (7, "restore", "done"),
    ]
    assert repr(reports[0]) == f"Report(id={reports[0].id}, kind=offload, state=done)"
    assert cache.manager.poll() == []


def test_a_dropped_handle_is_reported_too_and_its_blocks_go_home(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    cache.manager.offload([0, 1], after=stream, tag="dropped")
    gc.collect()
    assert cache.pool.stats()["quarantined_slots"] == 2
    assert cache.manager.poll() == []
    gate.open()
    assert cache.manager.drain(PATIENCE).quiet
    (report,) = cache.manager.poll()
    assert (report.tag, report.state) == ("dropped", "done")
    assert free_slots(cache.pool) == 8


def test_a_cancelled_transfer_is_reported_once(cache: Cache) -> None:
    """Public failure 25: the end of a cancelled transfer was filtered out."""
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream, tag=1)
    transfer.cancel()
    transfer.cancel()
    gate.open()
    assert cache.manager.drain(PATIENCE).quiet
    assert [(each.tag, each.state) for each in cache.manager.poll()] == [(1, "cancelled")]
    assert cache.manager.poll() == []


def test_poll_drives_a_manager_without_a_reaper(make_cache: MakeCache) -> None:
    cache = make_cache(reaper=False)
    cache.fill(0, 80)
    transfer = cache.manager.offload([0], after=READY, tag=3)
    reports: list[kvmem.Report] = []
    until(lambda: reports.extend(cache.manager.poll()) or reports)
    assert transfer.done()
    assert (transfer.result().blocks[0] == cache.expected(80)).all()


# ---- drain, rebind, close


def test_drain_says_whether_it_came_to_that(cache: Cache) -> None:
    """Public failure 131: a wait had no limit."""
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    report = cache.manager.drain(0)
    assert (report.quiet, report.cancelled, report.in_flight) == (False, 0, 1)
    assert report.slots["held_slots"] == 1
    assert cache.manager.drain(timeout=0.01).quiet is False
    gate.open()
    report = cache.manager.drain(PATIENCE)
    assert (report.quiet, report.in_flight) == (True, 0)
    assert transfer.done()
    assert not cache.manager.closed
    cache.manager.offload([0], after=READY).wait(PATIENCE)


def test_rebind_swaps_the_addresses(cache: Cache) -> None:
    cache.fill(3, 11)
    copy = cache.stored(3)
    moved = [np.zeros_like(array) for array in cache.arrays]
    cache.manager.rebind(kvmem.KVLayout.from_arrays(moved, memory=cache.device.name))
    cache.manager.restore(copy, [6], after=READY).wait(PATIENCE)
    assert [(array[6] == 11 + layer).all() for layer, array in enumerate(moved)] == [True, True]
    assert not any(array[6].any() for array in cache.arrays)


def test_rebind_while_something_is_unfinished_is_busy(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([4], after=stream)
    with pytest.raises(kvmem.Busy, match="drained") as refusal:
        cache.manager.rebind(cache.layout)
    assert (refusal.value.block, refusal.value.transfer) == (4, transfer.id)
    gate.open()
    cache.manager.drain(PATIENCE)
    cache.manager.rebind(cache.layout)


@pytest.mark.parametrize(
    ("shape", "layers", "differing"),
    [
        ((8, 2048), 1, ["regions: 2 and 1"]),
        ((7, 2048), 2, ["block_count: 8 and 7"]),
        (
            (8, 1024),
            2,
            [
                "region 0.*payload_bytes.*2048.* and 1024",
                "region 1.*payload_bytes.*2048.* and 1024",
            ],
        ),
    ],
)
def test_rebind_to_another_geometry_is_incompatible_and_lists_what_differs(
    cache: Cache, shape: tuple[int, int], layers: int, differing: list[str]
) -> None:
    arrays = [np.zeros(shape, np.uint8) for _ in range(layers)]
    with pytest.raises(kvmem.Incompatible, match=differing[0]) as refusal:
        cache.manager.rebind(kvmem.KVLayout.from_arrays(arrays, memory=cache.device.name))
    fields = refusal.value.fields
    assert len(fields) == len(differing)
    for field, pattern in zip(fields, differing, strict=True):
        assert re.search(pattern, field)


@pytest.mark.parametrize("bad", [None, 3, "x"])
def test_rebind_to_what_is_no_layout_is_a_type_error(cache: Cache, bad: Any) -> None:
    with pytest.raises(TypeError):
        cache.manager.rebind(bad)


@pytest.mark.host_only("a thread that waits passes the time-outs of virtual time at once")
def test_close_waits_for_the_old_work(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    closing = in_thread(cache.manager.close, PATIENCE)
    until(lambda: cache.manager.closed)
    assert not closing.done()
    gate.open()
    report = closing.result(PATIENCE)
    assert (report.quiet, report.cancelled, report.in_flight) == (True, 0, 0)
    assert transfer.state == "done"
    assert repr(report) == "CloseReport(quiet=True, cancelled=0, in_flight=0)"


def test_close_cancels_at_the_deadline_and_reports_what_is_left(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    begun = cache.manager.offload([0], after=READY)
    begun.wait(PATIENCE)
    stalled = cache.manager.offload([0, 1], after=stream)
    report = cache.manager.close(timeout=0.01)
    assert not report.quiet
    assert report.cancelled == 1
    assert report.in_flight == cache.manager.stats()["offload"]["active"]
    gate.open()
    with pytest.raises(kvmem.Cancelled):
        stalled.wait(PATIENCE)
    assert cache.manager.close().quiet


def test_a_closed_manager_takes_nothing_and_answers_questions(cache: Cache) -> None:
    cache.fill(0, 12)
    copy = cache.stored(0, tag=1)
    assert cache.manager.close().quiet
    assert cache.manager.close().quiet
    assert cache.manager.closed
    for call in (
        lambda: cache.manager.offload([0], after=READY),
        lambda: cache.manager.try_offload([0], after=READY),
        lambda: cache.manager.restore(copy, [0], after=READY),
        lambda: cache.manager.try_restore(copy, [0], after=READY),
        lambda: cache.manager.rebind(cache.layout),
    ):
        with pytest.raises(kvmem.Closed):
            call()
    assert [report.tag for report in cache.manager.poll()] == [1]
    assert cache.manager.busy([0]) == []
    assert cache.manager.stats()["offload"]["done"] == 1
    assert len(cache.manager.timeline()) == 1
    assert cache.manager.drain().quiet
    assert (copy.blocks[0] == cache.expected(12)).all()


@pytest.mark.host_only("a thread that waits passes the time-outs of virtual time at once")
def test_closing_tells_those_who_wait_at_a_bound(make_cache: MakeCache) -> None:
    cache = make_cache(max_queued_bytes=4096)
    stream, gate = cache.stalled_stream()
    cache.manager.offload([0], after=stream)
    waiting = in_thread(cache.manager.offload, [1], after=READY)
    until(lambda: cache.manager.stats()["waiters"] == 1)
    closing = in_thread(cache.manager.close)
    with pytest.raises(kvmem.Closed):
        waiting.result(PATIENCE)
    gate.open()
    assert closing.result(PATIENCE).quiet
    assert free_slots(cache.pool) == 8


def test_a_manager_is_a_context_manager(cache: Cache) -> None:
    with kvmem.Manager(cache.device, cache.layout, cache.pool) as manager:
        transfer = manager.offload([0], after=READY)
    assert manager.closed
    assert transfer.state == "done"
    with (
        pytest.raises(ZeroDivisionError),
        kvmem.Manager(cache.device, cache.layout, cache.pool) as manager,
    ):
        raise ZeroDivisionError
    assert manager.closed


def test_a_manager_dropped_with_transfers_alive_loses_nothing(cache: Cache) -> None:
    cache.fill(2, 33)
    stream, gate = cache.stalled_stream()
    manager = kvmem.Manager(cache.device, cache.layout, cache.pool)
    gone = weakref.ref(manager)
    kept = manager.offload([2], after=stream)
    manager.offload([3], after=stream)  # dropped at once
    del manager
    gc.collect()
    assert gone() is None
    gate.open()
    kept.wait(PATIENCE)
    assert (kept.result().blocks[0] == cache.expected(33)).all()
    until(lambda: free_slots(cache.pool) == 7)


def test_managers_share_a_device_and_a_pool(cache: Cache) -> None:
    other = kvmem.Manager(cache.device, cache.layout, cache.pool)
    cache.fill(1, 44)
    copy = cache.stored(1)
    other.restore(copy, [6], after=READY).wait(PATIENCE)
    assert cache.holds(6, 44)
    assert other.close().quiet


def test_a_copy_of_another_pool_is_refused(cache: Cache) -> None:
    other = Cache(cache.device)
    with pytest.raises(kvmem.InvalidArgument, match="another pool"):
        cache.manager.restore(other.stored(0), [0], after=READY)
    other.finish()


# ---- statistics


def test_the_statistics_count_exactly_what_happened(cache: Cache) -> None:
    """Public failure 138: a counter stayed at zero."""
    copy = cache.stored(0, 1, 2)
    cache.stored(3, tag=1)
    cache.manager.restore(copy[:2], [4, 5], after=READY).wait(PATIENCE)
    stream, gate = cache.stalled_stream()
    cache.manager.offload([6], after=stream).cancel()
    gate.open()
    assert cache.manager.drain(PATIENCE).quiet
    stats: Any = cache.manager.stats()
    for direction in ("offload", "restore"):
        for measured in ("queue_delay_total_us", "queue_delay_max_us", "guard_wait_total_us"):
            assert stats[direction].pop(measured) >= 0
    quiet = {
        "failed": 0,
        "active": 0,
        "waiting": 0,
        "bytes_staged": 0,
        "queued_bytes": 0,
        "window_bytes": 0,
        "window_descriptors": 0,
        "lanes_owned": 0,
    }
    assert stats == {
        "offload": quiet
        | {"accepted": 3, "done": 2, "cancelled": 1, "blocks_done": 4, "bytes_done": 4 * 4096},
        "restore": quiet
        | {"accepted": 1, "done": 1, "cancelled": 0, "blocks_done": 2, "bytes_done": 2 * 4096},
        "restoration_slots": 0,
        "reports_waiting": 1,
        "reports_taken": 1,
        "waiters": 0,
        "smallest_segment_bytes": 2048,
        "checksum": {
            "blocks_summed": 0,
            "blocks_verified": 0,
            "blocks_corrupt": 0,
            "busy_total_us": 0,
            "waiting": 0,
        },
    }


def test_the_statistics_show_what_is_in_flight(cache: Cache) -> None:
    copy = cache.stored(0)
    stream, gate = cache.stalled_stream()
    cache.manager.offload([1, 2], after=stream, tag=1)
    cache.manager.restore(copy, [3], after=stream)
    stats = cache.manager.stats()
    assert (stats["offload"]["active"], stats["restore"]["active"]) == (1, 1)
    assert (stats["offload"]["queued_bytes"], stats["restore"]["queued_bytes"]) == (8192, 4096)
    assert stats["restoration_slots"] == 1
    assert (stats["reports_taken"], stats["reports_waiting"]) == (1, 0)
    gate.open()
    assert cache.manager.drain(PATIENCE).quiet


def test_block_ids_may_be_made_as_they_are_asked_for() -> None:
    # A range makes each item anew. The debug allocator fills what is freed, so that one that is
    # looked at too late is seen.
    program = """
import kvmem
device = kvmem.open_device("virtual", move_bytes=False)
layout = kvmem.KVLayout([kvmem.Region(4096, 4096, 4096, 2000, memory="virtual")])
with kvmem.Manager(device, layout, host_bytes="8MiB") as manager:
    manager.offload(range(300, 1300), after=kvmem.READY).wait()
"""
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONMALLOC": "debug"},
        check=True,
        timeout=60,
    )
