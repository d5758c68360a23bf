"""What the benchmarks are made of: contenders, goals, and the fixtures' inside.

A goal is data. It is shown met or not met and never asserted: a benchmark is no unit test, and what
it measures depends on what else the machine does.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kvmem.bench.rounds import Comparison, no_collector
from table import Row, show_ns

ROOT = Path(__file__).resolve().parents[1]
BUILD_NATIVE = "cmake --workflow --preset bench"
ROUNDS = 15


@dataclass(frozen=True)
class Timed:
    """A contender with something before or behind what is timed, once a round.

    seconds: what it took, of one that runs in a process of its own and times itself.
    """

    run: Callable[[], object]
    before: Callable[[], object] = lambda: None
    after: Callable[[], object] = lambda: None
    seconds: Callable[[], float] | None = None


Contender = Callable[[], object] | Timed


@dataclass(frozen=True)
class AtMost:
    """At most so many times as long as the baseline."""

    times: float
    baseline: str

    def __str__(self) -> str:
        return f"<= {self.times:g} x {self.baseline}"

    def judge(self, found: Comparison, subject: str) -> tuple[bool, str]:
        ratio = found.ratio(subject, self.baseline)
        return ratio <= self.times, f"{ratio:.2f}"


class Faster:
    """At least so many times as fast as the best of the baselines."""

    def __init__(self, times: float, *baselines: str) -> None:
        self.times = times
        self.baselines = baselines

    def __str__(self) -> str:
        return f">= {self.times:g} x as fast as {', '.join(self.baselines)}"

    def judge(self, found: Comparison, subject: str) -> tuple[bool, str]:
        speed = min(found.ratio(baseline, subject) for baseline in self.baselines)
        return speed >= self.times, f"{speed:.2f}"


@dataclass(frozen=True)
class AtMostNs:
    """At most so many nanoseconds an operation."""

    ns: float

    def __str__(self) -> str:
        return f"<= {show_ns(self.ns)}"

    def judge(self, found: Comparison, subject: str) -> tuple[bool, str]:
        ns = found.median_ns(subject)
        return ns <= self.ns, show_ns(ns)


Goal = AtMost | Faster | AtMostNs


@dataclass
class Versus:
    """Times a subject beside its baselines, round by round, inside pytest-benchmark.

    Each round runs the baselines, in an order drawn anew, and then the subject: with an order that
    only turns, most baselines always run behind the same other one, and feel what it leaves behind.
    What counts is the median of the per-round ratios. One round more warms up and does not count.
    """

    benchmark: Any
    question: str
    rows: list[Row]
    rounds: int
    alone: bool = False  # without the baselines

    def __call__(
        self,
        subject: Contender,
        baselines: Mapping[str, Contender | None],
        *,
        operations: int,
        goals: Sequence[Goal] = (),
        name: str = "kvmem",
        moved_bytes: int = 0,
        rounds: int | None = None,
    ) -> None:
        """Each call of a contender does `operations` operations.

        baselines: None for one that cannot run here, with "name: why" as its name. Goals that name
            one of those are dropped.
        moved_bytes: of one call, where speed is of interest; then figures are GB/s.
        """
        if self.alone:
            baselines = {}
        there = {key: _timed(one) for key, one in baselines.items() if one is not None}
        missing = [key for key, one in baselines.items() if one is None]
        seconds: dict[str, list[float]] = {key: [] for key in [name, *there]}
        timed = _timed(subject)
        load = [os.getloadavg()[0]]
        draw = random.Random(self.question)

        def run_baselines() -> None:
            for key in draw.sample(list(there), len(there)):
                seconds[key].append(_seconds_of(there[key]))
            timed.before()

        with no_collector():
            self.benchmark.pedantic(
                timed.run,
                setup=run_baselines,
                teardown=timed.after,
                rounds=rounds or self.rounds,
                warmup_rounds=1,
            )
        if self.benchmark.disabled:
            timed.after()
            return
        load.append(os.getloadavg()[0])
        seconds[name] = list(self.benchmark.stats.stats.data)
        for key in there:
            del seconds[key][0]  # the round that warmed up
        found = Comparison(operations, seconds, load)
        kept = [goal for goal in goals if _can_judge(goal, there)]
        self._note(found, name, missing, kept, moved_bytes)

    def _note(
        self,
        found: Comparison,
        name: str,
        missing: Sequence[str],
        goals: Sequence[Goal],
        moved_bytes: int,
    ) -> None:
        def figure(key: str) -> str:
            ns = found.median_ns(key)
            return (
                f"{moved_bytes / (ns * found.operations):.2f} GB/s" if moved_bytes else show_ns(ns)
            )

        judged = [(str(goal), *goal.judge(found, name)) for goal in goals]
        info = self.benchmark.extra_info
        info["operations"] = found.operations
        info["load"] = found.load
        info["seconds"] = found.seconds
        info["ns_per_operation"] = {key: found.median_ns(key) for key in found.seconds}
        info["ratios"] = {
            key: [*found.quartiles(key, name)] for key in found.seconds if key != name
        }
        info["goals"] = [{"goal": text, "met": met, "found": got} for text, met, got in judged]
        self.rows.append(Row(self.question, name, figure(name), "1", *judged[0] if judged else ()))
        self.rows += [Row(self.question, "", "", "", *one) for one in judged[1:]]
        for key in found.seconds:
            if key != name:
                low, middle, high = found.quartiles(key, name)
                ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
                self.rows.append(Row(self.question, key, figure(key), ratio))
        self.rows += [Row(self.question, key, "not here") for key in missing]


def _timed(contender: Contender) -> Timed:
    return contender if isinstance(contender, Timed) else Timed(contender)


def _seconds_of(contender: Timed) -> float:
    contender.before()
    start = time.perf_counter()
    contender.run()
    seconds = time.perf_counter() - start
    if contender.seconds is not None:
        seconds = contender.seconds()
    contender.after()
    return seconds


def _can_judge(goal: Goal, there: Mapping[str, object]) -> bool:
    if isinstance(goal, AtMostNs):
        return True
    named = [goal.baseline] if isinstance(goal, AtMost) else goal.baselines
    return all(baseline in there for baseline in named)


@contextmanager
def pinned(*cores: int) -> Iterator[None]:
    """The calling thread, and threads that it starts, run on these cores only.

    Numbers count the cores that this process may use; there may be fewer than the number says.
    """
    allowed = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {allowed[core % len(allowed)] for core in cores})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def latencies_ns(call: Callable[[], object], count: int) -> list[int]:
    """How long each of `count` calls took, sorted. The clock's own cost is in it."""
    clock = time.perf_counter_ns
    found = [0] * count
    for number in range(count):
        start = clock()
        call()
        found[number] = clock() - start
    return sorted(found)


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(len(ordered) * share), len(ordered) - 1)]


def load_native() -> ModuleType | str:
    """The module of bench/native, or why it is not here.

    KVMEM_BENCH_NATIVE names the folder where it was built, unless that is the preset's.
    """
    name = "kvmem_bench"
    folder = Path(os.environ.get("KVMEM_BENCH_NATIVE", ROOT / "build" / "bench"))
    path = folder / (name + str(sysconfig.get_config_var("EXT_SUFFIX")))
    if not path.exists():
        return f"the native module is not built: {BUILD_NATIVE}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
