"""What takes turns: kvmem, and what one would write with Python and NumPy alone.

NumPy copies without OpenMP, in one thread, whatever OMP_NUM_THREADS says; kvmem copies with the
threads of its device. Each pair works on the same memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

import kvmem

LIVE = 512
BATCH = 64
CAPACITY = 1024

LAYERS = 16
"""Segments of a block that is copied."""

Words = NDArray[np.int64]
"""Blocks in 64-bit words, which NumPy moves faster than bytes."""


class KvmemPool:
    """A pool of which LIVE blocks are held."""

    def __init__(self) -> None:
        device = kvmem.open_device("host", workers=1)
        self._pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=CAPACITY * 4096)
        self._held = [self._pool.acquire(1) for _ in range(LIVE)]

    def churn(self, picks: Sequence[int]) -> None:
        """Give each of these back and take another."""
        held, acquire = self._held, self._pool.acquire
        for pick in picks:
            held[pick].release()
            held[pick] = acquire(1)

    def batches(self, count: int) -> None:
        """Take BATCH blocks and give them back."""
        acquire = self._pool.acquire
        for _ in range(count):
            acquire(BATCH).release()


class ListPool:
    """The same with a list behind a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = list(range(CAPACITY))
        self._held = [self._acquire() for _ in range(LIVE)]

    def _acquire(self) -> int:
        with self._lock:
            return self._free.pop()

    def _release(self, block: int) -> None:
        with self._lock:
            self._free.append(block)

    def _acquire_many(self, count: int) -> list[int]:
        with self._lock:
            blocks = self._free[-count:]
            del self._free[-count:]
            return blocks

    def _release_many(self, blocks: list[int]) -> None:
        with self._lock:
            self._free += blocks

    def churn(self, picks: Sequence[int]) -> None:
        held, acquire, release = self._held, self._acquire, self._release
        for pick in picks:
            release(held[pick])
            held[pick] = acquire()

    def batches(self, count: int) -> None:
        for _ in range(count):
            self._release_many(self._acquire_many(BATCH))


class Cache:
    """A device cache of some layers, and a manager with `slots` host blocks for it."""

    def __init__(
        self, device: kvmem.Device, layers: int, blocks: int, segment_bytes: int, slots: int
    ) -> None:
        self._memory = device.alloc(layers * blocks * segment_bytes)
        self._memory.array[:] = 1  # so that no page is touched for the first time under the clock
        words = self._memory.array.view(np.int64)
        self.layers: Words = words.reshape(layers, blocks, segment_bytes // 8)
        layout = kvmem.KVLayout.from_arrays(list(self.layers), memory=device.name)
        self.manager = kvmem.Manager(device, layout, host_bytes=slots * layout.block_bytes)

    def scattered(self, count: int) -> list[int]:
        """Draw blocks in random order, the same in each run."""
        return [int(i) for i in np.random.default_rng(1).permutation(self.layers.shape[1])[:count]]


class Submission:
    """The call of offload() alone, beside writing down what is to be copied where."""

    SEGMENT_BYTES = 4096
    REGIONS = 64
    BLOCKS = 156

    def __init__(self, device: kvmem.Device) -> None:
        self._cache = Cache(
            device, self.REGIONS, 2 * self.BLOCKS, self.SEGMENT_BYTES, slots=self.BLOCKS
        )
        self._blocks = self._cache.scattered(self.BLOCKS)
        self._transfer: kvmem.Transfer | None = None
        self._bases = [layer.ctypes.data for layer in self._cache.layers]
        self._target = self._cache.manager.pool.array.ctypes.data

    def offload(self) -> None:
        self._transfer = self._cache.manager.offload(self._blocks, after=kvmem.READY)

    def settle(self) -> None:
        """End what offload() began."""
        if self._transfer is not None:
            end(self._transfer)
            self._transfer = None

    def list_with_python(self) -> tuple[list[int], list[int], list[int]]:
        sources, targets, sizes = [], [], []
        size = self.SEGMENT_BYTES
        for slot, block in enumerate(self._blocks):
            target = self._target + slot * size * self.REGIONS
            for region, base in enumerate(self._bases):
                sources.append(base + block * size)
                targets.append(target + region * size)
                sizes.append(size)
        return sources, targets, sizes

    def list_with_numpy(self) -> tuple[Words, Words, Words]:
        size = self.SEGMENT_BYTES
        blocks = np.array(self._blocks, np.int64)[:, None]
        sources = np.array(self._bases, np.int64) + blocks * size
        targets = self._target + np.arange(sources.size, dtype=np.int64) * size
        return sources.ravel(), targets, np.full(sources.size, size, np.int64)

    def close(self) -> None:
        self._cache.manager.close()


class ScatteredCopy:
    """Blocks out of the cache into host memory and back, until the bytes are there."""

    def __init__(self, device: kvmem.Device, segment_bytes: int, nbytes: int) -> None:
        self.blocks = nbytes // (LAYERS * segment_bytes)
        self.nbytes = self.blocks * LAYERS * segment_bytes
        self.cache = Cache(device, LAYERS, 2 * self.blocks, segment_bytes, slots=self.blocks)
        self.picked = self.cache.scattered(self.blocks)
        host = self.cache.manager.pool.array.view(np.int64)
        self.slots: Words = host.reshape(self.blocks, LAYERS, -1)
        # As np.take gives it: all blocks of a layer behind one another.
        self.taken: Words = host.reshape(LAYERS, self.blocks, -1)
        self._kept: kvmem.HostCopy | None = None

    def offload(self) -> None:
        end(self.cache.manager.offload(self.picked, after=kvmem.READY))

    def loop_out(self) -> None:
        for slot, block in zip(self.slots, self.picked, strict=True):
            for layer, segment in enumerate(slot):
                np.copyto(segment, self.cache.layers[layer, block])

    def take(self) -> None:
        for layer, taken in zip(self.cache.layers, self.taken, strict=True):
            np.take(layer, self.picked, axis=0, out=taken, mode="clip")

    def restore(self) -> None:
        if self._kept is None:
            offloaded = self.cache.manager.offload(self.picked, after=kvmem.READY)
            offloaded.wait()
            self._kept = offloaded.result()
        self.cache.manager.restore(self._kept, self.picked, after=kvmem.READY).wait()

    def loop_in(self) -> None:
        for slot, block in zip(self.slots, self.picked, strict=True):
            for layer, segment in enumerate(slot):
                np.copyto(self.cache.layers[layer, block], segment)

    def put(self) -> None:
        for layer, taken in zip(self.cache.layers, self.taken, strict=True):
            layer[self.picked] = taken

    def close(self) -> None:
        if self._kept is not None:
            self._kept.release()
        self.cache.manager.close()


class Handoff:
    """One block of 2 MiB, handed to a thread that copies it or copied on the spot."""

    LAYERS = 32
    SEGMENT_BYTES = 64 << 10

    def __init__(self, device: kvmem.Device, blocks: int) -> None:
        self.blocks = blocks
        self._cache = Cache(device, self.LAYERS, blocks, self.SEGMENT_BYTES, slots=4)
        # A slot that kvmem does not use meanwhile.
        self._slot = self._cache.manager.pool.acquire(1)
        self._target: Words = self._slot[0].view(np.int64).reshape(self.LAYERS, -1)
        self._next = 0
        self._executor = ThreadPoolExecutor(1)
        self._running: Callable[[], object] | None = None

    def offload_each(self) -> None:
        for block in range(self.blocks):
            end(self._cache.manager.offload([block], after=kvmem.READY))

    def copy_each(self) -> None:
        for block in range(self.blocks):
            np.copyto(self._target, self._cache.layers[:, block])

    def submit(self) -> None:
        transfer = self._cache.manager.offload([self._next], after=kvmem.READY)
        self._running = lambda: end(transfer)

    def submit_to_executor(self) -> None:
        source = self._cache.layers[:, self._next]
        self._running = self._executor.submit(np.copyto, self._target, source).result

    def settle(self) -> None:
        """End what was submitted; the threads sleep when the next call comes."""
        if self._running is not None:
            self._running()
            self._running = None
        self._next = (self._next + 1) % self.blocks

    def close(self) -> None:
        self._executor.shutdown()
        self._slot.release()
        self._cache.manager.close()


def end(offloaded: kvmem.Transfer) -> None:
    """Wait for an offload and give its slots back."""
    offloaded.wait()
    copy = offloaded.result()
    assert copy is not None
    copy.release()


@contextmanager
def polling_thread() -> Iterator[None]:
    """A thread that looks once a millisecond whether there is something to do."""
    over = threading.Event()

    def poll() -> None:
        while not over.wait(0.001):
            pass

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
