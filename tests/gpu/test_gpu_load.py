"""A manager on a real GPU under load: cancels, both directions at once, several streams."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import kvmem
from gpu_cache import PATIENCE, GpuCache
from gpu_driver import Driver, Stream

MakeCache = Callable[..., GpuCache]
MakeStream = Callable[[], Stream]


def settled(transfer: kvmem.Transfer) -> str:
    """How it ended."""
    with suppress(kvmem.Cancelled):
        transfer.wait(PATIENCE)
    return transfer.state


def test_what_is_cancelled_under_load_spoils_nothing_and_gives_every_slot_back(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache = make_cache(blocks=64, layers=4, slots=256, window_bytes="1MiB")
    held = make_stream()
    for block in range(cache.blocks):
        cache.write(block, version=1)
    groups = [list(range(start, start + 8)) for start in range(0, 64, 8)]
    with gpu.spin(held) as spin:
        transfers = [
            cache.manager.offload(group, after=held if turn % 2 else kvmem.READY)
            for turn in range(4)
            for group in groups
        ]
        with ThreadPoolExecutor(4) as threads:
            outcomes = list(threads.map(lambda each: each.cancel(), transfers[::3]))
        spin.open()
    assert len(outcomes) == len(transfers[::3])
    done = 0
    for number, transfer in enumerate(transfers):
        state = settled(transfer)
        assert state == "done" or (state == "cancelled" and number % 3 == 0)
        if state != "done":
            continue
        done += 1
        blocks = transfer.result().blocks
        for place, block in enumerate(groups[number % len(groups)]):
            assert np.array_equal(blocks[place], cache.expected(block, version=1))
        transfer.result().release()
        del blocks
    assert done >= len(transfers) - len(outcomes)
    assert cache.manager.drain(PATIENCE).quiet
    assert cache.pool.stats()["free_slots"] == cache.pool.stats()["capacity_slots"]


def test_both_directions_at_once_do_not_mix_their_bytes(make_cache: MakeCache) -> None:
    cache = make_cache(blocks=32, segment_bytes=256 << 10, slots=64)
    for block in range(32):
        cache.write(block, version=1)
    lower, upper = list(range(16)), list(range(16, 32))
    copy = cache.stored(upper)
    for _ in range(20):
        offload = cache.manager.offload(lower, after=kvmem.READY)
        restore = cache.manager.restore(copy, upper, after=kvmem.READY)
        restore.wait(PATIENCE)
        offload.wait(PATIENCE)
        blocks = offload.result().blocks
        for place, block in enumerate(lower):
            assert np.array_equal(blocks[place], cache.expected(block, version=1))
        for block in upper:
            assert cache.holds(block, of=block, version=1)


def test_threads_with_streams_of_their_own_share_a_manager(
    make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache = make_cache(blocks=64, slots=128)

    def work(thread: int) -> None:
        stream = make_stream()
        mine = range(thread * 16, thread * 16 + 16)
        for version in range(1, 9):
            source, target = mine[version % 8], mine[8 + version % 8]
            cache.compute(stream, source, version)
            offload = cache.manager.offload([source], after=stream)
            offload.wait(PATIENCE)
            restore = cache.manager.restore(offload.result(), [target], after=stream)
            restore.wait_on(stream)
            stream.synchronize()
            assert cache.holds(target, of=source, version=version)
            restore.wait(PATIENCE)

    with ThreadPoolExecutor(4) as threads:
        for future in [threads.submit(work, thread) for thread in range(4)]:
            future.result()


def test_a_timeline_tells_the_stages_of_a_copy_in_their_order(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache, held, consumer = make_cache(timeline=True), make_stream(), make_stream()
    copy = cache.stored([0])
    with gpu.spin(held) as spin:
        restore = cache.manager.restore(copy, [1], after=held)
        restore.wait_on(consumer)
        spin.open()
        held.synchronize()
    restore.wait(PATIENCE)
    consumer.synchronize()
    record = cache.manager.timeline()[-1]
    stages = [record.requested, record.submitted, record.started, record.completed]
    assert None not in stages
    slack = 1e-3  # the clocks of host and GPU are compared to well within that
    for earlier, later in zip(stages, [*stages[1:], record.observed], strict=True):
        assert earlier <= later + slack  # type: ignore[operator]
    assert record.first_use is not None
    assert record.completed <= record.first_use + slack  # type: ignore[operator]


def test_the_device_says_which_memory_of_the_host_is_close_to_it(
    gpu: Driver, device: kvmem.Device
) -> None:
    assert device.info["pci_bus_id"].lower() == gpu.pci_bus_id
    path = Path("/sys/bus/pci/devices", gpu.pci_bus_id, "numa_node")
    if not path.exists():
        pytest.skip(f"{path} is not there: the machine does not show its buses")
    node = int(path.read_text())
    assert device.info["numa_node"] in ([None, 0] if node < 0 else [node])
