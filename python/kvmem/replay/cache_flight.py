"""What of a replayed cache belongs together: the layers of a group, and a request in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import kvmem
from kvmem.replay.cache_options import range_needed
from kvmem.replay.device_cache import DeviceCache, Lane
from kvmem.replay.engine import slot_bytes
from kvmem.replay.flight import Abort
from kvmem.replay.options import REGIONS
from kvmem.replay.trace import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

KEY_BYTES = 16


class GroupMemory:
    """One group of the cache: its layers on the device, its pool, its manager.

    The first group has the layers and block size of a plain replay. The others are small: a single
    layer, on the same lanes and streams.
    """

    def __init__(
        self,
        device: kvmem.Device,
        group: kvmem.Group,
        lanes: int,
        lane_blocks: int,
        block_bytes: int,
        host_slots: int,
        kind: int,
        beside: DeviceCache | None,
    ) -> None:
        self.group = group
        self.device_cache = DeviceCache(
            device,
            lanes,
            lane_blocks,
            block_bytes,
            regions=REGIONS if beside is None else 1,
            kind=kind,
            beside=beside,
        )
        self.pool = kvmem.BlockPool(
            device,
            block_bytes=block_bytes,
            capacity_bytes=host_slots * slot_bytes(block_bytes),
        )
        self.manager = kvmem.Manager(
            device,
            self.device_cache.layout,
            self.pool,
            max_queued_bytes=max(lanes * lane_blocks * block_bytes, 64 << 20),
        )

    def slots_of(self, seed: np.uint64) -> NDArray[np.int64]:
        """Find the pool's slots that have the block of this seed, also where it was before."""
        words = self.pool.array.view(np.uint64)[:, 0]
        return np.flatnonzero(words == self.device_cache.pattern.first_word(seed))


@dataclass
class GroupLane:
    """The device blocks of one request in one group."""

    memory: GroupMemory
    lane: Lane

    def needed(self, length: int) -> range:
        """Give the positions of the blocks that a hit of so many needs."""
        return range(*range_needed(self.memory.group, length))

    def blocks(self, count: int, present: range) -> NDArray[np.int64]:
        """Give the device blocks of `count` positions, -1 before those that are there."""
        blocks = self.lane.device_blocks(range(count))
        blocks[: present.start] = -1
        return blocks


@dataclass
class CacheFlight:
    """One request that was started and has not been finished."""

    request: Request
    owner: str
    lanes: list[GroupLane]
    seeds: list[NDArray[np.uint64]]
    """Of each group."""
    keys: NDArray[np.uint8]
    """One row a key."""
    abort: Abort | None
    load: kvmem.CacheTransfer | None = None
    store: kvmem.CacheTransfer | None = None
    on_device: int = 0
    """Leading keys that the load has delivered, or will have."""
    consumed: int | None = None
    """Leading keys that the consumer was made to read."""
    from_disk: bool = False
    verified: bool = False
    undo: list[tuple[NDArray[np.uint8], int]] = field(default_factory=list)
    """Host bytes to flip back when the load has ended: block and place in it."""

    def transfers(self) -> list[kvmem.CacheTransfer]:
        """List what was begun for this request."""
        return [transfer for transfer in (self.load, self.store) if transfer is not None]


def key_rows(keys: Sequence[int]) -> NDArray[np.uint8]:
    """Make the cache's keys of a request: uint8[keys, KEY_BYTES]."""
    words = np.zeros((len(keys), KEY_BYTES // 8), np.uint64)
    words[:, 0] = keys
    return words.view(np.uint8)
