"""How fast do blocks move between a GPU and pinned memory, beside cudaMemcpyAsync by hand?

1 GiB in segments of one size, at random places of the device cache and of the pool; what is done by
hand has the same addresses. "In one piece" moves as many bytes in eight calls: no batch can be
faster. Goals hold from 256 KiB on; below, calls and descriptors cost more than the link.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from gpu_moves import Moves

import kvmem
from gpu_cache import PATIENCE
from harness import Contender, Faster, Timed, Versus, latencies_ns, percentile

MakeMoves = Callable[..., Moves]
Size = Callable[[int, int], int]

KIB = 1 << 10
ROUNDS = 9
LOOP = "cudaMemcpyAsync loop"


def segments(*kib: int) -> Any:
    names = [f"{n} KiB" if n < 1024 else f"{n // 1024} MiB" for n in kib]
    return pytest.mark.parametrize("segment_bytes", [n * KIB for n in kib], ids=names)


WAYS = pytest.mark.parametrize("way", ["offload", "restore"])


@pytest.fixture
def nbytes(size: Size) -> int:
    return size(1 << 30, 128 << 20)


def hand(raw: Any, name: str = LOOP) -> dict[str, Contender | None]:
    return {f"{name}: no compiler": None} if raw is None else {name: raw.run}


@WAYS
@segments(16, 64, 256, 1024, 8192)
def test_blocks_between_gpu_and_pinned_memory(
    versus: Versus, moves: MakeMoves, nbytes: int, segment_bytes: int, way: str
) -> None:
    made = moves(segment_bytes, nbytes)
    goal = Faster(0.95, LOOP, "in one piece")
    versus(
        partial(made.run, way),
        {**hand(made.by_hand(way)), **hand(made.in_one_piece(way), "in one piece")},
        operations=made.segments,
        goals=[goal] if segment_bytes >= 256 * KIB else [],
        moved_bytes=made.nbytes,
        rounds=ROUNDS,
    )


@segments(64, 256, 1024, 8192)
def test_both_directions_at_once(
    versus: Versus, moves: MakeMoves, nbytes: int, segment_bytes: int
) -> None:
    made = moves(segment_bytes, nbytes)
    versus(
        made.run_both,
        hand(made.both_by_hand(), "loop over two streams"),
        operations=made.segments,
        goals=[Faster(0.9, "loop over two streams")] if segment_bytes >= 256 * KIB else [],
        moved_bytes=made.nbytes,
        rounds=ROUNDS,
    )


@WAYS
@segments(256)
def test_one_direction_in_two_classes_and_over_two_streams(
    versus: Versus, moves: MakeMoves, nbytes: int, segment_bytes: int, way: str
) -> None:
    made = moves(segment_bytes, nbytes)
    versus(
        partial(made.run_in_classes, way),
        {
            "kvmem, one class": partial(made.run, way),
            **hand(made.by_hand(way), "loop over one stream"),
            **hand(made.by_hand(way, streams=2), "loop over two streams"),
        },
        operations=made.segments,
        name="kvmem, demand and background",
        moved_bytes=made.nbytes,
        rounds=ROUNDS,
    )


@WAYS
@segments(16, 64, 256)
def test_batches_beside_one_by_one(
    versus: Versus, new_moves: MakeMoves, size: Size, segment_bytes: int, way: str
) -> None:
    nbytes = size(256 << 20, 16 << 20)
    batches = new_moves(segment_bytes, nbytes)
    one_by_one = new_moves(segment_bytes, nbytes, on=kvmem.open_device("cuda", batch=False))
    versus(
        partial(batches.run, way),
        {"kvmem, one by one": partial(one_by_one.run, way)},
        operations=batches.segments,
        moved_bytes=batches.nbytes,
        rounds=ROUNDS,
    )


@WAYS
@segments(64, 1024)
def test_pinned_beside_staged(
    versus: Versus, new_moves: MakeMoves, size: Size, segment_bytes: int, way: str
) -> None:
    nbytes = size(256 << 20, 16 << 20)
    pinned = new_moves(segment_bytes, nbytes)
    staged = new_moves(segment_bytes, nbytes, pool={"pin": "never"})
    versus(
        partial(pinned.run, way),
        {"staged": partial(staged.run, way)},
        operations=pinned.segments,
        name="pinned",
        moved_bytes=pinned.nbytes,
        rounds=ROUNDS,
    )


@WAYS
def test_a_descriptor_of_the_call_alone(
    versus: Versus, new_moves: MakeMoves, size: Size, way: str
) -> None:
    # Without a reaper all is submitted inside the call.
    made = new_moves(16 * KIB, size(128 << 20, 16 << 20), reaper=False)
    raw = made.by_hand(way)
    pending: list[Any] = []

    def wait() -> None:
        while pending:
            pending.pop().wait(PATIENCE)

    versus(
        Timed(lambda: pending.append(made.start(way)), after=wait),
        {LOOP: Timed(raw.submit, after=raw.wait)} if raw else hand(None),
        operations=made.segments,
        rounds=ROUNDS,
    )


@WAYS
@pytest.mark.parametrize("reaper", [True, False], ids=["with the reaper", "without reaper"])
def test_a_block_of_2_mib_moved_and_waited_for(
    versus: Versus, new_moves: MakeMoves, size: Size, way: str, reaper: bool
) -> None:
    made = new_moves(256 * KIB, 2 << 20, reaper=reaper)
    calls = size(50, 2)

    def times(call: Callable[[], object]) -> Contender:
        return lambda: [call() for _ in range(calls)]

    raw = made.by_hand(way)
    versus(
        times(partial(made.run, way)),
        {LOOP: times(raw.run)} if raw else hand(None),
        operations=calls,
        rounds=ROUNDS,
    )


def test_a_demand_restore_of_2_mib_while_background_fills_the_link(
    benchmark: Any, report: Callable[..., None], new_moves: MakeMoves, size: Size
) -> None:
    made = new_moves(256 * KIB, size(1 << 30, 64 << 20), window_bytes="32MiB")
    waited: list[int] = []

    def restore() -> None:
        background = made.start("restore", slice(1, None), "background")
        waited.extend(latencies_ns(lambda: made.start("restore", slice(1), "demand").wait(), 1))
        background.wait(PATIENCE)

    benchmark.pedantic(restore, rounds=size(20, 1))
    for share in (0.5, 0.9):
        report(f"window of 32 MiB, p{share * 100:.0f}", percentile(sorted(waited), share))
