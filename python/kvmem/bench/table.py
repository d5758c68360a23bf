"""Finished measurements as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:
    from kvmem.bench.result import BenchResult

CAPTION = (
    "Under each figure of kvmem are its baselines. ratio: how many times as long, or as much, as"
    " kvmem the baseline took; above 1 kvmem is ahead. The median over the rounds, and quartiles."
    " NumPy copies in one thread, kvmem with the threads of its device."
)


def make_table(result: BenchResult, ascii_only: bool = False) -> Table:
    """Lay out the rows, so that they fit into 80 columns."""
    table = Table(
        title=describe(result),
        title_justify="left",
        caption=f"{CAPTION} {describe_run(result)}",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("what", overflow="fold")
    for name in ("figure", "ratio", "quartiles", "load"):
        table.add_column(name, justify="right", overflow="fold")
    what = ""
    for row in result.rows:
        if row.what != what:
            what = row.what
            figure = show(row.kvmem_figure, row.unit, ascii_only)
            table.add_row(what, figure, "", "", f"{row.load[0]:.1f}", style="bold")
        table.add_row(
            f"  {row.baseline}",
            show(row.baseline_figure, row.unit, ascii_only),
            f"{row.ratio:,.2f}",
            f"{row.ratio_low:,.2f} to {row.ratio_high:,.2f}",
        )
    return table


def describe(result: BenchResult) -> str:
    """Say in one line what was measured where."""
    machine = result.machine
    return (
        f"kvmem {machine['kvmem']}, copy kernel {machine['copy_kernel']}: {machine['cpu']},"
        f" {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.1f} GiB of memory,"
        f" Linux {machine['linux']}, Python {machine['python']}, NumPy {machine['numpy']}"
    )


def describe_run(result: BenchResult) -> str:
    """Say what the run itself took."""
    said = f"It took {result.seconds:.0f} s"
    if result.peak_bytes is not None:
        said += f" and at most {result.peak_bytes / 2**20:,.0f} MiB"
    return said + "; load is the average over the minute before."


def show(value: float, unit: str, ascii_only: bool = False) -> str:
    """Three digits or more and a unit: 28.4 ns, 1.20 µs, 12.6 GB/s."""
    if unit == "ns":
        value, unit = _fitting(value)
    digits = 3 if value < 1 else 2 if value < 10 else 1
    return f"{value:,.{digits}f} {unit.replace('µ', 'u') if ascii_only else unit}"


def _fitting(ns: float) -> tuple[float, str]:
    for unit, size in (("ns", 1.0), ("µs", 1e3), ("ms", 1e6)):
        if ns < 1000 * size:
            return ns / size, unit
    return ns / 1e9, "s"
