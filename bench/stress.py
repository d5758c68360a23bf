"""Workers that do at once all that may be done with one manager, in random order.

A worker leases slots of the pool, offloads blocks of the device cache and restores them elsewhere,
cancels, drops handles, waits for a moment or to the end, and polls. Each has device blocks of its
own and knows which bytes they must hold: those of a pattern by (block, generation). Every call is
timed. At rest everything must have ended and come home: what is missing raises `Lost`.

The same worker runs in a thread, with the calls that block, and in a task of an event loop, with
those that are awaited (and now and then cancelled).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvmem
from kvmem.replay.pattern import BlockPattern
from stress_calls import KINDS, StressResult
from stress_worker import (
    DEVICE_BLOCKS,
    MOST_BLOCKS,
    PATIENCE,
    REGIONS,
    SEGMENT_BYTES,
    SLOTS,
    Lost,
    Worker,
    expect,
)

STATES = ("held_slots", "quarantined_slots", "poisoned_slots")


@dataclass(frozen=True)
class StressOptions:
    """workers: threads; or tasks of one event loop, with `tasks`."""

    workers: int = 4
    tasks: bool = False
    reaper: bool = True
    seed: int = 0

    @property
    def name(self) -> str:
        kind = "tasks" if self.tasks else "threads"
        return f"{self.workers} {kind}" + ("" if self.reaper else ", no reaper")


class Stress:
    """A device, a cache, a pool and a manager, and the workers that share them."""

    def __init__(self, options: StressOptions) -> None:
        self.options = options
        count = options.workers
        self.device = kvmem.open_device("host", workers=2)
        self.pattern = BlockPattern(REGIONS, SEGMENT_BYTES)
        shape = (REGIONS, count * DEVICE_BLOCKS, SEGMENT_BYTES // 8)
        self.cache = np.zeros(shape, np.uint64)
        block_bytes = REGIONS * SEGMENT_BYTES
        self.pool = kvmem.BlockPool(
            self.device, block_bytes=block_bytes, capacity_bytes=count * SLOTS * block_bytes
        )
        self.manager = kvmem.Manager(
            self.device,
            kvmem.KVLayout.from_arrays(list(self.cache), memory=self.device.name),
            self.pool,
            # Bounds that are met: a worker alone may have more than this in flight.
            max_queued_bytes=count * 2 * MOST_BLOCKS * block_bytes,
            window_bytes=count * MOST_BLOCKS * block_bytes,
            max_reports=16 * count,
            reaper=options.reaper,
        )
        self.workers = [Worker(self, number) for number in range(count)]

    def run(self, seconds: float) -> StressResult:
        """Let all work for so long, then come to rest and check. May be called again."""
        for worker in self.workers:
            worker.begin()
        started = time.perf_counter()
        deadline = started + seconds
        if self.options.tasks:
            asyncio.run(self._run_tasks(deadline))
        else:
            self._run_threads(deadline)
        self._rest()
        took = max(worker.ended for worker in self.workers) - started
        return StressResult.of(took, [(each.latencies, each.counts) for each in self.workers])

    def close(self) -> None:
        report = self.manager.close(PATIENCE)
        expect("what is in flight at the end", report.in_flight, 0)

    def _run_threads(self, deadline: float) -> None:
        with ThreadPoolExecutor(len(self.workers)) as threads:
            running = [threads.submit(_drive, each.work(deadline)) for each in self.workers]
        for each in running:
            each.result()

    async def _run_tasks(self, deadline: float) -> None:
        await asyncio.gather(*(each.work(deadline) for each in self.workers))

    def _rest(self) -> None:
        """Nothing is at work: all must have ended, been reported and come home."""
        manager, pool = self.manager, self.pool
        if not manager.drain(PATIENCE).quiet:
            raise Lost(f"transfers did not end within {PATIENCE} s: {manager.stats()}")
        reports = len(manager.poll())
        _wait_until(lambda: _at_home(manager, pool), "every slot at home")
        slots: dict[str, Any] = pool.stats()
        stats: Any = manager.stats()
        for state in STATES:
            expect(state, slots[state], 0)
        expect("free slots", slots["free_slots"], slots["capacity_slots"])
        for name in ("offload", "restore"):
            side = stats[name]
            ended = side["done"] + side["failed"] + side["cancelled"]
            expect(f"{name}s accepted", side["accepted"], ended)
            for bound in ("failed", "active", "waiting", "queued_bytes", "window_bytes"):
                expect(f"{name}: {bound}", side[bound], 0)
        for place in ("restoration_slots", "reports_waiting", "reports_taken", "waiters"):
            expect(place, stats[place], 0)
        self.workers[0].counts["reported"] += reports
        tagged = sum(each.counts["tagged"] for each in self.workers)
        expect("reports", sum(each.counts["reported"] for each in self.workers), tagged)


def _wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait until `condition()` is true. Raises Lost when that does not come."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise Lost(f"{what} did not come within {PATIENCE} s")
        time.sleep(0.001)


def _at_home(manager: kvmem.Manager, pool: kvmem.BlockPool) -> bool:
    manager.poll()  # nobody else reaps where there is no reaper
    slots = pool.stats()
    return bool(slots["free_slots"] == slots["capacity_slots"])


def _drive(work: Coroutine[Any, Any, None]) -> None:
    """Run what awaits only calls that block: it never suspends."""
    try:
        work.send(None)
    except StopIteration:
        return
    raise Lost("a call that blocks has suspended")


__all__ = ["KINDS", "Lost", "Stress", "StressOptions", "StressResult"]
