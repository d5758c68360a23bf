"""Threads: the GIL is let go in waits, nothing is lost in a storm, nothing stays behind."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmem
from kvmem import READY
from kvmem.testing import stall
from support import (
    PATIENCE,
    Cache,
    descriptors,
    free_slots,
    in_thread,
    native_threads,
    resident_bytes,
    ticking,
    until,
)

pytestmark = pytest.mark.host_only("storms of real threads in real time")

LONGEST_GAP = 0.5
"""Seconds without a tick that count as a GIL kept; the calls below wait for longer than that."""
WAIT = 0.7

STORM_SECONDS = float(os.environ.get("KVMEM_STORM_SECONDS", "2"))


# ---- the GIL


def waits(cache: Cache) -> dict[str, Callable[[], Any]]:
    """Calls that wait for WAIT seconds, on a cache of 2 slots."""
    stream, _ = cache.stalled_stream()
    transfer = cache.manager.offload([0, 1], after=stream, tag=1)
    behind = cache.device.stream()
    behind.wait(stream.record())
    return {
        "Transfer.wait": lambda: transfer.wait(WAIT),
        "BlockPool.acquire": lambda: cache.pool.acquire(1, timeout=WAIT),
        "Manager.offload": lambda: cache.manager.offload([2], after=READY, timeout=WAIT),
        "Manager.drain": lambda: cache.manager.drain(WAIT),
        "Manager.close": lambda: cache.manager.close(WAIT),
        "Stream.synchronize": lambda: behind.synchronize(WAIT),
    }


@pytest.mark.parametrize("reaper", [True, False], ids=["reaper", "no reaper"])
@pytest.mark.parametrize(
    "name",
    [
        "Transfer.wait",
        "BlockPool.acquire",
        "Manager.offload",
        "Manager.drain",
        "Manager.close",
        "Stream.synchronize",
    ],
)
def test_other_threads_run_while_one_waits(
    make_cache: Callable[..., Cache], name: str, reaper: bool
) -> None:
    """Public failure 127: a wait held the GIL.
    Public failure 144: the interpreter stood still while a call blocked.
    """
    cache = make_cache(slots=2, reaper=reaper)
    call = waits(cache)[name]
    started = time.monotonic()
    with ticking() as longest_gap, contextlib.suppress(kvmem.AtBound):
        call()
    assert time.monotonic() - started >= WAIT
    assert longest_gap() < LONGEST_GAP


def test_other_threads_run_while_a_pool_is_made_and_dropped(device: kvmem.Device) -> None:
    """Public failure 144: the interpreter stood still while a call blocked."""
    with ticking() as longest_gap:
        started = time.monotonic()
        pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes="1GiB", shared=True)
        took = time.monotonic() - started
        assert longest_gap() < max(took / 2, 0.05)
    with ticking() as longest_gap:
        started = time.monotonic()
        del pool
        took = time.monotonic() - started
        assert longest_gap() < max(took / 2, 0.05)


def test_other_threads_run_while_blocks_are_gathered(make_pool: Callable[..., Any]) -> None:
    pool = make_pool(slots=8, block_bytes=64 << 20)
    blocks = pool.acquire(8)
    out = np.zeros((8, 64 << 20), np.uint8)
    with ticking() as longest_gap:
        started = time.monotonic()
        while time.monotonic() - started < WAIT:
            blocks.gather(out=out)
    assert longest_gap() < LONGEST_GAP


# ---- two threads on one object


def test_one_stream_takes_copies_of_many_threads(device: kvmem.Device) -> None:
    stream = device.stream()
    sources = [np.full(1000, number, np.uint8) for number in range(8)]
    targets = [np.zeros((300, 1000), np.uint8) for _ in sources]

    def copy(number: int) -> None:
        for row in targets[number]:
            stream.copy(row, sources[number])

    for each in [in_thread(copy, number) for number in range(8)]:
        each.result(PATIENCE)
    stream.synchronize(PATIENCE)
    for number, target in enumerate(targets):
        assert (target == number).all()


def test_a_stream_keeps_the_arrays_of_copies_that_have_not_run(device: kvmem.Device) -> None:
    stream = device.stream()
    target = np.zeros(1 << 20, np.uint8)
    with stall(device, stream):
        stream.copy(target, np.full(1 << 20, 7, np.uint8))  # nobody else holds the source
        gc.collect()
        rubbish = [np.full(1 << 20, 9, np.uint8) for _ in range(4)]
    stream.synchronize(PATIENCE)
    assert (target == 7).all()
    assert len(rubbish) == 4


@pytest.mark.parametrize(
    ("target", "source", "words"),
    [
        (np.zeros(8, np.uint8), np.zeros(9, np.uint8), "the target has 8 bytes, the source 9"),
        (np.zeros(16, np.uint8)[::2], np.zeros(8, np.uint8), "contiguous"),
        (np.zeros(8, np.uint8), np.zeros(16, np.uint8)[::2], "contiguous"),
        (np.broadcast_to(np.uint8(1), 8), np.zeros(8, np.uint8), "contiguous"),
        (np.frombuffer(b"12345678", np.uint8), np.zeros(8, np.uint8), "read-only"),
    ],
)
def test_a_copy_that_cannot_be_is_refused(
    stream: kvmem.Stream, target: Any, source: Any, words: str
) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=words):
        stream.copy(target, source)


def test_a_copy_between_what_are_no_arrays_is_a_type_error(stream: kvmem.Stream) -> None:
    with pytest.raises(TypeError):
        stream.copy(object(), np.zeros(8))  # type: ignore[arg-type]
    stream.copy(np.zeros(0), np.zeros(0))  # nothing to do


def test_two_threads_may_ask_for_a_result_at_once(cache: Cache) -> None:
    for _ in range(100):
        transfer = cache.manager.offload([0], after=READY)
        transfer.wait(PATIENCE)
        together = threading.Barrier(2)

        def ask(
            transfer: kvmem.Transfer = transfer, together: threading.Barrier = together
        ) -> kvmem.HostCopy:
            together.wait(PATIENCE)
            copy = transfer.result()
            assert copy is not None
            return copy

        first, second = (each.result(PATIENCE) for each in [in_thread(ask), in_thread(ask)])
        assert first is second


def test_two_threads_may_close_at_once(make_cache: Callable[..., Cache]) -> None:
    """Public failure 155: a process did not end, or could not be closed twice."""
    for _ in range(20):
        cache = make_cache()
        cache.manager.offload([0], after=READY)
        closing = [in_thread(cache.manager.close, PATIENCE) for _ in range(2)]
        assert [each.result(PATIENCE).quiet for each in closing] == [True, True]


# ---- the storm


class Storm:
    """Workers that do everything at once. Each has two device blocks and knows what they hold."""

    def __init__(self, cache: Cache, seconds: float) -> None:
        self.cache = cache
        self.deadline = time.monotonic() + seconds
        self.rounds = 0
        self.polled = 0
        self.tagged = 0
        self.lock = threading.Lock()

    def work(self, worker: int) -> None:
        choose = random.Random(worker)
        home, away = 2 * worker, 2 * worker + 1
        manager = self.cache.manager
        value = 0
        while time.monotonic() < self.deadline:
            value = (value + 1 + worker) % 200
            self.cache.fill(home, value)
            tag = f"{worker}-{value}" if choose.random() < 0.5 else None
            priority: Any = choose.choice(["demand", "background"])
            stored = manager.offload([home], after=READY, priority=priority, tag=tag)
            self.count_tag(tag)
            fate = choose.random()
            if fate < 0.15:
                stored.cancel()
                self.wait_for_end(stored)
                continue
            if fate < 0.3:
                number = stored.id
                del stored  # nobody is interested any more
                assert number > 0
                until(lambda: not manager.busy([home]), "the end of a dropped transfer")
                continue
            stored.wait(PATIENCE)
            with stored.result() as copy:
                self.cache.fill(away, 0)
                restored = manager.restore(copy, [away], after=READY, tag=tag)
                self.count_tag(tag)
                if choose.random() < 0.2:
                    restored.cancel()
                    self.wait_for_end(restored)
                    continue
                restored.wait(PATIENCE)
                assert self.cache.holds(away, value), f"worker {worker}, value {value}"
            with self.lock:
                self.rounds += 1

    def count_tag(self, tag: str | None) -> None:
        if tag is not None:
            with self.lock:
                self.tagged += 1

    def wait_for_end(self, transfer: kvmem.Transfer) -> None:
        with contextlib.suppress(kvmem.Cancelled):
            transfer.wait(PATIENCE)

    def watch(self) -> None:
        while time.monotonic() < self.deadline:
            self.polled += len(self.cache.manager.poll())
            stats = self.cache.pool.stats()
            states = ("free_slots", "held_slots", "quarantined_slots", "poisoned_slots")
            assert sum(stats[state] for state in states) == stats["capacity_slots"]
            self.cache.manager.stats()
            self.cache.manager.drain(0)
            blocks = self.cache.pool.try_acquire(1)
            if blocks is not None:
                blocks.release(after=self.cache.device.stream())


@pytest.mark.parametrize("reaper", [True, False], ids=["reaper", "no reaper"])
def test_a_storm_of_threads_loses_nothing_and_mixes_nothing(
    make_cache: Callable[..., Cache], reaper: bool
) -> None:
    """Public failure 147: locks were taken in two orders."""
    cache = make_cache(
        blocks=16, slots=10, segment_bytes=30_000, window_bytes=65536, max_reports=32, reaper=reaper
    )
    storm = Storm(cache, STORM_SECONDS)
    workers = [in_thread(storm.work, worker) for worker in range(8)]
    watcher = in_thread(storm.watch)
    watcher.result(STORM_SECONDS + PATIENCE)
    until(lambda: storm_over(storm, workers), "the end of the storm")
    for each in workers:
        each.result(0)
    assert cache.manager.drain(PATIENCE).quiet
    storm.polled += len(cache.manager.poll())
    gc.collect()
    assert storm.rounds > 8
    assert storm.polled == storm.tagged
    until(lambda: free_slots(cache.pool) == 10, "every slot at home")
    stats = cache.manager.stats()
    for direction in (stats["offload"], stats["restore"]):
        assert direction["accepted"] == direction["done"] + direction["cancelled"]
        assert direction["queued_bytes"] == direction["window_bytes"] == 0
    assert cache.manager.close(PATIENCE).quiet


def storm_over(storm: Storm, workers: list[Any]) -> bool:
    """A worker may wait for a report place: somebody has to poll until all are done."""
    storm.polled += len(storm.cache.manager.poll())
    return all(each.done() for each in workers)


# ---- nothing stays behind


def test_managers_leave_no_thread_no_descriptor_and_no_memory_behind() -> None:
    arrays = [np.zeros((8, 65536), np.uint8)]
    layout = kvmem.KVLayout.from_arrays(arrays)

    def once(close: bool) -> None:
        device = kvmem.open_device("host", workers=2)
        manager = kvmem.Manager(device, layout, host_bytes="4MiB", timeline=close)
        stored = manager.offload([0, 1], after=device.stream())
        stored.wait(PATIENCE)
        manager.restore(stored.result(), [2, 3], after=READY).wait(PATIENCE)
        if close:
            assert manager.close(PATIENCE).quiet

    for number in range(20):
        once(bool(number % 2))
    gc.collect()
    threads, open_files = native_threads(), descriptors()
    memory = resident_bytes()
    for number in range(150):
        once(bool(number % 2))
    gc.collect()
    until(lambda: native_threads() <= threads, "the end of every thread")
    assert descriptors() == open_files
    assert resident_bytes() - memory < 4 << 20  # one pool that stays would be that much


def test_an_idle_manager_closes_at_once(cache: Cache) -> None:
    """Public failure 157: closing an idle engine took seconds, until a blocked thread gave up."""
    cache.stored(0)
    started = time.monotonic()
    assert cache.manager.close().quiet
    assert time.monotonic() - started < 0.5


def test_a_manager_without_a_reaper_starts_no_thread(cache: Cache) -> None:
    before = native_threads()
    manager = kvmem.Manager(cache.device, cache.layout, cache.pool, reaper=False)
    manager.offload([0], after=READY).wait(PATIENCE)
    assert native_threads() <= before
    manager.close()


def test_two_managers_of_one_device_share_one_reaper(device: kvmem.Device) -> None:
    before = native_threads()
    caches = [Cache(device) for _ in range(3)]
    until(lambda: native_threads() >= before + 1)
    assert native_threads() <= before + 1
    for each in caches:
        each.finish()
    until(lambda: native_threads() <= before, "the end of the reaper")


def test_many_rounds_of_small_results_do_not_grow() -> None:
    """Public failure 30: small handles kept many old lists alive."""
    device = kvmem.open_device("host", workers=1)
    pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes="4MiB")

    def rounds(count: int) -> list[Any]:
        kept = []
        for _ in range(count):
            with pool.acquire(8) as blocks:
                kept.append(int(blocks.indices[0]))
                blocks.share()
        return kept

    rounds(2000)
    before = resident_bytes()
    kept = rounds(20_000)
    assert resident_bytes() - before < 4 << 20
    assert len(kept) == 20_000
