"""Which way to replay the given options ask for, and which of them do not go with it."""

from __future__ import annotations

import enum
from collections.abc import Collection

from kvmem.replay.options import ReplayError


class Way(enum.Enum):
    """What `kvmem replay` does."""

    plain = enum.auto()
    """Manager and pool, with an index of the replay's own."""
    cache = enum.auto()
    """`kvmem.Cache`."""
    policies = enum.auto()
    """Compares eviction policies; nothing moves."""


_OF_DISK = ("disk_path", "disk_write")
_OF_CACHE = ("policy", "admit_after", "thrash", "groups", "disk", *_OF_DISK)
_OF_MOVING = (
    "gbps",
    "latency_us",
    "move_bytes",
    "host_blocks",
    "block_bytes",
    "hit",
    "abort_rate",
    "corrupt",
    "concurrency",
    "plot",
)


def way_of(given: Collection[str]) -> Way:
    """Decide by the names of the given parameters. Raises ReplayError for one too many."""
    if "policies" in given:
        _refuse(given, _OF_MOVING, "not with --policies, which moves nothing")
        _refuse(given, _OF_CACHE, "not with --policies, which has no cache")
        return Way.policies
    _refuse(given, ("capacities",), "only with --policies")
    if "disk" not in given:
        _refuse(given, _OF_DISK, "only with --disk")
    if any(name in given for name in _OF_CACHE):
        _refuse(given, ("plot",), "not on a cache: it has the slots of its pool all the time")
        return Way.cache
    _refuse(given, ("prefill_tokens_per_s",), "only with --policies or --policy")
    return Way.plain


def _refuse(given: Collection[str], names: Collection[str], why: str) -> None:
    for name in names:
        if name in given:
            raise ReplayError(f"--{name.replace('_', '-')}: {why}")
