"""Fixtures of the tests on a real GPU. Where there is none they are skipped, and say why."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

import gpu_cache
import gpu_driver
import kvmem


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = os.path.dirname(__file__)
    for item in items:
        if str(item.path).startswith(here) and "gpu" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        gpu_cache.gpu_or_skip()  # not in the fixture: so that the reason is shown once


@pytest.fixture(scope="session")
def gpu() -> gpu_driver.Driver:
    """The GPU, beside kvmem."""
    return gpu_cache.gpu_or_skip()


@pytest.fixture(scope="session")
def device(gpu: gpu_driver.Driver) -> kvmem.Device:
    return kvmem.open_device("cuda")


@pytest.fixture
def make_stream(gpu: gpu_driver.Driver) -> Iterator[Callable[[], gpu_driver.Stream]]:
    """Streams of the engine's own."""
    made: list[gpu_driver.Stream] = []

    def make() -> gpu_driver.Stream:
        made.append(gpu_driver.Stream(gpu))
        return made[-1]

    yield make
    for stream in made:
        stream.synchronize()
        stream.close()


@pytest.fixture
def make_cache(
    gpu: gpu_driver.Driver, device: kvmem.Device
) -> Iterator[Callable[..., gpu_cache.GpuCache]]:
    """Caches with a manager each; behind the test all must end and every slot be home."""
    made: list[gpu_cache.GpuCache] = []

    def make(*, on: kvmem.Device = device, **options: object) -> gpu_cache.GpuCache:
        made.append(gpu_cache.GpuCache(gpu, on, **options))
        return made[-1]

    yield make
    for cache in made:
        cache.finish()
