"""The cache under random calls, beside what must be true of it: a dict of what was stored."""

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kvmem
from keyed_cache import BLOCK, KeyedCache, keys
from kvmem import READY, Disk, Group, InvalidArgument, last
from kvmem.testing import stall
from support import PATIENCE, until

GROUPS = (Group("full"), Group("window", last(2)), Group("state", "state"))
CHAIN = 5
owners = st.sampled_from(["a", "b"])
chains = st.integers(0, 2)
counts = st.integers(1, CHAIN)


class CacheMachine(RuleBasedStateMachine):
    """Three chains of keys, full, window and state, a host tier and a disk too small for all."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.device = kvmem.open_device("host", workers=1)
        disk = Disk(Path(self.folder.name) / "d", 36 * 2 * BLOCK, landing_blocks=1, workers=1)
        self.keyed = KeyedCache(
            self.device, slots=6, landing=1, groups=GROUPS, reaper=False, disk=disk
        )
        self.stored = {}  # (group, key): the version of its bytes
        self.versions = {}  # of keys: another one when all its blocks were evicted
        self.hits = []  # (owner, keys, hit)
        self.moved = {}  # by owner: blocks offloaded, restored
        self.stream = self.device.stream()

    # ---- what the model knows ----

    def versioned(self, key):
        """What the bytes of a key follow from."""
        return key + bytes([self.versions.get(key, 0)])

    def longest(self, names):
        """How many leading keys could be found at most."""
        for length in range(len(names), 0, -1):
            needed = [
                (group.name, names[i])
                for group in GROUPS
                for i in range(length)
                if KeyedCache.needs(group, i, length)
            ]
            if all(each in self.stored for each in needed):
                return length
        return 0

    def blocks_moved(self, direction):
        """By the managers, who know nothing of keys or owners."""
        return sum(m.stats()[direction]["blocks_done"] for m in self.keyed.managers.values())

    def count(self, owner, offloaded=0, restored=0):
        before = self.moved.get(owner, (0, 0))
        self.moved[owner] = (before[0] + offloaded, before[1] + restored)

    # ---- what is done ----

    def begin_store(self, owner, chain, count, after, states):
        names = keys(100 * chain, count)
        self.keyed.fill([self.versioned(key) for key in names], range(count))
        blocks = {"full": range(count), "window": range(count)}
        blocks["state"] = [-1] * (count - states) + list(range(count - states, count))
        if self.hits:
            return names, self.keyed.cache.try_store(names, blocks, after=after, owner=owner)
        # Only writes to disk hold anything then, and they end.
        return names, self.keyed.cache.store(
            names, blocks, after=after, owner=owner, timeout=PATIENCE
        )

    @initialize()
    def begin_with_more_than_fits_in_host_memory(self):
        for chain in range(3):
            self.store("a", chain, CHAIN, True)
            self.flush()

    @rule(owner=owners, chain=chains, count=counts, every_state=st.booleans())
    def store(self, owner, chain, count, every_state):
        before = self.blocks_moved("offload")
        states = count if every_state else 1
        names, transfer = self.begin_store(owner, chain, count, READY, states)
        if transfer is None:
            return
        transfer.wait(PATIENCE)
        self.count(owner, offloaded=self.blocks_moved("offload") - before)
        covered = transfer.covered
        for group in GROUPS:
            given = range(count - states if group.need == "state" else 0, count)
            for i in given:
                if i < covered:
                    self.stored[group.name, names[i]] = self.versions.get(names[i], 0)
        if covered == count:
            assert len(self.keyed.cache.reserve(names)) == count

    @rule(owner=owners, chain=chains, count=counts)
    def store_and_cancel(self, owner, chain, count):
        with stall(self.device, self.stream):
            _, transfer = self.begin_store(owner, chain, count, self.stream, 1)
            if transfer is None or transfer.done():
                return
            transfer.cancel()
        until(lambda: self.keyed.cache.poll() == 0)
        assert transfer.state == "cancelled"

    @rule(owner=owners, chain=chains, count=counts)
    def hold(self, owner, chain, count):
        if len(self.hits) >= 3:
            return
        names = keys(100 * chain, count)
        hit = self.keyed.cache.reserve(names, owner=owner)
        assert len(hit) <= self.longest(names)
        self.hits.append((owner, names, hit))

    @precondition(lambda self: self.hits)
    @rule(length=st.integers(0, CHAIN))
    def load(self, length):
        self.load_kept(*self.hits.pop(0), length)

    @rule(owner=owners, chain=chains, count=counts)
    def reserve_and_load(self, owner, chain, count):
        names = keys(100 * chain, count)
        self.load_kept(owner, names, self.keyed.cache.reserve(names, owner=owner), count)

    def load_kept(self, owner, names, hit, length):
        kept = hit.keep(length)
        assert kept == len(hit) <= length
        assert kept <= self.longest(names[:length])
        versions = {key: self.versioned(key) for key in names}
        before = self.blocks_moved("restore")
        for array in self.keyed.arrays.values():
            array[8 : 8 + kept] = 0
        transfer = self.keyed.cache.load(
            hit, self.keyed.everywhere(range(8, 8 + kept)), after=READY
        )
        transfer.wait(PATIENCE)
        assert (transfer.state, transfer.loaded, transfer.failed_keys) == ("done", kept, [])
        restored = self.blocks_moved("restore") - before
        assert restored == sum(KeyedCache.needs(g, i, kept) for g in GROUPS for i in range(kept))
        self.count(owner, restored=restored)
        for group in GROUPS:
            for i in range(kept):
                if KeyedCache.needs(group, i, kept):
                    assert self.keyed.holds(versions[names[i]], 8 + i, group.name)

    @precondition(lambda self: self.hits)
    @rule()
    def release(self):
        self.hits.pop(0)[2].release()

    @rule(owner=owners)
    def drop_owner(self, owner):
        mine = [hit for each, _, hit in self.hits if each == owner and len(hit) > 0]
        assert self.keyed.cache.drop_owner(owner) == len(mine)
        self.hits = [each for each in self.hits if each[0] != owner]
        for hit in mine:
            try:
                self.keyed.cache.load(hit, self.keyed.everywhere(range(len(hit))), after=READY)
            except InvalidArgument:
                continue
            raise AssertionError("a hit of a dropped owner was loaded")
        self.moved.pop(owner, None)

    @precondition(lambda self: not self.hits)
    @rule(chain=chains, first=st.integers(0, CHAIN - 1))
    def evict(self, chain, first):
        names = keys(100 * chain + first, CHAIN - first)
        self.keyed.cache.evict(names)
        for key in names:
            self.versions[key] = self.versions.get(key, 0) + 1
            for group in GROUPS:
                self.stored.pop((group.name, key), None)
        assert len(self.keyed.cache.reserve(names)) == 0

    @rule()
    def flush(self):
        assert self.keyed.cache.flush(PATIENCE)

    @precondition(lambda self: not self.hits)
    @rule()
    def reopen(self):
        assert self.keyed.reopen().quiet  # what was evicted on demand stays away
        self.moved.clear()

    @invariant()
    def owners_have_what_was_delivered(self):
        for owner, (offloaded, restored) in self.moved.items():
            counts = self.keyed.cache.owner(owner)
            if counts is None:
                assert (offloaded, restored) == (0, 0)
                continue
            assert (counts["offloads"], counts["restores"]) == (offloaded, restored)

    @invariant()
    def the_cache_adds_up(self):
        self.keyed.cache._check()
        assert self.keyed.cache.stats()["transfers"] == 0

    def teardown(self):
        for _, _, hit in self.hits:
            hit.release()
        self.hits.clear()
        try:
            self.keyed.finish()
        finally:
            self.folder.cleanup()


CacheMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=40, deadline=None)
test_a_cache_under_random_calls = CacheMachine.TestCase
