"""Eviction policies by themselves, against an independent simulator's counts."""

from __future__ import annotations

import json

import numpy as np
import pytest

import kvmem
from kvmem import InvalidArgument
from test_replay_shared import TRACES, shared_file, trace

POLICIES = ["lru", "arc", "gdsf"]


def zipf(seed: int, accesses: int, distinct: int) -> np.ndarray:
    """Keys of which few are asked for often, with scans over new ones in between."""
    random = np.random.default_rng(seed)
    keys = random.zipf(1.2, accesses) % distinct
    for begin in range(0, accesses, 997):
        keys[begin : begin + 100] = distinct + begin + np.arange(len(keys[begin : begin + 100]))
    return keys


@pytest.mark.shared
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_counts_equal_the_published_ones_exactly(policy: str, name: str) -> None:
    golden = json.loads(shared_file("golden/mooncake_policy_hits.json").read_text())
    keys = np.array([key for request in trace(name) for key in request.keys], np.uint64)
    rows = golden["data"][f"{name}/{policy.upper()}"]["rows"]
    assert len(rows) == 7
    for capacity, hits in rows:
        assert kvmem.count_hits(policy, capacity, keys) == hits


@pytest.mark.parametrize("policy", POLICIES)
def test_counts_equal_those_of_libcachesim(policy: str) -> None:
    simulator = pytest.importorskip("libcachesim", reason="libcachesim is not installed")
    make = getattr(simulator, policy.upper())
    for seed in range(3):
        keys = zipf(seed, 5000, 700)
        for capacity in (1, 2, 50, 300):
            cache = make(cache_size=capacity)
            hits = 0
            for key in keys.tolist():
                request = simulator.Request()
                request.obj_id, request.obj_size = key, 1
                hits += cache.get(request)
            assert kvmem.count_hits(policy, capacity, keys) == hits, (seed, capacity)


def test_lru_is_what_a_plain_one_says() -> None:
    keys = zipf(7, 4000, 300)
    plain: dict[int, None] = {}
    expected = []
    for key in keys.tolist():
        expected.append(key in plain)
        plain.pop(key, None)
        plain[key] = None
        if len(plain) > 60:
            del plain[next(iter(plain))]
    assert kvmem.hits_of("lru", 60, keys).tolist() == expected
    assert kvmem.count_hits("lru", 60, keys) == sum(expected)


def test_gdsf_keeps_what_is_worth_more() -> None:
    rounds = 40
    keys = [key for turn in range(rounds) for key in (0, *range(1 + 8 * turn, 9 + 8 * turn))]
    plain = kvmem.count_hits("gdsf", 4, keys)
    dear = kvmem.count_hits("gdsf", 4, keys, [100.0 if key == 0 else 1.0 for key in keys])
    assert dear == rounds - 1, "the key that comes back in each round stays"
    assert plain <= dear


@pytest.mark.parametrize("policy", POLICIES)
def test_room_for_all_hits_whatever_was_seen(policy: str) -> None:
    keys = zipf(3, 2000, 400)
    assert kvmem.count_hits(policy, 10**6, keys) == len(keys) - len(np.unique(keys))
    assert kvmem.count_hits(policy, 5, []) == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("fifo", 4, [1]), "policy is 'fifo'"),
        (("lru", 0, [1]), "capacity is 0"),
        (("lru", -1, [1]), "capacity is -1"),
        (("lru", 1 << 40, [1]), "capacity is 1099511627776"),
        (("lru", 4, [-1]), "keys is [-1]"),
        (("lru", 4, [0.5]), "keys is [0.5]"),
        (("lru", 4, ["a"]), "keys is ['a']"),
        (("lru", 4, [1 << 64]), "keys is"),
        (("lru", 4, [1, 2], [1.0]), "1 values for 2 keys"),
        (("gdsf", 4, [1], [0.0]), "values[0] is 0"),
        (("gdsf", 4, [1], [float("nan")]), "values[0] is nan"),
        (("gdsf", 4, [1, 2], [1.0, float("inf")]), "values[1] is inf"),
        (("lru", (1 << 31) - 1, [1]), "capacity is 2147483647"),
        (("gdsf", 4, [1], ["a"]), "values is ['a']"),
    ],
)
def test_bad_input_is_refused_by_name(arguments: tuple, what: str) -> None:
    for call in (kvmem.count_hits, kvmem.hits_of):
        with pytest.raises(InvalidArgument) as error:
            call(*arguments)
        assert what in str(error.value)
