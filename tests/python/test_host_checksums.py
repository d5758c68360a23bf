"""Checksums of host blocks, as Python sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import kvmem
from support import PATIENCE, Cache, clock, native_threads, run_child, until

MakeCache = Callable[..., Cache]


@pytest.fixture
def sums(make_cache: MakeCache) -> Cache:
    return make_cache(checksum="always")


def flip(copy: kvmem.HostCopy, block: int, byte: int) -> None:
    with copy.blocks as blocks:
        blocks[block][byte] ^= 1


def test_what_was_stored_comes_back_verified(sums: Cache) -> None:
    for block in range(3):
        sums.fill(block, 10 * block + 1)
    copy = sums.stored(0, 1, 2)
    sums.manager.restore(copy, [5, 6, 7], after=kvmem.READY).wait(PATIENCE)
    assert all(sums.holds(5 + block, 10 * block + 1) for block in range(3))
    stats = sums.manager.stats()["checksum"]
    assert (stats["blocks_summed"], stats["blocks_verified"], stats["waiting"]) == (3, 3, 0)


def test_a_flipped_byte_is_named_and_reaches_no_device_block(sums: Cache) -> None:
    copy = sums.stored(0, 1, 2)
    flip(copy, 1, 4095)
    sums.fill(6, 99)
    restore = sums.manager.restore(copy, [5, 6, 7], after=kvmem.READY, tag="damaged")
    with pytest.raises(kvmem.Corrupt, match=r"block 1 \(slot") as caught:
        restore.wait(PATIENCE)
    error = caught.value
    assert (error.block, error.slot) == (1, copy.blocks.indices[1])
    assert error.expected != error.found
    assert restore.state == "failed"
    assert sums.holds(6, 99)
    assert sums.manager.busy([5, 6, 7]) == []
    (report,) = sums.manager.poll()
    assert (report.state, report.error) == ("failed", str(error))
    assert sums.manager.stats()["checksum"]["blocks_corrupt"] == 1


def test_awaiting_raises_it_too(sums: Cache) -> None:
    copy = sums.stored(0)
    flip(copy, 0, 0)

    async def restore() -> None:
        await (await sums.manager.restore_async(copy, [5], after=kvmem.READY))

    with pytest.raises(kvmem.Corrupt):
        asyncio.run(restore())


def test_a_copy_is_verified_by_hand(sums: Cache) -> None:
    copy = sums.stored(0, 1)
    assert copy.verify() == 2
    flip(copy, 1, 7)
    assert copy[:1].verify() == 1
    with pytest.raises(kvmem.Corrupt) as caught:
        copy.verify()
    assert caught.value.block == 1
    copy.release()
    with pytest.raises(kvmem.AlreadyReleased):
        copy.verify()


def test_a_copy_without_checksums_has_none_to_compare(cache: Cache) -> None:
    copy = cache.stored(0, 1)
    flip(copy, 0, 0)
    assert copy.verify() == 0
    cache.manager.restore(copy, [5, 6], after=kvmem.READY).wait(PATIENCE)
    assert cache.manager.stats()["checksum"]["blocks_verified"] == 0


def test_sampled_takes_the_first_and_each_nth_behind_it(make_cache: MakeCache) -> None:
    cache = make_cache(checksum="sampled", checksum_every=3)
    found = []
    for blocks in ([0, 1], [2, 3, 4], [5, 6]):
        with cache.stored(*blocks) as copy:
            found += [copy[i].verify() for i in range(len(copy))]
    assert found == [1, 0, 0, 1, 0, 0, 1]


def test_slots_by_number_are_verified_as_a_copy_is(sums: Cache) -> None:
    copy = sums.stored(0, 1)
    slots = copy.blocks.indices
    sums.manager.restore(slots, [5, 6], after=kvmem.READY).wait(PATIENCE)
    flip(copy, 0, 3)
    restore = sums.manager.restore(slots, [5, 6], after=kvmem.READY)
    with pytest.raises(kvmem.Corrupt):
        restore.wait(PATIENCE)


def test_an_offload_into_a_slot_renews_its_sum(sums: Cache) -> None:
    copy = sums.stored(0, 1)
    flip(copy, 0, 3)
    sums.fill(4, 50)
    with copy[:1].blocks as blocks:
        sums.manager.offload([4], after=kvmem.READY, into=blocks).wait(PATIENCE)
    assert copy.verify() == 2
    sums.manager.restore(copy, [5, 6], after=kvmem.READY).wait(PATIENCE)
    assert sums.holds(5, 50)


def test_the_timeline_says_when_the_sums_were_there(make_cache: MakeCache) -> None:
    cache = make_cache(checksum="always", timeline=True)
    before = clock(cache.device)
    copy = cache.stored(0)
    cache.manager.restore(copy, [5], after=kvmem.READY).wait(PATIENCE)
    offload, restore = cache.manager.timeline()
    assert offload.observed is not None
    assert offload.checked is not None
    assert restore.submitted is not None
    assert restore.checked is not None
    assert before <= offload.observed <= offload.checked <= restore.checked <= restore.submitted


@pytest.mark.host_only("counts threads")
def test_the_workers_are_there_only_when_asked_for(make_cache: MakeCache) -> None:
    before = native_threads()
    off = make_cache(reaper=False)
    assert native_threads() == before
    cache = make_cache(checksum="always", checksum_workers=3, reaper=False)
    assert native_threads() == before + 3
    assert cache.manager.close(PATIENCE).quiet
    until(lambda: native_threads() == before, "their end")
    assert off.manager.close(PATIENCE).quiet


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"checksum": "sometimes"}, "checksum is 'sometimes'"),
        ({"checksum": "always", "checksum_workers": 0}, "checksum_workers"),
        ({"checksum": "always", "checksum_workers": 65}, "checksum_workers is 65, at most 64"),
        ({"checksum": "sampled", "checksum_every": 0}, "checksum_every"),
        ({"checksum": "sampled", "checksum_every": True}, "checksum_every"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], name: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=name):
        Cache(kvmem.open_device("host", workers=1), **options)


def test_memory_without_bytes_has_no_checksums() -> None:
    device = kvmem.open_device("virtual", move_bytes=False)
    layout = kvmem.KVLayout([kvmem.Region(2**40, 4096, 4096, 8, memory=device.name)])
    with pytest.raises(kvmem.InvalidArgument, match="memory has bytes"):
        kvmem.Manager(device, layout, host_bytes="1MiB", checksum="always")


def test_a_process_may_end_with_work_in_the_queue() -> None:
    child = run_child(
        """
        import numpy as np, kvmem
        device = kvmem.open_device("host", workers=1)
        cache = np.ones((64, 1 << 20), np.uint8)
        layout = kvmem.KVLayout.from_arrays([cache], memory=device.name)
        manager = kvmem.Manager(device, layout, host_bytes="64MiB", checksum="always")
        transfers = [manager.offload([block], after=kvmem.READY) for block in range(64)]
        """
    )
    assert (child.returncode, child.stderr) == (0, "")
