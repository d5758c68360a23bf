"""Pools of other projects, under the same churn. peers.md says how to install them.

Each has run(picks), which gives back and takes one block for each of them, and batches(count),
which takes and gives back 64 at a time. The loops call the peers' own methods and nothing else.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import kvmem

LIVE = 256
BATCH = 64
CAPACITY = 1024


class PythonPool(Protocol):
    def run(self, picks: Iterable[int]) -> None: ...
    def batches(self, count: int) -> None: ...
    def close(self) -> None: ...


class Kvmem:
    def __init__(self, device: kvmem.Device) -> None:
        self.pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=CAPACITY * 4096)
        self.held = [self.pool.acquire(1) for _ in range(LIVE)]

    def run(self, picks: Iterable[int]) -> None:
        held, acquire = self.held, self.pool.try_acquire
        for pick in picks:
            held[pick].release()
            held[pick] = acquire(1)

    def batches(self, count: int) -> None:
        acquire = self.pool.acquire
        for _ in range(count):
            acquire(BATCH).release()

    def close(self) -> None:
        self.pool.close()


class ListBehindALock:
    """What one would write in an afternoon."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free = list(range(CAPACITY))
        self.held = [self.acquire() for _ in range(LIVE)]

    def acquire(self) -> int:
        with self.lock:
            return self.free.pop()

    def release(self, block: int) -> None:
        with self.lock:
            self.free.append(block)

    def acquire_many(self, count: int) -> list[int]:
        with self.lock:
            blocks = self.free[-count:]
            del self.free[-count:]
            return blocks

    def release_many(self, blocks: list[int]) -> None:
        with self.lock:
            self.free += blocks

    def run(self, picks: Iterable[int]) -> None:
        held, acquire, release = self.held, self.acquire, self.release
        for pick in picks:
            release(held[pick])
            held[pick] = acquire()

    def batches(self, count: int) -> None:
        for _ in range(count):
            self.release_many(self.acquire_many(BATCH))

    def close(self) -> None:
        pass


class VllmBlockPool:
    """vllm.v1.core.block_pool.BlockPool, without prefix caching."""

    def __init__(self) -> None:
        with quiet():
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
            from vllm.v1.core.block_pool import BlockPool

            self.pool = BlockPool(CAPACITY, False, 16)
        self.held = [self.pool.get_new_blocks(1) for _ in range(LIVE)]

    def run(self, picks: Iterable[int]) -> None:
        held, acquire, release = self.held, self.pool.get_new_blocks, self.pool.free_blocks
        for pick in picks:
            release(held[pick])
            held[pick] = acquire(1)

    def batches(self, count: int) -> None:
        acquire, release = self.pool.get_new_blocks, self.pool.free_blocks
        for _ in range(count):
            release(acquire(BATCH))

    def close(self) -> None:
        pass


class LmcacheAllocator:
    """An allocator of lmcache.v1.memory_allocators: "tensor", "paged" or "mixed"."""

    def __init__(self, kind: str) -> None:
        with quiet():
            os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
            os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
            import torch
            from lmcache.v1.memory_management import MemoryFormat

            shape, dtype = torch.Size([2, 1, 16, 64]), torch.bfloat16  # 4 KiB
            self.block: tuple[Any, ...] = (shape, dtype, MemoryFormat.KV_2LTD)
            self.allocator = _lmcache(kind, *self.block)
        self.held = [self.allocator.allocate(*self.block) for _ in range(LIVE)]

    def run(self, picks: Iterable[int]) -> None:
        held, acquire, block = self.held, self.allocator.allocate, self.block
        for pick in picks:
            held[pick].ref_count_down()
            held[pick] = acquire(*block)

    def batches(self, count: int) -> None:
        acquire, release = self.allocator.batched_allocate, self.allocator.batched_free
        shape, dtype, layout = self.block
        for _ in range(count):
            release(acquire(shape, dtype, BATCH, layout))

    def close(self) -> None:
        for block in self.held:
            block.ref_count_down()
        self.held.clear()
        self.allocator.close()


def _lmcache(kind: str, shape: Any, dtype: Any, layout: Any) -> Any:
    import torch

    nbytes = CAPACITY * 4096
    if kind == "mixed":
        from lmcache.v1.memory_allocators.mixed_memory_allocator import MixedMemoryAllocator

        return MixedMemoryAllocator(nbytes)
    memory = torch.empty(nbytes, dtype=torch.uint8)
    if kind == "paged":
        from lmcache.v1.memory_allocators.paged_tensor_memory_allocator import (
            PagedTensorMemoryAllocator,
        )

        return PagedTensorMemoryAllocator(memory, [shape], [dtype], layout)
    from lmcache.v1.memory_allocators.tensor_memory_allocator import TensorMemoryAllocator

    return TensorMemoryAllocator(memory)


PEERS = {
    "list behind a lock": ListBehindALock,
    "vLLM BlockPool": VllmBlockPool,
    "LMCache paged": lambda: LmcacheAllocator("paged"),
    "LMCache tensor": lambda: LmcacheAllocator("tensor"),
    "LMCache mixed": lambda: LmcacheAllocator("mixed"),
}


def installed() -> dict[str, PythonPool | None]:
    """All peers; None for one that cannot be imported, and why behind its name."""
    found: dict[str, PythonPool | None] = {}
    for name, make in PEERS.items():
        try:
            found[name] = make()
        except ImportError as error:
            found[f"{name}: no {error.name}"] = None
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """What these packages warn of on import is not ours to mend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
