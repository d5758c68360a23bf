"""Awaiting: one descriptor for each loop, no thread, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

import kvmem
from kvmem import READY, _async
from kvmem.testing import stall
from support import PATIENCE, Cache, descriptors, free_slots, in_thread

MakeCache = Callable[..., Cache]
Result = TypeVar("Result")

pytestmark = pytest.mark.host_only("awaiting moves no virtual clock")


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Run `main` with a deadline, and look that it left no reader behind."""

    async def checked() -> Result:
        result = await asyncio.wait_for(main, 2 * PATIENCE)
        wakes = _async._wakes.get(asyncio.get_running_loop())
        if wakes is not None:
            assert not wakes._pending
            assert not asyncio.get_running_loop().remove_reader(wakes.list.descriptor)
        return result

    return asyncio.run(checked())


async def waiters(cache: Cache, count: int) -> None:
    while cache.manager.stats()["waiters"] + cache.pool.stats()["waiters"] < count:
        await asyncio.sleep(0)


def test_awaiting_a_transfer_waits_for_its_end(cache: Cache) -> None:
    async def main() -> None:
        stream, gate = cache.stalled_stream()
        transfer = cache.manager.offload([0], after=stream)
        task = asyncio.ensure_future(transfer)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        cache.fill(0, 10)
        gate.open()
        assert await task is None
        assert (transfer.result().blocks[0] == cache.expected(10)).all()
        await transfer  # again, and at once

    run(main())


def test_awaiting_raises_the_error_of_the_transfer(cache: Cache) -> None:
    async def main() -> None:
        stream, gate = cache.stalled_stream()
        transfer = cache.manager.offload([0], after=stream)
        transfer.cancel()
        gate.open()
        with pytest.raises(kvmem.Cancelled):
            await transfer

    run(main())


def test_many_tasks_may_await_one_transfer(cache: Cache) -> None:
    """Public failure 165: many waited for one load, one after the other."""

    async def main() -> None:
        stream, gate = cache.stalled_stream()
        transfer = cache.manager.offload([0], after=stream)

        async def wait() -> None:
            await transfer

        tasks = [asyncio.create_task(wait()) for _ in range(10)]
        await asyncio.sleep(0)
        tasks[3].cancel()
        gate.open()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results.pop(3), asyncio.CancelledError)
        assert results == [None] * 9

    run(main())


def test_cancelling_the_task_does_not_cancel_the_transfer(cache: Cache) -> None:
    async def main() -> None:
        stream, gate = cache.stalled_stream()
        transfer = cache.manager.offload([0], after=stream)

        async def wait() -> None:
            await transfer

        task = asyncio.create_task(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert transfer.state in ("queued", "in_flight")
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.01)
        gate.open()
        await transfer
        assert transfer.state == "done"

    run(main())


def test_offload_and_restore_make_a_round_trip(cache: Cache) -> None:
    async def main() -> None:
        cache.fill(1, 20)
        stored = await cache.manager.offload_async([1], after=READY, tag="out")
        await stored
        restored = await cache.manager.restore_async(
            stored.result(), [6], after=[READY], priority="background", tag=2
        )
        await restored
        assert cache.holds(6, 20)
        assert [each.tag for each in cache.manager.poll()] == ["out", 2]

    run(main())


@pytest.mark.parametrize("bound", ["pool blocks", "max_queued_bytes", "max_reports"])
def test_offload_async_waits_at_each_bound(make_cache: MakeCache, bound: str) -> None:
    options: dict[str, Any] = {
        "pool blocks": {"slots": 1},
        "max_queued_bytes": {"max_queued_bytes": 4096},
        "max_reports": {"max_reports": 1},
    }[bound]
    cache = make_cache(**options)

    async def main() -> None:
        stream, gate = cache.stalled_stream()
        first = cache.manager.offload([0], after=stream, tag=1)
        task = asyncio.create_task(cache.manager.offload_async([1], after=READY, tag=2))
        await waiters(cache, 1)
        assert cache.manager.try_offload([2], after=READY, tag=3) is None
        gate.open()
        await first
        first.result().release()
        if bound == "max_reports":
            assert not task.done()
            assert [each.tag for each in cache.manager.poll()] == [1]
        second = await task
        await second
        assert second.state == "done"

    run(main())


def test_restore_async_waits_at_a_bound(make_cache: MakeCache) -> None:
    cache = make_cache(max_queued_bytes=4096)

    async def main() -> None:
        cache.fill(0, 20)
        copy = cache.stored(0)
        stream, gate = cache.stalled_stream()
        first = cache.manager.restore(copy, [5], after=stream)
        task = asyncio.create_task(cache.manager.restore_async(copy, [6], after=READY))
        await waiters(cache, 1)
        copy.release()  # the waiting call has a holder of its own
        gate.open()
        await first
        await (await task)
        assert cache.holds(6, 20)

    run(main())
    assert free_slots(cache.pool) == 8


@pytest.mark.parametrize("kind", ["offload", "restore"])
@pytest.mark.parametrize("when", ["while it waits", "after it was granted"])
def test_cancelling_a_task_at_a_bound_loses_nothing(
    make_cache: MakeCache, kind: str, when: str
) -> None:
    cache = make_cache(max_queued_bytes=4096)

    async def main() -> None:
        copy = cache.stored(0)
        stream, gate = cache.stalled_stream()
        start: Callable[[], Coroutine[Any, Any, kvmem.Transfer]]
        if kind == "offload":
            first: kvmem.Transfer = cache.manager.offload([1], after=stream)
            start = lambda: cache.manager.offload_async([2], after=READY)  # noqa: E731
        else:
            first = cache.manager.restore(copy, [1], after=stream)
            start = lambda: cache.manager.restore_async(copy, [2], after=READY)  # noqa: E731
        task = asyncio.create_task(start())
        await waiters(cache, 1)
        if when == "after it was granted":
            gate.open()
            first.wait(PATIENCE)  # the loop does not run meanwhile
        task.cancel()
        (error,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(error, asyncio.CancelledError)
        # The task and the error with its traceback are alive, as in a log of failures.
        assert cache.manager.stats()["waiters"] == 0
        gate.open()
        await first
        assert cache.manager.stats()[kind]["queued_bytes"] == 0  # type: ignore[literal-required]
        copy.release()
        assert free_slots(cache.pool) == (7 if kind == "offload" else 8)
        assert task.cancelled()

    run(main())


def test_after_is_taken_by_the_call(cache: Cache) -> None:
    async def main() -> None:
        stream = cache.device.stream()
        starting = cache.manager.offload_async([1], after=stream)
        cache.gates.append(stall(cache.device, stream))
        await (await starting)  # not held back by what came later

    run(main())


def test_a_wrong_argument_is_refused_by_the_call_itself(cache: Cache) -> None:
    copy = cache.stored(0)
    for call in (
        lambda: cache.manager.offload_async([99], after=READY),
        lambda: cache.manager.offload_async([0], after=None),
        lambda: cache.manager.restore_async(copy, [0, 1, 99], after=READY),
    ):
        with pytest.raises(kvmem.InvalidArgument):
            call()


def test_a_wrong_argument_is_refused_when_it_is_awaited(cache: Cache) -> None:
    async def main() -> None:
        with pytest.raises(kvmem.InvalidArgument, match="names 2"):
            await cache.manager.restore_async(cache.stored(0), [0, 1], after=READY)
        with pytest.raises(kvmem.InvalidArgument, match="count"):
            await cache.pool.acquire_async(0)
        with pytest.raises(kvmem.CapacityError):
            await cache.pool.acquire_async(99)

    run(main())


def test_busy_comes_out_of_the_awaiting_call(cache: Cache) -> None:
    async def main() -> None:
        copy = cache.stored(0)
        stream, gate = cache.stalled_stream()
        writing = cache.manager.restore(copy, [5], after=stream)
        with pytest.raises(kvmem.Busy) as refusal:
            await cache.manager.offload_async([5], after=READY)
        assert refusal.value.transfer == writing.id
        assert cache.manager.stats()["offload"]["queued_bytes"] == 0
        gate.open()
        await writing

    run(main())


def test_closing_tells_an_awaiting_call(make_cache: MakeCache) -> None:
    cache = make_cache(max_queued_bytes=4096)

    async def main() -> None:
        stream, gate = cache.stalled_stream()
        cache.manager.offload([0], after=stream)
        task = asyncio.create_task(cache.manager.offload_async([1], after=READY))
        await waiters(cache, 1)
        closing = in_thread(cache.manager.close)
        with pytest.raises(kvmem.Closed):
            await task
        gate.open()
        assert closing.result(PATIENCE).quiet

    run(main())


def test_acquire_async_waits_for_what_a_reaper_brings_home(cache: Cache) -> None:
    async def main() -> None:
        stream, gate = cache.stalled_stream()
        cache.manager.offload(list(range(8)), after=stream)
        task = asyncio.create_task(cache.pool.acquire_async(8))
        await waiters(cache, 1)
        gate.open()
        with await task as blocks:
            assert len(blocks) == 8

    run(main())


def test_two_loops_in_two_threads_do_not_disturb_each_other(cache: Cache) -> None:
    async def main(block: int) -> int:
        ended = 0
        for _ in range(100):
            stored = await cache.manager.offload_async([block], after=READY)
            await stored
            with stored.result() as copy:
                await (await cache.manager.restore_async(copy, [block + 2], after=READY))
            ended += 1
        return ended

    cache.fill(0, 10)
    cache.fill(1, 90)
    loops = [in_thread(lambda block=block: run(main(block))) for block in range(2)]
    assert [each.result(2 * PATIENCE) for each in loops] == [100, 100]
    assert cache.holds(2, 10)
    assert cache.holds(3, 90)
    assert free_slots(cache.pool) == 8


def test_one_loop_awaits_many_transfers_of_many_managers(make_cache: MakeCache) -> None:
    caches = [make_cache() for _ in range(3)]

    async def main() -> None:
        async def once(cache: Cache, block: int) -> None:
            stored = await cache.manager.offload_async([block], after=READY)
            await stored
            stored.result().release()

        await asyncio.gather(*(once(c, b) for _ in range(20) for c in caches for b in range(8)))

    run(main())
    for cache in caches:
        assert cache.manager.stats()["offload"]["done"] == 160


def test_loops_leave_no_descriptor_behind(cache: Cache) -> None:
    async def main() -> None:
        held = await cache.pool.acquire_async(8)
        task = asyncio.create_task(cache.pool.acquire_async(1))
        await asyncio.sleep(0)
        held.release()
        (await task).release()
        await (await cache.manager.offload_async([0], after=READY))

    run(main())
    gc.collect()
    before = descriptors()
    for _ in range(200):
        run(main())
    gc.collect()
    assert descriptors() == before
    assert len(_async._wakes) == 0


def test_a_loop_that_ends_with_a_task_still_waiting_leaves_nothing_behind(cache: Cache) -> None:
    held = cache.pool.acquire(8)
    loop = asyncio.new_event_loop()
    task = loop.create_task(cache.pool.acquire_async(3))
    loop.run_until_complete(asyncio.sleep(0.01))
    assert cache.pool.stats()["waiters"] == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    assert cache.pool.stats()["waiters"] == 0
    held.release()


def test_an_end_that_comes_after_the_loop_is_closed_hurts_nobody(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        await transfer

    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()
    del loop, task
    gc.collect()
    gate.open()
    transfer.wait(PATIENCE)
    assert transfer.state == "done"
