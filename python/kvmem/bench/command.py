"""The command `kvmem bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvmem.bench.options import FULL, QUICK, BenchError, BenchOptions

if TYPE_CHECKING:
    from kvmem.bench.result import BenchResult

HELP = """Measure kvmem on this machine, on the host device, beside Python and NumPy.

Blocks taken and given back, the call of offload(), copies of scattered
segments, the hand-off of one block, an idle manager, bookkeeping. Each stands
beside what one would write without kvmem; they take turns, round by round.

Takes about half a minute, on slow cores a whole one. Figures mean little on a
busy machine. Exits 2 if it could not run.

Example: kvmem bench --quick --only pool --only copy --plot bench.html
"""

Quick = Annotated[
    bool, typer.Option("--quick", help="Smaller and fewer rounds: some seconds, more noise.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="Only pool, submit, copy, handoff, idle or memory; may be given several times.",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        metavar="N", help="Timed rounds of each row. Default: as many as fit into some seconds."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE.html", help="Draw the ratios, with the figures behind each."),
]


def bench(
    quick: Quick = False,
    only: Only = None,
    rounds: Rounds = None,
    json_output: Json = False,
    plot: Plot = None,
) -> None:
    import kvmem

    try:
        options = BenchOptions(QUICK if quick else FULL, rounds, tuple(only or ()))
        _run(options, json_output, plot)
    except (BenchError, kvmem.KvmemError, MemoryError) as error:
        said = "not enough memory" if isinstance(error, MemoryError) else error
        typer.echo(f"kvmem bench: {said}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("kvmem bench: interrupted", err=True)
        raise typer.Exit(130) from None


def _run(options: BenchOptions, as_json: bool, plot: Path | None) -> None:
    from kvmem.bench.measures import MEASURES, run_bench
    from kvmem.bench.plot import expect_plot, write_plot

    options.expect_names(MEASURES)
    if plot is not None:
        expect_plot(plot)
    with _progress() as advance:
        result = run_bench(options, advance)
    if plot is not None:
        write_plot(result, plot)
    _show(result, as_json)


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Show a bar where a person looks on; say nothing to a file or a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    # Drawn between the rounds: a thread that draws would take time from what is measured.
    with Progress(
        console=console, transient=True, auto_refresh=False, disable=not sys.stderr.isatty()
    ) as bar:
        task = bar.add_task("measuring", total=1.0)

        def advance(what: str, done: float) -> None:
            bar.update(task, description=what, completed=done, refresh=True)

        yield advance


def _show(result: BenchResult, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.to_json()))
        return
    from rich.console import Console

    from kvmem.bench.table import make_table

    console = Console()
    console.print(make_table(result, ascii_only=console.options.ascii_only))
