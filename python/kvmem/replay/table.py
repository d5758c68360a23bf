"""A finished replay as a table for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from kvmem.replay.result import LATENCY_PARTS, SLOT_STATES

if TYPE_CHECKING:
    from kvmem.replay.result import ReplayResult


def make_table(result: ReplayResult, source: str) -> Table:
    """Lay out what the replay of `source` found."""
    table = Table(title=f"kvmem replay: {source}", title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for name, value in _work(result):
        table.add_row(name, value)
    table.add_section()
    for name, value in _latency(result):
        table.add_row(name, value)
    table.add_section()
    for name, value in _slots(result):
        table.add_row(name, value)
    table.add_section()
    for name, value in _verdict(result):
        table.add_row(name, value)
    return table


def _work(result: ReplayResult) -> list[tuple[str, str]]:
    counts = result.counts
    return [
        ("requests, blocks", f"{counts.requests:,}, {counts.blocks:,}"),
        ("block hit rate", f"{result.block_hit_rate:.4f}"),
        ("prefix hit rate", f"{result.prefix_hit_rate:.4f}"),
        ("offloaded", shown_bytes(result.bytes_offloaded)),
        ("restored", shown_bytes(result.bytes_restored)),
        ("per generated token", f"{result.bytes_per_generated_token:,.0f} bytes"),
        ("re-offloaded blocks", f"{result.reoffloaded_blocks:,}"),
        (_run_time(result), f"{counts.seconds:.2f} s"),
    ]


def _run_time(result: ReplayResult) -> str:
    return "run time, virtual" if result.options.device == "virtual" else "run time"


def _latency(result: ReplayResult) -> list[tuple[str, str]]:
    def both(prefix: str) -> str:
        p50, p99 = result.restore_us[f"{prefix}p50"], result.restore_us[f"{prefix}p99"]
        return "-" if p50 is None or p99 is None else f"{p50:,.0f}, {p99:,.0f} µs"

    rows = [("restore latency p50, p99", both(""))]
    return rows + [(f"  {part}", both(f"{part}_")) for part in LATENCY_PARTS]


def _slots(result: ReplayResult) -> list[tuple[str, str]]:
    run, end = result.run_slots, result.end_slots
    rows = [("host blocks", "after the run, after release")]
    rows += [(f"  {state}", f"{run[state]:,}, {end[state]:,}") for state in SLOT_STATES]
    rows.append(("  of", f"{end['capacity']:,}"))
    rows.append(("  peak held, quarantined", f"{run['peak_held']:,}, {run['peak_quarantined']:,}"))
    return rows


def _verdict(result: ReplayResult) -> list[tuple[str, str]]:
    counts, transfers = result.counts, result.transfers
    faults = result.faults()
    rows = [
        ("transfers ended once", f"{transfers['ended']:,} of {transfers['submitted']:,}"),
        ("cancelled, failed", f"{result.cancelled:,}, {result.failed:,}"),
        ("leaked blocks", f"{result.leaked_blocks:,}"),
        ("verified blocks, differing", f"{counts.verified:,}, {counts.mismatches:,}"),
    ]
    if counts.corrupted:
        rows.append(("corrupted on purpose", f"{counts.corrupted:,}"))
    if faults:
        verdict = f"[red]{'; '.join(faults)}[/]"
    elif result.options.move_bytes:
        verdict = "[green]every block as it was[/]"
    else:
        verdict = "[yellow]no bytes were moved[/]"
    return [*rows, ("verification", verdict)]


def shown_bytes(count: int) -> str:
    """Write bytes for people."""
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:,.0f} {unit}" if unit == "bytes" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"
