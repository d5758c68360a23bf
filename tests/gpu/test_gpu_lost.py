"""A kernel writes where nothing is: the GPU is lost for the process, and kvmem says so.

In child processes, since the loss is for good.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from gpu_driver import Driver

BEGIN = """
import numpy as np, sys
import kvmem
from gpu_cache import PATIENCE, GpuCache
from gpu_driver import Driver, DriverError, Stream

gpu, device = Driver(), kvmem.open_device("cuda")
cache = GpuCache(gpu, device, blocks=8, slots=32)
for block in range(8):
    cache.write(block, version=1)
observed = cache.stored([0, 1, 2])
held, faulty = Stream(gpu), Stream(gpu)

def raises_lost(call):
    try:
        call()
    except kvmem.DeviceLost as error:
        print("lost:", error, file=sys.stderr)
        return True
    return False

def lose():
    gpu.poke(faulty)
    try:
        faulty.synchronize()
    except DriverError as error:
        assert error.code == 700, error
    else:
        raise AssertionError("the kernel was let through")
"""


def expect_clean_exit(body: str) -> None:
    here = os.path.dirname(__file__)
    path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH", "")]))
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", BEGIN + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": path},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, f"status {ended.returncode}\n{ended.stderr}"
    assert ended.stdout.endswith("all is well\n"), ended.stderr


@pytest.mark.usefixtures("gpu")
def test_what_is_in_flight_ends_as_lost_and_what_was_observed_stays_readable() -> None:
    expect_clean_exit(
        """
        spin = gpu.spin(held)
        in_flight = cache.manager.offload([3, 4], after=held)
        lose()
        spin.open()
        assert raises_lost(lambda: in_flight.wait(PATIENCE))
        assert in_flight.state == "failed"
        for block in (0, 1, 2):
            assert np.array_equal(observed.blocks[block], cache.expected(block, version=1))
        assert raises_lost(lambda: cache.manager.offload([5], after=kvmem.READY).wait(PATIENCE))
        assert raises_lost(lambda: cache.manager.restore(observed, [5, 6, 7], after=held))
        counts = cache.pool.stats()
        assert counts["poisoned_slots"] == 2 and counts["held_slots"] == 3, counts
        observed.release()
        cache.manager.close(PATIENCE)
        print("all is well")
        """
    )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("closes", [True, False], ids=["closed", "left open"])
def test_a_process_whose_device_is_lost_leaves_as_any_other(closes: bool) -> None:
    expect_clean_exit(
        f"""
        transfers = [cache.manager.offload([block], after=held) for block in range(3, 8)]
        lose()
        if {closes}:
            cache.manager.close(PATIENCE)
            del observed, transfers, cache
        print("all is well")
        """
    )


@pytest.mark.usefixtures("gpu")
def test_a_process_leaves_while_copies_are_in_flight() -> None:
    expect_clean_exit(
        """
        spin = gpu.spin(held, limit_s=2.0)
        transfers = [cache.manager.offload([block], after=held) for block in range(3, 8)]
        print("all is well")
        """
    )


def test_the_driver_itself_sees_the_loss(gpu: Driver) -> None:
    expect_clean_exit(
        """
        lose()
        try:
            gpu.download(cache.address(0, 0), 16)
        except DriverError as error:
            assert error.code == 700, error
        else:
            raise AssertionError("the loss was not for good")
        print("all is well")
        """
    )
