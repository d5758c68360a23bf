"""The stress workload for long: nothing may grow.

    python bench/soak.py --minutes 10 [--threads 4]

Threads, tasks and threads without a reaper take turns, each on a manager of its own that lives as
long as the run. Every second memory, descriptors and threads are sampled and shown; what counts is
sampled between the turns, when all has come home. After a warm-up of a tenth of the time it fails

- when a descriptor or a thread more or less is there, or
- when resident memory grew by more than 8 MiB, and over the second half by more than 1 MiB a minute
  (the median of the slopes between any two samples, which one spike does not move).

Each manager keeps the records of its last 65,536 transfers: 8 MiB that fill within a long warm-up.

Exits 1 on growth, and raises `Lost` for what leaked, ended twice or holds wrong bytes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stress import Stress, StressOptions

TURNS = 30
"""Ten for each of the three; the first of each is the warm-up."""
WARM_UP = 3
SETTLE_SECONDS = 1.0
"""Until a thread more than before counts."""
MOST_GROWTH_BYTES = 8 << 20
MOST_SLOPE_BYTES = 1 << 20
"""A minute."""


@dataclass(frozen=True)
class Sample:
    seconds: float  # since the beginning
    resident_bytes: int
    descriptors: int
    threads: int

    def __str__(self) -> str:
        resident = self.resident_bytes / 2**20
        return f"{resident:7.1f} MiB {self.descriptors:4} descriptors {self.threads:3} threads"


_sampling = threading.Lock()
"""All that a sample opens, listings too, another one must not count."""


def take_sample(begun: float) -> Sample:
    with _sampling:
        with open("/proc/self/statm") as statm:
            resident_bytes = int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")
        descriptors = len(os.listdir("/proc/self/fd")) - 1  # without the one that lists them
        threads = len(os.listdir("/proc/self/task"))
    return Sample(time.monotonic() - begun, resident_bytes, descriptors, threads)


def growth(rests: Sequence[Sample]) -> list[str]:
    """What grew between the samples, which were all taken at rest behind the warm-up."""
    found = []
    for what in ("descriptors", "threads"):
        values = [getattr(sample, what) for sample in rests]
        if len(set(values)) > 1:
            found.append(f"{what} went from {values[0]} to {values[-1]}, {max(values)} at most")
    grown = rests[-1].resident_bytes - rests[0].resident_bytes
    slope = robust_slope(rests[len(rests) // 2 :]) * 60
    if grown > MOST_GROWTH_BYTES and slope > MOST_SLOPE_BYTES:
        found.append(
            f"resident memory grew by {grown / 2**20:.1f} MiB, "
            f"by {slope / 2**20:.1f} MiB a minute in the second half"
        )
    return found


def robust_slope(samples: Sequence[Sample]) -> float:
    """Resident bytes a second: the median of the slopes between any two samples."""
    return statistics.median(
        (later.resident_bytes - earlier.resident_bytes) / (later.seconds - earlier.seconds)
        for earlier, later in itertools.combinations(samples, 2)
    )


class Watch:
    """A thread that samples every second, and says so."""

    def __init__(self, begun: float, say: Callable[[str], None]) -> None:
        self.begun = begun
        self.doing = ""
        self.samples = [take_sample(begun)]
        self._say = say
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch")
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(1.0):
            self.samples.append(take_sample(self.begun))
            self._say(f"{self.samples[-1].seconds:6.0f} s  {self.samples[-1]}  {self.doing}")


def soak(seconds: float, workers: int, say: Callable[[str], None]) -> list[str]:
    """Run for so long; says what happens, and answers what grew."""
    begun = time.monotonic()
    watch = Watch(begun, say)
    rests: list[Sample] = []
    try:
        worlds = [
            Stress(StressOptions(workers, seed=1)),
            Stress(StressOptions(workers, tasks=True, seed=2)),
            Stress(StressOptions(workers, reaper=False, seed=3)),
        ]
        operations = 0
        for turn in range(TURNS):
            world = worlds[turn % len(worlds)]
            watch.doing = world.options.name
            result = world.run(seconds / TURNS)
            operations += sum(result.operations.values())
            del result
            rests.append(rest(begun, rests))
        for world in worlds:
            world.close()
    finally:
        watch.stop()
    say(f"{operations:,} calls; at rest, after the warm-up:")
    measured = rests[WARM_UP - 1 :]
    peak = max(sample.resident_bytes for sample in watch.samples)
    say(f"  first {measured[0]}")
    say(f"  last  {measured[-1]}")
    say(f"  most  {peak / 2**20:7.1f} MiB at any second")
    slope = robust_slope(measured[len(measured) // 2 :]) * 60
    say(f"  second half: {slope / 2**10:+.0f} KiB a minute")
    return growth(measured)


def rest(begun: float, before: Sequence[Sample]) -> Sample:
    """A sample once the threads of the turn are gone from the kernel too, as before."""
    gc.collect()
    if before:
        last = before[-1].threads
        deadline = time.monotonic() + SETTLE_SECONDS
        while take_sample(begun).threads > last and time.monotonic() < deadline:
            time.sleep(0.001)
    return take_sample(begun)


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--threads", type=int, default=4, help="workers at once")
    given = parser.parse_args(arguments)
    found = soak(given.minutes * 60, given.threads, lambda line: print(line, flush=True))
    for what in found:
        print(f"GROWTH: {what}")
    print("failed" if found else "constant")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
