"""How fast do scattered segments move, beside hand-written loops, NumPy and torch?

1 GiB of blocks of 16, 64 and 512 KiB at random addresses, by the same threads over the same
addresses; and 64 MiB of blocks taken out of a large array or put into it, on one core.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from harness import Contender, Faster, Versus, pinned
from peers import quiet

Size = Callable[[int, int], int]

SEGMENTS = pytest.mark.parametrize(
    ("segment_bytes", "times"),
    [(16 << 10, 1.10), (64 << 10, 1.25), (512 << 10, 1.35)],
    ids=["16 KiB", "64 KiB", "512 KiB"],
)


@SEGMENTS
@pytest.mark.parametrize("threads", [1, 2], ids=["1 thread", "2 threads"])
def test_segments_scattered_at_random(
    versus: Versus, native: ModuleType, size: Size, segment_bytes: int, times: float, threads: int
) -> None:
    nbytes = size(1 << 30, 4 << 20)
    copy = native.ScatteredCopy(segment_bytes, nbytes, threads=threads)
    versus(
        copy.copy_with_device,
        {
            "memcpy loop": copy.copy_with_memcpy,
            "one-stream non-temporal loop": copy.copy_with_nt,
            "kvmem's kernel": copy.copy_with_kvmem,
        },
        operations=nbytes // segment_bytes,
        goals=[Faster(times, "memcpy loop", "one-stream non-temporal loop")],
        name="kvmem host device",
        moved_bytes=nbytes,
        rounds=9,
    )
    copy.clear_targets()
    copy.copy_with_device()
    assert copy.all_copied()


class Gather:
    """Blocks of one large array, taken into a small one, or put back."""

    def __init__(self, blocks: int, segment_bytes: int, taken: int) -> None:
        self.large = np.ones((blocks, segment_bytes // 8), np.int64)
        self.small = np.ones((taken, segment_bytes // 8), np.int64)
        self.ids = np.random.default_rng(1).permutation(blocks)[:taken]
        self.segment_bytes = segment_bytes

    def copies(self, native: ModuleType, take: bool) -> Any:
        """The same copies, for kvmem's kernel on the calling thread."""
        copies = native.CopyList()
        for number, block in enumerate(self.ids):
            large = self.large.ctypes.data + int(block) * self.segment_bytes
            small = self.small.ctypes.data + number * self.segment_bytes
            copies.add(*((small, large) if take else (large, small)), self.segment_bytes)
        return copies

    def take(self) -> None:
        np.take(self.large, self.ids, axis=0, out=self.small, mode="clip")

    def put(self) -> None:
        self.large[self.ids] = self.small

    def torch(self, take: bool) -> dict[str, Contender | None]:
        """torch's best: 64-bit items are several times as fast as bytes."""
        name = f"torch {'index_select' if take else 'index_copy_'} (int64)"
        try:
            with quiet():
                import torch
        except ImportError as error:
            return {f"{name}: no {error.name}": None}
        torch.set_num_threads(1)
        large, small = torch.from_numpy(self.large), torch.from_numpy(self.small)
        ids = torch.from_numpy(self.ids)
        if take:
            return {name: partial(torch.index_select, large, 0, ids, out=small)}
        return {name: partial(large.index_copy_, 0, ids, small)}


@SEGMENTS
@pytest.mark.parametrize("way", ["taken", "put"])
def test_blocks_of_an_array(
    versus: Versus, native: ModuleType, size: Size, segment_bytes: int, times: float, way: str
) -> None:
    taken = size(64 << 20, 2 << 20) // segment_bytes
    gather = Gather(taken * 16, segment_bytes, taken)
    numpy = "NumPy take" if way == "taken" else "NumPy put"
    torch = gather.torch(way == "taken")
    with pinned(0):
        versus(
            gather.copies(native, way == "taken").with_kernel,
            {numpy: gather.take if way == "taken" else gather.put, **torch},
            operations=taken,
            goals=[Faster(1, numpy), *(Faster(1, name) for name in torch)],
            moved_bytes=taken * segment_bytes,
        )
