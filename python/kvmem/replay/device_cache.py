"""The device side of a replay: a stand-in for an engine's KV cache and its compute streams.

The cache has one region per layer, so every block lies scattered over as many segments. Each
request in flight owns a lane: a run of device blocks, a stream that computes and one that consumes.
"""

from __future__ import annotations

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


class DeviceCache:
    """Device memory of `lanes` requests with at most `lane_blocks` blocks each.

    Raises CapacityError when the memory cannot be had.
    """

    def __init__(
        self, device: kvmem.Device, lanes: int, lane_blocks: int, block_bytes: int
    ) -> None:
        if device.kind != "host":
            raise ReplayError(
                f"--device: replay computes on the host device for now, not on {device.name!r}"
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
        words = segment_bytes // WORD_BYTES
        regions = [buffer.array.view(np.uint64).reshape(blocks, words) for buffer in self._buffers]
        dirt = np.full((lane_blocks, words), _DIRT, dtype=np.uint64)
        self.lanes = [
            Lane(device, self.pattern, regions, dirt, first)
            for first in range(0, blocks, lane_blocks)
        ]


class Lane:
    """The device blocks and streams of one request in flight; a block's number is its position."""

    def __init__(
        self,
        device: kvmem.Device,
        pattern: BlockPattern,
        regions: Sequence[NDArray[np.uint64]],
        dirt: NDArray[np.uint64],
        first_block: int,
    ) -> None:
        self._pattern = pattern
        self._regions = [region[first_block : first_block + len(dirt)] for region in regions]
        self._dirt = dirt
        self._first_block = first_block
        # Sources of what is computed and targets of what is read: their positions never meet.
        self._outside = np.zeros((len(regions), *dirt.shape), dtype=np.uint64)
        self.producer = device.stream()
        self.consumer = device.stream()

    def device_blocks(self, positions: Sequence[int]) -> NDArray[np.int64]:
        """Give the device blocks at these positions."""
        return np.array(positions, dtype=np.int64) + self._first_block

    def dirty(self, positions: Sequence[int]) -> None:
        """Queue on the producer: overwrite these blocks, so that old bytes cannot pass for new."""
        for first, last in runs_of(positions):
            for region in self._regions:
                self.producer.copy(region[first:last], self._dirt[: last - first])

    def compute(self, positions: Sequence[int], seeds: NDArray[np.uint64]) -> None:
        """Queue on the producer: fill these blocks with the patterns of their seeds."""
        for first, last in runs_of(positions):
            self._pattern.fill(self._outside[:, first:last], seeds[first:last])
            for region, outside in zip(self._regions, self._outside, strict=True):
                self.producer.copy(region[first:last], outside[first:last])

    def consume(self, positions: Sequence[int], restore: kvmem.Transfer) -> None:
        """Queue on the consumer: layer by layer, wait for the restore and read these blocks.

        Raises the restore's error if it has failed by then.
        """
        runs = runs_of(positions)
        for stage, (region, outside) in enumerate(zip(self._regions, self._outside, strict=True)):
            restore.wait_on(self.consumer, stage=stage)
            for first, last in runs:
                self.consumer.copy(outside[first:last], region[first:last])

    def differing(self, positions: Sequence[int], seeds: NDArray[np.uint64]) -> int:
        """Count the consumed blocks that differ from the patterns of their seeds."""
        return sum(
            self._pattern.differing(self._outside[:, first:last], seeds[first:last])
            for first, last in runs_of(positions)
        )

    def synchronize(self, timeout: float) -> None:
        """Wait until both streams are idle, in seconds. Raises TimedOut."""
        self.consumer.synchronize(timeout)
        self.producer.synchronize(timeout)
