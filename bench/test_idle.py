"""How much of a core does an idle manager take?

The time of all threads of the process while nobody calls anything, right after some work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmem

GOAL_PERCENT = 0.1
MOST_PERCENT = 1.0
"""Asserted: a thread that polls every millisecond takes more."""

BLOCKS = 64
BLOCK_BYTES = 65536


@pytest.mark.parametrize("timeline", [False, True], ids=["", "timeline"])
@pytest.mark.parametrize("managers", [1, 8])
def test_processor_time_of_idle_managers(
    benchmark: Any,
    report: Callable[..., None],
    size: Callable[[float, float], float],
    managers: int,
    timeline: bool,
) -> None:
    seconds = size(5.0, 0.5)
    idle = [busy_before(timeline) for _ in range(managers)]

    def measure() -> float:
        before = time.process_time()
        time.sleep(seconds)
        return (time.process_time() - before) / seconds * 100

    found = benchmark.pedantic(measure, rounds=1)
    for manager in idle:
        assert manager.close().quiet
    name = f"{managers} idle" + (", with the timeline" if timeline else "")
    report(name, found, "% of a core", GOAL_PERCENT)
    assert found <= MOST_PERCENT


def busy_before(timeline: bool) -> kvmem.Manager:
    """A manager, on a device of its own, whose last transfers have just ended."""
    device = kvmem.open_device("host")
    cache = [np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)]
    layout = kvmem.KVLayout.from_arrays(cache, memory=device.name)
    manager = kvmem.Manager(device, layout, host_bytes=BLOCKS * BLOCK_BYTES, timeline=timeline)
    stream = device.stream()
    for _ in range(20):
        transfer = manager.offload(list(range(BLOCKS // 2)), after=stream)
        transfer.wait()
        with transfer.result() as copy:
            restored = manager.restore(copy, list(range(BLOCKS // 2, BLOCKS)), after=stream)
        restored.wait_on(stream)
        restored.wait()
    return manager
