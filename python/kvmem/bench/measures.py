"""What `kvmem bench` measures, each beside a baseline that needs only Python and NumPy."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import kvmem
from kvmem.bench import contenders
from kvmem.bench.contenders import Handoff, KvmemPool, ListPool, ScatteredCopy, Submission
from kvmem.bench.options import BenchError, BenchOptions, Sizes
from kvmem.bench.result import KVMEM, BenchResult, Row, describe_machine, peak_bytes, rows_of
from kvmem.bench.rounds import Comparison, compare, no_collector

SEGMENT_BYTES = (16 << 10, 64 << 10, 512 << 10)
"""Of what is copied."""

ELSEWHERE_BYTES = 64 << 20
"""Python, NumPy and what is not counted one by one."""

Progress = Callable[[str, float], object]
"""Called with what is measured and the share that is done of all, 0 to 1."""


class Bench:
    """Runs comparisons, so many in all, within their time and says how far they are."""

    def __init__(
        self,
        options: BenchOptions,
        comparisons: int = 1,
        on_progress: Progress = lambda *_: None,
    ) -> None:
        self.options = options
        self.sizes: Sizes = options.sizes
        self.device = kvmem.open_device("host")
        self._comparisons = comparisons
        self._on_progress = on_progress
        self._done = 0

    def compare(
        self,
        what: str,
        contenders: Mapping[str, Callable[[], object]],
        *,
        operations: int,
        settle: Callable[[], object] = lambda: None,
        times: int = 1,
    ) -> Comparison:
        """Let the contenders take turns for as many rounds as there is time for.

        times: so many times as many rounds; for one call a round.
        """
        with self.step(what) as advance:
            tried = compare(contenders, operations=operations, rounds=1, settle=settle)
            round_seconds = sum(seconds[0] for seconds in tried.seconds.values())
            rounds = self.options.rounds_for(round_seconds * times) * times
            return compare(
                contenders,
                operations=operations,
                rounds=rounds,
                settle=settle,
                on_round=partial(advance, 1 / (rounds + 1)),
            )

    @contextmanager
    def step(self, what: str) -> Iterator[Callable[[float], None]]:
        """One comparison of the run; gives the call that says which share more of it is done."""
        share = 0.0

        def advance(more: float) -> None:
            nonlocal share
            share += more
            self._on_progress(what, (self._done + share) / self._comparisons)

        advance(0.0)
        yield advance
        self._done += 1


def measure_pool(bench: Bench) -> Iterator[Row]:
    ours, theirs = KvmemPool(), ListPool()
    draw = random.Random(1)
    picks = [draw.randrange(contenders.LIVE) for _ in range(bench.sizes.churn)]
    batches = bench.sizes.churn // 10
    baseline = "list behind a lock"

    what = "a block taken and given back"
    pair = {KVMEM: partial(ours.churn, picks), baseline: partial(theirs.churn, picks)}
    found = bench.compare(what, pair, operations=len(picks))
    yield from rows_of(found, "pool", what, "ns", _same)

    what = f"{contenders.BATCH} blocks taken, given back"
    pair = {KVMEM: partial(ours.batches, batches), baseline: partial(theirs.batches, batches)}
    found = bench.compare(what, pair, operations=batches)
    yield from rows_of(found, "pool", what, "ns", _same)


def measure_submit(bench: Bench) -> Iterator[Row]:
    what = "a segment of an offload call"
    with closing(Submission(bench.device)) as work:
        found = bench.compare(
            what,
            {
                KVMEM: work.offload,
                "listed in Python": work.list_with_python,
                "listed with NumPy": work.list_with_numpy,
            },
            operations=Submission.BLOCKS * Submission.REGIONS,
            settle=work.settle,
        )
    yield from rows_of(found, "submit", what, "ns", _same)


def measure_copy(bench: Bench) -> Iterator[Row]:
    for segment_bytes in SEGMENT_BYTES:
        # In a function, at whose end the memory goes before there is that of the next.
        yield from _measure_copy_of(segment_bytes, bench)


def _measure_copy_of(segment_bytes: int, bench: Bench) -> Iterator[Row]:
    segments = f"{segment_bytes >> 10} KiB segments"
    with closing(ScatteredCopy(bench.device, segment_bytes, bench.sizes.copy_bytes)) as work:
        what = f"offload, {segments}"
        ways: dict[str, Callable[[], object]] = {
            KVMEM: work.offload,
            "NumPy row by row": work.loop_out,
            "NumPy take": work.take,
        }
        found = bench.compare(what, ways, operations=work.nbytes)
        yield from rows_of(found, "copy", what, "GB/s", _gbps)

        what = f"restore, {segments}"
        ways = {
            KVMEM: work.restore,
            "NumPy row by row": work.loop_in,
            "NumPy put": work.put,
        }
        found = bench.compare(what, ways, operations=work.nbytes)
        yield from rows_of(found, "copy", what, "GB/s", _gbps)


def measure_handoff(bench: Bench) -> Iterator[Row]:
    with closing(Handoff(bench.device, bench.sizes.handoff_blocks)) as work:
        what = "offload of 2 MiB and wait"
        pair = {KVMEM: work.offload_each, "NumPy copy on the spot": work.copy_each}
        found = bench.compare(what, pair, operations=work.blocks)
        yield from rows_of(found, "handoff", what, "ns", _same)

        what = "offload call for 2 MiB"
        calls = {KVMEM: work.submit, "ThreadPoolExecutor.submit": work.submit_to_executor}
        found = bench.compare(what, calls, operations=1, settle=work.settle, times=20)
        yield from rows_of(found, "handoff", what, "ns", _same)


def measure_idle(bench: Bench) -> Iterator[Row]:
    what = "idle manager, of a core"
    slept = bench.sizes.idle_seconds
    rounds = bench.options.rounds or 3
    baseline = "thread that polls each ms"
    found = Comparison(1, {KVMEM: [], baseline: []}, [os.getloadavg()[0]])
    with bench.step(what) as advance, closing(Handoff(bench.device, 1)) as work:
        work.offload_each()
        for _ in range(rounds):
            for name, seconds in found.seconds.items():
                with contenders.polling_thread() if name == baseline else nullcontext():
                    start = time.process_time()
                    time.sleep(slept)
                    # Never zero, by which one could not divide: going to sleep takes some, too.
                    seconds.append(time.process_time() - start)
            advance(1 / rounds)
    found.load.append(os.getloadavg()[0])
    yield from rows_of(found, "idle", what, "%", lambda ns: ns / 1e9 / slept * 100)


def measure_memory(bench: Bench) -> Iterator[Row]:
    what = "bookkeeping of a held slot"
    slots = bench.sizes.bookkept_slots
    load = os.getloadavg()[0]
    with bench.step(what):
        device = kvmem.open_device("virtual", move_bytes=False)
        before = _resident_bytes()
        pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=slots * 4096)
        with pool.acquire(slots):
            ours = _grown_bytes(before) / slots
        before = _resident_bytes()
        free = list(range(slots))
        theirs = _grown_bytes(before) / len(free)
    ratio = theirs / ours
    loads = (load, os.getloadavg()[0])
    yield Row(
        "memory", what, "list of integers", "bytes", ours, theirs, ratio, ratio, ratio, 1, loads
    )


@dataclass(frozen=True)
class Measure:
    """comparisons: how many it makes. needed_bytes: the most that it has at a time."""

    run: Callable[[Bench], Iterator[Row]]
    comparisons: int
    needed_bytes: Callable[[Sizes], int]


MEASURES = {
    "pool": Measure(measure_pool, 2, lambda _: contenders.CAPACITY * 4096),
    "submit": Measure(
        measure_submit,
        1,
        lambda _: 3 * Submission.BLOCKS * Submission.REGIONS * Submission.SEGMENT_BYTES,
    ),
    "copy": Measure(measure_copy, 2 * len(SEGMENT_BYTES), lambda sizes: 3 * sizes.copy_bytes),
    "handoff": Measure(
        measure_handoff,
        2,
        lambda sizes: (sizes.handoff_blocks + 4) * Handoff.LAYERS * Handoff.SEGMENT_BYTES,
    ),
    "idle": Measure(measure_idle, 1, lambda _: 5 * Handoff.LAYERS * Handoff.SEGMENT_BYTES),
    "memory": Measure(measure_memory, 1, lambda sizes: 128 * sizes.bookkept_slots),
}


def run_bench(options: BenchOptions, on_progress: Progress = lambda *_: None) -> BenchResult:
    """Measure what the options name. Raises BenchError when it does not fit into the memory."""
    options.expect_names(MEASURES)
    chosen = [one for name, one in MEASURES.items() if not options.only or name in options.only]
    start = time.monotonic()
    bench = Bench(options, sum(one.comparisons for one in chosen), on_progress)
    _expect_memory(bench.device, max(one.needed_bytes(options.sizes) for one in chosen))
    rows: list[Row] = []
    with no_collector():
        for one in chosen:
            rows += one.run(bench)
    machine = describe_machine(bench.device.info["copy_kernel"])
    return BenchResult(rows, machine, time.monotonic() - start, peak_bytes())


def _same(ns: float) -> float:
    return ns


def _gbps(ns_a_byte: float) -> float:
    return 1 / ns_a_byte


def _expect_memory(device: kvmem.Device, nbytes: int) -> None:
    nbytes += ELSEWHERE_BYTES
    try:
        # Had as one piece and given back untouched: each part alone might fit.
        device.alloc(nbytes)
    except kvmem.CapacityError as error:
        raise BenchError(
            f"needs {nbytes / 2**20:,.0f} MiB of memory at a time, and less with --quick"
            f" or --only: {error}"
        ) from None


def _resident_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _grown_bytes(before: int) -> int:
    """A byte at least: where memory from before was free, there may be no growth to see."""
    return max(1, _resident_bytes() - before)
