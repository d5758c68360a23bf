"""A signal ends every wait soon, and what was waited for is not lost."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import kvmem
from kvmem import READY
from support import PATIENCE, Cache, free_slots

SOON = 1.0
"""Seconds. It is to be 0.1; the rest is for a machine that is busy with other things."""

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need the main thread"
)


@pytest.fixture(autouse=True)
def interrupted_by_the_timer() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def seconds_until_interrupted(call: Callable[[], Any], delay: float = 0.1) -> float:
    """How long after the signal `call` ended with KeyboardInterrupt."""
    started = time.monotonic()
    signal.setitimer(signal.ITIMER_REAL, delay)
    with pytest.raises(KeyboardInterrupt):
        call()
    return time.monotonic() - started - delay


def waits(cache: Cache) -> dict[str, Callable[[], Any]]:
    """Each call that waits, on a cache of 2 slots whose stream is stalled."""
    stream, _ = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream, tag=1)
    copy_to = cache.device.stream()
    copy_to.wait(stream.record())
    return {
        "Transfer.wait": transfer.wait,
        "Transfer.wait with a timeout": lambda: transfer.wait(PATIENCE),
        "BlockPool.acquire": lambda: cache.pool.acquire(2),
        "Manager.offload at the pool": lambda: cache.manager.offload([1, 2], after=READY),
        "Manager.offload at max_reports": lambda: cache.manager.offload([1], after=READY, tag=2),
        "Manager.drain": cache.manager.drain,
        "Manager.close": lambda: cache.manager.close(None),
        "Stream.synchronize": copy_to.synchronize,
    }


@pytest.mark.parametrize(
    "name",
    [
        "Transfer.wait",
        "BlockPool.acquire",
        "Manager.offload at the pool",
        "Manager.offload at max_reports",
        "Manager.drain",
        "Manager.close",
        "Stream.synchronize",
    ],
)
@pytest.mark.parametrize("reaper", [True, False], ids=["reaper", "no reaper"])
def test_an_interrupt_ends_the_wait_soon_and_loses_nothing(
    make_cache: Callable[..., Cache], name: str, reaper: bool
) -> None:
    expect_interrupted(make_cache(slots=2, max_reports=1, reaper=reaper), name)


@pytest.mark.host_only("virtual time passes a time-out at once")
@pytest.mark.parametrize("reaper", [True, False], ids=["reaper", "no reaper"])
def test_an_interrupt_ends_a_wait_with_a_timeout(
    make_cache: Callable[..., Cache], reaper: bool
) -> None:
    cache = make_cache(slots=2, max_reports=1, reaper=reaper)
    expect_interrupted(cache, "Transfer.wait with a timeout")


def expect_interrupted(cache: Cache, name: str) -> None:
    assert seconds_until_interrupted(waits(cache)[name]) < SOON
    assert cache.manager.stats()["waiters"] == cache.pool.stats()["waiters"] == 0
    assert cache.manager.stats()["offload"]["queued_bytes"] == 4096
    assert free_slots(cache.pool) == 1
    for gate in cache.gates:
        gate.open()
    assert cache.manager.drain(PATIENCE).quiet
    assert [report.state for report in cache.manager.poll()] == ["done"]
    assert cache.manager.stats()["reports_taken"] == 0


def test_an_interrupt_ends_a_restore_at_a_bound(make_cache: Callable[..., Cache]) -> None:
    cache = make_cache(max_queued_bytes=4096)
    copy = cache.stored(0)
    stream, gate = cache.stalled_stream()
    first = cache.manager.restore(copy, [5], after=stream)
    assert seconds_until_interrupted(lambda: cache.manager.restore(copy, [6], after=READY)) < SOON
    copy.release()
    gate.open()
    first.wait(PATIENCE)
    assert free_slots(cache.pool) == 8
    assert cache.manager.stats()["restore"]["queued_bytes"] == 0


def test_an_interrupt_ends_the_making_of_a_pool(device: kvmem.Device) -> None:
    def endless(done: int, size: int) -> None:
        threading.Event().wait(0.05)  # so that it cannot be over before the signal comes

    assert (
        seconds_until_interrupted(
            lambda: kvmem.BlockPool(
                device, block_bytes=4096, capacity_bytes="1GiB", progress=endless
            )
        )
        < SOON
    )


def test_a_handler_that_raises_nothing_does_not_end_the_wait(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    signal.signal(signal.SIGALRM, lambda *_: gate.open())
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    transfer.wait()  # the handler runs while it waits: nobody else opens the gate
    assert transfer.state == "done"


def test_what_a_handler_raises_comes_out_of_the_wait(cache: Cache) -> None:
    class Alarm(Exception):
        pass

    def handler(*_: object) -> None:
        raise Alarm

    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(Alarm):
        transfer.wait()
    gate.open()
    transfer.wait(PATIENCE)


def test_a_wait_that_was_interrupted_can_be_repeated(cache: Cache) -> None:
    cache.fill(0, 10)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    for _ in range(3):
        seconds_until_interrupted(transfer.wait, 0.02)
    gate.open()
    transfer.wait(PATIENCE)
    assert (transfer.result().blocks[0] == cache.expected(10)).all()
