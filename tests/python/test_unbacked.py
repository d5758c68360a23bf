"""A virtual device without bytes: memory is addresses only, however many, and nobody touches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmem
from kvmem import READY, testing
from support import PATIENCE, run_child

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB


@pytest.fixture
def unbacked() -> kvmem.Device:
    return kvmem.open_device("virtual", move_bytes=False)


SHOWING: dict[str, Callable[[kvmem.Device, kvmem.BlockPool, kvmem.HostBlocks], object]] = {
    "BlockPool.array": lambda device, pool, blocks: pool.array,
    "a view of a block": lambda device, pool, blocks: blocks[0],
    "gather": lambda device, pool, blocks: blocks.gather(),
    "gather into an array": lambda device, pool, blocks: blocks.gather(np.zeros((1, 4096), "B")),
    "DeviceBuffer.array": lambda device, pool, blocks: device.alloc(4096).array,
    "Stream.copy": lambda device, pool, blocks: device.stream().copy(np.zeros(8), np.ones(8)),
}


@pytest.mark.parametrize("what", SHOWING)
def test_what_would_show_or_move_bytes_is_refused_and_says_why(
    unbacked: kvmem.Device, what: str
) -> None:
    pool = kvmem.BlockPool(unbacked, block_bytes=4096, capacity_bytes=4096)
    with pytest.raises(kvmem.InvalidArgument, match=r"no bytes move.* would crash"):
        SHOWING[what](unbacked, pool, pool.acquire(1))


def test_a_host_copy_is_refused_too(unbacked: kvmem.Device) -> None:
    manager, _ = make_manager(unbacked, blocks=4)
    transfer = manager.offload([1], after=READY)
    transfer.wait(PATIENCE)
    with pytest.raises(kvmem.InvalidArgument, match="no bytes move"):
        transfer.result().blocks[0]
    with pytest.raises(kvmem.InvalidArgument, match="no bytes move"):
        transfer.result().blocks.gather()


def make_manager(
    device: kvmem.Device, blocks: int, **options: Any
) -> tuple[kvmem.Manager, kvmem.DeviceBuffer]:
    """A device cache of one region, a pool of as many slots, and what keeps the cache alive."""
    buffer = device.alloc(blocks * BLOCK_BYTES)
    region = kvmem.Region(buffer.address, BLOCK_BYTES, BLOCK_BYTES, blocks, memory=device.name)
    manager = kvmem.Manager(
        device, kvmem.KVLayout([region]), host_bytes=blocks * BLOCK_BYTES, **options
    )
    return manager, buffer


def untouchable() -> list[tuple[int, int]]:
    """The ranges of this process's addresses that nobody may touch."""
    found = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            addresses, access = line.split()[:2]
            if access.startswith("---"):
                first, last = addresses.split("-")
                found.append((int(first, 16), int(last, 16)))
    return found


def added(before: list[tuple[int, int]], nbytes: int) -> int:
    """The address of the one range of so many bytes that was not there before."""
    pieces = untouchable()
    for first, last in before:
        cut = [((a, min(b, first)), (max(a, last), b)) for a, b in pieces]
        pieces = [(a, b) for pair in cut for a, b in pair if a < b]
    (address,) = [a for a, b in pieces if b - a == nbytes]
    return address


def touched(device: kvmem.Device, address: int, nbytes: int) -> bool:
    """Whether copies may touch both ends of that range, and nothing just outside it."""
    inside = [testing.may_touch(device, at, 1) for at in (address, address + nbytes - 1)]
    outside = [testing.may_touch(device, at, 1) for at in (address - 1, address + nbytes)]
    return all(inside) and not any(outside)


@pytest.mark.parametrize(
    "beyond", [1 << 31, 1 << 32, (1 << 40) + 4096], ids=["2^31", "2^32", "2^40"]
)
def test_addresses_and_numbers_are_exact_beyond(unbacked: kvmem.Device, beyond: int) -> None:
    """Public failure 170: offsets narrowed to 32 bits on the way, in whichever layer.

    A copy out of the last block into the last slot, and back. Both begin beyond the offset; while
    the copy is held, it may touch exactly these bytes.
    """
    blocks = beyond // BLOCK_BYTES + 2
    buffer = unbacked.alloc(blocks * BLOCK_BYTES)
    before = untouchable()
    region = kvmem.Region(buffer.address, BLOCK_BYTES, BLOCK_BYTES, blocks, memory=unbacked.name)
    manager = kvmem.Manager(
        unbacked, kvmem.KVLayout([region]), host_bytes=blocks * BLOCK_BYTES, timeline=True
    )
    pool, last = manager.pool, blocks - 1
    assert (pool.capacity, pool.stats()["region_bytes"]) == (blocks, blocks * BLOCK_BYTES)
    ends = [
        buffer.address + last * BLOCK_BYTES,
        added(before, blocks * BLOCK_BYTES) + last * BLOCK_BYTES,
    ]
    assert last * BLOCK_BYTES > beyond
    everything = pool.acquire(blocks)
    assert everything.indices[-1] == last

    def expect_exact(start: Callable[[], kvmem.Transfer]) -> kvmem.Transfer:
        testing.hold_copies(unbacked, 1)
        transfer = start()
        assert [touched(unbacked, end, BLOCK_BYTES) for end in ends] == [True, True]
        testing.release_copies(unbacked)
        began = testing.now(unbacked)
        transfer.wait(PATIENCE)
        took = testing.now(unbacked) - began
        assert took == pytest.approx(BLOCK_BYTES / 25e9 + 10e-6, abs=2e-9)
        return transfer

    stored = expect_exact(lambda: manager.offload([last], after=READY, into=[last]))
    copy = stored.result()
    assert copy is not None
    assert copy.blocks.indices.tolist() == [last]
    expect_exact(lambda: manager.restore(copy, [last], after=READY))
    stats = manager.stats()
    assert stats["offload"]["bytes_done"] == stats["restore"]["bytes_done"] == BLOCK_BYTES
    assert [record.bytes for record in manager.timeline()] == [BLOCK_BYTES] * 2
    assert manager.close().quiet


def test_a_transfer_of_more_than_4_gib_counts_every_byte(unbacked: kvmem.Device) -> None:
    """Public failure 170: the numbers that are told, too."""
    blocks = (5 << 30) // BLOCK_BYTES
    manager, _ = make_manager(unbacked, blocks, max_queued_bytes="8GiB")
    transfer = manager.offload(range(blocks), after=READY)
    assert manager.stats()["offload"]["queued_bytes"] == 5 << 30
    transfer.wait(PATIENCE)
    assert manager.stats()["offload"]["bytes_done"] == 5 << 30
    copy = transfer.result()
    assert (len(copy), copy.nbytes) == (blocks, 5 << 30)
    assert testing.now(unbacked) > (5 << 30) / 25e9
    assert manager.pool.stats()["held_slots"] == blocks


def test_what_no_address_can_reach_is_refused_when_it_is_configured(unbacked: kvmem.Device) -> None:
    """Public failure 171: a limit that is exceeded in silence wraps into memory that is mapped."""
    with pytest.raises(kvmem.InvalidArgument, match="address"):
        kvmem.KVLayout([kvmem.Region(1 << 62, 1 << 60, 1 << 20, 13, memory="virtual")])
    with pytest.raises(kvmem.InvalidArgument, match="slots"):
        kvmem.BlockPool(unbacked, block_bytes=1, capacity_bytes=4096 << 32)
    with pytest.raises(kvmem.CapacityError, match=f"wanted {1 << 50}"):
        kvmem.BlockPool(unbacked, block_bytes="1GiB", capacity_bytes=1 << 50)
    with pytest.raises(kvmem.CapacityError, match=f"wanted {1 << 50}, free {1 << 46}"):
        unbacked.alloc(1 << 50)


def test_a_pool_of_a_terabyte_needs_little_memory() -> None:
    """In a process of its own, whose largest resident size tells."""
    child = run_child(
        """
        import kvmem

        device = kvmem.open_device("virtual", move_bytes=False)
        block_bytes, blocks = 2 << 20, 1 << 19
        buffer = device.alloc(block_bytes * blocks)
        region = kvmem.Region(buffer.address, block_bytes, block_bytes, blocks, memory="virtual")
        manager = kvmem.Manager(device, kvmem.KVLayout([region]), host_bytes="1TiB")
        pool = manager.pool
        assert pool.capacity == blocks

        some = [pool.acquire(1) for _ in range(1000)]
        for each in some:
            each.release()
        with pool.acquire(blocks):
            assert pool.stats()["free_slots"] == 0
        first = manager.offload(range(500), after=kvmem.READY)
        last = manager.offload(range(blocks - 500, blocks), after=kvmem.READY)
        for transfer in (first, last):
            transfer.wait()
        manager.restore(last.result(), range(500), after=kvmem.READY).wait()
        assert manager.close().quiet
        with open("/proc/self/status") as status:
            (most,) = [line.split()[1] for line in status if line.startswith("VmHWM:")]
        print(most)
        """
    )
    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 100 << 10, f"{child.stdout.strip()} KiB"
