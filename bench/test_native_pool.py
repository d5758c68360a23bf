"""What does one block cost, acquired and released in C++, beside a bare list and allocators?

Random churn: 512 blocks are live, and each operation gives one of them back and takes another. The
bare list is what any pool comes down to: LIFO indices behind one mutex. It checks nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import ModuleType
from typing import Any

import pytest

from harness import AtMost, Goal, Timed, Versus, pinned

Size = Callable[[int, int], int]

ALLOCATED_BYTES = 512 << 10  # of the general allocators, whose time depends on it
BY_THREADS = pytest.mark.parametrize("threads", [1, 2], ids=["1 thread", "2 threads"])
ALLOCATORS = ("glibc", "mimalloc", "tcmalloc")


def churn(
    native: ModuleType, contender: str, operations: int, threads: int, **options: Any
) -> Timed:
    made = native.PoolChurn(contender, threads=threads, **options)
    return Timed(partial(made.run, operations))


def compare_pools(
    versus: Versus, native: ModuleType, size: Size, subject: str, threads: int, goals: list[Goal]
) -> None:
    """By one thread on one core; by several wherever they run."""
    operations = size(200_000, 1_000) // threads
    baselines: dict[str, Timed | None] = {
        "bare list": churn(native, "bare list", operations, threads)
    }
    for allocator in ALLOCATORS:
        try:
            baselines[allocator] = churn(
                native, allocator, operations, threads, block_bytes=ALLOCATED_BYTES
            )
        except native.NotInstalled as error:
            baselines[f"{allocator}: {error}"] = None
    with pinned(0) if threads == 1 else nullcontext():
        versus(
            churn(native, subject, operations, threads),
            baselines,
            operations=operations * threads,
            goals=goals if threads == 1 else [],
            name=f"kvmem {subject}",
        )


@BY_THREADS
def test_a_block_by_its_slot_in_cpp(
    versus: Versus, native: ModuleType, size: Size, threads: int
) -> None:
    compare_pools(versus, native, size, "indices", threads, [AtMost(1.2, "bare list")])


@BY_THREADS
def test_a_block_by_its_handle_in_cpp(
    versus: Versus, native: ModuleType, size: Size, threads: int
) -> None:
    compare_pools(versus, native, size, "handles", threads, [AtMost(1.6, "bare list")])
