"""A finished replay as one HTML file that works without a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvmem.replay.options import ReplayError
from kvmem.replay.result import SLOT_STATES

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from kvmem.replay.result import ReplayResult, Transfers

_POINTS_MOST = 20_000
_COLOURS = {"free": "#d9e2ec", "held": "#3b82f6", "quarantined": "#f59e0b", "poisoned": "#dc2626"}


def expect_plot(path: Path) -> None:
    """Check, before a long run, that a plot can be drawn and written. Raises ReplayError."""
    try:
        import plotly  # noqa: F401
    except ModuleNotFoundError:
        raise ReplayError("--plot: needs plotly: pip install 'kvmem[plot]'") from None
    try:
        # Appending leaves a plot from before as it is until there is a new one.
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ReplayError(f"--plot {path}: {error.strerror or error}") from None


def write_plot(result: ReplayResult, source: str, path: Path) -> None:
    """Draw slots by state, queue depth and restore latency over the run. Raises ReplayError."""
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=3,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.07,
        subplot_titles=("Host blocks by state", "Transfers not ended", "Restore latency"),
    )
    _add_occupancy(figure, result.occupancy)
    _add_depth(figure, result.timeline)
    _add_latency(figure, result.timeline)
    figure.update_xaxes(title_text="seconds since the start", row=3, col=1)
    figure.update_yaxes(title_text="blocks", row=1, col=1)
    figure.update_yaxes(title_text="transfers", row=2, col=1)
    figure.update_yaxes(title_text="microseconds", type="log", row=3, col=1)
    figure.update_layout(title_text=f"kvmem replay: {source}", height=1000, template="plotly_white")
    try:
        # With the library inside, so that the file opens anywhere.
        figure.write_html(str(path), include_plotlyjs=True, full_html=True)
    except OSError as error:
        raise ReplayError(f"--plot {path}: {error.strerror or error}") from None


def queue_depth(transfers: Transfers, restore: bool) -> tuple[NDArray[np.float64], ...]:
    """Steps of how many restores or offloads were requested and not observed to end.

    The first array holds the seconds, the second the number from then on.
    """
    rows = transfers.restore == restore
    times = np.concatenate([transfers.requested[rows], transfers.observed[rows]])
    steps = np.repeat([1.0, -1.0], np.count_nonzero(rows))
    order = np.argsort(times, kind="stable")
    return times[order], np.cumsum(steps[order])


def _add_occupancy(figure: object, occupancy: NDArray[np.float64]) -> None:
    from plotly.graph_objects import Scatter

    shown = occupancy[_thinned(len(occupancy))]
    # What moves stands below, what is free on top of it.
    for state in ("held", "quarantined", "poisoned", "free"):
        column = 1 + SLOT_STATES.index(state)
        line = {"width": 0.5, "color": _COLOURS[state], "shape": "hv"}
        trace = Scatter(
            x=shown[:, 0], y=shown[:, column], name=state, stackgroup="slots", line=line
        )
        _add(figure, trace, 1)


def _add_depth(figure: object, transfers: Transfers) -> None:
    from plotly.graph_objects import Scatter

    for restore, name in ((False, "offloads"), (True, "restores")):
        times, depth = queue_depth(transfers, restore)
        keep = _thinned(len(times))
        line = {"width": 1, "shape": "hv"}
        _add(figure, Scatter(x=times[keep], y=depth[keep], name=name, line=line), 2)


def _add_latency(figure: object, transfers: Transfers) -> None:
    from plotly.graph_objects import Scattergl

    rows = transfers.restore & transfers.done
    times = transfers.requested[rows]
    keep = _thinned(len(times))
    for part, seconds in transfers.restore_parts().items():
        marker = {"size": 3 if part != "total" else 4}
        trace = Scattergl(
            x=times[keep],
            y=seconds[keep] * 1e6,
            name=f"{part} µs",
            mode="markers",
            marker=marker,
            visible=True if part == "total" else "legendonly",
        )
        _add(figure, trace, 3)


def _add(figure: object, trace: object, row: int) -> None:
    figure.add_trace(trace, row=row, col=1)  # type: ignore[attr-defined]


def _thinned(count: int) -> NDArray[np.int64]:
    """Give at most so many of `count` rows that a browser draws them fast, the last one too."""
    if count <= _POINTS_MOST:
        return np.arange(count)
    return np.linspace(0, count - 1, _POINTS_MOST).astype(np.int64)
