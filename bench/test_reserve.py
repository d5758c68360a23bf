"""What does it cost to look up and hold 64 keys in an index of a million?

Keys are digests, drawn at random, so most of them are in no cache of the processor. A reservation
finds them, holds them and makes them the most recent ones; the maps only find. Other projects hold
what they find, as a reservation does, and let it go again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import index_peers
import kvmem
from harness import AtMost, AtMostNs, Contender, Faster, Timed, Versus, pinned

Size = Callable[[int, int], int]

BATCH = 64
KEY_BYTES = 32


def filled(entries: int, policy: str) -> tuple[kvmem.Index, np.ndarray]:
    index = kvmem.Index(slots=entries, key_bytes=KEY_BYTES, policy=policy)
    keys = np.random.default_rng(1).integers(0, 256, (entries, KEY_BYTES), np.uint8)
    for first in range(0, entries, 10_000):
        index.finish(index.plan_store(keys[first : first + 10_000]))
    return index, keys


def batches(keys: np.ndarray, count: int) -> list[list[bytes]]:
    draw = random.Random(2)
    return [[keys[i].tobytes() for i in draw.sample(range(len(keys)), BATCH)] for _ in range(count)]


@pytest.mark.parametrize("policy", ["lru", "arc", "gdsf"])
def test_reserving_64_keys_of_a_million(
    versus: Versus, native: ModuleType, size: Size, policy: str
) -> None:
    index, keys = filled(size(1_000_000, 2_000), policy)
    wanted = batches(keys, size(2_000, 4))
    joined = [b"".join(batch) for batch in wanted]
    bare = native.BareMap(keys.tobytes())
    known = {key.tobytes(): i for i, key in enumerate(keys)}
    assert len(index.reserve(wanted[0])) == BATCH
    assert bare.find(joined[0]) == BATCH
    held: list[kvmem.Reservation] = []

    def reserve() -> None:
        held.extend(map(index.reserve, wanted))

    def find() -> None:
        for batch in joined:
            bare.find(batch)

    def look_up() -> None:
        for batch in wanted:
            for key in batch:
                known[key]

    with pinned(0):
        versus(
            Timed(reserve, after=held.clear),
            {"bare hash map, 64 finds": Timed(find), "dict, 64 finds": Timed(look_up)},
            operations=len(wanted),
            goals=[AtMostNs(8_000), AtMost(3, "bare hash map, 64 finds")],
            name=f"kvmem Index.reserve, {policy}",
        )


def test_reserving_and_releasing_64_keys_of_100_thousand(versus: Versus, size: Size) -> None:
    index, keys = filled(size(100_000, 2_000), "lru")
    wanted = batches(keys, size(500, 4))
    peers = index_peers.installed([key.tobytes() for key in keys])

    def reserve() -> None:
        for batch in wanted:
            index.reserve(batch).release()

    def look_up(peer: index_peers.IndexPeer) -> Callable[[], None]:
        theirs = [peer.batch(batch) for batch in wanted]

        def run() -> None:
            for batch in theirs:
                peer.hold(batch)

        return run

    baselines: dict[str, Contender | None] = {
        name: peer and look_up(peer) for name, peer in peers.items()
    }
    with pinned(0):
        versus(
            reserve,
            baselines,
            operations=len(wanted),
            goals=[Faster(10, name) for name in peers],
            name="kvmem Index.reserve and release",
        )
    for peer in filter(None, peers.values()):
        peer.close()


def test_storing_and_evicting_64_keys(versus: Versus, size: Size) -> None:
    entries = size(100_000, 1_000)
    index, _ = filled(entries, "lru")
    turns = size(500, 4)
    fresh = np.random.default_rng(3).integers(0, 256, (turns * 64, BATCH, KEY_BYTES), np.uint8)
    at = iter(range(len(fresh)))

    def store() -> None:
        for _ in range(turns):
            index.finish(index.plan_store(fresh[next(at) % len(fresh)]))

    with pinned(0):
        versus(Timed(store), {}, operations=turns, name="kvmem plan_store and finish")


@pytest.mark.parametrize("policy", ["lru", "arc", "gdsf"])
def test_memory_of_an_entry(
    benchmark: Any, report: Callable[..., None], size: Size, policy: str
) -> None:
    entries = size(1_000_000, 10_000)
    index = benchmark.pedantic(
        kvmem.Index,
        kwargs={"slots": entries, "key_bytes": KEY_BYTES, "policy": policy},
        rounds=1,
    )
    report(f"kvmem Index, {policy}", round(index.stats()["bytes"] / entries, 1), "bytes", 128)
