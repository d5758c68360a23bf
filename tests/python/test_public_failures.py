"""Failures that users of other systems reported in public, each tried on what kvmem has.

The case numbers are those of docs/decisions/public-failures.md, which says for each case what went
wrong and where it is tested or why it cannot occur.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import gc
import os
import queue
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvmem
from kvmem import READY
from support import (
    PATIENCE,
    Cache,
    free_slots,
    in_thread,
    resident_bytes,
    run_child,
    ticking,
    until,
)

MakeCache = Callable[..., Cache]

STORM_SECONDS = float(os.environ.get("KVMEM_STORM_SECONDS", "2"))
ROOT = Path(__file__).resolve().parents[2]


def block_of(cache: Cache, value: int) -> list[np.ndarray[Any, Any]]:
    """What a kernel would compute: the segments of a block, as Cache.fill would fill them."""
    return [np.full(array.shape[1], value + i, np.uint8) for i, array in enumerate(cache.arrays)]


def compute(cache: Cache, stream: kvmem.Stream, block: int, value: int) -> None:
    """The engine's kernel: queued on its stream, it writes the block."""
    for array, segment in zip(cache.arrays, block_of(cache, value), strict=True):
        stream.copy(array[block], segment)


# ---- A: reuse and ordering


def test_a_thousand_stores_behind_the_kernel_read_what_it_wrote(make_cache: MakeCache) -> None:
    """Case 1: a store that does not wait for the kernel reads the block before it is computed."""
    cache = make_cache(segment_bytes=16384)
    engine = cache.device.stream()
    for turn in range(1000):
        value = turn % 200
        compute(cache, engine, 0, value)
        stored = cache.manager.offload([0], after=engine)
        stored.wait(PATIENCE)
        with stored.result() as copy:
            cache.manager.restore(copy, [1], after=READY).wait(PATIENCE)
        assert cache.holds(1, value), f"round {turn}"


@pytest.mark.parametrize("waits", [False, True], ids=["without wait_on", "with wait_on"])
def test_a_preempted_block_may_be_overwritten_behind_its_store(cache: Cache, waits: bool) -> None:
    """Case 4: the block of a preempted request was given away before its store had run.

    Without the wait the stored bytes are the next owner's, which shows that the test would notice.
    """
    cache.fill(0, 10)
    upstream, gate = cache.stalled_stream()
    stored = cache.manager.offload([0], after=upstream)
    assert cache.manager.busy([0, 1]) == [0]
    next_owner = cache.device.stream()
    if waits:
        stored.wait_on(next_owner)
    compute(cache, next_owner, 0, 50)
    if not waits:
        next_owner.synchronize(PATIENCE)
    gate.open()
    stored.wait(PATIENCE)
    next_owner.synchronize(PATIENCE)
    assert cache.manager.busy([0]) == []
    assert cache.holds(0, 50)
    assert (stored.result().blocks[0] == cache.expected(10 if waits else 50)).all()


def test_a_source_that_nobody_holds_any_more_is_not_refilled_under_the_copy(cache: Cache) -> None:
    """Case 6: the host side of a load went back to its pool as soon as the caller dropped it."""
    cache.fill(0, 10)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.restore(cache.stored(0), [5], after=stream)
    gc.collect()
    assert cache.pool.stats()["quarantined_slots"] == 1
    others = cache.pool.acquire(7)
    for i in range(len(others)):
        others[i][:] = 0xFF
    assert cache.pool.try_acquire(1) is None
    gate.open()
    transfer.wait(PATIENCE)
    assert cache.holds(5, 10)
    others.release()
    assert free_slots(cache.pool) == 8


def test_a_request_that_is_finished_without_its_blocks_has_no_result(cache: Cache) -> None:
    """Case 14: preempted and finished in one step, a request handed on a list of no blocks."""
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0, 1], after=stream)
    transfer.cancel()
    with pytest.raises(kvmem.NotDone):
        transfer.result()
    gate.open()
    assert cache.manager.drain(PATIENCE).quiet
    with pytest.raises(kvmem.Cancelled):
        transfer.result()
    copy = cache.stored(0)
    copy.release()
    for empty in (lambda: copy.blocks, copy.share, lambda: copy[0]):
        with pytest.raises(kvmem.AlreadyReleased):
            empty()
    with pytest.raises(kvmem.InvalidArgument, match="at least one block"):
        cache.manager.offload([], after=READY)


@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "unordered"])
def test_layers_that_are_used_as_they_arrive_equal_a_run_without_offload(
    make_cache: MakeCache, ordered: bool
) -> None:
    """Case 15: a prefetched layer was used before it had come, and dropped before its last use.

    One device block serves every request in turn. Layer by layer the consumer waits for its stage
    only; the next request is restored behind the consumer. Without both, bytes are wrong.
    """
    layers, requests = 4, 6
    cache = make_cache(blocks=requests + 1, slots=requests, layers=layers, segment_bytes=4096)
    for request in range(requests):
        cache.fill(request, 10 * request)
    copies = [cache.stored(request) for request in range(requests)]
    used = np.zeros((requests, layers, 4096), np.uint8)
    consumer, gate = cache.stalled_stream()
    shared = requests  # the device block
    loads: list[kvmem.Transfer] = []
    for request, copy in enumerate(copies):
        after: list[Any] = [*loads, consumer] if ordered else [*loads, cache.device.stream()]
        loads.append(cache.manager.restore(copy, [shared], after=after))
        for layer in range(layers):
            if ordered:
                loads[-1].wait_on(consumer, stage=layer)
            consumer.copy(used[request, layer], cache.arrays[layer][shared])
    if ordered:  # whatever could run too early has run by then
        assert not cache.manager.drain(0.05).quiet
    else:
        loads[-1].wait(PATIENCE)
    gate.open()
    loads[-1].wait(PATIENCE)
    consumer.synchronize(PATIENCE)
    plain = np.stack([np.stack([array[r] for array in cache.arrays]) for r in range(requests)])
    assert (used == plain).all() == ordered


def test_a_request_readmitted_with_a_store_outstanding_ends_each_transfer_once(
    cache: Cache,
) -> None:
    """Case 19: an engine died when a request came back while its old transfer was under way."""
    cache.fill(0, 30)
    stream, gate = cache.stalled_stream()
    old = cache.manager.offload([0], after=stream, tag="old")
    old.cancel()  # preempted
    new = cache.manager.offload([0], after=old, tag="new")  # admitted again
    assert not new.done()
    gate.open()
    new.wait(PATIENCE)
    assert (new.result().blocks[0] == cache.expected(30)).all()
    assert cache.manager.drain(PATIENCE).quiet
    ends = [(report.tag, report.state) for report in cache.manager.poll()]
    assert sorted(ends) == [("new", "done"), ("old", "cancelled")]
    assert cache.manager.poll() == []


# ---- B: leaks


def test_a_thousand_aborted_prefetches_leave_the_pool_whole(make_cache: MakeCache) -> None:
    """Case 21: each aborted prefetch kept some of its slots, until nothing could be fetched."""
    cache = make_cache(blocks=32, slots=32, segment_bytes=512, max_reports=8)
    choose = random.Random(21)
    with cache.stored(*range(16)) as copy:
        for _ in range(1000):
            stream = cache.device.stream()
            if choose.random() < 0.5:
                transfer = cache.manager.restore(copy, list(range(16, 32)), after=stream, tag=1)
            else:
                transfer = cache.manager.offload(list(range(16, 32)), after=stream, tag=1)
            for _ in range(choose.randrange(3)):
                cache.manager.poll()
            if choose.random() < 0.8:
                transfer.cancel()
            del transfer
            assert cache.manager.drain(PATIENCE).quiet
            cache.manager.poll()
            assert free_slots(cache.pool) == 16
    assert free_slots(cache.pool) == 32
    stats = cache.manager.stats()
    assert stats["reports_taken"] == stats["reports_waiting"] == stats["waiters"] == 0
    for direction in (stats["offload"], stats["restore"]):
        assert direction["active"] == direction["queued_bytes"] == direction["lanes_owned"] == 0


def test_blocks_that_were_held_for_a_load_that_never_came_can_all_be_had_again(
    cache: Cache,
) -> None:
    """Case 22: what a lookup had pinned stayed pinned when the request went away without a load."""
    for _ in range(1000 // 8):
        held = [cache.stored(block).share() for block in range(8)]
        assert cache.pool.try_acquire(1) is None
        del held
        with cache.pool.acquire(8, timeout=0) as whole:
            assert len(whole) == 8


def test_holders_may_let_go_in_any_order(cache: Cache) -> None:
    """Case 24: a block was freed in one order of releases and leaked in the other."""
    restored = 0
    for turn in range(10_000):
        blocks = cache.pool.acquire(1)
        holders = [blocks, blocks.share()]
        first, last = holders if turn % 2 else reversed(holders)
        first.release()
        assert free_slots(cache.pool) == 7
        last.release()
        if turn % 50 == 0:
            copy = cache.stored(0)
            pinned = copy.blocks
            cache.manager.restore(copy, [1], after=READY).wait(PATIENCE)
            for held in (copy, pinned) if restored % 2 else (pinned, copy):
                held.release()
            restored += 1
        assert free_slots(cache.pool) == 8


def test_a_cancelled_load_has_one_end_and_then_its_blocks_are_free(cache: Cache) -> None:
    """Case 25: the end of a cancelled load was filtered out, and its owner waited for ever."""
    copy = cache.stored(0)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.restore(copy, [5], after=stream, tag="load")
    assert transfer.cancel() == kvmem.CancelOutcome.draining
    copy.release()
    assert cache.manager.poll() == []
    assert cache.manager.busy([5]) == [5]
    assert cache.pool.stats()["quarantined_slots"] == 1
    gate.open()
    assert cache.manager.drain(PATIENCE).quiet
    assert [(each.tag, each.state) for each in cache.manager.poll()] == [("load", "cancelled")]
    assert cache.manager.poll() == []
    assert cache.manager.busy([5]) == []
    assert free_slots(cache.pool) == 8


def test_cancelling_what_has_not_run_stops_nothing_else(cache: Cache) -> None:
    """Case 26: cancelling a request that had never run stopped the whole engine."""
    stream, gate = cache.stalled_stream()
    transfers = [cache.manager.offload([block], after=stream) for block in range(8)]
    for transfer in transfers:  # some in flight, some still waiting in kvmem
        transfer.cancel()
        transfer.cancel()
    gate.open()
    assert cache.manager.drain(PATIENCE).quiet
    for transfer in transfers:
        assert transfer.state == "cancelled"
        assert transfer.cancel() == kvmem.CancelOutcome.already_done
    cache.fill(3, 10)
    assert (cache.stored(3).blocks[0] == cache.expected(10)).all()


def test_every_store_comes_to_an_end_whatever_it_is_of(cache: Cache) -> None:
    """Case 29: stores of nothing, of duplicates and of refused blocks were never retired."""
    copy = cache.stored(7)
    stream, gate = cache.stalled_stream()
    writing = cache.manager.restore(copy, [5], after=stream)
    with pytest.raises(kvmem.InvalidArgument, match="at least one block"):
        cache.manager.offload([], after=READY)
    duplicates = cache.manager.offload([2, 2, 2], after=READY)
    with pytest.raises(kvmem.Busy):
        cache.manager.offload([4, 5], after=READY)
    gate.open()
    duplicates.wait(PATIENCE)
    writing.wait(PATIENCE)
    assert cache.manager.drain(PATIENCE).quiet
    stats = cache.manager.stats()
    assert (stats["offload"]["accepted"], stats["offload"]["done"]) == (2, 2)
    assert stats["offload"]["active"] == stats["restore"]["active"] == 0


def test_small_results_keep_no_large_array_alive() -> None:
    """Case 30: a handle was a view of a free list, so a few handles kept many old lists alive."""
    device = kvmem.open_device("host", workers=1)
    pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes="16MiB")

    def rounds(count: int) -> collections.deque[Any]:
        kept: collections.deque[Any] = collections.deque(maxlen=1000)
        for _ in range(count):
            with pool.acquire(2) as blocks:
                kept.append(blocks.indices[:1])
        return kept

    for array in rounds(1000):
        owner = array if array.base is None else array.base
        assert owner.nbytes <= 2 * 8
    before = resident_bytes()
    kept = rounds(100_000)
    assert resident_bytes() - before < 1 << 20
    assert len(kept) == 1000


# ---- C: double free, use after free


def test_two_requests_with_one_block_do_not_disturb_each_other(cache: Cache) -> None:
    """Case 37: one request's removal, or its abort, took the data of the other one away."""
    cache.fill(0, 10)
    first = cache.stored(0)
    second = first.share()
    cache.manager.restore(first, [1], after=READY).wait(PATIENCE)
    first.release()
    stream, gate = cache.stalled_stream()
    aborted = cache.manager.restore(second, [2], after=stream)
    third = second.share()
    aborted.cancel()
    second.release()
    cache.manager.restore(third, [3], after=READY).wait(PATIENCE)
    gate.open()
    assert cache.manager.drain(PATIENCE).quiet
    assert cache.holds(1, 10)
    assert cache.holds(3, 10)
    third.release()
    assert free_slots(cache.pool) == 8


def test_a_block_of_odd_size_is_got_twice(make_cache: MakeCache) -> None:
    """Case 40: the first use of a small block invalidated it; the next one crashed."""
    cache = make_cache(segment_bytes=7, layers=3)
    cache.fill(0, 10)
    copy = cache.stored(0)
    for target in (1, 2):
        assert (copy.blocks[0] == cache.expected(10)).all()
        cache.manager.restore(copy, [target], after=READY).wait(PATIENCE)
        assert cache.holds(target, 10)
    copy.release()
    with pytest.raises(kvmem.AlreadyReleased):
        cache.manager.restore(copy, [3], after=READY)


@pytest.mark.host_only("a storm of real threads in real time")
def test_what_a_handle_names_does_not_change_while_others_allocate(
    make_pool: Callable[..., kvmem.BlockPool],
) -> None:
    """Case 41: a handle was read by one thread while another rebuilt the list behind it."""
    pool = make_pool(slots=16)
    held = [pool.acquire(2) for _ in range(4)]
    named = [blocks.indices.tolist() for blocks in held]
    indices = [blocks.indices for blocks in held]
    over = threading.Event()

    def churn() -> int:
        turns = 0
        while not over.is_set():
            with pool.acquire(8, timeout=PATIENCE) as blocks:
                assert not set(blocks.indices.tolist()) & {i for each in named for i in each}
            turns += 1
        return turns

    churning = in_thread(churn)
    deadline = time.monotonic() + min(STORM_SECONDS, 60)
    while time.monotonic() < deadline:
        assert [blocks.indices.tolist() for blocks in held] == named
        assert [array.tolist() for array in indices] == named
    over.set()
    assert churning.result(PATIENCE) > 0


# ---- D: exhaustion


@pytest.mark.host_only("a thread that waits passes the time-outs of virtual time at once")
def test_a_full_pool_refuses_in_time_and_a_release_wakes_the_waiter(
    pool: kvmem.BlockPool,
) -> None:
    """Case 46: with nothing to evict, an allocation was tried again and again for ever."""
    held = pool.acquire(4)
    for timeout in (0, 0.2):
        started = time.monotonic()
        with pytest.raises(kvmem.PoolExhausted):
            pool.acquire(1, timeout=timeout)
        assert timeout <= time.monotonic() - started < timeout + PATIENCE / 2
    waiting = in_thread(pool.acquire, 1)
    until(lambda: pool.stats()["waiters"] == 1)
    held.release()
    assert len(waiting.result(PATIENCE)) == 1


@pytest.mark.host_only("an event loop does not move virtual time")
def test_fifty_prefetches_of_a_quarter_of_the_pool_all_end(make_cache: MakeCache) -> None:
    """Case 51: prefetches took memory for all that was queued, and some were stuck for ever."""
    cache = make_cache(blocks=8, slots=8)
    for block in range(8):
        cache.fill(block, 10 * block)
    order: list[int] = []

    async def prefetch(number: int) -> None:
        first = 2 * (number % 4)
        stored = await cache.manager.offload_async([first, first + 1], after=READY)
        await stored
        order.append(number)
        with stored.result() as copy:
            assert (copy.blocks[1] == cache.expected(10 * (first + 1))).all()

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(*map(prefetch, range(50))), PATIENCE)

    asyncio.run(main())
    assert sorted(order) == list(range(50))
    stats = cache.pool.stats()
    assert stats["peak_held_slots"] <= stats["capacity_slots"] == stats["free_slots"]


def test_a_burst_at_a_slow_sink_is_bounded_and_each_refusal_is_an_answer(
    make_cache: MakeCache,
) -> None:
    """Case 57: stores that waited to be written back piled up without a limit."""
    cache = make_cache(slots=64, max_queued_bytes=16 * 4096)
    stream, gate = cache.stalled_stream()
    accepted = []
    for number in range(10_000):
        transfer = cache.manager.try_offload([number % 8], after=stream)
        if transfer is not None:
            accepted.append(transfer)
        if number % 100 == 0:
            assert cache.manager.stats()["offload"]["queued_bytes"] <= 16 * 4096
    assert len(accepted) == 16
    assert cache.manager.stats()["offload"]["accepted"] == 16
    gate.open()
    for transfer in accepted:
        transfer.wait(PATIENCE)
    assert cache.manager.try_offload([0], after=READY) is not None


# ---- E: shared memory


def test_killed_processes_leave_no_shared_memory_behind() -> None:
    """Case 60: a killed server left its named segment, so that no restart found room."""
    ran = run_child(
        """
    import os, signal, warnings
    import kvmem
    warnings.simplefilter("ignore", DeprecationWarning)

    def shared_bytes():
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("Shmem:")) << 10

    before, used = set(os.listdir("/dev/shm")), shared_bytes()
    for _ in range(10):
        pid = os.fork()
        if pid == 0:
            device = kvmem.open_device("host", workers=1)
            pool = kvmem.BlockPool(
                device, block_bytes=4096, capacity_bytes="64MiB", shared=True)
            os.kill(os.getpid(), signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -9
    mine = [name for name in set(os.listdir("/dev/shm")) - before if "kvmem" in name]
    print(mine, shared_bytes() - used < 320 << 20)
    """
    )
    assert (ran.stdout, ran.stderr) == ("[] True\n", "")


# ---- H: fragmentation


def test_every_second_free_block_serves_a_request_of_many(
    make_pool: Callable[..., kvmem.BlockPool],
) -> None:
    """Case 81: half of a store was free, in pieces too small for the next request."""
    pool = make_pool(slots=64)
    single = [pool.acquire(1) for _ in range(64)]
    for blocks in single[::2]:
        blocks.release()
    scattered = pool.acquire(32, timeout=0)
    assert len(set(scattered.indices.tolist())) == 32


def test_blocks_are_restored_into_scattered_free_ones(make_cache: MakeCache) -> None:
    """Case 82: a restore wanted neighbouring cells, found none, and stopped the server."""
    cache = make_cache(blocks=32)
    for block in range(8):
        cache.fill(block, 20 * block)
    copy = cache.stored(*range(8))
    scattered = [31, 9, 23, 11, 28, 13, 17, 15]
    cache.manager.restore(copy, scattered, after=READY).wait(PATIENCE)
    for block, target in enumerate(scattered):
        assert cache.holds(target, 20 * block)


# ---- I: layouts


@pytest.mark.parametrize("axis", range(4))
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 3, 2), (3, 2, 1, 0), (2, 0, 3, 1)], ids=str)
def test_layouts_of_one_shape_are_told_apart_by_what_is_declared(
    device: kvmem.Device, random: np.random.Generator, order: tuple[int, ...], axis: int
) -> None:
    """Case 85: with two heads the shape fits two layouts, and the wrong one was guessed.

    A layout that no copy of whole blocks fits is refused when it is made.
    """
    dense = random.integers(0, 256, (4, 4, 4, 4)).astype(np.uint8)
    array = dense.transpose(order)
    before = array.copy()
    blocks = np.moveaxis(array, axis, 0)
    behind = blocks[0].strides[axis:]
    if list(behind) != [4 ** (len(behind) - 1 - i) for i in range(len(behind))]:
        with pytest.raises(kvmem.InvalidArgument, match="axis"):
            kvmem.KVLayout.from_arrays([array], block_axis=axis)
        return
    layout = kvmem.KVLayout.from_arrays([array], block_axis=axis, memory=device.name)
    assert layout.block_count == 4
    assert layout.block_bytes == 64
    with kvmem.Manager(device, layout, host_bytes="64KiB") as manager:
        stored = manager.offload([3, 1], after=READY)
        stored.wait(PATIENCE)
        manager.restore(stored.result(), [0, 2], after=READY).wait(PATIENCE)
    then = np.moveaxis(before, axis, 0)
    assert (blocks == then[[3, 1, 1, 3]]).all()


# ---- M: metrics


def test_both_directions_are_counted(make_cache: MakeCache) -> None:
    """Case 139: the counter of one direction was wired up, that of the other stayed at zero."""
    cache = make_cache(blocks=20, slots=10)
    copy = cache.stored(*range(10))
    cache.manager.restore(copy, list(range(10, 20)), after=READY).wait(PATIENCE)
    stats = cache.manager.stats()
    for direction in (stats["offload"], stats["restore"]):
        assert (direction["blocks_done"], direction["bytes_done"]) == (10, 10 * cache.block_bytes)


# ---- N: threads


@pytest.mark.host_only("a storm of real threads in real time")
def test_blocks_may_be_let_go_by_other_threads_than_took_them(
    make_pool: Callable[..., kvmem.BlockPool],
) -> None:
    """Case 143: taking a block was locked, and dropping the last handle elsewhere was not."""
    pool = make_pool(slots=16)
    passed: queue.Queue[kvmem.HostBlocks | None] = queue.Queue(maxsize=12)
    deadline = time.monotonic() + STORM_SECONDS
    guards = [threading.Lock() for _ in range(16)]

    def take(seed: int) -> None:
        choose = random.Random(seed)
        while time.monotonic() < deadline:
            blocks = pool.acquire(1 + choose.randrange(2), timeout=PATIENCE)
            for slot in blocks.indices.tolist():
                assert guards[slot].acquire(blocking=False), "two owners"
            passed.put(blocks, timeout=PATIENCE)

    def drop() -> int:
        dropped = 0
        while (blocks := passed.get(timeout=STORM_SECONDS + PATIENCE)) is not None:
            for slot in blocks.indices.tolist():
                guards[slot].release()
            del blocks
            dropped += 1
        return dropped

    takers = [in_thread(take, seed) for seed in range(4)]
    droppers = [in_thread(drop) for _ in range(4)]
    for each in takers:
        each.result(STORM_SECONDS + PATIENCE)
    for _ in droppers:
        passed.put(None, timeout=PATIENCE)
    assert sum(each.result(PATIENCE) for each in droppers) > 8
    assert free_slots(pool) == 16


@pytest.mark.host_only("a storm of real threads in real time")
def test_a_heartbeat_goes_on_while_eight_threads_store_and_load(make_cache: MakeCache) -> None:
    """Case 147: two locks taken in two orders froze a service until its heartbeats timed out."""
    cache = make_cache(blocks=16, slots=8, segment_bytes=30_000, window_bytes=65536)
    deadline = time.monotonic() + STORM_SECONDS

    def work(worker: int) -> int:
        rounds = 0
        while time.monotonic() < deadline:
            cache.fill(worker, worker + rounds % 100)
            with cache.stored(worker) as copy:
                cache.manager.restore(copy, [8 + worker], after=READY).wait(PATIENCE)
            assert cache.holds(8 + worker, worker + rounds % 100)
            rounds += 1
        return rounds

    with ticking() as longest_gap:
        workers = [in_thread(work, worker) for worker in range(8)]
        for each in workers:
            assert each.result(STORM_SECONDS + PATIENCE) > 0
    assert longest_gap() < 2.5


# ---- O: signals


@pytest.mark.host_only("a thread that waits passes the time-outs of virtual time at once")
def test_a_manager_may_be_closed_by_a_signal_handler_and_again(cache: Cache) -> None:
    """Case 155: an engine could not be closed from where an interrupt ended its work."""
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    closed: list[bool] = []

    def handler(*_: object) -> None:
        closed.append(cache.manager.close(0).quiet)
        gate.open()
        closed.append(cache.manager.close(PATIENCE).quiet)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        main = threading.get_ident()
        waits = threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGUSR1))
        waits.start()
        with contextlib.suppress(kvmem.Cancelled):
            transfer.wait(PATIENCE)
        until(lambda: len(closed) == 2, "the handler")
    finally:
        waits.join()
        signal.signal(signal.SIGUSR1, before)
    assert closed == [False, True]
    assert transfer.done()
    assert cache.manager.close().quiet


# ---- S: configuration

HUGE = 2**62


@pytest.mark.parametrize(
    "make",
    [
        lambda device: kvmem.BlockPool(device, block_bytes=HUGE, capacity_bytes=2**63 - 1),
        lambda device: kvmem.BlockPool(device, block_bytes=HUGE, capacity_bytes=HUGE),
        lambda device: kvmem.BlockPool(device, block_bytes=1, capacity_bytes=HUGE),
        lambda device: kvmem.BlockPool(device, block_bytes="4096TiB", capacity_bytes="4096TiB"),
        lambda _: kvmem.KVLayout([kvmem.Region(4096, HUGE, 64, HUGE)]),
        lambda _: kvmem.KVLayout([kvmem.Region(4096, 2**32, 64, 2**32 + 1)]),
        lambda _: kvmem.KVLayout([kvmem.Region(HUGE, HUGE, HUGE, 4)]),
        lambda device: kvmem.Manager(
            device,
            kvmem.KVLayout([kvmem.Region(4096, HUGE, HUGE, 2, memory=device.name)]),
            host_bytes=HUGE,
        ),
        lambda device: device.alloc(HUGE),
    ],
)
def test_huge_sizes_and_their_products_are_refused_with_numbers(
    device: kvmem.Device, make: Callable[[kvmem.Device], Any]
) -> None:
    """Case 174: a size was accepted that led to a division by zero or a wrapped product later."""
    with pytest.raises((kvmem.InvalidArgument, kvmem.CapacityError), match=r"\d"):
        make(device)


# ---- Q and R: sizes that no machine has. A virtual device that moves no bytes has addresses only.


def unbacked() -> kvmem.Device:
    return kvmem.open_device("virtual", move_bytes=False, gbps=1e5)


def test_a_refusal_takes_no_longer_the_more_is_held() -> None:
    """Case 168: each allocation walked the whole cache when nothing in it could be evicted."""
    pool = kvmem.BlockPool(unbacked(), block_bytes=4096, capacity_bytes=4096 * 10**6)
    held = pool.acquire(10**6)
    started = time.monotonic()
    for _ in range(100_000):  # as many walks would take minutes
        assert pool.try_acquire(1) is None
    assert time.monotonic() - started < PATIENCE
    assert (pool.stats()["refused"], len(held)) == (100_000, 10**6)


def test_a_pool_of_many_terabytes_is_counted_to_the_byte() -> None:
    """Case 170: offsets were narrowed to 32 bits with very large pools."""
    device = unbacked()
    block_bytes, blocks = 2**30 + 4096, 4096
    region = kvmem.Region(2**40 + 4096, 2**31, block_bytes, blocks, memory=device.name)
    layout = kvmem.KVLayout([region])
    pool = kvmem.BlockPool(device, block_bytes=block_bytes, capacity_bytes=blocks * block_bytes)
    whole = blocks * block_bytes
    assert whole > 2**42
    assert pool.stats()["region_bytes"] == whole
    with kvmem.Manager(
        device, layout, pool, max_queued_bytes=2 * whole, window_bytes=whole, reaper=False
    ) as manager:
        stored = manager.offload(range(blocks), after=READY)
        assert manager.stats()["offload"]["queued_bytes"] == whole
        stored.wait()
        copy = stored.result()
        assert copy.nbytes == whole
        assert copy.blocks.indices.max() == blocks - 1
        for part in (copy[:1], copy[2:3], copy[4:5], copy[1024:1025], copy[-1:]):
            manager.restore(part, [blocks - 1], after=READY).wait()
        stats = manager.stats()
    assert stats["offload"]["bytes_done"] == whole
    assert stats["restore"]["bytes_done"] == 5 * block_bytes
    assert (stats["offload"]["queued_bytes"], stats["offload"]["window_bytes"]) == (0, 0)


def test_what_cannot_be_addressed_is_refused_when_it_is_made() -> None:
    """Case 171: a wrapped offset lay in mapped memory, and the output was silently wrong."""
    with pytest.raises(kvmem.InvalidArgument, match="4294967295"):  # one slot too many
        kvmem.BlockPool(unbacked(), block_bytes=4096, capacity_bytes=2**32 * 4096)
    with pytest.raises(kvmem.InvalidArgument, match=r"2\^64"):
        kvmem.KVLayout([kvmem.Region(2**62, 2**40, 64, 2**24)])


# ---- the list of cases

TEST_NAME = re.compile(r"`(tests/[\w/.]+)::([\w.]+)`")


def test_every_test_that_the_list_of_cases_names_is_there() -> None:
    text = (ROOT / "docs/decisions/public-failures.md").read_text(encoding="utf-8")
    named = sorted(set(TEST_NAME.findall(text)))
    assert len(named) > 100
    dead = []
    for path, name in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        suite, _, test = name.partition(".")
        pattern = rf"\bdef {name}\(" if not test else rf"\bTEST(_[FP])?\({suite},\s+{test}\)"
        if not re.search(pattern, source):
            dead.append(f"{path}::{name}")
    assert dead == []
