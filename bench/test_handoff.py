"""What does an offload add to the bare copy of one 2 MiB block?

The bare copy is the same kernel on the calling thread, over the same segments. Offload, wait and
give back, from Python; and the call of offload() alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from types import ModuleType

import pytest

import kvmem
from harness import AtMost, Versus, percentile

Size = Callable[[int, int], int]

SEGMENTS = 32
SEGMENT_BYTES = 64 << 10
BLOCKS = 64  # more than the caches hold, so that each block comes from memory


class Engine:
    def __init__(self, blocks: int, reaper: bool) -> None:
        device = kvmem.open_device("host")
        self.blocks = blocks
        self.memory = device.alloc(SEGMENTS * blocks * SEGMENT_BYTES)
        self.memory.array[:] = 1
        layers = self.memory.array.reshape(SEGMENTS, blocks, SEGMENT_BYTES)
        layout = kvmem.KVLayout.from_arrays(list(layers), memory=device.name)
        self.manager = kvmem.Manager(
            device, layout, host_bytes=4 * layout.block_bytes, reaper=reaper
        )

    def offload_each(self) -> None:
        offload = self.manager.offload
        for block in range(self.blocks):
            transfer = offload([block], after=kvmem.READY)
            transfer.wait()
            transfer.result().release()

    def copies(self, native: ModuleType) -> list[object]:
        """The bare copies that offload_each() makes, one for each block."""
        with self.manager.pool.acquire(1) as slot:
            target = slot[0].ctypes.data
        made = []
        for block in range(self.blocks):
            copy = native.CopyList()
            for segment in range(SEGMENTS):
                source = self.memory.address + (segment * self.blocks + block) * SEGMENT_BYTES
                copy.add(target + segment * SEGMENT_BYTES, source, SEGMENT_BYTES)
            made.append(copy)
        return made


def call_each(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


@pytest.fixture(params=[True, False], ids=["with the reaper", "without reaper"])
def engine(request: pytest.FixtureRequest, size: Size) -> Engine:
    return Engine(size(BLOCKS, 2), request.param)


def test_a_2_mib_block_offloaded_and_waited_for(
    versus: Versus, native: ModuleType, engine: Engine
) -> None:
    copies = engine.copies(native)
    versus(
        engine.offload_each,
        {
            "bare copy": partial(call_each, [copy.with_kernel for copy in copies]),
            "memcpy": partial(call_each, [copy.with_memcpy for copy in copies]),
        },
        operations=engine.blocks,
        goals=[AtMost(1.15, "bare copy")],
    )
    assert engine.manager.close().quiet


def test_the_call_of_offload_alone(
    benchmark: Callable[..., None], report: Callable[..., None], engine: Engine, size: Size
) -> None:
    """The workers sleep when each call begins, as they do when transfers are rare."""
    found = []

    def submit() -> None:
        for number in range(size(400, 2)):
            start = time.perf_counter_ns()
            transfer = engine.manager.offload([number % engine.blocks], after=kvmem.READY)
            found.append(time.perf_counter_ns() - start)
            transfer.wait()
            transfer.result().release()

    benchmark.pedantic(submit, rounds=1)  # type: ignore[attr-defined]
    report("kvmem p50", percentile(sorted(found), 0.5), most=40_000)
    report("kvmem p90", percentile(sorted(found), 0.9))
    assert engine.manager.close().quiet
