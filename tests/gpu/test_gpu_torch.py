"""torch on the same GPU: its tensors as the cache, its streams, its events, its graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvmem
from gpu_cache import PATIENCE
from gpu_driver import Driver

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own

BLOCKS, WORDS = 8, 65536
MANY_CYCLES = 200_000_000  # about 0.1 s: kernels behind it start late


@pytest.fixture
def torch(gpu: Driver) -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA here")
    return torch


@pytest.fixture
def layers(torch: Any) -> Any:
    made = [torch.zeros((BLOCKS, WORDS), dtype=torch.int32, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    return made


@pytest.fixture
def manager(device: kvmem.Device, layers: Any) -> Iterator[kvmem.Manager]:
    layout = kvmem.KVLayout.from_arrays(layers)
    assert layout.memory == device.name
    manager = kvmem.Manager(device, layout, host_bytes="64MiB")
    yield manager
    assert manager.close(PATIENCE).quiet


def compute(torch: Any, layers: Any, block: int, value: int) -> None:
    """On torch's current stream, late."""
    torch.cuda._sleep(MANY_CYCLES)
    for number, layer in enumerate(layers):
        layer[block].fill_(value + number)


def holds(layers: Any, block: int, value: int) -> bool:
    return all(bool((layer[block] == value + n).all()) for n, layer in enumerate(layers))


@pytest.mark.parametrize("by", ["stream", "event"])
def test_blocks_go_from_one_stream_of_torch_to_another(
    torch: Any, layers: Any, manager: kvmem.Manager, by: str
) -> None:
    producing, consuming = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(producing):
        compute(torch, layers, 1, 100)
        after = producing if by == "stream" else producing.record_event()
    offload = manager.offload([1], after=after)
    with torch.cuda.stream(consuming):
        torch.cuda._sleep(MANY_CYCLES)
        before = [layer[2].clone() for layer in layers]  # the last reader of what is overwritten
    offload.wait(PATIENCE)
    restore = manager.restore(offload.result(), [2], after=[consuming, producing])
    restore.wait_on(consuming)
    with torch.cuda.stream(consuming):
        seen = [layer[2].clone() for layer in layers]
    consuming.synchronize()
    assert all(bool((layer == 0).all()) for layer in before)
    assert all(bool((layer == 100 + number).all()) for number, layer in enumerate(seen))
    restore.wait(PATIENCE)
    assert holds(layers, 2, 100)


def test_the_default_stream_of_torch_is_a_stream(
    torch: Any, layers: Any, manager: kvmem.Manager
) -> None:
    stream = torch.cuda.current_stream()
    compute(torch, layers, 3, 7)
    offload = manager.offload([3], after=stream)
    offload.wait(PATIENCE)
    restore = manager.restore(offload.result(), [4], after=stream)
    restore.wait_on(stream)
    assert holds(layers, 4, 7)
    restore.wait(PATIENCE)


def test_an_event_of_torch_that_was_never_recorded_is_refused(
    torch: Any, manager: kvmem.Manager
) -> None:
    with pytest.raises(kvmem.InvalidArgument):
        manager.offload([0], after=torch.cuda.Event())


def test_a_graph_of_torch_is_captured_while_a_manager_works(
    torch: Any, layers: Any, manager: kvmem.Manager
) -> None:
    tensor = torch.zeros(1024, device="cuda")
    compute(torch, layers, 5, 9)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tensor += 1
        for _ in range(5):
            offload = manager.offload([5], after=kvmem.READY)
            offload.wait(PATIENCE)
            manager.restore(offload.result(), [6], after=kvmem.READY).wait(PATIENCE)
        tensor += 1
    graph.replay()
    torch.cuda.synchronize()
    assert bool((tensor == 2).all())
    assert holds(layers, 6, 9)


def test_torch_sees_no_error_and_no_other_device_behind_a_call(
    torch: Any, layers: Any, manager: kvmem.Manager
) -> None:
    current = torch.cuda.current_device()
    with pytest.raises(kvmem.InvalidArgument):
        manager.offload([0], after=5)
    manager.offload([0], after=kvmem.READY).wait(PATIENCE)
    torch.cuda.synchronize()
    torch.zeros(16, device="cuda").add_(1).sum().item()
    assert torch.cuda.current_device() == current
