"""An engine captures a graph, in the mode that forbids other threads most calls, while kvmem works.

The twin makes such a call itself, and the capture is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ctypes import byref, c_uint64
from typing import Any

import numpy as np
import pytest

import kvmem
from gpu_cache import PATIENCE, GpuCache
from gpu_driver import Driver, DriverError, Stream

MakeCache = Callable[..., GpuCache]
MakeStream = Callable[[], Stream]

IN_THREAD = pytest.mark.parametrize("other_thread", [False, True], ids=["here", "in a thread"])


def run(call: Callable[[], Any], other_thread: bool) -> Any:
    if not other_thread:
        return call()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()


@IN_THREAD
@pytest.mark.parametrize("reaper", [True, False], ids=["reaper", "no reaper"])
def test_a_capture_stays_valid_while_a_manager_works(
    gpu: Driver,
    make_cache: MakeCache,
    make_stream: MakeStream,
    other_thread: bool,
    reaper: bool,
) -> None:
    cache, capturing, held = make_cache(reaper=reaper), make_stream(), make_stream()
    cache.write(0, version=1)
    target = cache.device.alloc(4096)

    def work() -> None:
        for _ in range(5):
            copy = cache.stored([0])
            cache.manager.restore(copy, [1], after=held).wait(PATIENCE)
            cache.manager.poll()
        # Memory and streams are made and given back, too.
        assert kvmem.BlockPool(cache.device, block_bytes=4096, capacity_bytes="1MiB").pinned
        assert cache.device.alloc(4096).address
        cache.device.stream().synchronize()

    with gpu.capture(capturing):
        gpu.fill(capturing, target.address, 4096, 1)
        run(work, other_thread)
        gpu.fill(capturing, target.address, 4096, 2)
    assert cache.holds(1, of=0, version=1)


@IN_THREAD
def test_a_capture_is_lost_by_a_call_that_is_not_careful(
    gpu: Driver, make_stream: MakeStream, other_thread: bool
) -> None:
    capturing = make_stream()
    with (
        pytest.raises(DriverError, match="cuStreamEndCapture"),
        gpu.capture(capturing),
        pytest.raises(DriverError, match="cuMemAlloc"),
    ):
        run(lambda: gpu.call("cuMemAlloc_v2", byref(c_uint64()), 4096), other_thread)


def test_an_event_of_a_capture_is_refused(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache, capturing = make_cache(), make_stream()
    refusal = None
    # CUDA may end a capture of which an event is asked for, whoever asks.
    with suppress(DriverError), gpu.capture(capturing):
        event = capturing.record()
        with pytest.raises(kvmem.InvalidArgument) as refusal:
            cache.manager.offload([0], after=event)
    assert refusal is not None
    assert np.array_equal(cache.stored([0]).blocks[0], cache.read(0))
