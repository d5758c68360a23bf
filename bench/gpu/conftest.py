"""Fixtures of the benchmarks on a real GPU. Where there is none they are skipped, and say why."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvmem

# What the engine does beside kvmem is written once.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from gpu_moves import Moves
from raw_copies import load_loop

from gpu_cache import gpu_or_skip
from gpu_driver import Driver


def pytest_runtest_setup(item: pytest.Item) -> None:
    gpu_or_skip()  # not in the fixture: so that the reason is shown once


@pytest.fixture(scope="session")
def gpu() -> Driver:
    return gpu_or_skip()


@pytest.fixture(scope="session")
def device(gpu: Driver) -> kvmem.Device:
    return kvmem.open_device("cuda")


@pytest.fixture(scope="session")
def loop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_loop(tmp_path_factory.mktemp("raw"))


MakeMoves = Callable[..., Moves]


@pytest.fixture
def new_moves(gpu: Driver, device: kvmem.Device, loop: Any) -> Iterator[MakeMoves]:
    made: list[Moves] = []

    def make(segment_bytes: int, nbytes: int, on: kvmem.Device = device, **options: Any) -> Moves:
        made.append(Moves(gpu, on, loop, segment_bytes, nbytes, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="session")
def moves(gpu: Driver, device: kvmem.Device, loop: Any) -> Iterator[MakeMoves]:
    """The last one is kept for whoever asks for the same."""
    last: dict[tuple[int, int], Moves] = {}

    def make(segment_bytes: int, nbytes: int) -> Moves:
        if (segment_bytes, nbytes) not in last:
            while last:
                last.popitem()[1].close()
            last[segment_bytes, nbytes] = Moves(gpu, device, loop, segment_bytes, nbytes)
        return last[segment_bytes, nbytes]

    yield make
    while last:
        last.popitem()[1].close()
