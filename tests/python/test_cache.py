"""The cache from Python: right bytes or none, keys and blocks in every form, errors by name."""

import asyncio
import gc

import numpy as np
import pytest

import kvmem
from keyed_cache import BLOCK, MANIFEST, KeyedCache, keys
from kvmem import READY, Cache, Disk, Group, InvalidArgument, ThrashBudget, last
from kvmem.testing import stall
from support import PATIENCE, free_slots, in_thread, run_forked, until

HYBRID = (Group("full"), Group("window", last(2)), Group("state", "state"))


@pytest.fixture
def make_keyed(device):
    made = []

    def make(**options):
        made.append(KeyedCache(device, **options))
        return made[-1]

    yield make
    for keyed in made:
        keyed.finish()


@pytest.fixture
def keyed(make_keyed):
    return make_keyed()


def test_what_was_stored_comes_back_byte_for_byte(keyed):
    stored = keyed.store(keys(1, 5))
    assert (stored.kind, stored.state, stored.covered, stored.present) == ("store", "done", 5, 0)
    assert stored.refused is None
    loaded = keyed.load(keys(1, 8))
    assert (loaded.kind, loaded.state, loaded.loaded, loaded.failed_keys) == ("load", "done", 5, [])
    assert keyed.store(keys(1, 5)).present == 5
    assert keyed.cache.stats()["blocks_from_host"] == 5


def test_a_hit_needs_the_blocks_that_its_groups_say_and_no_others(make_keyed):
    keyed = make_keyed(groups=HYBRID)
    keyed.fill(keys(1, 4), range(4))
    blocks = {"full": range(4), "window": np.arange(4), "state": [-1, -1, -1, 3]}
    keyed.cache.store(keys(1, 4), blocks, after=READY).wait(PATIENCE)
    hit = keyed.cache.reserve(keys(1, 4))
    assert len(hit) == 4
    assert hit.tiers == {"host": 4 + 2 + 1, "disk": 0}
    anything = 1 << 40
    targets = {
        "full": range(8, 12),
        "window": [-1, anything, 10, 11],
        "state": [anything] * 3 + [11],
    }
    keyed.cache.load(hit, targets, after=READY).wait(PATIENCE)
    assert all(keyed.holds(key, 8 + i) for i, key in enumerate(keys(1, 4)))
    assert [keyed.arrays["window"][b].any() for b in range(8, 12)] == [False, False, True, True]
    assert [keyed.arrays["state"][b].any() for b in range(8, 12)] == [False, False, False, True]
    assert keyed.holds(keys(3)[0], 10, "window")
    assert keyed.holds(keys(4)[0], 11, "state")
    assert keyed.cache.reserve(keys(1, 3)).tiers["host"] == 0  # no state is there for a shorter one


def test_what_is_missing_in_a_dict_has_no_blocks(make_keyed):
    keyed = make_keyed(groups=HYBRID[:2])
    keyed.cache.store(keys(1, 2), {"full": [0, 1]}, after=READY).wait(PATIENCE)
    assert len(keyed.cache.reserve(keys(1, 2))) == 0
    keyed.store(keys(1, 2))
    hit = keyed.cache.reserve(keys(1, 2))
    with pytest.raises(InvalidArgument, match="-1"):
        keyed.cache.load(hit, {"full": [8, 9]}, after=READY)
    keyed.cache.load(hit, keyed.everywhere([8, 9]), after=READY).wait(PATIENCE)


@pytest.mark.parametrize(
    "form",
    [list, tuple, b"".join, lambda names: np.array(names, "V32")],
    ids=["list", "tuple", "bytes", "items"],
)
def test_keys_and_blocks_come_in_every_form(make_keyed, form):
    keyed = make_keyed(key_bytes=32)
    names = form(keys(1, 3))
    keyed.fill(keys(1, 3), range(3))
    for blocks in ([0, 1, 2], np.arange(3, dtype=np.uint16), {"full": (0, 1, 2)}):
        keyed.cache.store(names, blocks, after=READY).wait(PATIENCE)
    assert len(keyed.cache.reserve(names)) == 3
    assert keyed.cache.advise(names, prefill_tokens_per_s=1e3, block_tokens=16).restorable == 3
    assert keyed.cache.evict(names) == 3


def test_a_key_that_stands_twice_is_one_block_and_is_delivered_twice(keyed):
    twice = [*keys(1), *keys(1), *keys(2)]
    keyed.fill(twice, range(3))
    stored = keyed.cache.store(twice, [0, 1, 2], after=READY)
    stored.wait(PATIENCE)
    assert stored.covered == 3
    assert keyed.cache.stats()["blocks_stored"] == 2
    assert keyed.load(twice).loaded == 3


def test_empty_calls_are_nothing(keyed):
    for nothing in ([], (), b"", np.empty((0, 32), np.uint8)):
        assert keyed.cache.store(nothing, [], after=READY).state == "done"
        hit = keyed.cache.reserve(nothing)
        assert (len(hit), hit.tiers, hit.pending) == (0, {"host": 0, "disk": 0}, False)
        load = keyed.cache.load(hit, [], after=READY)
        load.wait()
        assert (load.state, load.loaded, load.failed_keys) == ("done", 0, [])
        assert keyed.cache.evict(nothing) == 0
    assert keyed.cache.advise([], prefill_tokens_per_s=1, block_tokens=1).kind == "recompute"


@pytest.mark.parametrize(
    ("names", "blocks", "options", "what"),
    [
        (keys(1, 2), [0, 1, 2], {}, "3 device blocks of group 'full' for 2 keys"),
        (keys(1, 2), [0], {}, "1 device blocks of group 'full' for 2 keys"),
        (keys(1, 2), [0, 16], {}, "16"),
        (keys(1, 3), [0, -1, 2], {}, "not one range"),
        ([b"x" * 32, b"x" * 31], [0, 1], {}, r"keys\[1\] has 31 bytes"),
        ([b"x" * 15], [0], {}, "15 bytes"),
        ("x" * 32, [0], {}, "keys is 'xxx"),
        (keys(1), ["0"], {}, "blocks holds '0'"),
        (keys(1), {"ful": [0]}, {}, "names a group that the cache does not have"),
        (keys(1), {"full": "0"}, {}, r"blocks\['full'\] is '0'"),
        (keys(1), [0], {"after": None}, "after is required"),
        (keys(1), [0], {"after": []}, "after is an empty list"),
        (keys(1), [0], {"priority": "high"}, "priority is 'high'"),
        (keys(1), [0], {"value": 0.0}, "value"),
        (keys(1), [0], {"timeout": -1}, "timeout is -1"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name_and_changes_nothing(
    keyed, names, blocks, options, what
):
    with pytest.raises(InvalidArgument, match=what):
        keyed.cache.store(names, blocks, **({"after": READY} | options))
    stats = keyed.cache.stats()
    assert stats["groups"]["full"]["host"]["free"] == 8
    assert stats["transfers"] == stats["plans"] == 0


def test_a_cache_has_one_length_of_keys(keyed):
    keyed.store(keys(1))
    for call in (
        lambda names: keyed.cache.store(names, [0], after=READY),
        keyed.cache.reserve,
        keyed.cache.evict,
        lambda names: keyed.cache.why_miss(names[0]),
    ):
        with pytest.raises(InvalidArgument, match="20 bytes"):
            call(keys(1, size=20))


def test_a_hit_is_released_or_loaded_once(keyed):
    keyed.store(keys(1, 2))
    hit = keyed.cache.reserve(keys(1, 2))
    with pytest.raises(InvalidArgument, match="1 device blocks"):
        keyed.cache.load(hit, [8], after=READY)
    keyed.cache.load(hit, [8, 9], after=READY).wait(PATIENCE)
    for call in (
        hit.release,
        lambda: hit.keep(1),
        lambda: keyed.cache.load(hit, [8, 9], after=READY),
    ):
        with pytest.raises(kvmem.AlreadyReleased):
            call()
    with keyed.cache.reserve(keys(1, 2)) as hit:
        assert keyed.cache.stats()["reservations"] == 1
        assert hit.keep(1) == len(hit) == 1
    assert keyed.cache.stats()["reservations"] == 0
    with pytest.raises(kvmem.AlreadyReleased):
        hit.release()
    dropped = keyed.cache.reserve(keys(1, 2))
    del dropped
    gc.collect()
    assert keyed.cache.stats()["reservations"] == 0


def test_a_hit_of_another_cache_is_refused(make_keyed):
    one, other = make_keyed(), make_keyed()
    one.store(keys(1))
    with pytest.raises(InvalidArgument, match="another cache"):
        other.cache.load(one.cache.reserve(keys(1)), [8], after=READY)


def test_a_cancelled_store_is_a_miss_and_a_cancelled_load_delivers_nothing(keyed, device, stream):
    gate = stall(device, stream)
    store = keyed.cache.store(keys(1, 2), [0, 1], after=stream)
    assert store.cancel() in {kvmem.CancelOutcome.not_submitted, kvmem.CancelOutcome.draining}
    gate.open()
    with pytest.raises(kvmem.Cancelled):
        store.wait(PATIENCE)
    assert store.cancel() is kvmem.CancelOutcome.already_done
    assert keyed.cache.why_miss(keys(1)[0]).reason == "store_failed"
    keyed.store(keys(1, 2))
    gate = stall(device, stream)
    load = keyed.cache.load(keyed.cache.reserve(keys(1, 2)), [8, 9], after=stream)
    load.cancel()
    gate.open()
    with pytest.raises(kvmem.Cancelled):
        load.wait(PATIENCE)
    assert (load.state, load.loaded, load.failed_keys) == ("cancelled", 0, keys(1, 2))
    assert keyed.cache.stats()["keys_loaded"] == 0


def test_work_behind_wait_on_sees_what_was_loaded(keyed, device, stream):
    keyed.store(keys(1))
    seen = np.zeros(BLOCK, np.uint8)
    load = keyed.cache.load(keyed.cache.reserve(keys(1)), [8], after=READY)
    load.wait_on(stream)
    stream.copy(seen, keyed.arrays["full"][8])
    stream.synchronize(PATIENCE)
    assert (seen == keyed.arrays["full"][0]).all()
    load.wait(PATIENCE)


def test_a_block_in_use_is_refused(keyed, device, stream):
    keyed.store(keys(1))
    with stall(device, stream):
        store = keyed.cache.store(keys(2), [0], after=stream)
        with pytest.raises(kvmem.Busy, match="block 0"):
            keyed.cache.load(keyed.cache.reserve(keys(1)), [0], after=READY)
    store.wait(PATIENCE)
    keyed.cache.load(keyed.cache.reserve(keys(1)), [0], after=READY).wait(PATIENCE)


@pytest.mark.host_only("awaiting moves no virtual clock")
def test_two_tasks_await_loads_of_one_cache(keyed, device):
    keyed.store(keys(1, 4))

    async def load(stream, first):
        hit = keyed.cache.reserve(keys(1, 4))
        await keyed.cache.load(hit, range(first, first + 4), after=stream)
        return [keyed.holds(key, first + i) for i, key in enumerate(keys(1, 4))]

    async def main():
        stream = device.stream()
        gate = stall(device, stream)
        held = asyncio.ensure_future(load(stream, 8))
        assert await load(READY, 4) == [True] * 4
        assert not held.done()
        gate.open()
        assert await held == [True] * 4

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


@pytest.mark.host_only("awaiting moves no virtual clock")
def test_awaiting_raises_the_error_and_cancelling_the_task_cancels_nothing(keyed, device, stream):
    async def main():
        gate = stall(device, stream)
        kept = keyed.cache.store(keys(1), [0], after=stream)
        task = asyncio.ensure_future(kept)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        dropped = keyed.cache.store(keys(2), [1], after=stream)
        dropped.cancel()
        gate.open()
        with pytest.raises(kvmem.Cancelled):
            await dropped
        await kept
        await kept  # again, and at once
        assert kept.state == "done"

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_load_attaches_to_what_is_being_stored(keyed, device, stream):
    keyed.fill(keys(1, 3), range(3))
    with stall(device, stream):
        store = keyed.cache.store(keys(1, 3), [0, 1, 2], after=stream)
        second = keyed.cache.store(keys(1, 3), [3, 4, 5], after=READY)
        assert (second.state, second.covered, second.attached) == ("done", 3, 3)
        stopped = keyed.cache.reserve(keys(1, 3))
        assert (len(stopped), stopped.pending) == (0, True)
        hit = keyed.cache.reserve(keys(1, 3), pending="attach")
        assert (len(hit), hit.pending) == (3, True)
        load = keyed.cache.load(hit, [8, 9, 10], after=READY)
        assert not load.done()
        assert keyed.cache.why_miss(keys(1)[0]).reason == "in_flight"
    load.wait(PATIENCE)
    assert store.done()
    assert all(keyed.holds(key, 8 + i) for i, key in enumerate(keys(1, 3)))
    with pytest.raises(InvalidArgument, match="pending is 'wait'"):
        keyed.cache.reserve(keys(1), pending="wait")


def test_a_load_that_attached_to_a_store_that_failed_delivers_less(keyed, device, stream):
    keyed.store(keys(1))
    gate = stall(device, stream)
    store = keyed.cache.store(keys(2), [1], after=stream)
    load = keyed.cache.load(keyed.cache.reserve(keys(1, 2), pending="attach"), [8, 9], after=READY)
    store.cancel()
    gate.open()
    with pytest.raises(kvmem.CopyFailed, match="attached"):
        load.wait(PATIENCE)
    assert (load.state, load.loaded, load.failed_keys) == ("failed", 1, keys(2))
    assert keyed.holds(keys(1)[0], 8)


def test_what_a_shorter_hit_would_need_may_have_no_block(make_keyed, device, stream):
    keyed = make_keyed(groups=[Group("full"), Group("window", need=last(1))])
    keyed.store(keys(1, 2))
    keyed.fill(keys(3), [2])
    gate = stall(device, stream)
    store = keyed.cache.store(keys(3), keyed.everywhere([2]), after=stream)
    hit = keyed.cache.reserve(keys(1, 3), pending="attach")
    load = keyed.cache.load(hit, {"full": [8, 9, 10], "window": [-1, -1, 10]}, after=READY)
    store.cancel()
    gate.open()
    with pytest.raises(kvmem.CopyFailed, match="attached"):
        load.wait(PATIENCE)
    assert (load.state, load.loaded) == ("failed", 0)


def test_dropping_an_owner_ends_its_hits_and_its_books(keyed):
    keyed.store(keys(1, 2), owner="a")
    keyed.cache.note_tokens("a", 10)
    assert keyed.cache.owner("a")["offloads"] == 2
    assert keyed.cache.owner("a")["bytes_per_token"] == 2 * BLOCK / 10
    mine, other = (keyed.cache.reserve(keys(1, 2), owner=owner) for owner in "ab")
    assert keyed.cache.drop_owner("a") == 1
    assert keyed.cache.owner("a") is None
    assert keyed.cache.stats()["owners"]["offloads"] == 2
    with pytest.raises(InvalidArgument):
        keyed.cache.load(mine, [8, 9], after=READY)
    keyed.cache.load(other, [8, 9], after=READY).wait(PATIENCE)


def test_a_key_is_admitted_the_nth_time(make_keyed):
    keyed = make_keyed(admit_after=3)
    for _ in range(2):
        refused = keyed.store(keys(1, 2))
        assert (refused.state, refused.covered) == ("done", 0)
        assert "offered less than 3 times" in refused.refused
        assert keyed.cache.why_miss(keys(1)[0]).reason == "not_admitted"
    assert keyed.store(keys(1, 2)).covered == 2
    assert keyed.cache.stats()["keys_not_admitted"] == 4


def test_a_thrash_budget_refuses_with_a_reason_and_resumes(make_keyed):
    keyed = make_keyed(
        thrash=ThrashBudget(max_bytes_per_token=BLOCK, resume=0.5, least_bytes="8KiB")
    )
    keyed.cache.note_tokens("a", 1)
    keyed.store(keys(1, 4), owner="a")
    refused = keyed.store(keys(11, 2), owner="a")
    assert refused.covered == 0
    assert "token" in refused.refused
    assert keyed.cache.why_miss(keys(11)[0]).reason == "thrash"
    assert keyed.cache.owner("a")["refused"] == keyed.cache.stats()["keys_refused"] == 2
    assert keyed.store(keys(11), owner="b").covered == 1
    keyed.cache.note_tokens("a", 2)  # below the limit, and not yet below half of it
    assert keyed.store(keys(12), owner="a").covered == 0
    keyed.cache.note_tokens("a", 100)
    assert keyed.store(keys(12), owner="a").covered == 1


def test_advice_compares_restoring_recomputing_and_waiting(keyed, device, stream):
    assert keyed.cache.advise(keys(1), prefill_tokens_per_s=1e3, block_tokens=16).restorable == 0
    keyed.store(keys(1, 2))
    with stall(device, stream):
        keyed.cache.store(keys(3, 2), [2, 3], after=stream)
        slow = keyed.cache.advise(keys(1, 5), prefill_tokens_per_s=1.0, block_tokens=16)
        assert (slow.restorable, slow.pending, slow.kind) == (2, 2, "wait")
        assert slow.recompute_seconds == 5 * 16
        assert slow.restore_seconds == pytest.approx(3 * 16, rel=0.01)
        quick = keyed.cache.advise(keys(1, 2), prefill_tokens_per_s=1e12, block_tokens=16)
        assert quick.kind == "recompute"
        here = keyed.cache.advise(keys(1, 2), prefill_tokens_per_s=1.0, block_tokens=16)
        assert here.kind == "restore"
    assert keyed.cache.stats()["reservations"] == 0
    with pytest.raises(InvalidArgument, match="no manifest"):
        keyed.cache.advise(keys(1), prefill_tokens_per_s=1e3)
    with pytest.raises(InvalidArgument, match="prefill_tokens_per_s is 0"):
        keyed.cache.advise(keys(1), prefill_tokens_per_s=0, block_tokens=16)


def test_events_name_tier_group_and_key(make_keyed):
    keyed = make_keyed(groups=HYBRID[:2], max_events=4)
    keyed.store(keys(1))
    keyed.cache.evict(keys(1))
    events, lost = keyed.cache.take_events()
    assert lost == 0
    assert sorted(events) == sorted(
        (kind, "host", group, keys(1)[0])
        for kind in ("stored", "removed")
        for group in ("full", "window")
    )
    assert keyed.cache.take_events() == ([], 0)
    keyed.store(keys(1, 3))
    assert keyed.cache.take_events()[1] == 4  # what was too old to be of use


def test_a_store_without_room_says_who_holds_what(keyed):
    keyed.store(keys(1, 8))
    with keyed.cache.reserve(keys(1, 8), owner="req-17"):
        assert keyed.cache.try_store(keys(11), [0], after=READY) is None
        assert keyed.cache.why_miss(keys(11)[0]).reason == "no_room"
        with pytest.raises(kvmem.PoolExhausted, match="req-17") as error:
            keyed.cache.store(keys(11), [0], after=READY, timeout=0)
        assert error.value.free == 0
    assert keyed.store(keys(11)).covered == 1


@pytest.mark.host_only("a thread that waits passes the time-outs of virtual time at once")
def test_a_store_that_waits_for_room_lets_other_threads_make_it(keyed):
    keyed.store(keys(1, 8))
    hit = keyed.cache.reserve(keys(1, 8))
    keyed.fill(keys(11), [0])
    waiting = in_thread(keyed.cache.store, keys(11), [0], after=READY, timeout=PATIENCE)
    assert not waiting.done()
    hit.release()
    waiting.result(PATIENCE).wait(PATIENCE)
    assert keyed.load(keys(11)).loaded == 1


def test_eviction_makes_room_and_says_so(keyed):
    keyed.store(keys(1, 8))
    keyed.store(keys(21, 2))
    assert keyed.cache.why_miss(keys(8)[0]).reason == "evicted"  # tail first
    assert keyed.cache.why_miss(keys(1)[0]).reason == "none"
    assert keyed.cache.why_miss(keys(99)[0]).reason == "never_stored"
    assert keyed.cache.evict(keys(1, 2)) == 2
    assert keyed.cache.why_miss(keys(1)[0]).reason == "removed"
    assert keyed.cache.clear() == 6
    with pytest.raises(InvalidArgument, match="key is 'k'"):
        keyed.cache.why_miss("k")


def test_close_reports_and_everything_after_it_is_refused(keyed, device, stream):
    keyed.store(keys(1))
    hit = keyed.cache.reserve(keys(1))
    gate = stall(device, stream)
    store = keyed.cache.store(keys(2), [1], after=stream)
    report = keyed.cache.close(0)
    assert (report.quiet, report.cancelled, report.disk) == (False, 1, None)
    gate.open()
    until(store.done)
    assert free_slots(keyed.pools["full"]) == 0
    assert keyed.cache.close(PATIENCE).quiet
    assert free_slots(keyed.pools["full"]) == 8
    for call in (
        lambda: keyed.cache.store(keys(3), [0], after=READY),
        lambda: keyed.cache.try_store(keys(3), [0], after=READY),
        lambda: keyed.cache.reserve(keys(1)),
        lambda: keyed.cache.load(hit, [8], after=READY),
        lambda: keyed.cache.evict(keys(1)),
        keyed.cache.clear,
    ):
        with pytest.raises(kvmem.Closed):
            call()
    assert keyed.cache.stats()["stores"] == 1
    keyed.cache.note_tokens("a", 1)  # books go on


@pytest.mark.host_only("the copy threads are what a child lacks")
def test_a_forked_child_is_told_so(keyed):
    keyed.store(keys(1))
    hit = keyed.cache.reserve(keys(1))
    transfer = keyed.cache.store(keys(2), [1], after=READY)
    transfer.wait(PATIENCE)

    def child():
        for call in (
            lambda: keyed.cache.store(keys(3), [0], after=READY),
            lambda: keyed.cache.reserve(keys(1)),
            lambda: keyed.cache.load(hit, [8], after=READY),
            lambda: keyed.cache.note_tokens("a", 1),
            lambda: keyed.cache.owner("a"),
            lambda: keyed.cache.drop_owner("a"),
            lambda: keyed.cache.why_miss(keys(1)[0]),
            lambda: keyed.cache.evict(keys(1)),
            keyed.cache.stats,
            keyed.cache.poll,
            keyed.cache.close,
            transfer.wait,
            transfer.cancel,
        ):
            with pytest.raises(kvmem.Forked):
                call()

    assert run_forked(child) == ""
    assert keyed.load(keys(1)).loaded == 1


def test_whatever_outlives_the_cache_does_no_harm(device, stream):
    keyed = KeyedCache(device)
    gate = stall(device, stream)
    store = keyed.cache.store(keys(1, 2), [0, 1], after=stream)
    hit = keyed.cache.reserve(keys(1, 2), pending="attach")
    load = keyed.cache.load(hit, [8, 9], after=READY)
    del keyed.cache
    gc.collect()
    gate.open()
    load.wait(PATIENCE)
    assert store.done()
    del store, hit, load
    gc.collect()
    until(lambda: free_slots(keyed.pools["full"]) == 8)
    assert keyed.managers["full"].close(PATIENCE).quiet


@pytest.mark.host_only("a storm of real threads in real time")
def test_threads_store_and_load_at_once(make_keyed):
    keyed = make_keyed(slots=12, blocks=32)
    wrong = []

    def work(number):
        first, mine = 8 * number, keys(10 * number, 4)
        for _ in range(20):
            keyed.store(mine, first, owner=str(number))
            if keyed.load(mine, first + 4).loaded > 4:
                wrong.append(number)

    threads = [in_thread(work, number) for number in range(4)]
    for thread in threads:
        thread.result(2 * PATIENCE)
    assert not wrong
    stats = keyed.cache.stats()
    assert stats["owners"]["restores"] == stats["blocks_from_host"]
    assert stats["plans"] == stats["transfers"] == 0


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"policy": "fifo"}, "fifo"),
        ({"policy": 7}, "policy is 7"),
        ({"admit_after": 0}, "admit_after is 0"),
        ({"admit_after": 256}, "admit_after is 256"),
        ({"slots": 0}, "slots is 0"),
        ({"slots": 1 << 32}, "slots is 4294967296"),
        ({"key_bytes": 8}, "key_bytes"),
        ({"max_transfers": 0}, "max_transfers is 0"),
        ({"low_free": 2.0}, "the watermarks are 2 and 0"),
        ({"low_free": "much"}, "low_free is 'much'"),
        ({"host_bytes_per_second": 0.0}, "host_bytes_per_second is 0"),
        ({"host_bytes_per_second": float("nan")}, "host_bytes_per_second is nan"),
        ({"manifest": "m"}, "manifest is 'm'"),
        ({"disk": "/d"}, "disk is '/d'"),
        ({"thrash": 3}, "thrash is 3"),
        ({"thrash": ThrashBudget(resume=2.0)}, "resume"),
        ({"thrash": ThrashBudget(max_unused_share=-1.0)}, "max_unused_share"),
        ({"thrash": ThrashBudget(least_bytes="lots")}, "least_bytes is 'lots'"),
        ({"groups": ["full"]}, "'full', which is no Group"),
        ({"groups": []}, "0 groups"),
        ({"groups": HYBRID}, "3 groups"),
        ({"disk": Disk("d", 1 << 20), "manifest": None}, "a disk needs one"),
        ({"disk": Disk("d", "big")}, "capacity_bytes is 'big'"),
        ({"disk": Disk("d", 1 << 20, write="maybe")}, "write is 'maybe'"),
        ({"disk": Disk("d", 1 << 20, sync="often")}, "sync is 'often'"),
        ({"disk": Disk("d", 1 << 20, workers=0)}, "workers is 0"),
        ({"disk": Disk("d", 1 << 20, landing_blocks=0)}, "landing_blocks is 0"),
        ({"disk": Disk("d", 1 << 20, write_back_free=2.0)}, "write_back_free is 2"),
    ],
)
@pytest.mark.host_only("it is about arguments")
def test_what_a_cache_cannot_be_is_refused_by_name(device, tmp_path, monkeypatch, options, what):
    monkeypatch.chdir(tmp_path)
    layout = kvmem.KVLayout.from_arrays([np.zeros((4, BLOCK), np.uint8)])
    manager = kvmem.Manager(device, layout, host_bytes=4 * BLOCK, reaper=False)
    with pytest.raises(InvalidArgument, match=what):
        Cache(manager, **({"manifest": MANIFEST} | options))
    assert free_slots(manager.pool) == 4
    assert not list(tmp_path.iterdir())


@pytest.mark.host_only("it is about arguments")
def test_managers_and_groups_belong_together(device):
    layout = kvmem.KVLayout.from_arrays([np.zeros((4, BLOCK), np.uint8)])
    manager = kvmem.Manager(device, layout, host_bytes=4 * BLOCK, reaper=False)
    elsewhere = kvmem.Manager(kvmem.open_device("host"), layout, host_bytes=4 * BLOCK, reaper=False)
    for managers, groups, what in (
        ({}, None, "0 groups"),
        ({"full": manager}, HYBRID, "and the groups are full, window, state"),
        ({"full": 7}, None, "the manager of group 'full' is 7"),
        (7, None, "the manager of group 'full' is 7"),
        ({"full": manager, "other": elsewhere}, None, "on another device"),
    ):
        with pytest.raises(InvalidArgument, match=what):
            Cache(managers, groups=groups, slots=1)
    with pytest.raises(kvmem.CapacityError, match="cannot give the cache 5 slots"):
        Cache(manager, slots=5)
    with Cache(manager, slots=3) as cache, pytest.raises(kvmem.CapacityError):
        Cache(manager, slots=2)
    assert cache.manifest is None
