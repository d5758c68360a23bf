"""Contenders timed side by side.

Machines are noisy, and a noise that lasts hits whoever runs just then. So the contenders take
turns, round by round, and what counts is the median of the per-round ratios, not the ratio of two
medians taken at different times.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Comparison:
    """What each contender took, a figure a round.

    operations: how many one run does; every figure below is of one operation.
    seconds: of one run, by contender, in order of the rounds.
    load: the 1-minute load average before and after.
    """

    operations: int
    seconds: dict[str, list[float]]
    load: list[float] = field(default_factory=list)

    def median_ns(self, name: str) -> float:
        """Nanoseconds an operation, the median over the rounds."""
        return statistics.median(self.seconds[name]) / self.operations * 1e9

    def ratio(self, name: str, baseline: str) -> float:
        """How many times as long as the baseline: the median of the per-round ratios."""
        return statistics.median(self.ratios(name, baseline))

    def quartiles(self, name: str, baseline: str) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the per-round ratios."""
        ratios = self.ratios(name, baseline)
        if len(ratios) == 1:
            return ratios[0], ratios[0], ratios[0]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return low, middle, high

    def ratios(self, name: str, baseline: str) -> list[float]:
        """Round by round."""
        return [
            ours / theirs
            for ours, theirs in zip(self.seconds[name], self.seconds[baseline], strict=True)
        ]


def compare(
    contenders: Mapping[str, Callable[[], object]],
    *,
    operations: int,
    rounds: int,
    on_round: Callable[[], object] = lambda: None,
    settle: Callable[[], object] = lambda: None,
) -> Comparison:
    """Run all contenders in turn, `rounds` times, after one round that does not count.

    Each call of a contender does `operations` operations. Who begins changes from round to round.
    on_round: called behind each round, for a progress bar.
    settle: called behind each contender, not timed; ends what it has left running.
    """
    names = list(contenders)
    found = Comparison(operations, {name: [] for name in names}, [os.getloadavg()[0]])
    for number in range(-1, rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            start = time.perf_counter()
            contenders[name]()
            seconds = time.perf_counter() - start
            settle()
            if number >= 0:
                found.seconds[name].append(seconds)
        on_round()
    found.load.append(os.getloadavg()[0])
    return found


@contextmanager
def no_collector() -> Iterator[None]:
    """Keep collections away, which would hit whoever runs just then."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
