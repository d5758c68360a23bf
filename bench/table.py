"""The one table that a run of the benchmarks ends with."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

HEAD = ("question", "contender", "figure", "ratio", "goal", "met")


@dataclass
class Row:
    """One contender of one question.

    figure: nanoseconds an operation, or what else was measured, with its unit.
    ratio: how many times as long as the subject, median and quartiles over the rounds.
    met: None without a goal; found says what the goal was held against.
    """

    question: str
    contender: str
    figure: str
    ratio: str = ""
    goal: str = ""
    met: bool | None = None
    found: str = ""

    def cells(self) -> tuple[str, ...]:
        met = "" if self.met is None else f"{'yes' if self.met else 'NO'}: {self.found}"
        return (self.question, self.contender, self.figure, self.ratio, self.goal, met)


def show_ns(ns: float) -> str:
    """Three digits or more and a unit: 28.4 ns, 1.20 µs, 77.1 ms."""
    units = {"ns": 1.0, "µs": 1e3, "ms": 1e6, "s": 1e9}
    unit = next((unit for unit, size in units.items() if ns < 1000 * size), "s")
    value = ns / units[unit]
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.1f} {unit}"


def show(value: float, unit: str) -> str:
    """Three digits or more, as show_ns does for times."""
    if unit == "ns":
        return show_ns(value)
    return f"{value:,.0f} {unit}" if abs(value) >= 1000 else f"{value:.3g} {unit}"


def text_table(rows: Sequence[Row]) -> Iterator[str]:
    """For a terminal: a question is printed once."""
    cells = [HEAD, *_without_repeats(rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(HEAD))]
    for line in cells:
        yield "  ".join(
            cell.ljust(width) for cell, width in zip(line, widths, strict=True)
        ).rstrip()


def markdown_table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| {' | '.join(HEAD)} |"
    yield "|---" * len(HEAD) + "|"
    for line in _without_repeats(rows):
        yield f"| {' | '.join(line)} |"


def _without_repeats(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    last = ""
    for row in rows:
        cells = row.cells()
        yield ("" if row.question == last else row.question, *cells[1:])
        last = row.question


def machine() -> str:
    """The machine in words, without its name."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, {memory_bytes / 2**30:.1f} GiB of memory, "
        f"Linux {platform.release().partition('-')[0]}, Python {platform.python_version()}"
    )


def write_results(path: Path, rows: Sequence[Row], command: str, load: Sequence[float]) -> None:
    missed = [row for row in rows if row.met is False]
    judged = [row for row in rows if row.met is not None]
    lines = [
        "# Results",
        "",
        f"`{command}`, {datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC.",
        "",
        f"{machine()}.",
        f"Load average {load[0]:.1f} before, {load[1]:.1f} after. One OpenMP thread.",
        "",
        "A figure is of one operation, the median over the rounds. A ratio says how many times as",
        "long as kvmem a contender took: the median of the per-round ratios, and their quartiles.",
        "",
        *markdown_table(rows),
        "",
        f"{len(judged) - len(missed)} of {len(judged)} goals met.",
    ]
    path.write_text("\n".join(lines) + "\n")
