"""How many calls a second go through while threads, or tasks, do everything at once?

The workload is in stress.py. A leak, a transfer without an end or a wrong byte fails the test, in
a benchmark run too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stress import KINDS, Stress, StressOptions, StressResult
from table import Row, show_ns

SECONDS = 3.0
SMOKE_SECONDS = 0.05
SHOWN_WORKERS = 4
"""The number of workers for which each kind of call has a row."""


def options_of(workers: int, kind: str) -> StressOptions:
    return StressOptions(workers, tasks=kind == "tasks", reaper=kind != "no reaper")


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["threads", "no reaper", "tasks"])
def test_calls_a_second_of_workers_that_do_everything_at_once(
    benchmark: Any, versus: Any, size: Callable[[float, float], float], workers: int, kind: str
) -> None:
    options = options_of(workers, kind)
    stress = Stress(options)
    result = benchmark.pedantic(stress.run, args=(size(SECONDS, SMOKE_SECONDS),), rounds=1)
    stress.close()
    assert all(result.operations[each] for each in KINDS), result.operations
    for what in ("verified", "tagged", "done"):
        assert result.counts[what], result.counts
    benchmark.extra_info.update(result.figures())
    benchmark.extra_info["ns_per_operation"] = {"kvmem": 1e9 / result.operations_per_second}
    if not benchmark.disabled:
        question = "calls a second of workers that do everything at once"
        versus.rows += rows(question, options, result)


def rows(question: str, options: StressOptions, result: StressResult) -> list[Row]:
    """Of all calls, and of each kind."""
    kinds = (None, *KINDS) if options.workers == SHOWN_WORKERS else (None,)
    found = []
    for kind in kinds:
        count = sum(result.operations.values()) if kind is None else result.operations[kind]
        figures = [f"{count / result.seconds:,.0f}/s"]
        figures += [
            f"{name} {show_ns(us * 1000)}" for name, us in result.percentiles_us(kind).items()
        ]
        name = f"{options.name}, {kind or 'all'}"
        found.append(Row(question, name, ", ".join(figures)))
    return found
