"""A cache by keys over device blocks whose bytes follow from their key."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvmem
from kvmem import READY, Group, Manifest
from support import PATIENCE, free_slots

BLOCK = 4096
FIELDS: dict[str, Any] = {
    "model": "m-7b",
    "weights": "rev 1",
    "dtype": "bfloat16",
    "quantisation": "per-head",
    "scale_layout": "behind",
    "layers": 32,
    "kv_heads": 8,
    "head_size": 128,
    "block_tokens": 16,
    "groups": {"full": "layer,kv,token,head,dim"},
    "engine": "engine 1",
    "engine_abi": "1",
    "rope": {"theta": 10000.0},
    "adapter": None,
    "tp_rank": 0,
    "tp_size": 2,
    "pp_rank": 0,
    "pp_size": 2,
    "cp_rank": 0,
    "cp_size": 2,
    "salt": None,
    "kvmem_abi": 1,
}
MANIFEST = Manifest(**FIELDS)


def keys(first: int, count: int = 1, size: int = 32) -> list[bytes]:
    return [number.to_bytes(size, "little") for number in range(first, first + count)]


def payload(key: bytes, group: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What a block of this key holds in this group."""
    seed = hashlib.blake2b(key, key=group.encode()).digest()
    return np.frombuffer(seed * (BLOCK // len(seed)), np.uint8)


class KeyedCache:
    """A kvmem.Cache with a pool and a manager for each group, and device blocks for it.

    slots: of each group in host memory, but for landing blocks.
    """

    def __init__(
        self,
        device: kvmem.Device,
        *,
        slots: int = 8,
        landing: int = 0,
        blocks: int = 16,
        groups: Sequence[Group] = (Group("full"),),
        reaper: bool = True,
        **options: Any,
    ) -> None:
        self.groups = list(groups)
        self.arrays = {g.name: np.zeros((blocks, BLOCK), np.uint8) for g in groups}
        self.pools = {}
        self.managers = {}
        for name, array in self.arrays.items():
            layout = kvmem.KVLayout.from_arrays([array], memory=device.name)
            pool = kvmem.BlockPool(
                device, block_bytes=BLOCK, capacity_bytes=(slots + landing) * BLOCK
            )
            self.pools[name] = pool
            self.managers[name] = kvmem.Manager(device, layout, pool, reaper=reaper)
        self.options = options
        self.open()

    def reopen(self, **changes: Any) -> kvmem.CacheCloseReport:
        """As another process would, with other options."""
        report = self.cache.close(PATIENCE)
        self.open(**changes)
        return report

    def open(self, **changes: Any) -> None:
        self.options |= changes
        manifest = MANIFEST if self.options.get("disk") is not None else None
        self.cache = kvmem.Cache(
            self.managers, groups=self.groups, **({"manifest": manifest} | self.options)
        )

    def fill(self, names: Sequence[bytes], blocks: Sequence[int]) -> None:
        for name, array in self.arrays.items():
            for key, block in zip(names, blocks, strict=True):
                array[block] = payload(key, name)

    def holds(self, key: bytes, block: int, group: str = "full") -> bool:
        return bool((self.arrays[group][block] == payload(key, group)).all())

    def everywhere(self, blocks: Sequence[int]) -> dict[str, Sequence[int]]:
        return dict.fromkeys(self.arrays, blocks)

    def store(self, names: Sequence[bytes], first: int = 0, **options: Any) -> kvmem.CacheTransfer:
        """Of all groups, from device blocks `first`, `first` + 1, ..."""
        blocks = range(first, first + len(names))
        self.fill(names, blocks)
        transfer = self.cache.store(
            names, self.everywhere(blocks), **({"after": READY, "timeout": PATIENCE} | options)
        )
        transfer.wait(PATIENCE)
        return transfer

    def load(self, names: Sequence[bytes], first: int = 8, **options: Any) -> kvmem.CacheTransfer:
        """Load the longest prefix there is, to its end, whichever that is, and check the bytes."""
        hit = self.cache.reserve(names, **options)
        blocks = range(first, first + len(hit))
        for array in self.arrays.values():
            array[first : first + len(hit)] = 0
        transfer = self.cache.load(hit, self.everywhere(blocks), after=READY)
        try:
            transfer.wait(PATIENCE)
        except kvmem.KvmemError:
            assert transfer.state != "done"
        assert transfer.done()
        for position in range(transfer.loaded):
            for group in self.groups:
                if self.needs(group, position, transfer.loaded):
                    assert self.holds(names[position], first + position, group.name)
        return transfer

    @staticmethod
    def needs(group: Group, position: int, length: int) -> bool:
        count = {"all": length, "state": 1}.get(str(group.need)) or group.need.count
        return position >= length - count

    def finish(self) -> None:
        """Close it; every slot goes home."""
        report = self.cache.close(PATIENCE)
        assert report.quiet
        assert report.in_flight == 0
        self.cache._check()
        for manager in self.managers.values():
            assert manager.close(PATIENCE).quiet
        for pool in self.pools.values():
            assert free_slots(pool) == pool.capacity
