"""The device side of a replay: a stand-in for an engine's KV cache and its compute.

The cache has one region per layer, so every block lies scattered over as many segments. Each
request in flight owns a lane: a run of device blocks, a stream that computes and one that consumes.

On the host device computing and consuming are copies on those streams, so that a transfer that
overtakes them shows. On a virtual device they take no time and no link, so that what is measured
there is transfers alone: a lane's blocks are written before its transfers are submitted, and read
when those have ended.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

import kvmem
from kvmem.replay.options import REGIONS, ReplayError
from kvmem.replay.pattern import WORD_BYTES, BlockPattern

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What a restore's targets hold before it: never the bytes of a block, whose words are all odd.
_DIRT = np.uint64(0xDEADBEEF00000000)

Run = tuple[int, int]
"""Positions first to last, the last one excluded."""


def runs_of(positions: Sequence[int]) -> list[Run]:
    """Join ascending positions into runs of neighbours."""
    runs: list[Run] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = (runs[-1][0], position + 1)
        else:
            runs.append((position, position + 1))
    return runs


class Lane(ABC):
    """The device blocks and streams of one request in flight; a block's number is its position."""

    def __init__(
        self,
        device: kvmem.Device,
        pattern: BlockPattern,
        buffers: Sequence[kvmem.DeviceBuffer],
        blocks: int,
        first_block: int,
    ) -> None:
        self._pattern = pattern
        self._blocks = blocks
        self._first_block = first_block
        self._regions: list[NDArray[np.uint64]] = []
        """uint64[blocks, words of a segment] of each region; none where no bytes move."""
        if device.info["has_bytes"]:
            shape = (-1, pattern.segment_bytes // WORD_BYTES)
            for buffer in buffers:
                words = buffer.array.view(np.uint64).reshape(shape)
                self._regions.append(words[first_block : first_block + blocks])
        self.producer = device.stream()
        self.consumer = device.stream()

    def device_blocks(self, positions: Sequence[int]) -> NDArray[np.int64]:
        """Give the device blocks at these positions."""
        return np.array(positions, dtype=np.int64) + self._first_block

    @abstractmethod
    def dirty(self, positions: Sequence[int]) -> None:
        """Overwrite these blocks, so that old bytes cannot pass for new."""

    @abstractmethod
    def compute(self, positions: Sequence[int], seeds: NDArray[np.uint64]) -> None:
        """Fill these blocks with the patterns of their seeds."""

    def consume(self, positions: Sequence[int], restore: kvmem.Transfer) -> None:
        """Let the consumer wait layer by layer for the restore, and read these blocks.

        Raises the restore's error if it has failed by then.
        """
        runs = runs_of(positions)
        for stage in range(REGIONS):
            restore.wait_on(self.consumer, stage=stage)
            self._read(stage, runs)

    @abstractmethod
    def _read(self, stage: int, runs: Sequence[Run]) -> None: ...

    @abstractmethod
    def differing(self, positions: Sequence[int], seeds: NDArray[np.uint64]) -> int:
        """Count the consumed blocks that differ from the patterns of their seeds."""

    def synchronize(self, timeout: float) -> None:
        """Wait until both streams are idle, in seconds. Raises TimedOut."""
        self.consumer.synchronize(timeout)
        self.producer.synchronize(timeout)


class StreamLane(Lane):
    """Computing and consuming are copies on the lane's streams."""

    def __init__(
        self,
        device: kvmem.Device,
        pattern: BlockPattern,
        buffers: Sequence[kvmem.DeviceBuffer],
        blocks: int,
        first_block: int,
    ) -> None:
        super().__init__(device, pattern, buffers, blocks, first_block)
        shape = self._regions[0].shape
        self._dirt = np.full(shape, _DIRT, dtype=np.uint64)
        # Sources of what is computed and targets of what is read: their positions never meet.
        self._outside = np.zeros((len(self._regions), *shape), dtype=np.uint64)

    def dirty(self, positions: Sequence[int]) -> None:
        for first, last in runs_of(positions):
            for region in self._regions:
                self.producer.copy(region[first:last], self._dirt[: last - first])

    def compute(self, positions: Sequence[int], seeds: NDArray[np.uint64]) -> None:
        for first, last in runs_of(positions):
            self._pattern.fill(self._outside[:, first:last], seeds[first:last])
            for region, outside in zip(self._regions, self._outside, strict=True):
                self.producer.copy(region[first:last], outside[first:last])

    def _read(self, stage: int, runs: Sequence[Run]) -> None:
        for first, last in runs:
            self.consumer.copy(self._outside[stage][first:last], self._regions[stage][first:last])

    def differing(self, positions: Sequence[int], seeds: NDArray[np.uint64]) -> int:
        return sum(
            self._pattern.differing(self._outside[:, first:last], seeds[first:last])
            for first, last in runs_of(positions)
        )


class InstantLane(Lane):
    """Computing and consuming take no time; without bytes they are nothing at all."""

    def dirty(self, positions: Sequence[int]) -> None:
        for first, last in runs_of(positions):
            for region in self._regions:
                region[first:last] = _DIRT

    def compute(self, positions: Sequence[int], seeds: NDArray[np.uint64]) -> None:
        if not self._regions:
            return
        for first, last in runs_of(positions):
            for stage, region in enumerate(self._regions):
                self._pattern.fill_segment(stage, region[first:last], seeds[first:last])

    def _read(self, stage: int, runs: Sequence[Run]) -> None:
        del stage, runs  # differing() looks at the blocks themselves

    def differing(self, positions: Sequence[int], seeds: NDArray[np.uint64]) -> int:
        if not self._regions:
            return 0
        return sum(
            self._pattern.differing(
                np.stack([region[first:last] for region in self._regions]), seeds[first:last]
            )
            for first, last in runs_of(positions)
        )


_LANES = {"host": StreamLane, "virtual": InstantLane}


class DeviceCache:
    """Device memory of `lanes` requests with at most `lane_blocks` blocks each.

    Raises CapacityError when the memory cannot be had.
    """

    def __init__(
        self, device: kvmem.Device, lanes: int, lane_blocks: int, block_bytes: int
    ) -> None:
        if device.kind not in _LANES:
            raise ReplayError(
                "--device: replay computes on the host device and on a virtual one for now, not on"
                f" {device.name!r}"
            )
        self.lane_blocks = lane_blocks
        self.pattern = BlockPattern(REGIONS, block_bytes // REGIONS)
        segment_bytes = block_bytes // REGIONS
        blocks = lanes * lane_blocks
        self._buffers = [device.alloc(blocks * segment_bytes) for _ in range(REGIONS)]
        self.layout = kvmem.KVLayout(
            [
                kvmem.Region(
                    buffer.address,
                    segment_bytes,
                    segment_bytes,
                    blocks,
                    memory=device.name,
                    stage=stage,
                )
                for stage, buffer in enumerate(self._buffers)
            ]
        )
        lane = _LANES[device.kind]
        self.lanes: list[Lane] = [
            lane(device, self.pattern, self._buffers, lane_blocks, first)
            for first in range(0, blocks, lane_blocks)
        ]
