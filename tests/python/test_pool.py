"""BlockPool and HostBlocks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmem
from kvmem.testing import now, stall
from support import PATIENCE, Cache, free_slots, in_thread, until

MakePool = Callable[..., kvmem.BlockPool]

NOT_COUNTS = [0, -1, True, 1.0, float("nan"), 2**63, 2**64, "1", None, np.True_]
NOT_SIZES = [*NOT_COUNTS[:-3], None, [], "", "x", "8XB", "1.5B", "-1", "0", "9" * 5000, "1e3"]
NOT_TIMEOUTS = [-1, -0.5, float("nan"), float("-inf"), True, "1", [], 10**400, np.zeros(1)]


# ---- making one


def test_capacity_is_cut_into_slots_of_whole_pages(device: kvmem.Device) -> None:
    """Public failure 73: sizes were rounded up to a power of two.
    Public failure 94: a pool size that is no multiple of the chunk stopped the start.
    """
    pool = kvmem.BlockPool(device, block_bytes=5000, capacity_bytes=8192 * 3 + 100)
    assert (pool.block_bytes, pool.slot_bytes, pool.capacity) == (5000, 8192, 3)
    stats = pool.stats()
    assert stats["padding_bytes"] == 3 * (8192 - 5000)
    assert stats["region_bytes"] == 3 * 8192


@pytest.mark.parametrize("size", ["16KiB", "16 kib", 16384, np.int64(16384), "16384", "16384B"])
def test_sizes_are_integers_or_strings_with_units(device: kvmem.Device, size: Any) -> None:
    assert kvmem.BlockPool(device, block_bytes="4KiB", capacity_bytes=size).capacity == 4


@pytest.mark.parametrize("bad", NOT_SIZES, ids=lambda bad: repr(bad)[:20])
@pytest.mark.parametrize("name", ["block_bytes", "capacity_bytes"])
def test_a_size_that_is_none_is_refused_by_name_and_value(
    device: kvmem.Device, name: str, bad: Any
) -> None:
    """Public failure 174: a size of zero was accepted."""
    sizes = {"block_bytes": 4096, "capacity_bytes": 16384, name: bad}
    with pytest.raises(kvmem.InvalidArgument, match=name) as refusal:
        kvmem.BlockPool(device, **sizes)
    if len(repr(bad)) < 30:
        assert str(bad) in str(refusal.value) or repr(bad) in str(refusal.value)


def test_what_an_index_raises_comes_through(device: kvmem.Device) -> None:
    class Broken:
        def __index__(self) -> int:
            raise ZeroDivisionError("no index today")

    with pytest.raises(ZeroDivisionError, match="no index today"):
        kvmem.BlockPool(device, block_bytes=Broken(), capacity_bytes=16384)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("pin", "sometimes"), ("hugepages", "maybe"), ("numa_node", 4096), ("numa_node", -1)],
)
def test_an_option_that_is_none_is_refused_by_value(
    device: kvmem.Device, name: str, bad: Any
) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=str(bad)):
        kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=4096, **{name: bad})


@pytest.mark.parametrize("name", ["pin", "hugepages", "numa_node", "progress", "device"])
def test_an_option_of_a_wrong_type_is_a_type_error(device: kvmem.Device, name: str) -> None:
    options: dict[str, Any] = {"device": device, "block_bytes": 4096, "capacity_bytes": 4096}
    with pytest.raises(TypeError):
        kvmem.BlockPool(**{**options, name: 1.5})


def test_less_than_one_slot_is_a_capacity_error_with_numbers(device: kvmem.Device) -> None:
    """Public failure 94: a pool size that is no multiple of the chunk stopped the start."""
    with pytest.raises(kvmem.CapacityError, match="capacity_bytes") as refusal:
        kvmem.BlockPool(device, block_bytes=5000, capacity_bytes=8191)
    assert refusal.value.bound == "capacity_bytes"
    assert (refusal.value.wanted, refusal.value.largest) == (8192, 8191)


def test_more_than_the_machine_has_is_refused_before_any_page_is_touched(
    device: kvmem.Device,
) -> None:
    """Public failure 62: the limit of the container was not looked at."""
    touched: list[int] = []
    with pytest.raises(kvmem.CapacityError, match=r"wanted 1099511627776, free \d+") as refusal:
        kvmem.BlockPool(
            device,
            block_bytes="1GiB",
            capacity_bytes="1TiB",
            progress=lambda done, _: touched.append(done),
        )
    assert refusal.value.wanted == 2**40
    assert not touched


def test_progress_is_told_until_everything_is_touched(device: kvmem.Device) -> None:
    told: list[tuple[int, int]] = []
    kvmem.BlockPool(
        device,
        block_bytes=4096,
        capacity_bytes="64MiB",
        progress=lambda done, size: told.append((done, size)),
    )
    done = [each for each, _ in told]
    assert done == sorted(done)
    assert told[-1] == (2**26, 2**26)


@pytest.fixture
def lockable(device: kvmem.Device) -> kvmem.Device:
    """A device on which a few pages can be pinned."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if os.geteuid() != 0 and soft not in (resource.RLIM_INFINITY,) and soft < 2**16:
        pytest.skip(f"RLIMIT_MEMLOCK is {soft}")
    return device


def test_progress_counts_each_byte_again_when_it_is_pinned(lockable: kvmem.Device) -> None:
    told: list[tuple[int, int]] = []
    pool = kvmem.BlockPool(
        lockable,
        block_bytes=4096,
        capacity_bytes=16384,
        pin="required",
        progress=lambda done, size: told.append((done, size)),
    )
    assert told == [(16384, 32768), (32768, 32768)]
    assert pool.pinned
    assert pool.stats()["pinned_bytes"] == 16384


def test_progress_that_returns_false_while_pinning_cancels(lockable: kvmem.Device) -> None:
    with pytest.raises(kvmem.Cancelled, match="pinning"):
        kvmem.BlockPool(
            lockable,
            block_bytes=4096,
            capacity_bytes=16384,
            pin="required",
            progress=lambda done, size: done <= size / 2,
        )


def test_a_pool_pins_in_the_background_while_it_is_in_use(lockable: kvmem.Device) -> None:
    pool = kvmem.BlockPool(lockable, block_bytes=4096, capacity_bytes=16384, pin="background")
    with pool.acquire(4) as blocks:
        blocks[3][:] = 7
        until(lambda: pool.pinned, "the end of pinning")
        assert pool.stats()["pinned_bytes"] == pool.stats()["region_bytes"] == 16384
        assert pool.stats()["pin_error"] is None
        assert (blocks[3] == 7).all()


def test_pin_gbps_makes_chunks_small_and_pauses_between_them(lockable: kvmem.Device) -> None:
    """Four seconds from one slot to the next, and nobody waits for them: it would be one chunk."""
    pool = kvmem.BlockPool(
        lockable, block_bytes=4096, capacity_bytes=16384, pin="background", pin_gbps=1e-6
    )
    until(lambda: pool.stats()["pinned_bytes"], "the first chunk")
    assert 0 < pool.stats()["pinned_bytes"] < 16384
    assert not pool.pinned
    pool.close()


@pytest.mark.parametrize("bad", [0, -1, True, "1", float("nan"), float("inf"), 1e-7, 10**400])
def test_a_pin_gbps_that_is_no_speed_is_refused_by_name(device: kvmem.Device, bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="pin_gbps"):
        kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=4096, pin_gbps=bad)


def test_progress_that_returns_false_cancels(device: kvmem.Device) -> None:
    with pytest.raises(kvmem.Cancelled):
        kvmem.BlockPool(device, block_bytes=4096, capacity_bytes="1MiB", progress=lambda *_: False)


def test_what_progress_raises_comes_through(device: kvmem.Device) -> None:
    def broken(done: int, size: int) -> None:
        raise KeyError(done)

    with pytest.raises(KeyError):
        kvmem.BlockPool(device, block_bytes=4096, capacity_bytes="1MiB", progress=broken)


def test_a_shared_pool_works_like_a_private_one(device: kvmem.Device) -> None:
    pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=8192, shared=True)
    blocks = pool.acquire(2)
    blocks[1][:] = 9
    assert (blocks.gather()[1] == 9).all()


# ---- acquiring


def test_try_acquire_gives_none_when_too_few_are_free(pool: kvmem.BlockPool) -> None:
    held = pool.try_acquire(3)
    assert held is not None
    assert pool.try_acquire(2) is None
    assert pool.stats()["refused"] == 1
    assert pool.try_acquire(1) is not None


def test_try_acquire_of_more_than_there_is_gives_none(pool: kvmem.BlockPool) -> None:
    assert pool.try_acquire(5) is None
    assert pool.try_acquire(2**62) is None


@pytest.mark.parametrize("bad", NOT_COUNTS, ids=repr)
def test_a_count_that_is_none_is_refused(pool: kvmem.BlockPool, bad: Any) -> None:
    for call in (pool.try_acquire, pool.acquire, lambda n: asyncio.run(pool.acquire_async(n))):
        with pytest.raises(kvmem.InvalidArgument, match="count"):
            call(bad)
    assert free_slots(pool) == 4


@pytest.mark.parametrize("bad", NOT_TIMEOUTS, ids=lambda bad: repr(bad)[:20])
def test_a_timeout_that_is_none_is_refused(pool: kvmem.BlockPool, bad: Any) -> None:
    """Public failure 174: a size of zero was accepted."""
    with pytest.raises(kvmem.InvalidArgument, match="timeout"):
        pool.acquire(1, timeout=bad)
    assert free_slots(pool) == 4


@pytest.mark.parametrize("good", [None, 0, 0.0, 1, float("inf"), 1e300, np.float32(1), np.int64(1)])
def test_a_timeout_is_any_number_of_seconds(pool: kvmem.BlockPool, good: Any) -> None:
    assert len(pool.acquire(1, timeout=good)) == 1


def test_counts_may_be_numpy_integers(pool: kvmem.BlockPool) -> None:
    assert len(pool.acquire(np.uint8(2))) == 2


def test_more_than_the_pool_has_is_a_capacity_error_at_once(pool: kvmem.BlockPool) -> None:
    held = pool.acquire(3)
    with pytest.raises(
        kvmem.CapacityError, match="wanted 5, free 1, largest possible 4"
    ) as refusal:
        pool.acquire(5)
    error = refusal.value
    assert (error.wanted, error.free, error.largest, error.held) == (5, 1, 4, len(held))
    with pytest.raises(kvmem.CapacityError):
        asyncio.run(pool.acquire_async(5))


def test_a_timeout_is_pool_exhausted_with_numbers_and_comes_in_time(
    device: kvmem.Device, pool: kvmem.BlockPool
) -> None:
    """Public failure 46: an allocation was tried again for ever."""
    held = pool.acquire(3)
    started = now(device)
    with pytest.raises(kvmem.PoolExhausted, match="wanted 2, free 1") as refusal:
        pool.acquire(2, timeout=0.2)
    assert 0.2 <= now(device) - started < 1.0
    error = refusal.value
    assert (error.bound, error.wanted, error.free, error.held) == ("pool blocks", 2, 1, len(held))
    assert isinstance(error, kvmem.AtBound)
    assert pool.stats()["waiters"] == 0


def test_a_timeout_of_zero_does_not_wait_and_does_not_stay_in_the_queue(
    pool: kvmem.BlockPool,
) -> None:
    held = pool.acquire(4)
    with pytest.raises(kvmem.PoolExhausted):
        pool.acquire(1, timeout=0)
    held.release()
    assert pool.try_acquire(4) is not None


@pytest.mark.host_only("a thread that waits passes the time-outs of virtual time at once")
def test_threads_are_served_first_come_first_served(pool: kvmem.BlockPool) -> None:
    held = [pool.acquire(1) for _ in range(4)]
    order: list[int] = []

    def wait(number: int, count: int) -> None:
        with pool.acquire(count, timeout=PATIENCE):
            order.append(number)

    waiting = []
    for number, count in enumerate([3, 1, 2]):  # the first wants most and is not overtaken
        waiting.append(in_thread(wait, number, count))
        until(lambda n=number: pool.stats()["waiters"] == n + 1)
    held.pop().release()
    held.pop().release()
    assert pool.try_acquire(1) is None  # nobody overtakes those who wait
    assert order == []
    held.pop().release()
    for each in waiting:
        each.result(PATIENCE)
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]


def test_tasks_are_served_first_come_first_served(pool: kvmem.BlockPool) -> None:
    async def main() -> list[int]:
        held = await pool.acquire_async(4)
        order: list[int] = []

        async def wait(number: int, count: int) -> None:
            with await pool.acquire_async(count):
                order.append(number)

        waiting = []
        for number, count in enumerate([4, 1, 2]):
            waiting.append(asyncio.create_task(wait(number, count)))
            while pool.stats()["waiters"] <= number:
                await asyncio.sleep(0)
        held.release()
        await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE)
        return order

    order = asyncio.run(main())
    assert order[0] == 0
    assert sorted(order) == [0, 1, 2]
    assert free_slots(pool) == 4


@pytest.mark.parametrize("when", ["while it waits", "after it was granted"])
def test_cancelling_an_awaiting_task_loses_nothing(pool: kvmem.BlockPool, when: str) -> None:
    async def main() -> None:
        held = await pool.acquire_async(3)
        task = asyncio.create_task(pool.acquire_async(2))
        while pool.stats()["waiters"] == 0:
            await asyncio.sleep(0)
        if when == "after it was granted":
            held.release()  # the loop has not looked yet
        task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(error, asyncio.CancelledError)
        held = held if not held.released else pool.acquire(3, timeout=0)
        assert pool.stats()["waiters"] == 0
        assert pool.try_acquire(1) is not None, "the cancelled task stands in the queue"
        held.release()
        # The task and the error with its traceback are alive here, as in a log of failures.
        assert free_slots(pool) == 4
        assert task.cancelled()
        assert error is not None

    asyncio.run(main())


# ---- what is held


def test_indices_are_the_rows_of_the_array(pool: kvmem.BlockPool) -> None:
    """Public failure 41: a returned handle was a view of a list that another thread rebuilt."""
    blocks = pool.acquire(3)
    assert blocks.indices.dtype == np.int64
    assert len(set(blocks.indices.tolist())) == len(blocks) == 3
    for i, slot in enumerate(blocks.indices):
        blocks[i][:] = 10 + i
        assert (pool.array[slot] == 10 + i).all()
    blocks.indices[:] = 99  # a copy
    assert 99 not in blocks.indices


def test_the_array_is_a_view_of_the_arena_with_the_slots_as_row_stride(
    make_pool: MakePool,
) -> None:
    """Public failure 108: buffers were less aligned than they claimed."""
    pool = make_pool(slots=3, block_bytes=5000)
    array = pool.array
    assert (array.shape, array.strides, array.dtype) == ((3, 5000), (8192, 1), np.uint8)
    assert array.flags.writeable
    assert not array.flags.owndata
    assert array.ctypes.data % 4096 == 0
    assert array.ctypes.data == pool.array.ctypes.data


def test_the_array_keeps_the_pool_alive(make_pool: MakePool) -> None:
    pool = make_pool(slots=2)
    gone = weakref.ref(pool)
    array = pool.array
    array[1] = 7
    del pool
    gc.collect()
    assert gone() is not None
    assert (array[1] == 7).all()
    del array
    gc.collect()
    assert gone() is None


def test_blocks_keep_their_memory_when_the_pool_is_dropped(make_pool: MakePool) -> None:
    pool = make_pool(slots=2)
    blocks = pool.acquire(1)
    del pool
    gc.collect()
    blocks[0][:] = 3
    assert (blocks.gather() == 3).all()


def test_a_view_holds_its_block_and_no_other(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(2)
    view = blocks[1]
    part = view[10:20]
    blocks.release()
    assert free_slots(pool) == 3
    part[:] = 5
    del view
    gc.collect()
    assert free_slots(pool) == 3
    assert pool.try_acquire(4) is None
    del part
    gc.collect()
    assert free_slots(pool) == 4


@pytest.mark.parametrize("bad", [2, -3, 2**70, -(2**70)])
def test_an_index_out_of_range_is_an_index_error(pool: kvmem.BlockPool, bad: int) -> None:
    with pytest.raises(IndexError):
        pool.acquire(2)[bad]


@pytest.mark.parametrize("bad", ["0", 0.0, None, slice("0", 1)])
def test_an_index_of_a_wrong_type_is_a_type_error(pool: kvmem.BlockPool, bad: Any) -> None:
    with pytest.raises(TypeError):
        pool.acquire(2)[bad]


def test_an_index_may_be_negative_or_of_numpy(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(2)
    blocks[1][:] = 8
    assert (blocks[-1] == 8).all()
    assert (blocks[np.int32(1)] == 8).all()


def test_gather_is_a_copy(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(2)
    blocks[0][:], blocks[1][:] = 1, 2
    copy = blocks.gather()
    blocks[0][:] = 9
    assert (copy.shape, copy[0, 0], copy[1, 0]) == ((2, 4096), 1, 2)


def test_gather_fills_the_array_that_is_given(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(2)
    blocks[0][:], blocks[1][:] = 1, 2
    out = np.zeros((2, 4096), np.uint8)
    assert blocks.gather(out=out) is out
    assert (out[:, 5] == [1, 2]).all()


def read_only() -> np.ndarray[Any, Any]:
    array = np.zeros((2, 4096), np.uint8)
    array.setflags(write=False)
    return array


@pytest.mark.parametrize(
    "bad",
    [
        3,
        [[0]],
        np.zeros((2, 4096), np.int8),
        np.zeros((2, 4095), np.uint8),
        np.zeros((3, 4096), np.uint8),
        np.zeros(8192, np.uint8),
        np.zeros((2, 4096), np.uint8, order="F"),
        np.zeros((2, 8192), np.uint8)[:, ::2],
        read_only(),
    ],
    ids=lambda bad: repr(bad)[:30],
)
def test_gather_refuses_an_array_that_does_not_fit(pool: kvmem.BlockPool, bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="out"):
        pool.acquire(2).gather(out=bad)


def test_gather_holds_the_blocks_that_another_thread_releases_meanwhile(
    make_pool: MakePool,
) -> None:
    pool = make_pool(slots=16, block_bytes=8 << 20)
    for _ in range(5):
        blocks = pool.acquire(16)
        pool.array[:] = 6
        began = threading.Event()

        def gather(held: kvmem.HostBlocks = blocks, began: threading.Event = began) -> Any:
            began.set()
            return held.gather()

        gathered = in_thread(gather)
        began.wait(PATIENCE)
        blocks.release()
        with contextlib.suppress(kvmem.AlreadyReleased):  # the release came first
            assert (gathered.result(PATIENCE) == 6).all()
        until(lambda: free_slots(pool) == 16)


def test_a_share_is_a_second_holder(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(3)
    second = blocks.share()
    assert (second.indices == blocks.indices).all()
    blocks.release()
    assert free_slots(pool) == 1
    second.release()
    assert free_slots(pool) == 4


# ---- letting go


def test_a_second_release_raises_and_changes_nothing(pool: kvmem.BlockPool) -> None:
    """Public failure 35: a second release freed the data of others."""
    blocks, other = pool.acquire(2), pool.acquire(1)
    blocks.release()
    again = pool.acquire(2)
    with pytest.raises(kvmem.AlreadyReleased):
        blocks.release()
    assert free_slots(pool) == 1
    assert not again.released
    assert not other.released


def test_released_blocks_cannot_be_used(pool: kvmem.BlockPool, stream: kvmem.Stream) -> None:
    blocks = pool.acquire(1)
    blocks.release()
    assert blocks.released
    assert len(blocks) == 0
    for use in (
        lambda: blocks.indices,
        lambda: blocks[0],
        blocks.gather,
        blocks.share,
        lambda: blocks.release(after=stream),
    ):
        with pytest.raises(kvmem.AlreadyReleased):
            use()


def test_blocks_are_released_once_when_two_threads_release_them(pool: kvmem.BlockPool) -> None:
    """Public failure 35: a second release freed the data of others."""
    for _ in range(200):
        blocks = pool.acquire(4)
        together = threading.Barrier(2)

        def release(
            held: kvmem.HostBlocks = blocks, together: threading.Barrier = together
        ) -> bool:
            together.wait(PATIENCE)
            try:
                held.release()
            except kvmem.AlreadyReleased:
                return False
            return True

        released = [in_thread(release), in_thread(release)]
        assert sorted(each.result(PATIENCE) for each in released) == [False, True]
        assert free_slots(pool) == 4


def test_blocks_are_a_context_manager(pool: kvmem.BlockPool) -> None:
    with pool.acquire(2) as blocks:
        assert free_slots(pool) == 2
    assert blocks.released
    with pytest.raises(ZeroDivisionError), pool.acquire(2):
        raise ZeroDivisionError
    with pool.acquire(2) as blocks:
        blocks.release()  # leaving does not release again
    assert free_slots(pool) == 4


def test_dropped_blocks_go_home(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(4)
    del blocks
    gc.collect()
    assert free_slots(pool) == 4


# ---- release(after=)


def advance(stream: kvmem.Stream) -> None:
    """Whoever waits reaps; there is no manager and so no reaper here."""
    stream.synchronize(PATIENCE)


@pytest.mark.parametrize("form", ["stream", "handle", "event", "list", "both"])
def test_release_after_keeps_the_blocks_until_the_device_is_there(
    device: kvmem.Device, pool: kvmem.BlockPool, form: str
) -> None:
    """Public failure 12: a deallocation took a stream and ignored it.
    Public failure 53: a full pool did not say what kept it full.
    """
    stream = device.stream()
    blocks = pool.acquire(3)
    with stall(device, stream):
        after: dict[str, Any] = {
            "stream": stream,
            "handle": stream.handle,
            "event": stream.record(),
            "list": [stream],
            "both": [device.stream(), stream.record()],
        }
        blocks.release(after=after[form])
        assert blocks.released
        stats = pool.stats()
        assert (stats["quarantined_slots"], stats["free_slots"]) == (3, 1)
        with pytest.raises(kvmem.PoolExhausted) as refusal:
            pool.acquire(2, timeout=0)
        assert refusal.value.quarantined == 3
    assert len(pool.acquire(4, timeout=PATIENCE)) == 4


def test_release_after_what_is_already_reached_is_a_release(
    pool: kvmem.BlockPool, stream: kvmem.Stream
) -> None:
    event = stream.record()
    until(event.done)
    pool.acquire(4).release(after=event)
    assert free_slots(pool) == 4
    pool.acquire(4).release(after=kvmem.READY)
    assert free_slots(pool) == 4


def test_release_after_gives_only_this_holder_back(
    device: kvmem.Device, pool: kvmem.BlockPool
) -> None:
    stream = device.stream()
    blocks = pool.acquire(2)
    second = blocks.share()
    with stall(device, stream):
        blocks.release(after=stream)
        assert pool.stats()["quarantined_slots"] == 0
        second.release()
        assert pool.stats()["quarantined_slots"] == 2
    advance(stream)
    until(lambda: (advance(stream), free_slots(pool) == 4)[1])


@pytest.mark.parametrize(
    "bad", [[], "x", 3, -1, 2**64, 1.5, True, object(), [[]], b"x"], ids=lambda bad: repr(bad)[:20]
)
def test_release_after_nonsense_is_refused_and_releases_nothing(
    pool: kvmem.BlockPool, bad: Any
) -> None:
    blocks = pool.acquire(2)
    with pytest.raises(kvmem.InvalidArgument, match=r"after|stream"):
        blocks.release(after=bad)
    assert not blocks.released
    assert free_slots(pool) == 2


def test_release_after_a_transfer_is_refused(cache: Cache) -> None:
    transfer = cache.manager.offload([0], after=kvmem.READY)
    blocks = cache.pool.acquire(1)
    with pytest.raises(kvmem.InvalidArgument, match="transfer"):
        blocks.release(after=transfer)
    assert not blocks.released


@pytest.mark.host_only("a thread that waits passes the time-outs of virtual time at once")
@pytest.mark.parametrize("guarded", [False, True], ids=["plain release", "release(after=)"])
def test_a_copy_loop_of_the_users_own_needs_release_after(
    device: kvmem.Device, make_pool: MakePool, guarded: bool
) -> None:
    """The user queues a copy of a block on a stream and lets go of the block before that has run.

    The next owner gets the same slot and fills it. With the guard the bytes arrive; without it
    they do not, which shows that the test would notice.

    Public failure 3: a staging buffer was filled again while a copy still had to read it.
    """
    pool = make_pool(slots=1)
    stream = device.stream()
    arrived = np.zeros(4096, np.uint8)
    blocks = pool.acquire(1)
    blocks[0][:] = 1
    gate = stall(device, stream)
    view = blocks[0]
    stream.copy(arrived, np.frombuffer(memoryview(pool.array[0]), np.uint8))
    del view
    blocks.release(after=stream if guarded else None)

    def next_owner() -> None:
        with pool.acquire(1, timeout=PATIENCE) as mine:
            mine[0][:] = 2

    reuse = in_thread(next_owner)
    if guarded:
        until(lambda: pool.stats()["waiters"] == 1)
    else:
        reuse.result(PATIENCE)
    gate.open()
    advance(stream)
    reuse.result(PATIENCE)
    assert (arrived == (1 if guarded else 2)).all()


def test_a_copy_from_a_view_holds_the_block_by_itself(
    device: kvmem.Device, make_pool: MakePool
) -> None:
    pool = make_pool(slots=1)
    stream = device.stream()
    arrived = np.zeros(4096, np.uint8)
    blocks = pool.acquire(1)
    blocks[0][:] = 1
    with stall(device, stream):
        stream.copy(arrived, blocks[0])  # the stream keeps the view
        blocks.release()
        assert pool.try_acquire(1) is None
    advance(stream)
    assert (arrived == 1).all()
    until(lambda: (advance(stream), free_slots(pool) == 1)[1])


# ---- closing


def test_a_closed_pool_gives_nothing_more_and_what_is_held_stays_good(
    pool: kvmem.BlockPool,
) -> None:
    blocks = pool.acquire(1)
    pool.close()
    pool.close()
    for call in (pool.try_acquire, pool.acquire, lambda n: asyncio.run(pool.acquire_async(n))):
        with pytest.raises(kvmem.Closed):
            call(1)
    blocks[0][:] = 4
    assert (blocks.share().gather() == 4).all()
    blocks.release()
    assert free_slots(pool) == 4
    assert pool.array.shape == (4, 4096)


def test_closing_tells_those_who_wait(pool: kvmem.BlockPool) -> None:
    held = pool.acquire(4)
    waiting = in_thread(pool.acquire, 1)
    until(lambda: pool.stats()["waiters"] == 1)
    pool.close()
    with pytest.raises(kvmem.Closed):
        waiting.result(PATIENCE)

    assert len(held) == 4


def test_closing_tells_those_who_await(pool: kvmem.BlockPool) -> None:
    async def main() -> None:
        held = pool.acquire(4)
        task = asyncio.create_task(pool.acquire_async(1))
        while pool.stats()["waiters"] == 0:
            await asyncio.sleep(0)
        pool.close()
        with pytest.raises(kvmem.Closed):
            await asyncio.wait_for(task, PATIENCE)
        held.release()

    asyncio.run(main())


# ---- statistics


def test_the_statistics_say_exactly_what_happened(make_pool: MakePool) -> None:
    """Public failure 79: nobody saw how long the pool took.
    Public failure 138: a counter stayed at zero.
    """
    pool = make_pool(slots=4, block_bytes=5000)
    first, second = pool.acquire(3), pool.acquire(1)
    assert pool.try_acquire(1) is None
    first.release()
    stats = pool.stats()
    touch_seconds = stats.pop("touch_seconds")
    assert touch_seconds >= 0
    assert isinstance(stats.pop("transparent_huge_pages"), bool)
    assert stats == {
        "capacity_slots": 4,
        "free_slots": 3,
        "held_slots": 1,
        "quarantined_slots": 0,
        "poisoned_slots": 0,
        "peak_held_slots": 4,
        "peak_quarantined_slots": 0,
        "waiters": 0,
        "acquired_slots": 4,
        "refused": 1,
        "block_bytes": 5000,
        "slot_bytes": 8192,
        "padding_bytes": 4 * 3192,
        "region_bytes": 4 * 8192,
        "pinned_bytes": 0,
        "pin_error": None,
        "page_bytes": 4096,
        "numa_node": None,
    }
    assert len(second) == 1
