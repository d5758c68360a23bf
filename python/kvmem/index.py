"""Which key is in which slot, and who needs it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, SupportsIndex

from . import _core
from ._core import Plan, Reservation
from ._shown import shown
from .errors import InvalidArgument
from .policies import PolicyName

__all__ = ["Group", "Index", "Last", "Plan", "Reservation", "last"]


@dataclass(frozen=True)
class Last:
    """The need of a sliding window. Made by last()."""

    count: int
    """Blocks, at least 1."""


def last(count: int) -> Last:
    """Say that a hit needs the last `count` blocks of a group, as a sliding window does."""
    return Last(count)


@dataclass(frozen=True)
class Group:
    """Layers that share a layout and a block size, and what of them a hit needs.

    name: names the group in plans and statistics; one of a kind within an index.
    need: "all" is every block, last(n) the last n, "state" the last one alone.
    slots: of this group; None is what the index says.
    """

    name: str
    need: Literal["all", "state"] | Last = "all"
    slots: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidArgument(f"a group's name is {shown(self.name)}, not a string")
        try:
            self.name.encode()
        except UnicodeEncodeError:
            message = f"a group's name is {shown(self.name)}, which is no valid text"
            raise InvalidArgument(message) from None


class Index(_core.Index):
    """Maps keys to slots: no device, no bytes. Any thread.

    It plans, and whoever copies may be another process: slots travel as integers. A scheduler calls
    plan_store() and plan_load(), its workers copy, and finish() says for each rank how that ended.
    A key is readable when all ranks have stored it; a slot is free again when nobody holds it and
    all ranks have ended.

    slots: of each group that does not say otherwise.
    groups: Group objects; None is one group "full" that needs all blocks.
    policy: what is evicted first: "lru", "arc", or "gdsf", which looks at `value` of plan_store().
    ranks: how many ranks finish each plan.
    key_bytes: 16 to 64; None is the length of the first key.
    low_free, high_free: trim() evicts where less than the share `low_free` of a group's slots is
        free, until `high_free` is. 0 to 1.
    max_plans: plans and reservations that are not finished, at most.
    max_events: events that wait for take_events(), at most; 0 makes none.

    Keys are a list or tuple of bytes, a NumPy array of rows of bytes, or one contiguous buffer
    where key_bytes is known. A key that stands twice in one call is one block. Raises
    InvalidArgument.
    """

    def __init__(
        self,
        slots: SupportsIndex | None = None,
        *,
        groups: Sequence[Group] | None = None,
        policy: PolicyName = "lru",
        ranks: SupportsIndex = 1,
        key_bytes: SupportsIndex | None = None,
        low_free: float = 0.0,
        high_free: float = 0.0,
        max_plans: SupportsIndex = 1 << 16,
        max_events: SupportsIndex = 0,
    ) -> None:
        described: list[tuple[str, object, SupportsIndex]] = []
        for group in [Group("full")] if groups is None else groups:
            if not isinstance(group, Group):
                raise InvalidArgument(f"groups has {shown(group)}, which is no Group")
            its = slots if group.slots is None else group.slots
            if its is None:
                raise InvalidArgument(f"slots is None, and group {group.name!r} says none either")
            described.append((group.name, group.need, its))
        super().__init__(
            groups=described,
            policy=policy,
            ranks=ranks,
            key_bytes=key_bytes,
            low_free=low_free,
            high_free=high_free,
            max_plans=max_plans,
            max_events=max_events,
        )
