"""Finished measurements as one HTML file that works without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvmem.bench.options import BenchError
from kvmem.bench.table import describe, describe_run, show

if TYPE_CHECKING:
    from pathlib import Path

    from kvmem.bench.result import BenchResult, Row


def expect_plot(path: Path) -> None:
    """Check, before a long run, that a plot can be drawn and written. Raises BenchError."""
    from kvmem.replay.options import ReplayError
    from kvmem.replay.plot import expect_plot

    try:
        expect_plot(path)
    except ReplayError as error:
        raise BenchError(str(error)) from None


def write_plot(result: BenchResult, path: Path) -> None:
    """Draw each ratio with its quartiles; the figures show where one points. Raises BenchError."""
    from plotly.graph_objects import Figure

    figure = Figure()
    for name in dict.fromkeys(row.name for row in result.rows):
        _add_bars(figure, name, [row for row in result.rows if row.name == name])
    figure.add_vline(x=1, line={"color": "#111827", "width": 1})
    figure.update_xaxes(title_text="ratio to the baseline: above 1 kvmem is ahead", type="log")
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(
        title={"text": f"{describe(result)}<br>{describe_run(result)}", "font": {"size": 13}},
        height=200 + 40 * len(result.rows),
        template="plotly_white",
        barmode="overlay",  # each bar has a line of its own
    )
    try:
        # With the library inside, so that the file opens anywhere.
        figure.write_html(str(path), include_plotlyjs=True, full_html=True)
    except OSError as error:
        raise BenchError(f"--plot {path}: {error.strerror or error}") from None


def _add_bars(figure: object, name: str, rows: list[Row]) -> None:
    from plotly.graph_objects import Bar

    bars = Bar(
        name=name,
        orientation="h",
        base=1,
        x=[row.ratio - 1 for row in rows],
        y=[f"{row.what}<br>beside: {row.baseline}" for row in rows],
        error_x={
            "type": "data",
            "symmetric": False,
            "array": [row.ratio_high - row.ratio for row in rows],
            "arrayminus": [row.ratio - row.ratio_low for row in rows],
        },
        hovertext=[_hover(row) for row in rows],
        hoverinfo="text",
    )
    figure.add_trace(bars)  # type: ignore[attr-defined]


def _hover(row: Row) -> str:
    return (
        f"kvmem {show(row.kvmem_figure, row.unit)}"
        f"<br>{row.baseline} {show(row.baseline_figure, row.unit)}"
        f"<br>ratio {row.ratio:.2f}, quartiles {row.ratio_low:.2f} to {row.ratio_high:.2f}"
        f"<br>{row.rounds} rounds, load {row.load[0]:.1f}"
    )
