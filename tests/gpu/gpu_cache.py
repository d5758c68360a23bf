"""A device cache on a real GPU, with a pool and a manager; what the tests of tests/gpu share."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvmem
from gpu_driver import Driver, NoGpu, Spin, Stream, pattern

PATIENCE = 20.0
"""Seconds until a wait for something that must come counts as lost."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@functools.cache
def find_gpu() -> Driver | str:
    """The GPU, or why kvmem cannot use one."""
    found: Driver | str
    try:
        found = Driver()  # first: it says what the driver needs to know before it is loaded
    except NoGpu as why:
        found = str(why)
    try:
        kvmem.open_device("cuda")
    except kvmem.DeviceUnavailable as why:
        found = str(why)
    return found


def gpu_or_skip() -> Driver:
    """Skip the test where there is no GPU, unless KVMEM_TEST_GPU=1 says that there is one."""
    found = find_gpu()
    if isinstance(found, Driver):
        return found
    if os.environ.get("KVMEM_TEST_GPU") == "1":
        pytest.fail(found, pytrace=False)
    pytest.skip(found)


def seed_of(block: int, layer: int, version: int = 0) -> int:
    """Of the pattern in a segment: differs from all others."""
    return (version * 1000 + layer) * 100_000 + block


class GpuCache:
    """`layers` pieces of GPU memory with `blocks` segments each, `gap_bytes` apart.

    interleaved: one piece, in which the segments of a block stand side by side.
    """

    def __init__(
        self,
        gpu: Driver,
        device: kvmem.Device,
        *,
        blocks: int = 8,
        layers: int = 2,
        segment_bytes: int = 65536,
        gap_bytes: int = 0,
        interleaved: bool = False,
        slots: int | None = None,
        pool: dict[str, Any] | None = None,
        **manager: Any,
    ) -> None:
        self.gpu = gpu
        self.device = device
        self.blocks, self.layers, self.segment_bytes = blocks, layers, segment_bytes
        self.block_bytes = layers * segment_bytes
        place = segment_bytes + gap_bytes
        self.stride = place * layers if interleaved else place
        pieces = 1 if interleaved else layers
        self.buffers = [device.alloc(blocks * self.stride) for _ in range(pieces)]
        self.bases = [
            self.buffers[0].address + layer * place if interleaved else self.buffers[layer].address
            for layer in range(layers)
        ]
        self.layout = kvmem.KVLayout(
            [
                kvmem.Region(base, self.stride, segment_bytes, blocks, device.name, stage=layer)
                for layer, base in enumerate(self.bases)
            ]
        )
        slot_bytes = -(-self.block_bytes // 4096) * 4096
        self.pool = kvmem.BlockPool(
            device,
            block_bytes=self.block_bytes,
            capacity_bytes=(blocks if slots is None else slots) * slot_bytes,
            **(pool or {}),
        )
        self.manager = kvmem.Manager(device, self.layout, self.pool, **manager)

    def address(self, block: int, layer: int) -> int:
        return self.bases[layer] + block * self.stride

    # ---- bytes

    def expected(self, block: int, version: int = 0) -> Bytes:
        """The payload of a block that was written as that version, as a host block has it."""
        return np.concatenate(
            [
                pattern(self.segment_bytes, seed_of(block, layer, version))
                for layer in range(self.layers)
            ]
        )

    def write(self, block: int, version: int = 0) -> None:
        """By the driver's own copies; done when it returns."""
        segments = self.expected(block, version).reshape(self.layers, self.segment_bytes)
        for layer, segment in enumerate(segments):
            self.gpu.upload(self.address(block, layer), segment)

    def compute(self, stream: Stream, block: int, version: int = 0) -> None:
        """By a kernel on that stream, as an engine would."""
        for layer in range(self.layers):
            place, seed = self.address(block, layer), seed_of(block, layer, version)
            self.gpu.fill(stream, place, self.segment_bytes, seed)

    def read(self, block: int) -> Bytes:
        segments = [
            self.gpu.download(self.address(block, layer), self.segment_bytes)
            for layer in range(self.layers)
        ]
        return np.concatenate(segments)

    def holds(self, block: int, of: int, version: int = 0) -> bool:
        """Whether the block has the bytes that were written to block `of`."""
        return bool(np.array_equal(self.read(block), self.expected(of, version)))

    def fill_memory(self, value: int) -> None:
        """All of it, gaps included."""
        for buffer in self.buffers:
            self.gpu.upload(buffer.address, np.full(buffer.nbytes, value, np.uint8))

    # ---- transfers

    def stored(self, blocks: Sequence[int]) -> kvmem.HostCopy:
        transfer = self.manager.offload(list(blocks), after=kvmem.READY)
        transfer.wait(PATIENCE)
        return transfer.result()

    def finish(self) -> None:
        if not self.manager.closed:
            assert self.manager.close(PATIENCE).quiet
        counts = self.pool.stats()
        states = ("free_slots", "held_slots", "quarantined_slots", "poisoned_slots")
        assert sum(counts[state] for state in states) == counts["capacity_slots"]
        assert counts["quarantined_slots"] == counts["poisoned_slots"] == 0


class Reader:
    """An engine that reads blocks by a kernel, and what it saw."""

    def __init__(self, cache: GpuCache) -> None:
        self.cache = cache
        self.seen = cache.device.alloc(cache.block_bytes)

    def read(self, stream: Stream, block: int) -> None:
        cache = self.cache
        for layer in range(cache.layers):
            target = self.seen.address + layer * cache.segment_bytes
            cache.gpu.read(stream, target, cache.address(block, layer), cache.segment_bytes)

    def saw(self, block: int, version: int = 0) -> bool:
        found = self.cache.gpu.download(self.seen.address, self.cache.block_bytes)
        return bool(np.array_equal(found, self.cache.expected(block, version)))


def open_and_end(spin: Spin, stream: Stream) -> None:
    """Lets the stream go, which must have been held until now, and waits for it."""
    assert not spin.ran_out(), "something waited for the stream that was held back"
    spin.open()
    stream.synchronize()
