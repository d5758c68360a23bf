"""Which blocks the host tier holds: least recently used, decided key by key in file order.

The index knows keys and holders, no device and no bytes. What it decides depends on the order of
the requests alone, never on how fast copies are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvmem.replay.options import HitRule

if TYPE_CHECKING:
    import kvmem
    from kvmem.replay.flight import Offload


class Entry:
    """One key of the index: a block that is on the host, on its way there, or planned."""

    __slots__ = ("copy", "key", "offload")

    def __init__(self, key: int) -> None:
        self.key = key
        self.offload: Offload | None = None
        """The unsettled offload that writes the block."""
        self.copy: kvmem.HostCopy | None = None
        """The index's holder of the block, once its offload was observed."""

    @property
    def planned(self) -> bool:
        """Not offloaded yet: the request that computes the block is being started."""
        return self.copy is None and self.offload is None


@dataclass
class Plan:
    """What one request does with its blocks; positions count within its keys, ascending."""

    restores: list[int] = field(default_factory=list)
    sources: list[kvmem.HostCopy | None] = field(default_factory=list)
    """The index's holder of each restored block, whatever is evicted afterwards."""
    stores: list[int] = field(default_factory=list)
    stored: list[Entry] = field(default_factory=list)
    """The entry of each block to offload."""
    evicted: list[Entry] = field(default_factory=list)
    present: int = 0
    """Blocks that were in the index when their turn came."""
    prefix: int = 0
    """Those of them that no miss stands before."""
    passed_over: int = 0
    """Misses that this request itself pushed out again, so that they are never offloaded."""


class HostIndex:
    """Keys of the host tier, least recently used first. Not thread-safe."""

    def __init__(self, capacity: int, hit: HitRule) -> None:
        self._capacity = capacity
        self._hit = hit
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._gone: set[int] = set()
        """Keys that were offloaded and then evicted."""
        self.reoffloaded = 0
        """Blocks offloaded again after they had been evicted."""

    def __len__(self) -> int:
        return len(self._entries)

    def offloads_of(self, keys: Sequence[int]) -> list[Offload]:
        """Name the unsettled offloads that write any of these blocks."""
        found: dict[int, Offload] = {}
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.offload is not None:
                found[id(entry.offload)] = entry.offload
        return list(found.values())

    def plan(self, keys: Sequence[int]) -> Plan:
        """Decide hit or miss key by key, evicting on the way.

        Every key becomes the most recently used one. A block that is planned already because the
        key stands twice in the request counts as a hit, and is not restored: it is on the device.
        """
        plan = Plan()
        entries = self._entries
        new: list[tuple[int, Entry]] = []
        for position, key in enumerate(keys):
            entry = entries.get(key)
            if entry is None:
                entry = entries[key] = Entry(key)
                new.append((position, entry))
                if len(entries) > self._capacity:
                    self._evict(plan)
                continue
            entries.move_to_end(key)
            in_prefix = plan.prefix == position
            plan.present += 1
            plan.prefix += in_prefix
            if (in_prefix or self._hit == "blocks") and not entry.planned:
                plan.restores.append(position)
                plan.sources.append(entry.copy)
        for position, entry in new:
            if entries.get(entry.key) is entry:
                plan.stores.append(position)
                plan.stored.append(entry)
        plan.passed_over = len(new) - len(plan.stores)
        return plan

    def count_stores(self, entries: Sequence[Entry]) -> None:
        """Note that these blocks are offloaded now."""
        self.reoffloaded += sum(entry.key in self._gone for entry in entries)

    def holds(self, entry: Entry) -> bool:
        """Say whether the entry has been neither evicted nor discarded."""
        return self._entries.get(entry.key) is entry

    def discard(self, entries: Sequence[Entry]) -> None:
        """Forget blocks whose offload did not happen, was cancelled or failed."""
        for entry in entries:
            if self.holds(entry):
                del self._entries[entry.key]

    def clear(self) -> None:
        """Let go of every holder."""
        self._entries.clear()

    def _evict(self, plan: Plan) -> None:
        _, entry = self._entries.popitem(last=False)
        if entry.planned:
            return
        self._gone.add(entry.key)
        plan.evicted.append(entry)
        # Others may still know the entry; the block must not stay held through them.
        entry.copy = None
