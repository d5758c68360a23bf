"""The index from Python: keys in every form, plans as objects, errors by name."""

import gc
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

import kvmem
from kvmem import Group, Index, InvalidArgument, PoolExhausted


def keys(first, count=1, size=32):
    return [number.to_bytes(size, "little") for number in range(first, first + count)]


def stored(index, names, **options):
    plan = index.plan_store(names, **options)
    index.finish(plan)
    return plan


def test_what_is_stored_is_found_by_its_keys():
    index = Index(slots=8)
    plan = index.plan_store(keys(1, 4), owner="a")
    assert len(plan) == 4
    assert sorted(plan.slots["full"].tolist()) == [0, 1, 2, 3]
    assert plan.positions["full"].tolist() == [0, 1, 2, 3]
    assert index.peek(keys(1, 4)) == 0
    assert index.state(keys(1)[0]) == "writing"
    assert index.finish(plan)
    hit = index.reserve(keys(1, 6), owner="b")
    assert (len(hit), hit.pending) == (4, False)
    load = index.begin(hit)
    assert load.slots["full"].tolist() == plan.slots["full"].tolist()
    assert index.finish(load, 0, True)
    assert index.stats()["blocks_loaded"] == 4


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        lambda names: np.frombuffer(b"".join(names), np.uint8).reshape(len(names), -1),
        lambda names: np.array(names, "V32"),
        b"".join,
        lambda names: memoryview(bytearray(b"".join(names))),
    ],
    ids=["list", "tuple", "rows", "items", "bytes", "buffer"],
)
def test_keys_come_in_every_form(form):
    index = Index(slots=8, key_bytes=32)
    assert len(stored(index, form(keys(1, 4)))) == 4
    assert index.peek(keys(1, 4)) == 4
    assert index.peek(form(keys(1, 4))) == 4
    assert index.remove(form(keys(2, 1))) == 1
    assert len(index.reserve(form(keys(1, 4)))) == 1


@pytest.mark.parametrize(
    ("names", "what"),
    [
        ([b"x" * 32, b"x" * 31], "keys[1] has 31 bytes, and keys[0] has 32"),
        ([b"x" * 15], "a key has 15 bytes, which must be 16 to 64"),
        ([b"x" * 65], "a key has 65 bytes, which must be 16 to 64"),
        (["x" * 32], "keys[0] is 'xxx"),
        ([b"x" * 32, None], "keys[1] is None"),
        ("x" * 32, "keys is 'xxx"),
        (7, "keys is 7"),
        (b"x" * 64, "the index must know its key_bytes"),
        (np.zeros((4, 64), np.uint8)[:, ::2], "not contiguous"),
    ],
)
def test_what_is_no_key_is_refused_by_name(names, what):
    index = Index(slots=4)
    for call in (index.plan_store, index.reserve, index.peek, index.remove):
        if call in (index.peek, index.remove) and "must be 16" in what:
            continue  # an empty index has no keys to compare with
        with pytest.raises(InvalidArgument) as error:
            call(names)
        assert what in str(error.value)
    assert index.stats()["groups"]["full"]["free"] == 4


def test_an_index_has_one_length_of_keys():
    index = Index(slots=4)
    stored(index, keys(1))
    with pytest.raises(InvalidArgument, match="20 bytes, and those of this index have 32"):
        index.reserve(keys(1, size=20))


def test_empty_calls_are_nothing():
    index = Index(slots=4)
    for nothing in ([], (), b"", np.empty((0, 32), np.uint8)):
        assert len(index.plan_store(nothing)) == 0
        assert len(index.reserve(nothing)) == 0
        assert index.peek(nothing) == 0
        assert index.remove(nothing) == 0
    assert index.finish(index.plan_store([])) is True
    assert len(index.begin(index.reserve([]))) == 0


def test_a_reservation_ends_with_its_object():
    index = Index(slots=2)
    stored(index, keys(1, 2))
    hit = index.reserve(keys(1, 2))
    assert index.try_plan_store(keys(10)) is None
    del hit
    gc.collect()
    assert index.stats()["reservations"] == 0
    with index.reserve(keys(1, 2)) as hit:
        assert index.stats()["reservations"] == 1
    assert index.stats()["reservations"] == 0
    with pytest.raises(kvmem.AlreadyReleased):
        hit.release()
    with index.reserve(keys(1, 2)) as hit:
        load = index.begin(hit)
    assert index.stats()["plans"] == 1, "begun: only finish() lets go"
    index.finish(load)


def test_the_refusal_says_who_holds_what():
    index = Index(slots=3)
    stored(index, keys(1, 3))
    hits = [index.reserve(keys(1, 2), owner="req-17"), index.reserve(keys(1, 3), owner="req-3")]
    with pytest.raises(PoolExhausted, match="'req-3': 3, 'req-17': 2") as error:
        index.plan_store(keys(10, 2))
    assert (error.value.wanted, error.value.free, error.value.held) == (2, 0, 3)
    assert index.holdings() == {"req-3": (1, 3), "req-17": (1, 2)}
    assert index.drop_owner("req-3") == 1
    assert len(hits) == 2
    assert index.try_plan_store(keys(10)) is not None


def test_groups_say_what_a_hit_needs():
    index = Index(
        slots=16,
        groups=[
            Group("full"),
            Group("window", need=kvmem.last(2)),
            Group("state", need="state", slots=4),
        ],
    )
    assert index.stats()["groups"]["state"]["slots"] == 4
    for end in (3, 6):
        stored(index, keys(1, end))
    hit = index.reserve(keys(1, 8))
    assert len(hit) == 6
    assert index.keep(hit, 5) == 3
    load = index.begin(hit)
    assert {name: array.tolist() for name, array in load.positions.items()} == {
        "full": [0, 1, 2],
        "window": [1, 2],
        "state": [2],
    }
    index.finish(load)
    plan = index.plan_store(keys(20, 4), ranges={"window": (2, 4), "state": (4, 4)})
    assert plan.positions["window"].tolist() == [2, 3]
    assert plan.positions["state"].size == 0


def test_an_attached_hit_waits_for_the_store():
    index = Index(slots=8)
    plan = index.plan_store(keys(1, 4))
    hit = index.reserve(keys(1, 4), pending="attach")
    assert (len(hit), hit.pending) == (4, True)
    assert index.begin(hit) is None
    index.finish(plan)
    assert len(index.begin(hit)) == 4


def test_events_mirror_the_index():
    index = Index(slots=2, max_events=100)
    mirror = set()
    for first in range(0, 20, 2):
        stored(index, keys(first, 2))
        events, lost = index.take_events()
        assert lost == 0
        for kind, group, key in events:
            assert group == "full"
            (mirror.add if kind == "stored" else mirror.remove)(key)
    assert mirror == set(keys(18, 2))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"slots": 0}, "slots is 0"),
        ({"slots": None}, "slots is None"),
        ({"slots": 4, "policy": "fifo"}, "policy is 'fifo'"),
        ({"slots": 4, "ranks": 0}, "ranks is 0"),
        ({"slots": 4, "key_bytes": 8}, "key_bytes is 8"),
        ({"slots": 4, "low_free": 0.5, "high_free": 0.1}, "watermarks"),
        ({"slots": 4, "low_free": float("nan")}, "watermarks"),
        ({"slots": 4, "groups": []}, "there are 0 groups"),
        ({"slots": 4, "groups": ["full"]}, "which is no Group"),
        ({"slots": 4, "groups": [Group("a"), Group("a")]}, "two groups have the name 'a'"),
        ({"slots": 4, "groups": [Group("a", need="most")]}, "need is 'most'"),
        ({"slots": 4, "groups": [Group("a", need=kvmem.last(0))]}, "need is 0"),
        ({"slots": 4, "max_plans": 0}, "max_plans is 0"),
        ({"slots": 1 << 33}, "slots is 8589934592"),
    ],
)
def test_what_makes_no_index_is_refused_by_name(options, what):
    with pytest.raises(InvalidArgument) as error:
        Index(**options)
    assert what in str(error.value)


def test_calls_refuse_what_they_cannot_mean():
    index = Index(slots=4, ranks=2)
    plan = index.plan_store(keys(1))
    for call in (
        lambda: index.finish(plan, 2),
        lambda: index.finish(plan, -1),
        lambda: index.finish(plan.id + 1),
        lambda: index.finish("plan"),
        lambda: index.reserve(keys(1), pending="maybe"),
        lambda: index.reserve(keys(1), expires_seconds=-1.0),
        lambda: index.plan_store(keys(1), value=0.0),
        lambda: index.plan_store(keys(1), value=float("nan")),
        lambda: index.plan_store(keys(1), ranges={"none": (0, 1)}),
        lambda: index.plan_store(keys(1), ranges={"full": (0, 2)}),
    ):
        with pytest.raises(InvalidArgument):
            call()
    assert index.finish(plan, 0) is False
    with pytest.raises(InvalidArgument, match="finished plan"):
        index.finish(plan, 0)
    assert index.finish(plan, 1) is True


def test_plans_and_reservations_of_another_index_are_refused():
    here, there = Index(slots=4), Index(slots=4)
    plan, other = here.plan_store(keys(1)), there.plan_store(keys(1))
    with pytest.raises(InvalidArgument, match="the plan is of another index"):
        there.finish(plan)
    assert there.peek(keys(1)) == 0
    assert here.finish(plan)
    assert there.finish(other)
    hit = here.reserve(keys(1))
    with pytest.raises(InvalidArgument, match="the reservation is of another index"):
        there.begin(hit)
    with pytest.raises(InvalidArgument, match="the reservation is of another index"):
        there.keep(hit, 0)
    assert here.finish(here.begin(hit))


def test_a_buffer_that_is_refused_is_let_go():
    buffer = bytearray(33)
    with pytest.raises(InvalidArgument, match="no multiple of the 32"):
        Index(slots=4, key_bytes=32).peek(buffer)
    buffer.append(1)  # BufferError while anybody has it


def test_ranges_that_run_code_of_the_callers_come_before_the_keys():
    names = keys(1, 4)

    class Last:
        def __index__(self):
            names.clear()
            return 4

    index = Index(slots=8)
    assert len(index.plan_store(names, ranges={"full": (0, Last())})) == 0
    assert index.stats()["groups"]["full"]["free"] == 8


def test_a_block_of_code_ends_well_though_its_reservation_has_ended():
    index = Index(slots=4)
    stored(index, keys(1))
    with index.reserve(keys(1), owner="a") as hit:
        assert len(hit) == 1
        assert index.drop_owner("a") == 1


def test_a_forked_child_is_told():
    code = """
        import os, kvmem
        index = kvmem.Index(slots=4)
        index.finish(index.plan_store([b"x" * 16]))
        hit = index.reserve([b"x" * 16])
        child = os.fork()
        if child == 0:
            try:
                index.reserve([b"x" * 16])
            except kvmem.Forked:
                del hit
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert len(index.begin(hit)) == 1
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


class IndexMachine(RuleBasedStateMachine):
    """Two owners of the same keys, two ranks; what is found is what was stored and not evicted."""

    chain = st.tuples(st.integers(0, 3), st.integers(1, 5)).map(lambda c: keys(10 * c[0], c[1]))

    def __init__(self):
        super().__init__()
        self.index = Index(slots=10, ranks=2, policy="arc")
        self.open = {}  # id -> (is a store, keys it writes or reads, ranks that ended, ok)
        self.published = set()

    @rule(names=chain, owner=st.sampled_from(["one", "two"]))
    def store(self, names, owner):
        plan = self.index.try_plan_store(names, owner)
        if plan is not None and plan.id:
            written = {names[i] for i in plan.positions["full"].tolist()}
            for store, held, _, good in self.open.values():
                assert not (store and good and written & held), "two write one key"
            self.open[plan.id] = (True, written, set(), True)

    @rule(names=chain, owner=st.sampled_from(["one", "two"]))
    def load(self, names, owner):
        plan = self.index.plan_load(names, owner)
        assert set(names[: len(plan)]) <= self.published, "readable and never published"
        if len(plan):
            self.open[plan.id] = (False, set(names[: len(plan)]), set(), True)

    @rule(data=st.data(), rank=st.integers(0, 1), ok=st.booleans())
    def finish(self, data, rank, ok):
        if not self.open:
            return
        number = data.draw(st.sampled_from(sorted(self.open)))
        store, held, ended, good = self.open[number]
        if rank in ended:
            with pytest.raises(InvalidArgument):
                self.index.finish(number, rank, ok)
            return
        last = self.index.finish(number, rank, ok)
        assert last == (len(ended) == 1)
        self.open[number] = (store, held, ended | {rank}, good and ok)
        if last:
            del self.open[number]
            if store and good and ok:
                self.published |= held

    @invariant()
    def what_is_read_stays(self):
        for store, held, _, _ in self.open.values():
            for key in held:
                assert self.index.state(key) != "missing" or store

    @invariant()
    def slots_are_conserved(self):
        its = self.index.stats()["groups"]["full"]
        assert its["free"] + its["writing"] + its["ready"] + its["leaving"] == its["slots"]


IndexMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestIndexMachine = IndexMachine.TestCase
