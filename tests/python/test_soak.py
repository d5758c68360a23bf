"""The soak of bench/soak.py: it passes when nothing grows, and what grows is found."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"

MIB = 1 << 20


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH))
    import soak

    return soak


def test_a_short_soak_finds_nothing_that_grows() -> None:
    ran = subprocess.run(
        [sys.executable, BENCH / "soak.py", "--minutes", "0.05", "--threads", "2"],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.endswith("constant\n")
    assert " descriptors " in ran.stdout


def leaks() -> dict[str, Callable[[list[Any]], None]]:
    return {
        "descriptors": lambda kept: kept.append(open("/dev/null")),
        "threads": lambda kept: kept.append(sleeper()),
        "resident memory": lambda kept: kept.append(resident(2 * MIB)),
    }


def resident(nbytes: int) -> mmap.mmap:
    """Memory from the kernel: what malloc gives may be left from earlier, and resident already."""
    memory = mmap.mmap(-1, nbytes)
    np.frombuffer(memory, np.uint8)[:] = 1
    return memory


def sleeper() -> threading.Event:
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()
    return over


@pytest.mark.parametrize("what", ["descriptors", "threads", "resident memory"])
def test_what_each_turn_leaves_behind_is_found(
    soak: ModuleType, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    kept: list[Any] = []
    run = soak.Stress.run

    def leaking(stress: Any, seconds: float) -> Any:
        leaks()[what](kept)
        return run(stress, seconds)

    monkeypatch.setattr(soak.Stress, "run", leaking)
    monkeypatch.setattr(soak, "SETTLE_SECONDS", 0.02)  # of each turn, where threads are left
    monkeypatch.setattr(soak, "TURNS", 15)
    try:
        found = soak.soak(0.0, 1, lambda line: None)
    finally:
        for each in kept:
            if isinstance(each, threading.Event):
                each.set()
            elif hasattr(each, "close"):
                each.close()
    assert len(found) == 1
    assert found[0].startswith(what)


def samples(soak: ModuleType, resident: list[float]) -> list[Any]:
    """One every ten seconds, of so many MiB."""
    return [
        soak.Sample(10.0 * number, int(mib * MIB), 5, 11) for number, mib in enumerate(resident)
    ]


def test_memory_that_wavers_or_settles_does_not_grow(soak: ModuleType) -> None:
    wavering = [100.0 + number % 3 for number in range(28)]
    spike = [100.0] * 27 + [140.0]
    settling = [60.0 + min(number, 9) * 5 for number in range(28)]
    slow = [100.0 + 0.1 * number for number in range(28)]
    for resident in (wavering, spike, settling, slow):
        assert soak.growth(samples(soak, resident)) == []


def test_memory_that_goes_on_growing_does(soak: ModuleType) -> None:
    steady = [100.0 + 0.4 * number for number in range(28)]
    noise = itertools.cycle([0.0, 6.0, -6.0])
    noisy = [100.0 + 2 * number + next(noise) for number in range(28)]
    for resident in (steady, noisy):
        (found,) = soak.growth(samples(soak, resident))
        assert found.startswith("resident memory grew by")


def test_a_sample_counts_what_this_process_has(soak: ModuleType) -> None:
    gc.collect()  # what other tests left goes now, and not between the samples
    before = soak.take_sample(0.0)
    kept = resident(64 * MIB)
    with open(os.devnull):
        after = soak.take_sample(0.0)
    assert after.descriptors == before.descriptors + 1
    assert after.resident_bytes - before.resident_bytes > 60 * MIB
    assert len(kept) == 64 * MIB
