"""What the tests of the Python face share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kvmem
import support
from kvmem import _cuda
from support import Cache


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        only = metafunc.definition.get_closest_marker("host_only")
        kinds = ["host"] if only else ["host", "virtual"]
        metafunc.parametrize("device", kinds, indirect=True)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[kvmem.Device]:
    if request.param == "host":
        yield kvmem.open_device("host", workers=2)
        return
    device = kvmem.open_device("virtual", seed=7)
    support.clocks.append(device)
    yield device
    support.clocks.remove(device)


@pytest.fixture
def stream(device: kvmem.Device) -> kvmem.Stream:
    return device.stream()


@pytest.fixture
def make_pool(device: kvmem.Device) -> Callable[..., kvmem.BlockPool]:
    def make(slots: int = 4, block_bytes: int = 4096) -> kvmem.BlockPool:
        slot_bytes = -(-block_bytes // 4096) * 4096
        return kvmem.BlockPool(device, block_bytes=block_bytes, capacity_bytes=slots * slot_bytes)

    return make


@pytest.fixture
def pool(make_pool: Callable[..., kvmem.BlockPool]) -> kvmem.BlockPool:
    return make_pool()


@pytest.fixture
def make_cache(device: kvmem.Device) -> Iterator[Callable[..., Cache]]:
    """Caches with a manager each. What a test leaves stalled is let go, and everything must end."""
    made: list[Cache] = []

    def make(**options: object) -> Cache:
        made.append(Cache(device, **options))
        return made[-1]

    yield make
    for cache in made:
        cache.finish()


@pytest.fixture
def cache(make_cache: Callable[..., Cache]) -> Cache:
    return make_cache()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without one, whatever this machine has."""
    none = SimpleNamespace(usability="no_device", absent=True, sentence="no GPU")
    monkeypatch.setattr(_cuda, "find", lambda: none)


@pytest.fixture(scope="session")
def fakes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tests build what they need of the fake CUDA runtime, once."""
    return tmp_path_factory.mktemp("fakes")


@pytest.fixture
def random() -> np.random.Generator:
    return np.random.default_rng(7)
