"""What does the disk tier make of a disk, beside a bare loop, fio and what other engines use?

Blocks of 2 MiB, so many calls of the system at a time, past the page cache where there is a way.
Tier and loop have huge pages, and the same places on disk; the tier also sums each block, writes a
header page in front of it and again behind it, and verifies sum and header when it reads. The
others have memory of the kind that is theirs, write files of their own and verify nothing.

The files lie in KVMEM_BENCH_DISK, or where pytest puts what is temporary.
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import disk_peers
from harness import AtMost, Contender, Faster, Goal, Timed, Versus

Size = Callable[[int, int], int]

BLOCK_BYTES = 2 << 20
LOOP = "O_DIRECT loop"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    chosen = os.environ.get("KVMEM_BENCH_DISK")
    place = Path(chosen) / "kvmem-bench" if chosen else tmp_path
    place.mkdir(exist_ok=True)
    yield place
    shutil.rmtree(place)


def peers(
    disk: object, folder: Path, depth: int, what: str
) -> tuple[dict[str, Contender | None], list[Goal]]:
    """The contenders, and that the tier is to be ahead of each that is there."""
    found: dict[str, Contender | None] = {}
    # Shared memory, where both vLLM and LMCache have their blocks.
    theirs = mmap.mmap(-1, memoryview(disk).nbytes)
    theirs[:] = memoryview(disk).cast("B")
    there = disk_peers.installed(folder, theirs, BLOCK_BYTES, depth)
    # And ours, where they can take any: how much of the difference is the memory's.
    ours = disk_peers.installed(folder / "ours", disk, BLOCK_BYTES, depth, disk_peers.ANY_MEMORY)
    there |= {f"{name}, huge pages": peer for name, peer in ours.items() if peer}
    for name, peer in there.items():
        if peer is None:
            found[name] = None
            continue
        before = peer.clear if what == "write" else lambda: None
        seconds = peer.seconds if isinstance(peer, disk_peers.Fio) else None
        if what == "read":
            peer.write()
        found[name] = Timed(getattr(peer, what), before=before, seconds=seconds)
    return found, [Faster(1, name) for name in found]


@pytest.mark.parametrize("depth", [4, 8], ids="{} at a time".format)
@pytest.mark.parametrize("what", ["write", "read"])
def test_blocks_of_2_mib_on_disk(
    versus: Versus, native: ModuleType, size: Size, folder: Path, what: str, depth: int
) -> None:
    blocks = size(256, 4)
    disk = native.DiskBlocks(str(folder), block_bytes=BLOCK_BYTES, blocks=blocks, depth=depth)
    disk.tier_write()
    disk.clear()
    disk.tier_read()
    assert disk.holds()
    others, goals = peers(disk, folder, depth, what)
    baselines: dict[str, Contender | None] = {LOOP: getattr(disk, f"raw_{what}")}
    if what == "write":
        baselines["O_DIRECT loop with a tier's calls"] = disk.raw_write_with_headers
    versus(
        getattr(disk, f"tier_{what}"),
        {**baselines, **others},
        operations=blocks,
        goals=[AtMost(1 / 0.95, LOOP), *goals],
        name="kvmem disk tier" if disk.direct else "kvmem disk tier, buffered",
        moved_bytes=blocks * BLOCK_BYTES,
        rounds=25,
    )
    disk.clear()
    disk.tier_read()
    assert disk.holds()
