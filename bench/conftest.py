"""Fixtures of the benchmarks: one question a file, each beside its baseline in the same run.

`pytest bench --benchmark-only` measures. Any other run is a smoke run: every benchmark once, at a
small size, so that none rots.
"""

from __future__ import annotations

import os

# Before anything imports numpy or torch: with two OpenMP threads torch collapses as soon as one
# core is busy, which would flatter kvmem.
os.environ["OMP_NUM_THREADS"] = "1"

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import pytest

import harness
import table

Value = TypeVar("Value")

rows: list[table.Row] = []
load_before = os.getloadavg()[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvmem benchmarks")
    group.addoption("--results", metavar="FILE.md", help="write the table there")
    group.addoption(
        "--rounds", type=int, default=harness.ROUNDS, help="timed rounds of each benchmark"
    )
    group.addoption(
        "--quick",
        action="store_true",
        help="only what `versus` times, without the baselines: for compare.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    # pytest-benchmark reads these when it is configured, which is behind this.
    if not config.option.benchmark_only:
        config.option.benchmark_disable = True
    config.option.benchmark_quiet = True  # the table below instead


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.quick:
        kept = [item for item in items if _is_timed_by_versus(item)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept


def _is_timed_by_versus(item: pytest.Item) -> bool:
    """One that asks for `benchmark` itself measures something of its own."""
    asked = inspect.signature(getattr(item, "function", lambda: None)).parameters
    return "versus" in asked and "benchmark" not in asked


@pytest.fixture
def full(request: pytest.FixtureRequest) -> bool:
    """Whether this run measures."""
    return bool(request.config.option.benchmark_only)


@pytest.fixture
def size(full: bool) -> Callable[[Value, Value], Value]:
    """size(full, smoke): how much of something."""
    return lambda measured, smoke: measured if full else smoke


@pytest.fixture
def question(request: pytest.FixtureRequest) -> str:
    """The name of the test as a sentence."""
    name, _, parameters = str(request.node.name).removesuffix("]").partition("[")
    sentence = name.removeprefix("test_").replace("_", " ")
    return ", ".join([sentence, *filter(None, parameters.split("-"))])


@pytest.fixture
def versus(benchmark: Any, question: str, request: pytest.FixtureRequest) -> harness.Versus:
    """Times a subject beside its baselines: see harness.Versus."""
    option = request.config.option
    return harness.Versus(benchmark, question, rows, option.rounds, alone=option.quick)


@pytest.fixture
def report(benchmark: Any, question: str, full: bool) -> Callable[..., None]:
    """report(contender, value, unit, most=...): a row where time a call says too little.

    unit "ns" is shown in whatever unit of time fits. most: the goal, shown and not asserted.
    """

    def note(contender: str, value: float, unit: str = "ns", most: float | None = None) -> None:
        benchmark.extra_info[contender] = {"value": value, "unit": unit, "most": most}
        shown = table.show(value, unit)
        goal = "" if most is None else f"<= {table.show(most, unit)}"
        met = None if most is None else value <= most
        if full:
            rows.append(table.Row(question, contender, shown, "", goal, met, shown))

    return note


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The module of bench/native. Skips without it, unless KVMEM_BENCH_REQUIRED is set."""
    found = harness.load_native()
    if isinstance(found, str):
        (pytest.fail if os.environ.get("KVMEM_BENCH_REQUIRED") else pytest.skip)(found)
    return found


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if not rows:
        return
    load = (load_before, os.getloadavg()[0])
    terminalreporter.section("kvmem beside its baselines")
    for line in table.text_table(rows):
        terminalreporter.write_line(line)
    terminalreporter.write_line(f"load average {load[0]:.1f} before, {load[1]:.1f} after")
    if config.option.results:
        command = " ".join(["python -m pytest", *_arguments(sys.argv[1:])])
        table.write_results(Path(config.option.results), rows, command, load)


def _arguments(given: list[str]) -> list[str]:
    """Without the files that are written, whose names say nothing about the results."""
    kept = []
    skip = False
    for argument in given:
        if not skip and not argument.startswith(("--results", "--benchmark-json")):
            kept.append(argument)
        skip = argument in {"--results", "--benchmark-json"}
    return kept
