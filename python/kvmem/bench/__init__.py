"""Measures kvmem beside a baseline in the same run: `kvmem bench`, and the folder bench/.

`kvmem bench` on the command line, or:

    from kvmem.bench.measures import run_bench
    from kvmem.bench.options import QUICK, BenchOptions

    result = run_bench(BenchOptions(QUICK))

Needs nothing but NumPy; the table needs rich, the command typer, the plot plotly.
"""
