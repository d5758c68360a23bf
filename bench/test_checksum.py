"""What does a CRC32C of every block cost, summed while it is copied, beside the copy without?"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from harness import AtMost, Versus

Size = Callable[[int, int], int]


@pytest.mark.parametrize("threads", [1, 2], ids=["1 thread", "2 threads"])
@pytest.mark.parametrize("kib", [16, 64, 512], ids="{} KiB".format)
def test_a_copy_with_its_checksum(
    versus: Versus, native: ModuleType, size: Size, kib: int, threads: int
) -> None:
    nbytes = size(1 << 30, 4 << 20)
    segment_bytes = kib << 10
    copy = native.ScatteredCopy(segment_bytes, nbytes, threads=threads)
    versus(
        copy.copy_with_crc,
        {
            "without checksum": copy.copy_with_kvmem,
            "memcpy, then checksum": copy.memcpy_then_crc,
            "checksum alone": copy.crc_only,
        },
        operations=nbytes // segment_bytes,
        goals=[AtMost(1.2, "without checksum")],
        moved_bytes=nbytes,
        rounds=9,
    )
    copy.clear_targets()
    copy.copy_with_crc()
    assert copy.all_copied()
    assert copy.copy_with_crc() == copy.memcpy_then_crc() == copy.crc_only()
