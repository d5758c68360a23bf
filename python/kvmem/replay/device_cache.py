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
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

import kvmem
from kvmem.replay.options import REGIONS, ReplayError
from kvmem.replay.pattern import WORD_BYTES, BlockPattern

if TYPE_CHECKING:
    from numpy.typing import NDArray

# What a restore's targets hold before it: never the bytes of a block, whose words are all odd.
_DIRT = np.uint64(0xDEADBEEF00000000)

# Far beyond what any copy here takes: reaching it means that something hangs.
_STUCK_SECONDS = 120.0

PIECES_BYTES = 2 << 20
"""Blocks that all lanes together have outside the device at a time, unless one block is larger."""

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
        piece_blocks: int,
        beside: Lane | None = None,
    ) -> None:
        self.pattern = pattern
        self._piece_blocks = piece_blocks
        self._blocks = blocks
        self._first_block = first_block
        self._regions: list[NDArray[np.uint64]] = []
        """uint64[blocks, words of a segment] of each region; none where no bytes move."""
        if device.info["has_bytes"]:
            shape = (-1, pattern.segment_bytes // WORD_BYTES)
            for buffer in buffers:
                words = buffer.array.view(np.uint64).reshape(shape)
                self._regions.append(words[first_block : first_block + blocks])
        self.producer: kvmem.Stream = device.stream() if beside is None else beside.producer
        self.consumer: kvmem.Stream = device.stream() if beside is None else beside.consumer

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
        for stage in range(self.pattern.regions):
            restore.wait_on(self.consumer, stage=stage)
            self.read(stage, positions)

    def read(self, stage: int, positions: Sequence[int]) -> None:
        """Let the consumer read one layer of these blocks, if there are so many layers."""
        if stage < self.pattern.regions:
            self._read(stage, positions[: self._piece_blocks])

    def differing(self, positions: Sequence[int], seeds: NDArray[np.uint64]) -> int:
        """Count the consumed blocks that differ from the patterns of their seeds."""
        if not self._regions:
            return 0
        return sum(
            self.pattern.differing(self._consumed_bytes(piece, number), seeds[piece])
            for number, piece in enumerate(self._pieces(positions))
        )

    def _pieces(self, positions: Sequence[int]) -> Iterator[list[int]]:
        for first in range(0, len(positions), self._piece_blocks):
            yield list(positions[first : first + self._piece_blocks])

    @abstractmethod
    def _read(self, stage: int, piece: Sequence[int]) -> None:
        """Let the consumer read one region of these blocks."""

    @abstractmethod
    def _consumed_bytes(self, piece: list[int], number: int) -> NDArray[np.uint64]:
        """Give what the consumer found: uint64[regions, blocks, words]; consume() read piece 0."""

    def synchronize(self, timeout: float) -> None:
        """Wait until both streams are idle, in seconds. Raises TimedOut."""
        self.consumer.synchronize(timeout)
        self.producer.synchronize(timeout)


class StreamLane(Lane):
    """Computing and consuming are copies on the lane's streams, from and to memory outside.

    There is little of that, however large the device: what is computed beyond it waits until the
    bytes before have arrived, and what is consumed beyond it is read when it is verified.
    """

    def __init__(
        self,
        device: kvmem.Device,
        pattern: BlockPattern,
        buffers: Sequence[kvmem.DeviceBuffer],
        blocks: int,
        first_block: int,
        piece_blocks: int,
        beside: Lane | None = None,
    ) -> None:
        super().__init__(device, pattern, buffers, blocks, first_block, piece_blocks, beside)
        shape = (len(self._regions), piece_blocks, self._regions[0].shape[1])
        self._dirt = np.full(shape[1:], _DIRT, dtype=np.uint64)
        self._sources = np.zeros(shape, dtype=np.uint64)
        self._targets = np.zeros(shape, dtype=np.uint64)

    def dirty(self, positions: Sequence[int]) -> None:
        for piece in self._pieces(positions):
            for region in self._regions:
                for target, source in _beside(region, self._dirt, piece):
                    self.producer.copy(target, source)

    def compute(self, positions: Sequence[int], seeds: NDArray[np.uint64]) -> None:
        for number, piece in enumerate(self._pieces(positions)):
            if number > 0:
                self.producer.synchronize(_STUCK_SECONDS)
            self.pattern.fill(self._sources[:, : len(piece)], seeds[piece])
            for region, outside in zip(self._regions, self._sources, strict=True):
                for target, source in _beside(region, outside, piece):
                    self.producer.copy(target, source)

    def _read(self, stage: int, piece: Sequence[int]) -> None:
        for source, target in _beside(self._regions[stage], self._targets[stage], piece):
            self.consumer.copy(target, source)

    def _consumed_bytes(self, piece: list[int], number: int) -> NDArray[np.uint64]:
        if number > 0:
            for stage in range(self.pattern.regions):
                self._read(stage, piece)
            self.consumer.synchronize(_STUCK_SECONDS)
        return self._targets[:, : len(piece)]


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
                self.pattern.fill_segment(stage, region[first:last], seeds[first:last])

    def _read(self, stage: int, piece: Sequence[int]) -> None:
        del stage, piece  # differing() looks at the blocks themselves

    def _consumed_bytes(self, piece: list[int], number: int) -> NDArray[np.uint64]:
        del number
        return np.stack([region[piece] for region in self._regions])


def _beside(
    region: NDArray[np.uint64], outside: NDArray[np.uint64], positions: Sequence[int]
) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.uint64]]]:
    """Pair up the runs of these blocks in the region with memory outside, where they are dense."""
    place = 0
    for first, last in runs_of(positions):
        yield region[first:last], outside[place : place + last - first]
        place += last - first


_LANES = {"host": StreamLane, "virtual": InstantLane}


class DeviceCache:
    """Device memory of `lanes` requests with at most `lane_blocks` blocks each.

    beside: the memory of other layers of the same requests, whose streams its lanes share. Equal
    keys have other bytes there: `kind` tells them apart. Raises CapacityError when the memory
    cannot be had.
    """

    def __init__(
        self,
        device: kvmem.Device,
        lanes: int,
        lane_blocks: int,
        block_bytes: int,
        *,
        regions: int = REGIONS,
        kind: int = 0,
        beside: DeviceCache | None = None,
    ) -> None:
        if device.kind not in _LANES:
            raise ReplayError(
                "--device: replay computes on the host device and on a virtual one for now, not on"
                f" {device.name!r}"
            )
        self.lane_blocks = lane_blocks
        segment_bytes = block_bytes // regions
        self.pattern = BlockPattern(regions, segment_bytes, kind)
        blocks = lanes * lane_blocks
        self._buffers = [device.alloc(blocks * segment_bytes) for _ in range(regions)]
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
        piece_blocks = max(1, min(lane_blocks, PIECES_BYTES // (lanes * block_bytes)))
        self.lanes: list[Lane] = [
            lane(
                device,
                self.pattern,
                self._buffers,
                lane_blocks,
                number * lane_blocks,
                piece_blocks,
                None if beside is None else beside.lanes[number],
            )
            for number in range(lanes)
        ]
