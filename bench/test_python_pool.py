"""What does a block cost from Python, beside the pools of other engines?

256 blocks are live; each operation gives one of them back and takes another. Or 64 are taken and
given back at a time.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

import kvmem
from harness import AtMostNs, Contender, Faster, Versus, latencies_ns, percentile, pinned
from peers import LIVE, Kvmem, PythonPool, installed

Size = Callable[[int, int], int]


@pytest.fixture
def kvmem_pool() -> Kvmem:
    return Kvmem(kvmem.open_device("host", workers=1))


@pytest.fixture(scope="session")
def peers() -> Iterator[dict[str, PythonPool | None]]:
    found = installed()
    yield found
    for pool in found.values():
        if pool is not None:
            pool.close()


def contenders(
    peers: dict[str, PythonPool | None], call: Callable[[PythonPool], Contender]
) -> dict[str, Contender | None]:
    return {name: pool and call(pool) for name, pool in peers.items()}


def test_one_block_from_python(
    versus: Versus, kvmem_pool: Kvmem, peers: dict[str, PythonPool | None], size: Size
) -> None:
    draw = random.Random(1)
    picks = [draw.randrange(LIVE) for _ in range(size(20_000, 100))]
    with pinned(0):
        versus(
            partial(kvmem_pool.run, picks),
            contenders(peers, lambda pool: partial(pool.run, picks)),
            operations=len(picks),
            goals=[AtMostNs(450), Faster(1.8, "vLLM BlockPool"), Faster(4, "LMCache paged")],
        )


def test_64_blocks_from_python(
    versus: Versus, kvmem_pool: Kvmem, peers: dict[str, PythonPool | None], size: Size
) -> None:
    batches = size(2_000, 10)
    with pinned(0):
        versus(
            partial(kvmem_pool.batches, batches),
            contenders(peers, lambda pool: partial(pool.batches, batches)),
            operations=batches,
            goals=[AtMostNs(1_000), Faster(1.8, "vLLM BlockPool"), Faster(4, "LMCache paged")],
        )


@contextmanager
def busy_python_threads(count: int) -> Iterator[None]:
    """Threads that compute and want the GIL all the time."""
    over = threading.Event()

    def work() -> None:
        number = 0
        while not over.is_set():
            for _ in range(1_000):
                number = (number * 3 + 1) % 1_000_003

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize("others", [0, 2], ids=["0 of them", "2 of them"])
def test_the_slowest_calls_beside_busy_python_threads(
    benchmark: Callable[..., list[int]],
    report: Callable[..., None],
    kvmem_pool: Kvmem,
    size: Size,
    others: int,
) -> None:
    pool = kvmem_pool.pool

    def pair() -> None:
        pool.acquire(1).release()

    with pinned(0), busy_python_threads(others):
        found = benchmark.pedantic(  # type: ignore[attr-defined]
            latencies_ns, args=(pair, size(100_000, 100)), rounds=1
        )
    report("kvmem p50", percentile(found, 0.5))
    report("kvmem p99", percentile(found, 0.99), most=20_000 if others else None)
