"""Replays request traces through the production code, with real bytes.

`kvmem replay` on the command line, or:

    from kvmem.replay.engine import run_replay
    from kvmem.replay.options import ReplayOptions
    from kvmem.replay.trace import read_trace

    result = run_replay(read_trace(path), ReplayOptions(host_blocks=10_000))

Needs nothing but NumPy; the table needs rich, the command typer, the plot plotly.
"""
