"""One worker of the stress test: what it does, and what it knows."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

import kvmem
from stress_calls import Awaiting, Blocking, Calls, GivenUp, Latencies

if TYPE_CHECKING:
    from stress import Stress

PATIENCE = 20.0
"""Seconds until a wait for something that must come counts as lost."""

REGIONS = 4
SEGMENT_BYTES = 4096
DEVICE_BLOCKS = 32
"""Of each worker. Fewer slots than that, so that the pool is full at times."""
SLOTS = 28
MOST_BLOCKS = 8
"""Of one lease or transfer."""
MOST_LEASES = 2
MOST_STORED = 2
MOST_FLIGHTS = 4
LEAST_ACTIONS = 500
"""Of each worker, however short the time: enough for each kind of call."""


class Lost(Exception):
    """Something leaked, ended twice or never, or holds other bytes than it must."""


@dataclass(eq=False)
class Flight:
    """A transfer that has not been seen to end."""

    transfer: kvmem.Transfer  # deleted when the handle is dropped
    blocks: list[int]
    seeds: np.ndarray[Any, np.dtype[np.uint64]]
    cancelled: bool = False


class Worker:
    """One thread's or task's share: blocks, leases, results and what is in flight."""

    def __init__(self, stress: Stress, number: int) -> None:
        options = stress.options
        self.cache, self.pattern = stress.cache, stress.pattern
        self.manager, self.pool = stress.manager, stress.pool
        self.stream = stress.device.stream()
        self.choose = random.Random(1000 * options.seed + number)
        self.latencies = Latencies()
        self.calls: Calls = (Awaiting if options.tasks else Blocking)(self.latencies, self.choose)
        self.number = number
        self.generation = 0
        self.idle = list(range(number * DEVICE_BLOCKS, (number + 1) * DEVICE_BLOCKS))
        self.leases: list[tuple[kvmem.HostBlocks, int]] = []
        self.stored: list[tuple[kvmem.HostCopy, Any]] = []
        self.flights: list[Flight] = []
        self.dropped: list[Flight] = []
        self.actions: dict[Callable[[], Coroutine[Any, Any, None]], int] = {
            self.lease: 6,
            self.end_lease: 5,
            self.store: 5,
            self.load: 5,
            self.settle: 7,
            self.look: 2,
            self.cancel: 2,
            self.drop: 2,
            self.poll: 3,
        }

    def begin(self) -> None:
        self.latencies.clear()
        self.counts: Counter[str] = Counter()
        self.ended = 0.0

    async def work(self, deadline: float) -> None:
        """Do one thing after the other until the deadline, then settle everything."""
        actions, weights = list(self.actions), list(self.actions.values())
        left = LEAST_ACTIONS
        while left > 0 or time.perf_counter() < deadline:
            left -= 16
            for act in self.choose.choices(actions, weights, k=16):
                await act()
            await self.calls.breathe()
        self.ended = time.perf_counter()
        self.latencies.stop()
        while self.flights:
            await self.settle()
        while self.dropped:
            await self.poll()
            self.sweep()
            await self.calls.breathe()
        while self.leases:
            await self.end_lease()
        while self.stored:
            self.let_go()

    # ---- the pool

    async def lease(self) -> None:
        if len(self.leases) == MOST_LEASES:
            await self.end_lease()
            return
        count = self.choose.randint(1, MOST_BLOCKS)
        try:
            blocks = await self.calls.acquire(self.pool, count)
        except GivenUp:
            self.counts["refused"] += 1
            return
        self.generation += 1
        _mark(blocks)[0] = self.generation
        self.leases.append((blocks, self.generation))

    async def end_lease(self) -> None:
        if not self.leases:
            return
        blocks, mark = self.leases.pop(self.choose.randrange(len(self.leases)))
        expect("the bytes of a lease", int(_mark(blocks)[0]), mark)
        self.calls.release(blocks, self.stream if self.choose.random() < 0.5 else None)

    # ---- transfers

    async def store(self) -> None:
        blocks = self.take()
        if not blocks:
            await self.settle()
            return
        seeds, after = self.write(blocks)
        how = {"after": after, "priority": self.any_priority(), "tag": self.any_tag()}
        try:
            transfer = await self.calls.offload(self.manager, blocks, **how)
        except GivenUp:
            self.give_up(blocks)
            return
        self.accepted(Flight(transfer, blocks, seeds), how["tag"])

    async def load(self) -> None:
        if not self.stored:
            return
        copy, seeds = self.choose.choice(self.stored)
        blocks = self.take(len(copy))
        if not blocks:
            await self.settle()
            return
        first = self.choose.randrange(len(blocks))
        self.idle += blocks[:first]
        blocks, seeds = blocks[first:], seeds[first:]
        after = self.put(blocks, np.zeros((REGIONS, len(blocks), SEGMENT_BYTES // 8), np.uint64))
        how = {"after": after, "priority": self.any_priority(), "tag": self.any_tag()}
        try:
            transfer = await self.calls.restore(self.manager, copy[first:], blocks, **how)
        except GivenUp:
            self.give_up(blocks)
            return
        self.accepted(Flight(transfer, blocks, seeds), how["tag"])
        if self.choose.random() < 0.3:
            self.let_go()  # the copy in flight is a holder

    async def settle(self) -> None:
        """Wait for the end of one."""
        if self.flights:
            flight = self.flights.pop(self.choose.randrange(len(self.flights)))
            self.finish(flight, await self.calls.wait(flight.transfer, PATIENCE))

    async def look(self) -> None:
        """Wait for the end of one, but not for long."""
        if self.flights:
            at = self.choose.randrange(len(self.flights))
            try:
                state = await self.calls.wait(self.flights[at].transfer, None)
            except GivenUp:
                return
            self.finish(self.flights.pop(at), state)

    async def cancel(self) -> None:
        if self.flights:
            flight = self.choose.choice(self.flights)
            flight.cancelled = True
            self.counts[self.calls.cancel(flight.transfer)] += 1

    async def drop(self) -> None:
        if self.flights:
            flight = self.flights.pop(self.choose.randrange(len(self.flights)))
            self.calls.drop(flight)
            self.dropped.append(flight)

    async def poll(self) -> None:
        self.counts["reported"] += self.calls.poll(self.manager)

    # ---- what it knows

    def take(self, count: int = 0) -> list[int]:
        """So many idle blocks, any number without; none where there are none to be had."""
        if len(self.flights) == MOST_FLIGHTS:
            return []
        count = count or self.choose.randint(1, MOST_BLOCKS)
        if len(self.idle) < count:
            self.sweep()
        if len(self.idle) < count:
            return []
        self.choose.shuffle(self.idle)
        taken, self.idle = self.idle[:count], self.idle[count:]
        return taken

    def write(self, blocks: list[int]) -> tuple[Any, object]:
        """Give them new bytes; their seeds, and what a copy must be ordered behind."""
        self.generation += 1
        seeds = self.pattern.seeds([block << 32 | self.generation for block in blocks])
        values = np.empty((REGIONS, len(blocks), SEGMENT_BYTES // 8), np.uint64)
        self.pattern.fill(values, seeds)
        return seeds, self.put(blocks, values)

    def put(self, blocks: list[int], values: Any) -> object:
        """Write the blocks at once or on the stream; gives what a copy must be ordered behind."""
        if self.choose.random() < 0.7:
            self.cache[:, blocks] = values
            return self.any_after()
        for region in range(REGIONS):
            for block, value in zip(blocks, values[region], strict=True):
                self.stream.copy(self.cache[region, block], value)
        return self.stream

    def accepted(self, flight: Flight, tag: object) -> None:
        self.flights.append(flight)
        self.counts["accepted"] += 1
        self.counts["tagged"] += tag is not None

    def give_up(self, blocks: list[int]) -> None:
        """A bound was met in vain: make room for others."""
        self.counts["refused"] += 1
        self.stream.synchronize(PATIENCE)  # it may still write what was to be offloaded
        self.idle += blocks
        if self.stored:
            self.let_go()

    def let_go(self) -> None:
        copy, _ = self.stored.pop(0)
        copy.release()

    def finish(self, flight: Flight, state: str) -> None:
        """It ended: done, or cancelled by us."""
        if state != "done" and not flight.cancelled:
            raise Lost(f"a transfer that nobody cancelled ended {state}")
        if state == "done":
            copy = flight.transfer.result()
            if copy is None:
                self.verify(flight)
            else:
                self.stored.append((copy, flight.seeds))
                if len(self.stored) > MOST_STORED:
                    self.let_go()
        else:
            self.stream.synchronize(PATIENCE)  # an offload may have ended before what it was behind
        self.counts[state] += 1
        self.idle += flight.blocks

    def sweep(self) -> None:
        """Take back the blocks of transfers without a handle that have ended."""
        for flight in self.dropped[:]:
            if not self.manager.busy(flight.blocks):
                self.dropped.remove(flight)
                if flight.cancelled:
                    self.stream.synchronize(PATIENCE)
                else:
                    self.verify(flight)
                self.idle += flight.blocks

    def verify(self, flight: Flight) -> None:
        """A restore has brought the pattern; an offload has left it."""
        wrong = self.pattern.differing(self.cache[:, flight.blocks], flight.seeds)
        expect("blocks with other bytes than they must hold", wrong, 0)
        self.counts["verified"] += len(flight.blocks)

    def any_after(self) -> object:
        return self.stream if self.choose.random() < 0.5 else kvmem.READY

    def any_priority(self) -> str:
        return "demand" if self.choose.random() < 0.5 else "background"

    def any_tag(self) -> int | None:
        return self.generation if self.choose.random() < 0.3 else None


def _mark(blocks: kvmem.HostBlocks) -> Any:
    return blocks[0][:8].view(np.uint64)


def expect(what: str, seen: int, wanted: int) -> None:
    if seen != wanted:
        raise Lost(f"{what}: {seen}, not {wanted}")
