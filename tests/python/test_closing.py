"""Closing a manager tells those who wait for something that is not the manager's own."""

from __future__ import annotations

import asyncio

import pytest

from kvmem import READY, Closed, InvalidArgument
from support import PATIENCE, Cache, in_thread, until


def waiters(cache: Cache) -> int:
    count: int = cache.manager.pool.stats()["waiters"]
    return count


def test_closing_tells_a_call_that_waits_for_slots(cache: Cache) -> None:
    pool = cache.manager.pool
    with pool.acquire(pool.capacity):
        waiting = in_thread(cache.manager.offload, [0], after=READY)
        until(lambda: waiters(cache) == 1)
        assert cache.manager.close(PATIENCE).quiet
        with pytest.raises(Closed):
            waiting.result(PATIENCE)
        assert waiters(cache) == 0


def test_closing_tells_a_task_that_waits_for_slots(cache: Cache) -> None:
    pool = cache.manager.pool

    async def run() -> None:
        task = asyncio.create_task(cache.manager.offload_async([0], after=READY))
        while waiters(cache) == 0:
            await asyncio.sleep(0)
        assert cache.manager.close(PATIENCE).quiet
        with pytest.raises(Closed):
            await asyncio.wait_for(task, PATIENCE)
        assert waiters(cache) == 0

    with pool.acquire(pool.capacity):
        asyncio.run(run())


def test_a_task_that_gives_up_leaves_nothing_that_a_close_would_tell(cache: Cache) -> None:
    pool = cache.manager.pool

    async def run() -> None:
        for _ in range(3):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(cache.manager.offload_async([0], after=READY), 0.01)
        assert waiters(cache) == 0

    with pool.acquire(pool.capacity):
        asyncio.run(run())
    cache.manager.offload([0], after=READY).wait(PATIENCE)


def test_two_blocks_may_not_go_into_one_slot(cache: Cache) -> None:
    with cache.manager.pool.acquire(1) as blocks:
        (slot,) = blocks.indices
        with pytest.raises(InvalidArgument, match=f"into: slot {slot} stands twice"):
            cache.manager.offload([1, 2], into=[slot, slot], after=READY)
