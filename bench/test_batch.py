"""What does a segment cost until it is submitted?

About 10,000 segments: 157 blocks of 64 regions (layers), descriptors built in C++; and the whole
call of offload() from Python for 156 blocks, checks, descriptors and submission together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
import pytest

import kvmem
from harness import AtMostNs, Timed, Versus, pinned

Size = Callable[[int, int], int]

REGIONS = 64
SEGMENT_BYTES = 4096


@pytest.mark.parametrize("blocks", ["scattered", "contiguous"])
def test_a_segment_of_a_batch_in_cpp(
    versus: Versus, native: ModuleType, size: Size, blocks: str
) -> None:
    bench = native.BatchBuild(
        blocks=157, regions=REGIONS, segment_bytes=SEGMENT_BYTES, contiguous=blocks == "contiguous"
    )
    times = size(50, 1)
    with pinned(0):
        versus(
            partial(bench.build, times),
            {"three arrays appended to": partial(bench.by_hand, times)},
            operations=bench.segments * times,
            goals=[AtMostNs(10)],
        )
    bench.build(1)
    assert bench.descriptors == (1 if blocks == "contiguous" else bench.segments)


class Engine:
    """A cache, a manager and one offload at a time."""

    def __init__(self, kind: str, blocks: int) -> None:
        device = kvmem.open_device(kind, **({"move_bytes": False} if kind == "virtual" else {}))
        count = blocks * 4
        self.memory = device.alloc(REGIONS * count * SEGMENT_BYTES)
        regions = [
            kvmem.Region(
                self.memory.address + stage * count * SEGMENT_BYTES,
                SEGMENT_BYTES,
                SEGMENT_BYTES,
                count,
                memory=device.name,
                stage=stage,
            )
            for stage in range(REGIONS)
        ]
        layout = kvmem.KVLayout(regions)
        self.manager = kvmem.Manager(device, layout, host_bytes=layout.block_bytes * blocks)
        self.blocks = np.random.default_rng(1).permutation(count)[:blocks].tolist()
        self.transfer: kvmem.Transfer | None = None

    def offload(self) -> None:
        self.transfer = self.manager.offload(self.blocks, after=kvmem.READY)

    def end(self) -> None:
        if self.transfer is not None:
            self.transfer.wait()
            copy = self.transfer.result()
            assert copy is not None
            copy.release()
            self.transfer = None


@pytest.mark.parametrize("device", ["virtual", "host"])
def test_a_segment_of_offload_from_python(
    versus: Versus, native: ModuleType, size: Size, device: str
) -> None:
    """The virtual device has no thread and copies nothing: what is timed is the call alone."""
    blocks = size(156, 2)
    engine = Engine(device, blocks)
    bench = native.BatchBuild(
        blocks=blocks, regions=REGIONS, segment_bytes=SEGMENT_BYTES, contiguous=False
    )
    versus(
        Timed(engine.offload, after=engine.end),
        {"the descriptors alone, in C++": partial(bench.build, 1)},
        operations=bench.segments,
        goals=[AtMostNs(60)],
        name=f"kvmem on the {device} device",
        rounds=50,
    )
    assert engine.manager.close().quiet
