"""How much memory does the bookkeeping take, and how much a replay beyond its pool and device?

Measured in fresh processes, and asserted: these are no timings. Bookkeeping is the private memory
that pools and managers of two sizes differ by, on a device without bytes.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MOST_SLOT_BYTES = 64
MOST_DEVICE_BLOCK_BYTES = 8
MOST_REPLAY_BYTES = 64 << 20

# Every slot is held once, by one lease: what grows with use is there too.
BOOKKEEPING = """
import sys
import kvmem

slots, blocks = (int(each) for each in sys.argv[1:])
device = kvmem.open_device("virtual", move_bytes=False)
cache = device.alloc(blocks * 4096)
layout = kvmem.KVLayout([kvmem.Region(cache.address, 4096, 4096, blocks, memory=device.name)])
pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=slots * 4096)
manager = kvmem.Manager(device, layout, pool)
lease = pool.acquire(slots)
with open("/proc/self/smaps_rollup") as rollup:
    fields = dict(line.split(":") for line in rollup if ":" in line)
print(sum(int(fields[name].split()[0]) * 1024 for name in ("Private_Clean", "Private_Dirty")))
"""

# The peak of this program alone: that of getrusage would begin with its parent's.
REPLAY = """
import atexit
import sys
from kvmem.cli import main

def say_peak():
    with open("/proc/self/status") as status:
        peaks = [line.split()[1] for line in status if line.startswith("VmHWM")]
    print(int(peaks[0]) * 1024, file=sys.stderr)

atexit.register(say_peak)
main()
"""


def run_child(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
    )


def private_bytes(slots: int, device_blocks: int) -> int:
    return int(run_child(BOOKKEEPING, slots, device_blocks).stdout)


@pytest.mark.parametrize(
    ("what", "most"),
    [("slot", MOST_SLOT_BYTES), ("device block", MOST_DEVICE_BLOCK_BYTES)],
    ids=["a slot", "a device block"],
)
def test_bytes_of_bookkeeping(
    benchmark: Any,
    report: Callable[..., None],
    size: Callable[[int, int], int],
    what: str,
    most: int,
) -> None:
    few = size(8 << 20, 1 << 20)

    def measure() -> float:
        one = private_bytes(few, few)
        two = private_bytes(2 * few, few) if what == "slot" else private_bytes(few, 2 * few)
        return (two - one) / few

    # 2 MiB pages may round each of the two up.
    noise = 2 * (2 << 20) / few
    found = benchmark.pedantic(measure, rounds=1)
    report(f"of a {what}", round(found, 1), "bytes", most)
    assert 1 < found <= most + noise


@pytest.mark.parametrize(
    ("block_kib", "device"),
    [
        (16, ["host"]),
        (1024, ["host"]),
        (16, ["virtual"]),
        # With bytes this device also keeps what it has read early of restores that are in flight.
        (1024, ["virtual", "--no-move-bytes"]),
    ],
    ids=["16 KiB, host", "1 MiB, host", "16 KiB, virtual", "1 MiB, virtual without bytes"],
)
def test_peak_of_a_replay_beyond_pool_and_device(
    benchmark: Any,
    report: Callable[..., None],
    size: Callable[[int, int], int],
    tmp_path: Path,
    block_kib: int,
    device: list[str],
) -> None:
    """Half of the requests find everything on the host, the others nothing."""
    # So large that memory which grows with the device or the requests would not fit.
    blocks, lanes, requests = size(192, 48), 4, size(100, 16)
    host_blocks = 2 * blocks
    trace = tmp_path / "trace.jsonl"
    write_trace(trace, requests, blocks)

    def peak(*more: object) -> int:
        said = run_child(
            REPLAY, "replay", trace, "--json", "--concurrency", lanes, "--device", *device, *more
        )
        assert not json.loads(said.stdout)["faults"]
        return int(said.stderr.split()[-1])

    def measure() -> tuple[int, int]:
        start = peak("--limit", 1, "--block-bytes", 256, "--host-blocks", blocks)
        had = 0 if "--no-move-bytes" in device else (host_blocks + lanes * blocks) * block_kib << 10
        return start, peak("--block-bytes", block_kib << 10, "--host-blocks", host_blocks) - had

    start, beyond = benchmark.pedantic(measure, rounds=1)
    report("kvmem replay", round(beyond / 2**20, 1), "MiB")
    report("of that, what a replay of nothing takes", round(start / 2**20, 1), "MiB")
    report("of that, the rest", round((beyond - start) / 2**20, 1), "MiB", 64)
    assert beyond - start <= MOST_REPLAY_BYTES


def write_trace(path: Path, requests: int, blocks: int) -> None:
    """Every second request is for the same prompt."""
    with path.open("w") as lines:
        for number in range(requests):
            first = 0 if number % 2 else (number + 1) * blocks
            line = {
                "timestamp": number,
                "input_length": blocks * 512,
                "output_length": 1,
                "hash_ids": list(range(first, first + blocks)),
            }
            lines.write(json.dumps(line) + "\n")
