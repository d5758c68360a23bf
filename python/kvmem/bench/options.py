"""What a run of `kvmem bench` is asked to do, checked once and refused by name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvmem._shown import shown

ROUNDS_MOST = 1000


class BenchError(Exception):
    """The benchmarks cannot run as asked; the message names what is wrong."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything: so much that two slow cores are done in a minute, or in seconds."""

    churn: int
    """Blocks given back and taken in one round."""
    copy_bytes: int
    """Moved in one round; the cache is twice as large."""
    handoff_blocks: int
    idle_seconds: float
    bookkept_slots: int
    budget_seconds: float
    """For the rounds of one comparison, unless their number was given."""
    rounds_most: int


FULL = Sizes(20_000, 256 << 20, 64, 1.0, 1 << 20, 3.5, 61)
QUICK = Sizes(5_000, 32 << 20, 16, 0.4, 1 << 20, 0.7, 25)


@dataclass(frozen=True)
class BenchOptions:
    """Options of one run. Raises BenchError that names the option, its value and its limit."""

    sizes: Sizes = FULL
    rounds: int | None = None
    """Of each comparison; None is as many as its time allows."""
    only: tuple[str, ...] = ()
    """Names of what is measured; empty is everything."""

    def __post_init__(self) -> None:
        if self.rounds is not None and not 1 <= self.rounds <= ROUNDS_MOST:
            raise BenchError(f"--rounds: {shown(self.rounds)} is outside 1 to {ROUNDS_MOST}")

    def expect_names(self, known: Collection[str]) -> None:
        """Raise BenchError for a name that is none of those that are known."""
        for name in self.only:
            if name not in known:
                raise BenchError(f"--only: {shown(name)} is none of {', '.join(known)}")

    def rounds_for(self, round_seconds: float) -> int:
        """How many rounds that take so long each; three at least, or quartiles mean nothing."""
        if self.rounds is not None:
            return self.rounds
        affordable = int(self.sizes.budget_seconds / max(round_seconds, 1e-9))
        return max(3, min(affordable, self.sizes.rounds_most))
