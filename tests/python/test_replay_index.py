"""Hit or miss, key by key, against the plainest cache of the same kind."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable

import pytest

from kvmem.replay.index import HostIndex, Plan
from kvmem.replay.options import HitRule


class FakeOffload:
    """Stands for a submitted offload: all that the index asks of one is that it exists."""


def plan(index: HostIndex, keys: Iterable[int]) -> Plan:
    """Plan a request and let its offload be submitted."""
    made = index.plan(list(keys))
    index.count_stores(made.stored)
    for entry in made.stored:
        entry.offload = FakeOffload()  # type: ignore[assignment]
    return made


def lru_hits(requests: Iterable[Iterable[int]], capacity: int) -> list[list[bool]]:
    cache: OrderedDict[int, None] = OrderedDict()
    hits = []
    for keys in requests:
        hits.append([])
        for key in keys:
            hits[-1].append(key in cache)
            cache[key] = None
            cache.move_to_end(key)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def some_requests(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.sample(range(60), draw.randint(1, 20)) for _ in range(300)]


@pytest.mark.parametrize("hit", ["prefix", "blocks"])
@pytest.mark.parametrize("capacity", [1, 2, 7, 19, 20, 40, 59, 60, 1000])
def test_decisions_are_those_of_a_plain_lru_cache(hit: HitRule, capacity: int) -> None:
    requests = some_requests(capacity)
    index = HostIndex(capacity, hit)
    for keys, hits in zip(requests, lru_hits(requests, capacity), strict=True):
        made = plan(index, keys)
        prefix = hits.index(False) if False in hits else len(hits)
        assert made.present == sum(hits)
        assert made.prefix == prefix
        usable = prefix if hit == "prefix" else len(hits)
        assert made.restores == [i for i in range(usable) if hits[i]]
        misses = [i for i, present in enumerate(hits) if not present]
        # Of its own misses a request keeps the last ones.
        assert made.stores == misses[made.passed_over :]
        assert len(index) <= capacity


def test_a_block_behind_the_first_miss_is_neither_restored_nor_stored_twice() -> None:
    index = HostIndex(10, "prefix")
    plan(index, [1, 2, 3])
    made = plan(index, [1, 9, 3])
    assert (made.restores, made.stores) == ([0], [1])
    assert (made.present, made.prefix) == (2, 1)


def test_what_a_request_pushed_out_itself_is_not_stored() -> None:
    index = HostIndex(2, "blocks")
    made = plan(index, [1, 2, 3, 4, 5])
    assert (made.stores, made.passed_over) == ([3, 4], 3)
    assert made.evicted == []


def test_a_hit_that_the_same_request_evicts_later_keeps_its_source() -> None:
    """Public failure 45: victims were chosen among the keys of the request itself."""
    index = HostIndex(2, "blocks")
    first = plan(index, [1])
    holder = object()
    first.stored[0].copy = holder  # type: ignore[assignment]
    made = plan(index, [1, 2, 3])
    assert made.sources == [holder]
    assert [entry.key for entry in made.evicted] == [1]
    assert first.stored[0].copy is None


def test_a_key_that_stands_twice_in_a_request_counts_as_a_hit() -> None:
    index = HostIndex(4, "blocks")
    made = plan(index, [5, 5])
    assert (made.present, made.restores, made.stores) == (1, [], [0])


def test_only_blocks_that_were_evicted_count_as_offloaded_again() -> None:
    index = HostIndex(2, "blocks")
    plan(index, [1, 2])
    plan(index, [3])
    assert index.reoffloaded == 0
    plan(index, [1])
    assert index.reoffloaded == 1
    discarded = plan(index, [7]).stored
    index.discard(discarded)
    plan(index, [7])
    assert index.reoffloaded == 1


def test_a_discarded_block_is_a_miss() -> None:
    """Public failure 113: a block that cannot be loaded stayed a hit."""
    index = HostIndex(4, "blocks")
    made = plan(index, [1, 2])
    index.discard(made.stored[:1])
    assert plan(index, [1, 2]).restores == [1]
