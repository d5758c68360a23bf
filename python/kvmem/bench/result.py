"""What was measured, and on which machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvmem.bench.rounds import Comparison

KVMEM = "kvmem"
"""The contender that all others stand beside."""


@dataclass(frozen=True)
class Row:
    """kvmem beside one baseline.

    unit: of both figures: "ns" of one operation, "GB/s", "%" of a core, or "bytes".
    ratio: how many times as long as kvmem the baseline took, or as much: the median over the
        rounds, and the quartiles. Above 1 kvmem is ahead, whatever the unit.
    load: the 1-minute load average before and after.
    """

    name: str
    what: str
    baseline: str
    unit: str
    kvmem_figure: float
    baseline_figure: float
    ratio: float
    ratio_low: float
    ratio_high: float
    rounds: int
    load: tuple[float, float]


def rows_of(
    found: Comparison, name: str, what: str, unit: str, figure: Callable[[float], float]
) -> list[Row]:
    """Make a row of each baseline. figure: from nanoseconds an operation to the unit."""
    ours = figure(found.median_ns(KVMEM))
    rows = []
    for baseline in found.seconds:
        if baseline != KVMEM:
            low, ratio, high = found.quartiles(baseline, KVMEM)
            theirs = figure(found.median_ns(baseline))
            rounds = len(found.seconds[KVMEM])
            load = (found.load[0], found.load[-1])
            rows.append(
                Row(name, what, baseline, unit, ours, theirs, ratio, low, high, rounds, load)
            )
    return rows


@dataclass(frozen=True)
class BenchResult:
    """The rows of one run, and where it ran."""

    rows: list[Row]
    machine: dict[str, Any]
    seconds: float
    peak_bytes: int | None
    """The most memory that the process had; None where the kernel does not say."""

    def to_json(self) -> dict[str, Any]:
        """Everything in plain values."""
        return asdict(self)


def describe_machine(copy_kernel: str) -> dict[str, Any]:
    """Say what the figures depend on, without the machine's name."""
    import numpy as np

    import kvmem

    return {
        "kvmem": kvmem.__version__,
        "copy_kernel": copy_kernel,
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "linux": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def _cpu_model() -> str:
    model = _field(Path("/proc/cpuinfo"), "model name")
    return model or platform.machine() or "unknown processor"


def peak_bytes() -> int | None:
    """Give the peak of this process's resident memory; getrusage would begin with its parent's."""
    kib = _field(Path("/proc/self/status"), "VmHWM").split()
    return int(kib[0]) * 1024 if kib else None


def _field(path: Path, name: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    values = (line.partition(":")[2].strip() for line in lines if line.startswith(name))
    return next(values, "")
