"""What a replay on a `kvmem.Cache` is asked to do, checked once and refused by name."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import kvmem
from kvmem._shown import shown
from kvmem._units import parse_bytes
from kvmem.policies import PolicyName
from kvmem.replay.options import BLOCK_TOKENS, REGIONS, ReplayError, ReplayOptions
from kvmem.replay.policies import TOKENS_PER_SECOND, expect_rate

DiskWriteName = Literal["through", "back"]

ADMIT_MOST = 255
THRASH_MOST = 1e18
WINDOW_MOST = 1 << 20
_WINDOW = re.compile(r"\d{1,9}", re.ASCII)
FULL = "full"


@dataclass(frozen=True)
class CacheReplayOptions:
    """Options of one replay on a cache. Raises ReplayError that names the option and its limit."""

    replay: ReplayOptions
    policy: PolicyName = "lru"
    disk_bytes: int | None = None
    disk_path: Path | None = None
    """None: a folder of its own, removed at the end."""
    disk_write: DiskWriteName = "through"
    admit_after: int = 1
    thrash: float | None = None
    """Bytes moved for each generated token, over the whole trace; stores are refused beyond it."""
    groups: str = FULL
    prefill_tokens_per_s: float = TOKENS_PER_SECOND

    def __post_init__(self) -> None:
        if self.policy not in get_args(PolicyName):
            known = ", ".join(get_args(PolicyName))
            raise ReplayError(f"--policy: {shown(self.policy)} is none of {known}")
        if self.replay.hit != "prefix":
            raise ReplayError("--hit: not 'blocks' on a cache, which restores prefixes")
        if not 1 <= self.admit_after <= ADMIT_MOST:
            raise ReplayError(f"--admit-after: {self.admit_after} is not 1 to {ADMIT_MOST}")
        if self.thrash is not None and not 0 < self.thrash <= THRASH_MOST:  # also refuses NaN
            raise ReplayError(f"--thrash: {self.thrash} is not above 0 and up to {THRASH_MOST:g}")
        if self.disk_write not in get_args(DiskWriteName):
            raise ReplayError(f"--disk-write: {shown(self.disk_write)} is neither through nor back")
        expect_rate(self.prefill_tokens_per_s)
        parse_groups(self.groups)
        if self.disk_bytes is not None:
            self._expect_disk()

    def _expect_disk(self) -> None:
        if not self.replay.move_bytes:
            raise ReplayError("--disk: not with --no-move-bytes: there is nothing to write")
        if self.replay.corrupt:
            raise ReplayError("--corrupt: not with --disk, which may hold the block unharmed")

    def cache_groups(self) -> list[kvmem.Group]:
        """Give the groups of the cache, the one that needs every block first."""
        return parse_groups(self.groups)

    def manifest(self) -> kvmem.Manifest:
        """Say what else than the keys decides the bytes of a block."""
        return kvmem.Manifest(
            model="kvmem replay",
            weights=f"pattern of {self.replay.block_bytes} bytes",
            dtype="uint64",
            layers=REGIONS,
            kv_heads=1,
            head_size=1,
            block_tokens=BLOCK_TOKENS,
            groups={group.name: "layer,word" for group in self.cache_groups()},
            engine="kvmem replay",
            engine_abi="1",
            rope=None,
            adapter=None,
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            cp_rank=0,
            cp_size=1,
        )


def parse_groups(given: str) -> list[kvmem.Group]:
    """Read "full", with "+window:N" and "+state" behind it as wanted. Raises ReplayError."""
    first, *others = given.split("+")
    if first != FULL:
        raise ReplayError(f"--groups: {shown(given)} does not begin with {FULL}")
    groups = [kvmem.Group(FULL)]
    for part in others:
        name, _, count = part.partition(":")
        if part == "state":
            groups.append(kvmem.Group(name, need="state"))
        elif name == "window" and _WINDOW.fullmatch(count) and 1 <= int(count) <= WINDOW_MOST:
            groups.append(kvmem.Group(name, need=kvmem.last(int(count))))
        else:
            raise ReplayError(
                f"--groups: {shown(part)} is neither state nor window:N with 1 to {WINDOW_MOST}"
                " blocks"
            )
    if len({group.name for group in groups}) < len(groups):
        raise ReplayError(f"--groups: {shown(given)} has two groups of one kind")
    return groups


def parse_disk_bytes(text: str) -> int:
    """Read bytes, plain or with a unit ("4GiB"). Raises ReplayError for anything else."""
    try:
        return int(parse_bytes("--disk", text))
    except kvmem.InvalidArgument as error:
        raise ReplayError(str(error)) from None


def range_needed(group: kvmem.Group, length: int) -> tuple[int, int]:
    """Say which blocks of a group a hit of so many blocks needs: first to last, it excluded."""
    if group.need == "all":
        return 0, length
    count = 1 if isinstance(group.need, str) else group.need.count
    return max(0, length - count), length
