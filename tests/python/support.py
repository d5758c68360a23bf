"""Helpers of the tests of the Python face."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

import kvmem
from kvmem.testing import Gate, advance, now, stall

Result = TypeVar("Result")

PATIENCE = 20.0
"""Seconds until a wait for something that must come counts as lost."""


clocks: list[kvmem.Device] = []
"""Virtual devices under test: somebody must move their clocks."""


def until(condition: Callable[[], object], what: str = "the condition") -> None:
    """Wait until `condition()` is true; fail when it does not come."""
    deadline = time.monotonic() + PATIENCE
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come within {PATIENCE} s"
        for device in clocks:
            advance(device, 0.001)
        pause.wait(0.001)


def clock(device: kvmem.Device) -> float:
    """The clock that its timeline is on: the monotonic one, unless time is virtual."""
    return now(device) if device.info["virtual_time"] else time.monotonic()


def in_thread(call: Callable[..., Result], *args: Any, **kwargs: Any) -> Future[Result]:
    """Run `call` in a thread of its own, which does not keep the process alive."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def free_slots(pool: kvmem.BlockPool) -> int:
    free = pool.stats()["free_slots"]
    assert isinstance(free, int)
    return free


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def native_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@contextmanager
def ticking() -> Iterator[Callable[[], float]]:
    """A thread that does nothing but run Python; yields a call that says its longest gap."""
    gaps = [0.0]
    over = threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not over.wait(0.005):
            now = time.monotonic()
            gaps.append(now - last)
            last = now
        gaps.append(time.monotonic() - last)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield lambda: max(gaps)
    finally:
        over.set()
        thread.join()


def run_child(script: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Run `script` in a fresh interpreter. Warnings are errors in it, as they are here."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def run_forked(child: Callable[[], None], timeout: float = PATIENCE) -> str:
    """Run `child` in a fork of this process; give what went wrong there, empty when nothing did.

    The child leaves without any clean-up of the interpreter, as the children of multiprocessing do.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        pid = os.fork()
    if pid == 0:
        said = ""
        try:
            child()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode()[:4000])
        os._exit(0 if not said else 1)
    os.close(writing)
    ended = in_thread(os.waitpid, pid, 0)
    if not wait([ended], timeout).done:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(ended.result()[1])
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode()
    if status == -signal.SIGKILL:
        return "the child hung"
    return said or ("" if status == 0 else f"the child ended with status {status}")


class Cache:
    """A device cache of `layers` arrays uint8[blocks, bytes], a pool and a manager."""

    def __init__(
        self,
        device: kvmem.Device,
        *,
        blocks: int = 8,
        slots: int = 8,
        layers: int = 2,
        segment_bytes: int = 2048,
        **manager: Any,
    ) -> None:
        self.device = device
        self.arrays = [np.zeros((blocks, segment_bytes), np.uint8) for _ in range(layers)]
        self.layout = kvmem.KVLayout.from_arrays(self.arrays, memory=device.name)
        block_bytes = layers * segment_bytes
        self.block_bytes = block_bytes
        slot_bytes = -(-block_bytes // 4096) * 4096
        self.pool = kvmem.BlockPool(
            device, block_bytes=block_bytes, capacity_bytes=slots * slot_bytes
        )
        self.manager = kvmem.Manager(device, self.layout, self.pool, **manager)
        self.gates: list[Gate] = []

    def stalled_stream(self) -> tuple[kvmem.Stream, Gate]:
        """A stream on which nothing runs before its gate is opened."""
        stream = self.device.stream()
        gate = stall(self.device, stream)
        self.gates.append(gate)
        return stream, gate

    def fill(self, block: int, value: int) -> None:
        """Give the block bytes that differ in each layer: `value`, `value` + 1, ..."""
        for layer, array in enumerate(self.arrays):
            array[block] = value + layer

    def holds(self, block: int, value: int) -> bool:
        return all((array[block] == value + layer).all() for layer, array in enumerate(self.arrays))

    def expected(self, value: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The payload of a host block that fill(block, value) leads to."""
        return np.concatenate(
            [np.full(a.shape[1], value + layer, np.uint8) for layer, a in enumerate(self.arrays)]
        )

    def stored(self, *blocks: int, **options: Any) -> kvmem.HostCopy:
        """Those blocks, offloaded."""
        transfer = self.manager.offload(list(blocks), after=kvmem.READY, **options)
        transfer.wait(PATIENCE)
        return transfer.result()

    def finish(self) -> None:
        for gate in self.gates:
            gate.open()
        if not self.manager.closed:
            assert self.manager.close(PATIENCE).quiet
        assert self.manager.drain(PATIENCE).quiet
        counts = self.pool.stats()
        states = ("free_slots", "held_slots", "quarantined_slots", "poisoned_slots")
        assert sum(counts[state] for state in states) == counts["capacity_slots"]
        assert counts["quarantined_slots"] == counts["poisoned_slots"] == 0
