"""The cache: an index, managers and a disk in one process, by the keys of blocks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, SupportsIndex

from . import _async, _core
from ._core import Advice, CacheCloseReport, CacheHit, CacheTransfer
from ._manifests import Manifests
from ._shown import shown
from ._units import parse_bytes
from .errors import InvalidArgument
from .index import Group
from .manifest import KEY_BYTES, Difference, Manifest
from .policies import PolicyName

__all__ = [
    "Advice",
    "Cache",
    "CacheCloseReport",
    "CacheHit",
    "CacheTransfer",
    "Disk",
    "Miss",
    "ThrashBudget",
]


@dataclass(frozen=True)
class Disk:
    """A folder of slots behind the host memory of a cache. docs/DISK_FORMAT.md.

    path: a folder of its own, made if missing; one process has it at a time.
    capacity_bytes: reserved there when the cache is made; each block takes two pages of 4 KiB more.
        The groups share the slots in proportion to those that they have in host memory.
    write: "through" writes each block as soon as it can be found; "back" the oldest, once less than
        the share `write_back_free` of a group's host slots is free of blocks that are not written.
    landing_blocks: host slots of each group, set aside for what comes from disk.
    max_writes: host blocks held for the disk at once.
    max_queued: reads, and as many writes, whose turn at the disk has not come.
    workers: reads and writes at a time. There are a quarter more threads, at least one, for
        the checksums.
    sync: when what is written is made to survive a power cut: "never" by us, "on_close", or
        "each_write". What is read is right in any case.
    direct: past the page cache where the file system lets us.
    keep: False begins empty.
    probe_after_seconds: how often a disk in trouble is tried again.
    stall_after_seconds: a call of the system that takes longer means trouble.
    close_within_seconds: what a cache that was not closed waits for it at its end.
    """

    path: str | os.PathLike[str]
    capacity_bytes: SupportsIndex | str
    write: Literal["through", "back"] = "through"
    write_back_free: float = 0.25
    landing_blocks: int = 16
    max_writes: int = 32
    max_queued: int = 64
    workers: int = 4
    sync: Literal["never", "on_close", "each_write"] = "never"
    direct: bool = True
    keep: bool = True
    probe_after_seconds: float = 1.0
    stall_after_seconds: float = 10.0
    close_within_seconds: float = 30.0


@dataclass(frozen=True)
class ThrashBudget:
    """When stores of an owner are refused, because its blocks go back and forth for nothing.

    Each limit is a ratio of the owner's own counts; None is no limit. Once one is exceeded, its
    stores are refused until all are below `resume` times their limits.

    max_bytes_per_token: bytes both ways, over tokens generated.
    max_unused_share: bytes restored and never used, of all that were restored.
    max_again_share: blocks offloaded again, of all that were offloaded.
    resume: 0 to 1.
    least_bytes: moved, before anything is judged.
    """

    max_bytes_per_token: float | None = None
    max_unused_share: float | None = None
    max_again_share: float | None = None
    resume: float = 0.5
    least_bytes: SupportsIndex | str = "64MiB"


@dataclass(frozen=True)
class Miss:
    """Why a key is not found.

    reason: "never_stored", or so long ago that it is forgotten; "none": it is there; "in_flight",
        being stored; "not_admitted", offered fewer than `admit_after` times; "thrash", refused by
        the budget of its owner; "no_room", all slots were held; "store_failed", or cancelled;
        "evicted" for others or by clear(), and not on disk; "removed" by evict(); "corrupt", gone
        bad in host memory, and not on disk; "disk_failed", not read back, or wrong;
        "other_manifest", on disk under another manifest.
    detail: more, in words, or None; of "disk_failed" how the read ended.
    differences: of "other_manifest", the fields that differ from this cache's manifest. Of
        "never_stored" too, where the disk has, or had, blocks of another manifest, from the one of
        those that was used last: keys that Manifest.key() makes are others under each manifest.
        `mine` is this cache's.
    """

    reason: str
    detail: str | None = None
    differences: tuple[Difference, ...] = ()


class Cache(_core.Cache):
    """Stores and loads the blocks of an engine by their keys. Any thread.

    A key is found only when its bytes have been observed to be there, and a load is done only if
    every block of it was delivered. The slots that it takes of the pools are its own until it is
    closed.

    manager: a Manager, or several by the name of a group, all on one device.
    manifest: what must be equal for stored blocks to be used again. A disk needs one.
    groups: what of each group a hit needs; None is all blocks.
    policy: what is evicted first: "lru", "arc", or "gdsf", which looks at `value` of store().
    admit_after: a key is stored the nth time that it is offered, 1 to 255.
    disk: a Disk behind host memory, or None.
    thrash: a ThrashBudget, or None for no limits.
    slots: host slots of each group that does not say otherwise; None is all that are free, but for
        the landing blocks of a disk.
    key_bytes: 16 to 64; None is the length of the first key, and with a disk the 32 bytes that
        Manifest.key() makes.
    low_free, high_free: where less than the share `low_free` of a group's slots is free, some are
        evicted ahead of need, until `high_free` is. 0 to 1.
    max_transfers: stores and loads that have not ended, at most.
    max_plans: those, and hits.
    max_events: events that wait for take_events(), at most; 0 makes none.
    max_owners: owners of whom books are kept; others count in the total alone.
    host_bytes_per_second, disk_bytes_per_second: what advise() takes for granted until the first
        copy was measured.

    Keys are a list or tuple of bytes, a NumPy array of rows of bytes, or one contiguous buffer
    where key_bytes is known. A key that stands twice in one call is one block. Raises
    InvalidArgument, and CapacityError where a pool or the disk cannot give what is asked for.
    """

    def __init__(
        self,
        manager: _core.Manager | Mapping[str, _core.Manager],
        manifest: Manifest | None = None,
        *,
        groups: Sequence[Group] | None = None,
        policy: PolicyName = "lru",
        admit_after: SupportsIndex = 1,
        disk: Disk | None = None,
        thrash: ThrashBudget | None = None,
        slots: SupportsIndex | None = None,
        key_bytes: SupportsIndex | None = None,
        low_free: float = 0.0,
        high_free: float = 0.0,
        max_transfers: SupportsIndex = 4096,
        max_plans: SupportsIndex = 1 << 16,
        max_events: SupportsIndex = 0,
        max_owners: SupportsIndex = 1 << 16,
        host_bytes_per_second: float = 10e9,
        disk_bytes_per_second: float = 1e9,
    ) -> None:
        _expect("manifest", manifest, Manifest)
        _expect("disk", disk, Disk)
        _expect("thrash", thrash, ThrashBudget)
        if disk is not None and manifest is None:
            raise InvalidArgument("manifest is None, and a disk needs one: it stands in each slot")
        if disk is not None and key_bytes is None:
            key_bytes = KEY_BYTES
        folder = None if disk is None else _folder(disk)
        super().__init__(
            {
                "groups": _described(manager, groups, slots),
                "policy": policy,
                "admit_after": admit_after,
                "disk": _disk_values(disk, folder, manifest),
                "thrash": _thrash_values(thrash),
                "key_bytes": key_bytes,
                "low_free": low_free,
                "high_free": high_free,
                "max_transfers": max_transfers,
                "max_plans": max_plans,
                "max_events": max_events,
                "max_owners": max_owners,
                "host_bytes_per_second": host_bytes_per_second,
                "disk_bytes_per_second": disk_bytes_per_second,
            }
        )
        self._manifest = manifest
        self._manifests: Manifests | None = None
        if folder is not None and manifest is not None:  # the folder is ours from here on
            self._manifests = Manifests(folder)
            with contextlib.suppress(OSError):  # only explanations would be missing
                self._manifests.remember(manifest)

    @property
    def manifest(self) -> Manifest | None:
        return self._manifest

    def store_async(
        self,
        keys: _core._Keys,
        blocks: _core._Blocks,
        *,
        after: object,
        owner: str = "",
        priority: Literal["demand", "background"] = "background",
        value: float = 1.0,
    ) -> Coroutine[Any, Any, CacheTransfer]:
        """store(), to be awaited instead of blocking.

        `keys`, `blocks` and `after` are taken by the call, before any await. Cancelling the task
        before the store is accepted gives up its place, and nothing is stored.
        """
        return _async.start(self._draft_store(keys, blocks, after, owner, priority, value))

    def advise(
        self,
        keys: _core._Keys,
        *,
        prefill_tokens_per_s: float,
        block_tokens: float | None = None,
    ) -> Advice:
        """Compare loading these keys with recomputing them. Holds and counts nothing.

        block_tokens: of each key; None is what the manifest says. Predicted from what the paths to
        the host and the disk carried so far, and what is queued now. It never decides: ranks of one
        engine must do the same.
        """
        if block_tokens is None:
            if self._manifest is None:
                raise InvalidArgument("block_tokens is None, and there is no manifest to say it")
            block_tokens = self._manifest.block_tokens
        return self._advise(keys, prefill_tokens_per_s, block_tokens)

    def why_miss(self, key: bytes) -> Miss:
        """Say why a key is not found, as far as it is remembered. Raises InvalidArgument."""
        reason, outcome, digest = self._why_miss(key)
        if digest is not None:
            return self._explained(reason, "", self._other(digest))
        if reason == "never_stored" and (words := self._other_blocks()):
            assert self._manifests is not None
            assert self._manifest is not None
            return self._explained(reason, words, self._manifests.newest_other(self._manifest))
        return Miss(reason, outcome)

    def _other(self, digest: bytes) -> Manifest | None:
        return None if self._manifests is None else self._manifests.find(digest)

    def _other_blocks(self) -> str:
        """Say in words which blocks the disk has or had, and cannot be found; "" for none."""
        disk = self.stats()["disk"]
        if disk is None:
            return ""
        if disk["blocks_foreign"] > 0:
            return f"the disk had {disk['blocks_foreign']} blocks of other manifests; "
        if disk["why_empty"] not in {None, "it is new"}:
            return f"the disk began empty: {disk['why_empty']}; "
        return ""

    def _explained(self, reason: str, words: str, other: Manifest | None) -> Miss:
        assert self._manifest is not None
        if other is None:
            return Miss(reason, f"{words}the other manifest is not known")
        differences = tuple(self._manifest.compare(other))
        return Miss(reason, words + self._manifest.explain(other), differences)


def _expect(name: str, value: object, kind: type) -> None:
    if value is not None and not isinstance(value, kind):
        raise InvalidArgument(f"{name} is {shown(value)}, which is no {kind.__name__}")


def _described(
    manager: object, groups: Sequence[Group] | None, slots: SupportsIndex | None
) -> list[tuple[str, object, object, object]]:
    """Name, need, manager and slots of each group."""
    groups = None if groups is None else list(groups)
    for each in groups or ():
        if not isinstance(each, Group):
            raise InvalidArgument(f"groups has {shown(each)}, which is no Group")
    if not isinstance(manager, Mapping):
        groups = [Group("full")] if groups is None else groups
        if len(groups) != 1:
            raise InvalidArgument(
                f"manager is one, and there are {len(groups)} groups: a mapping of their names to"
                " managers is needed"
            )
        manager = {groups[0].name: manager}
    if groups is None:
        groups = [Group(name) for name in manager]
    if len(manager) != len(groups) or not all(group.name in manager for group in groups):
        raise InvalidArgument(
            f"manager has {', '.join(map(shown, manager)) or 'none'}, and the groups are"
            f" {', '.join(group.name for group in groups) or 'none'}"
        )
    for name, its in manager.items():
        if not isinstance(its, _core.Manager):
            raise InvalidArgument(f"the manager of group {name!r} is {shown(its)}, not a Manager")
    return [
        (g.name, g.need, manager[g.name], slots if g.slots is None else g.slots) for g in groups
    ]


def _folder(disk: Disk) -> Path:
    try:
        path = os.path.abspath(os.fsdecode(disk.path))
        if b"\0" not in os.fsencode(path):
            return Path(path)
    except (TypeError, UnicodeError):
        pass
    raise InvalidArgument(f"path is {shown(disk.path)}, which is no path of a folder")


def _disk_values(
    disk: Disk | None, folder: Path | None, manifest: Manifest | None
) -> dict[str, Any] | None:
    if disk is None or folder is None or manifest is None:
        return None
    for name in ("direct", "keep"):
        if not isinstance(getattr(disk, name), bool):
            raise InvalidArgument(f"{name} is {shown(getattr(disk, name))}, not True or False")
    return _values(disk) | {
        "path": os.fsencode(folder),
        "capacity_bytes": parse_bytes("capacity_bytes", disk.capacity_bytes),
        "manifest": manifest.digest,
    }


def _thrash_values(thrash: ThrashBudget | None) -> dict[str, Any] | None:
    if thrash is None:
        return None
    least_bytes = parse_bytes("least_bytes", thrash.least_bytes)
    return _values(thrash) | {"least_bytes": least_bytes}


def _values(options: Disk | ThrashBudget) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
