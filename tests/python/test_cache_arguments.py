"""What callers may hand to a cache and an index by mistake, and what they keep in them."""

import gc
import types
import weakref

import numpy as np
import pytest

import kvmem
from keyed_cache import FIELDS, MANIFEST, KeyedCache, keys
from kvmem import READY, Cache, Disk, Group, Index, InvalidArgument, Manifest
from support import PATIENCE


@pytest.fixture
def keyed(device):
    keyed = KeyedCache(device)
    yield keyed
    keyed.finish()


def test_a_cache_and_a_manager_in_a_cycle_are_collected(device):
    keyed = KeyedCache(device)
    (manager,) = keyed.managers.values()
    left = [weakref.ref(keyed.cache), weakref.ref(manager)]
    keyed.cache.engine = keyed
    manager.engine = keyed
    del keyed, manager
    gc.collect()
    assert [each() for each in left] == [None, None]


def test_an_error_may_speak_of_any_text():
    index = Index(1)
    with pytest.raises(InvalidArgument, match="neither a list"):
        index.plan_store("é" * 200)  # what is shown of it ends inside no character
    index.plan_store(keys(1), owner=b"\xff\xfe")
    with pytest.raises(kvmem.PoolExhausted, match="\ufffd"):
        index.plan_store(keys(2))
    assert list(index.holdings()) == ["\ufffd\ufffd"]


@pytest.mark.parametrize(
    "wrong",
    [
        np.array([["a" * 32], [None]], object),
        np.array(["abcdefgh"]),
        np.full((2, 4), np.nan),
        np.array(["2026-01-01"] * 4, "M8[s]").reshape(1, 4),
        np.empty((5, 0), np.uint8),
    ],
    ids=["objects", "text", "floats", "times", "no bytes"],
)
def test_keys_are_bytes(wrong):
    index = Index(4)
    with pytest.raises(InvalidArgument, match="keys"):
        index.plan_store(wrong)
    assert index.key_bytes is None


def test_rows_of_integers_are_keys():
    hashes = np.arange(8, dtype=np.uint64).reshape(2, 4)
    index = Index(4)
    index.finish(index.plan_store(hashes))
    assert index.peek([row.tobytes() for row in hashes]) == 2


def test_what_is_refused_leaves_an_index_as_it_was():
    index = Index(4)
    with pytest.raises(InvalidArgument, match="range"):
        index.plan_store([b"x" * 20], ranges={"full": (3, 2)})
    assert index.key_bytes is None
    with pytest.raises(InvalidArgument, match="group is 5"):
        index.state(keys(1)[0], 5)
    with pytest.raises(InvalidArgument, match="group"):
        index.state(keys(1)[0], -1)


def test_hashes_of_64_bits_are_accesses():
    assert kvmem.count_hits("lru", 2, [2**64 - 1, 1, 2**64 - 1]) == 1
    assert kvmem.count_hits("lru", 2, [2**63, 5, 5]) == 1
    for wrong in ([1.5, 2**64 - 1], [-1, 2**63], [2**64], [True, 2**63 + 1, "a"]):
        with pytest.raises(InvalidArgument, match="keys is"):
            kvmem.count_hits("lru", 2, wrong)


def test_no_error_shows_a_salt():
    for wrong in (b"TOP-SECRET", 5, "TOP-SECRET\ud800", "TOP-SECRET\u0378", "S" * 100_000):
        with pytest.raises(InvalidArgument, match="salt") as error:
            Manifest(**FIELDS | {"salt": wrong})
        assert "SECRET" not in str(error.value)


def test_a_manifest_that_can_be_made_can_be_read():
    most = {f"group {i}": "layer" for i in range(4096)}
    made = Manifest(**FIELDS | {"groups": most})
    assert Manifest.from_bytes(made.to_bytes()) == made
    with pytest.raises(InvalidArgument, match="4097"):
        Manifest(**FIELDS | {"groups": most | {"one more": "layer"}})


@pytest.mark.parametrize("name", [3, None, b"full", "full\ud800"])
def test_the_name_of_a_group_is_text(name):
    with pytest.raises(InvalidArgument, match="name"):
        Group(name)


def test_managers_are_named_by_their_groups(keyed):
    (manager,) = keyed.managers.values()
    for wrong in ({1: manager}, {"other": manager}, {}, {"full": manager, "more": manager}):
        with pytest.raises(InvalidArgument):
            Cache(wrong, groups=[Group("full")])
    with pytest.raises(InvalidArgument):
        Cache({1: manager})
    keyed.cache.close(PATIENCE)
    groups = (Group(name) for name in ["full"])
    Cache({"full": manager}, groups=groups).close(PATIENCE)


@pytest.mark.parametrize("path", [3, None, "a\0b", "a\ud800", b"a\0b"])
def test_a_disk_is_in_a_folder(keyed, path):
    (manager,) = keyed.managers.values()
    with pytest.raises(InvalidArgument, match="path"):
        Cache(manager, MANIFEST, disk=Disk(path, capacity_bytes="1MiB"))


@pytest.mark.parametrize("options", [{"keep": "False"}, {"direct": "no"}, {"direct": 1}])
def test_what_is_not_true_or_false_is_neither(keyed, tmp_path, options):
    (manager,) = keyed.managers.values()
    with pytest.raises(InvalidArgument, match="not True or False"):
        Cache(manager, MANIFEST, disk=Disk(tmp_path, capacity_bytes="1MiB", **options))


def test_counts_have_bounds_and_numbers_come_in_every_form(keyed):
    (manager,) = keyed.managers.values()
    keyed.cache.close(PATIENCE)
    with pytest.raises(InvalidArgument, match="max_events"):
        Cache(manager, max_events=1 << 60)
    Cache(manager, low_free=np.float32(0.25), high_free=np.float64(0.5)).close(PATIENCE)
    for wrong in ("0.5", True, None, 1j):
        with pytest.raises(InvalidArgument, match="low_free"):
            Cache(manager, low_free=wrong)


def test_blocks_by_group_are_any_mapping(keyed):
    keyed.fill(keys(1), [3])
    blocks = types.MappingProxyType({"full": [3]})
    keyed.cache.store(keys(1), blocks, after=READY).wait(PATIENCE)
    assert keyed.load(keys(1)).loaded == 1
