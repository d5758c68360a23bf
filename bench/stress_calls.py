"""The calls of the stress test, blocking and awaited, each timed by its kind."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Coroutine, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

import numpy as np

import kvmem

Started = TypeVar("Started")

KINDS = (
    "acquire",
    "release",
    "release_after",
    "offload",
    "restore",
    "wait",
    "wait_timed",
    "cancel",
    "drop",
    "poll",
)
PERCENTILES = {"p50": 50.0, "p99": 99.0, "p99.9": 99.9}
SHORT = 0.001
"""Seconds of a wait that may be in vain."""


class GivenUp(Exception):
    """A bound was not passed, or an end not seen, in the time given."""


class Latencies:
    """Nanoseconds of each call by kind, in memory that is there from the beginning.

    The last `most` of each kind are kept; all are counted.
    """

    def __init__(self, most: int = 1 << 15) -> None:
        self._ns = np.ones((len(KINDS), most), np.int64)  # touched: no growth while it fills
        self._counts = [0] * len(KINDS)
        self._running = True

    def clear(self) -> None:
        self._counts = [0] * len(KINDS)
        self._running = True

    def stop(self) -> None:
        """Count no more."""
        self._running = False

    def add(self, kind: int, ns: int) -> None:
        if self._running:
            count = self._counts[kind]
            self._ns[kind, count % self._ns.shape[1]] = ns
            self._counts[kind] = count + 1

    def count(self, kind: int) -> int:
        return self._counts[kind]

    def kept(self, kind: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return self._ns[kind, : self._counts[kind]]


@dataclass
class StressResult:
    """seconds: until the last worker stopped. operations: timed calls, by kind.

    counts: of what else the workers saw, summed.
    """

    seconds: float
    operations: dict[str, int]
    counts: Counter[str]
    _ns: dict[str, np.ndarray[Any, np.dtype[np.int64]]]

    @classmethod
    def of(cls, seconds: float, seen: Iterable[tuple[Latencies, Counter[str]]]) -> StressResult:
        seen = list(seen)
        operations, ns = {}, {}
        for number, kind in enumerate(KINDS):
            operations[kind] = sum(latencies.count(number) for latencies, _ in seen)
            ns[kind] = np.concatenate([latencies.kept(number) for latencies, _ in seen])
        counts = sum((counts for _, counts in seen), Counter[str]())
        return cls(seconds, operations, counts, ns)

    @property
    def operations_per_second(self) -> float:
        return sum(self.operations.values()) / self.seconds

    def percentiles_us(self, kind: str | None = None) -> dict[str, float]:
        """Of one kind, or of all; empty where there was none."""
        ns = np.concatenate(list(self._ns.values())) if kind is None else self._ns[kind]
        if not len(ns):
            return {}
        values = np.percentile(ns, list(PERCENTILES.values())) / 1000
        return dict(zip(PERCENTILES, values.tolist(), strict=True))

    def figures(self) -> dict[str, Any]:
        """Plain values, for a report."""
        return {
            "operations_per_second": round(self.operations_per_second),
            "all_us": self.percentiles_us(),
            "kinds": {
                kind: {"operations": self.operations[kind]} | self.percentiles_us(kind)
                for kind in KINDS
            },
            "counts": dict(sorted(self.counts.items())),
        }

    def table(self) -> str:
        """One line for all, and one for each kind."""
        lines = [f"{'call':<14}{'a second':>10}" + "".join(f"{p + ' us':>11}" for p in PERCENTILES)]
        for kind in (None, *KINDS):
            count = sum(self.operations.values()) if kind is None else self.operations[kind]
            values = self.percentiles_us(kind).values()
            lines.append(
                f"{kind or 'all':<14}{count / self.seconds:>10,.0f}"
                + "".join(f"{value:>11.1f}" for value in values)
            )
        return "\n".join(lines)


(
    _ACQUIRE,
    _RELEASE,
    _RELEASE_AFTER,
    _OFFLOAD,
    _RESTORE,
    _WAIT,
    _WAIT_TIMED,
    _CANCEL,
    _DROP,
    _POLL,
) = range(len(KINDS))


class Calls(ABC):
    """What a worker calls. The async ones raise GivenUp at a bound."""

    def __init__(self, latencies: Latencies, choose: Random) -> None:
        self._latencies = latencies
        self._choose = choose

    @contextmanager
    def _timed(self, kind: int) -> Any:
        """For calls that are long beside this."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self._latencies.add(kind, time.perf_counter_ns() - start)

    # ---- calls that never wait

    def release(self, blocks: kvmem.HostBlocks, after: kvmem.Stream | None) -> None:
        start = time.perf_counter_ns()
        if after is None:
            blocks.release()
        else:
            blocks.release(after=after)
        kind = _RELEASE if after is None else _RELEASE_AFTER
        self._latencies.add(kind, time.perf_counter_ns() - start)

    def cancel(self, transfer: kvmem.Transfer) -> str:
        with self._timed(_CANCEL):
            return transfer.cancel().name

    def drop(self, flight: Any) -> None:
        with self._timed(_DROP):
            del flight.transfer

    def poll(self, manager: kvmem.Manager) -> int:
        with self._timed(_POLL):
            return len(manager.poll())

    async def acquire(self, pool: kvmem.BlockPool, count: int) -> kvmem.HostBlocks:
        start = time.perf_counter_ns()
        blocks = pool.try_acquire(count)
        if blocks is None:
            blocks = await self._acquire(pool, count)
        self._latencies.add(_ACQUIRE, time.perf_counter_ns() - start)
        return blocks

    async def wait(self, transfer: kvmem.Transfer, patience: float | None) -> str:
        """Its state at the end; GivenUp where there is no patience and it does not end soon."""
        with self._timed(_WAIT_TIMED if patience is None else _WAIT):
            try:
                await self._wait(transfer, SHORT if patience is None else patience)
            except kvmem.Cancelled:
                pass
            except (kvmem.TimedOut, asyncio.TimeoutError):
                if patience is None:
                    raise GivenUp from None
                raise
        return transfer.state

    # ---- calls that may wait

    @abstractmethod
    async def _acquire(self, pool: kvmem.BlockPool, count: int) -> kvmem.HostBlocks: ...
    @abstractmethod
    async def offload(self, manager: kvmem.Manager, *what: Any, **how: Any) -> kvmem.Transfer: ...
    @abstractmethod
    async def restore(self, manager: kvmem.Manager, *what: Any, **how: Any) -> kvmem.Transfer: ...
    @abstractmethod
    async def _wait(self, transfer: kvmem.Transfer, seconds: float) -> None: ...
    @abstractmethod
    async def breathe(self) -> None: ...


class Blocking(Calls):
    """Of a thread. Nothing here suspends."""

    async def _acquire(self, pool: kvmem.BlockPool, count: int) -> kvmem.HostBlocks:
        with _bounded():
            return pool.acquire(count, timeout=SHORT)

    async def offload(self, manager: kvmem.Manager, *what: Any, **how: Any) -> kvmem.Transfer:
        with self._timed(_OFFLOAD), _bounded():
            return manager.offload(*what, **how, timeout=SHORT)

    async def restore(self, manager: kvmem.Manager, *what: Any, **how: Any) -> kvmem.Transfer:
        with self._timed(_RESTORE), _bounded():
            return manager.restore(*what, **how, timeout=SHORT)

    async def _wait(self, transfer: kvmem.Transfer, seconds: float) -> None:
        transfer.wait(seconds)

    async def breathe(self) -> None:
        pass


class Awaiting(Calls):
    """Of a task, whose helpers are cancelled at times: when out of time, or at any moment."""

    async def _acquire(self, pool: kvmem.BlockPool, count: int) -> kvmem.HostBlocks:
        return await self._in_time(pool.acquire_async(count))

    async def offload(self, manager: kvmem.Manager, *what: Any, **how: Any) -> kvmem.Transfer:
        with self._timed(_OFFLOAD):
            return await self._in_time(manager.offload_async(*what, **how))

    async def restore(self, manager: kvmem.Manager, *what: Any, **how: Any) -> kvmem.Transfer:
        with self._timed(_RESTORE):
            return await self._in_time(manager.restore_async(*what, **how))

    async def _wait(self, transfer: kvmem.Transfer, seconds: float) -> None:
        await asyncio.wait_for(transfer, seconds)

    async def breathe(self) -> None:
        await asyncio.sleep(0)

    async def _in_time(self, starting: Coroutine[Any, Any, Started]) -> Started:
        task = asyncio.ensure_future(starting)
        if self._choose.random() < 0.1:
            if self._choose.random() < 0.5:
                await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task], timeout=SHORT)
        task.cancel()  # does nothing once it has ended
        try:
            return await task
        except (asyncio.CancelledError, kvmem.AtBound):
            raise GivenUp from None


@contextmanager
def _bounded() -> Any:
    try:
        yield
    except kvmem.AtBound:
        raise GivenUp from None
