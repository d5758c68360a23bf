"""The cache over a disk: found again after a restart, right bytes or a miss with a reason."""

import asyncio
import gc
import shutil
import stat

import numpy as np
import pytest

import kvmem
from keyed_cache import BLOCK, FIELDS, MANIFEST, KeyedCache, keys, payload
from kvmem import READY, Difference, Disk, Group, InvalidArgument, Manifest, last
from support import PATIENCE, free_slots, until

pytestmark = pytest.mark.host_only("a disk is in real time")

SLOT = 3 * 4096
HYBRID = (Group("full"), Group("window", last(2)), Group("state", "state"))

CHANGES = {
    "model": "m-8b",
    "weights": "rev 2",
    "dtype": "float16",
    "quantisation": "per-tensor",
    "scale_layout": "in front",
    "layers": 33,
    "kv_heads": 9,
    "head_size": 129,
    "block_tokens": 17,
    "groups": {"full": "kv,layer,token,head,dim"},
    "engine": "engine 2",
    "engine_abi": "2",
    "rope": {"theta": 500000.0},
    "adapter": "digest",
    "tp_rank": 1,
    "tp_size": 3,
    "pp_rank": 1,
    "pp_size": 3,
    "cp_rank": 1,
    "cp_size": 3,
    "salt": "tenant",
    "kvmem_abi": 2,
}
PATHS = {"groups": "groups.full", "rope": "rope.theta"}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def make_keyed(device, folder):
    made = []

    def make(*, slots=4, disk_slots=32, landing=2, disk=None, **options):
        disk = {"landing_blocks": landing, "workers": 2} | (disk or {})
        options["disk"] = Disk(folder, int(disk_slots * SLOT), **disk)
        made.append(KeyedCache(device, slots=slots, landing=landing, **options))
        return made[-1]

    yield make
    for keyed in made:
        keyed.finish()


@pytest.fixture
def keyed(make_keyed):
    return make_keyed()


def from_disk_alone(keyed, names):
    """Store them, and let host memory forget them."""
    keyed.store(names)
    assert keyed.cache.flush(PATIENCE)
    filler = keys(1000, 4)
    keyed.store(filler)
    assert keyed.cache.flush(PATIENCE)
    assert keyed.cache.reserve(names).tiers == {"host": 0, "disk": len(names)}


def test_what_host_memory_has_no_room_for_comes_back_from_disk(keyed):
    from_disk_alone(keyed, keys(1, 4))
    assert keyed.load(keys(1, 4)).loaded == 4
    stats = keyed.cache.stats()
    assert stats["blocks_from_disk"] == 4
    assert stats["landing_free"] == 2
    assert stats["disk"]["reads"]["ended"] == {"ok": 4}
    assert stats["groups"]["full"]["disk"]["ready"] == 8


def test_a_restart_finds_the_disk(keyed):
    keyed.store(keys(1, 4))
    report = keyed.reopen()
    assert (report.quiet, report.unwritten) == (True, 0)
    assert report.disk == {"dropped": 0, "running": 0, "sync_error": 0}
    assert keyed.cache.stats()["disk"]["recovered"] == 4
    assert keyed.load(keys(1, 5)).loaded == 4
    keyed.reopen(disk=Disk(keyed.options["disk"].path, 32 * SLOT, keep=False, landing_blocks=2))
    assert keyed.cache.stats()["disk"]["why_empty"] == "asked for"
    assert keyed.load(keys(1, 5)).loaded == 0


def test_a_restart_finds_the_blocks_of_every_group(make_keyed):
    keyed = make_keyed(groups=HYBRID)
    keyed.store(keys(1, 4))
    keyed.reopen()
    assert keyed.cache.reserve(keys(1, 4)).tiers == {"host": 0, "disk": 7}
    assert keyed.load(keys(1, 4)).loaded == 4


def test_writing_back_waits_for_need_or_for_the_end(make_keyed):
    keyed = make_keyed(slots=8, disk={"write": "back", "write_back_free": 0.25})
    keyed.store(keys(1, 4))
    assert keyed.cache.poll() == 0
    assert keyed.cache.stats()["disk"]["to_write"] == 4
    keyed.store(keys(5, 4))
    until(lambda: keyed.cache.poll() == 0 and keyed.cache.stats()["disk"]["blocks_written"] >= 2)
    assert keyed.reopen().unwritten == 0
    assert keyed.load(keys(1, 8)).loaded == 8


def test_a_cache_without_a_reaper_is_moved_by_its_calls(make_keyed):
    keyed = make_keyed(reaper=False)
    from_disk_alone(keyed, keys(1, 4))
    hit = keyed.cache.reserve(keys(1, 4))
    load = keyed.cache.load(hit, range(8, 12), after=READY)
    until(lambda: keyed.cache.poll() == 0)
    assert load.loaded == 4
    assert all(keyed.holds(key, 8 + i) for i, key in enumerate(keys(1, 4)))


def test_awaiting_a_load_from_disk_wakes_the_task(keyed):
    from_disk_alone(keyed, keys(1, 4))

    async def main():
        hit = keyed.cache.reserve(keys(1, 4))
        await keyed.cache.load(hit, range(8, 12), after=READY)

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
    assert all(keyed.holds(key, 8 + i) for i, key in enumerate(keys(1, 4)))


def test_work_behind_wait_on_sees_what_came_from_disk(keyed, stream):
    from_disk_alone(keyed, keys(1, 4))
    load = keyed.cache.load(keyed.cache.reserve(keys(1, 4)), range(8, 12), after=READY)
    load.wait_on(stream)
    seen = np.zeros((4, BLOCK), np.uint8)
    stream.copy(seen, keyed.arrays["full"][8:12])
    stream.synchronize(PATIENCE)
    assert all((seen[i] == payload(key, "full")).all() for i, key in enumerate(keys(1, 4)))
    load.wait(PATIENCE)


def test_a_cancelled_load_from_disk_gives_its_landing_blocks_back(keyed):
    from_disk_alone(keyed, keys(1, 4))
    load = keyed.cache.load(keyed.cache.reserve(keys(1, 4)), range(8, 12), after=READY)
    load.cancel()
    until(lambda: keyed.cache.poll() == 0)
    assert load.state in {"cancelled", "done"}
    until(lambda: keyed.cache.poll() == 0 and keyed.cache.stats()["landing_free"] == 2)
    del load
    assert keyed.load(keys(1, 4)).loaded == 4


def test_events_tell_the_tiers_apart(make_keyed):
    keyed = make_keyed(max_events=100)
    keyed.store(keys(1))
    assert keyed.cache.flush(PATIENCE)
    assert keyed.cache.take_events() == (
        [("stored", tier, "full", keys(1)[0]) for tier in ("host", "disk")],
        0,
    )


# ---- right bytes, or a miss with a reason ----


def test_a_wrong_byte_on_disk_cuts_the_prefix_and_is_a_miss_from_then(keyed, folder):
    keyed.store(keys(1, 4))
    keyed.reopen()
    files = (folder / "slots-0000.kv").read_bytes()
    at = files.index(keyed.arrays["full"][2].tobytes())  # of the third key
    with open(folder / "slots-0000.kv", "r+b") as file:
        file.seek(at + 100)
        file.write(bytes([files[at + 100] ^ 4]))
    load = keyed.load(keys(1, 4))
    assert (load.state, load.loaded, load.failed_keys) == ("failed", 2, keys(3))
    with pytest.raises(kvmem.CopyFailed, match="bad_data_sum"):
        load.wait()
    assert len(keyed.cache.reserve(keys(1, 4))) == 2
    miss = keyed.cache.why_miss(keys(3)[0])
    assert (miss.reason, miss.detail) == ("disk_failed", "bad_data_sum")
    stats = keyed.cache.stats()
    assert stats["keys_loaded"] == 2
    assert stats["disk"]["retired"] == 1
    assert stats["owners"]["restores"] == 3  # blocks that arrived, the one behind the gap too


def test_what_was_evicted_on_demand_stays_away_after_a_restart(keyed):
    keyed.store(keys(1, 2))
    assert keyed.cache.flush(PATIENCE)
    assert keyed.cache.evict(keys(1, 2)) == 4
    keyed.reopen()
    assert len(keyed.cache.reserve(keys(1, 2))) == 0


@pytest.mark.parametrize("field", FIELDS)
def test_another_value_of_one_field_is_a_miss_that_names_it(keyed, field):
    assert FIELDS.keys() == CHANGES.keys()
    keyed.store(keys(1, 2))
    other = MANIFEST.replace(**{field: CHANGES[field]})
    keyed.reopen(manifest=other)
    assert len(keyed.cache.reserve(keys(1, 2))) == 0
    assert keyed.load(keys(1, 2)).loaded == 0
    miss = keyed.cache.why_miss(keys(1)[0])
    assert miss.reason == "other_manifest"
    assert [each.field for each in miss.differences] == [PATHS.get(field, field)]
    assert "tenant" not in str(miss)
    keyed.reopen(manifest=MANIFEST)
    assert keyed.load(keys(1, 2)).loaded == 2


def test_a_manifest_is_kept_beside_the_slots_that_were_written_under_it(keyed, folder):
    file = folder / "manifests" / f"{MANIFEST.hexdigest}.kvmf"
    assert Manifest.from_bytes(file.read_bytes()) == MANIFEST
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    keyed.store(keys(1))
    keyed.reopen(manifest=MANIFEST.replace(tp_rank=1))
    assert keyed.cache.why_miss(keys(1)[0]).differences == (Difference("tp_rank", 1, 0),)
    for damaged in (b"", file.read_bytes()[:-1], MANIFEST.replace(layers=2).to_bytes()):
        file.write_bytes(damaged)
        miss = keyed.cache.why_miss(keys(1)[0])
        assert (miss.reason, miss.differences) == ("other_manifest", ())
        assert miss.detail == "the other manifest is not known"
    file.unlink()
    (file.parent / f"{MANIFEST.hexdigest}.new").write_bytes(b"of a crash")
    keyed.reopen(manifest=MANIFEST)
    assert [each.suffix for each in file.parent.iterdir()] == [".kvmf"] * 2
    assert keyed.load(keys(1)).loaded == 1


def test_keys_of_another_manifest_are_explained_by_the_newest_one(keyed):
    hashes = keys(1, 2)
    keyed.store([MANIFEST.key(each) for each in hashes])
    assert keyed.cache.why_miss(keys(99)[0]).differences == ()
    between, now = MANIFEST.replace(tp_rank=1), MANIFEST.replace(dtype="float16")
    keyed.reopen(manifest=between)
    keyed.reopen(manifest=MANIFEST)
    keyed.reopen(manifest=now)
    miss = keyed.cache.why_miss(now.key(hashes[0]))
    assert miss.reason == "never_stored"
    assert miss.differences == (Difference("dtype", "float16", "bfloat16"),)
    assert miss.detail.startswith("the disk had 2 blocks of other manifests; ")


def test_a_disk_of_another_geometry_begins_empty_and_says_what_differs(keyed, device, folder):
    keyed.store(keys(1))
    keyed.cache.close(PATIENCE)
    larger = MANIFEST.replace(head_size=256)
    wide = kvmem.KVLayout.from_arrays([keyed.arrays["full"].reshape(8, 2 * BLOCK)])
    manager = kvmem.Manager(device, wide, host_bytes=4 * 2 * BLOCK)
    disk = Disk(folder, 32 * SLOT, landing_blocks=1)
    with kvmem.Cache(manager, larger, disk=disk) as cache:
        miss = cache.why_miss(keys(1)[0])
        assert miss.reason == "never_stored"
        assert miss.detail.startswith("the disk began empty: it has blocks of 4096 bytes")
        assert miss.differences == (Difference("head_size", 256, 128),)


# ---- disks that cannot be used ----


def test_a_path_that_is_no_folder_of_its_own_is_refused(make_keyed, folder, tmp_path):
    folder.write_text("a file")
    with pytest.raises(InvalidArgument, match="disk tier"):
        make_keyed()
    folder.unlink()
    folder.mkdir()
    (folder / "photos").mkdir()
    with pytest.raises(InvalidArgument, match="holds photos"):
        make_keyed()
    assert [each.name for each in folder.iterdir()] == ["photos"]


def test_a_capacity_below_one_block_is_refused(make_keyed):
    with pytest.raises(kvmem.CapacityError, match="no room for one slot"):
        make_keyed(disk_slots=0.5)
    with pytest.raises(kvmem.CapacityError, match="less than a slot a group"):
        make_keyed(disk_slots=2, groups=HYBRID)


def test_a_folder_belongs_to_one_cache_at_a_time(keyed, device, folder):
    layout = kvmem.KVLayout.from_arrays([keyed.arrays["full"]])
    manager = kvmem.Manager(device, layout, host_bytes=2 * BLOCK)
    with pytest.raises(InvalidArgument, match="in use by process"):
        kvmem.Cache(manager, MANIFEST, disk=Disk(folder, SLOT, landing_blocks=1))
    assert free_slots(manager.pool) == 2


def test_a_disk_without_its_superblock_begins_empty(keyed, folder):
    keyed.store(keys(1))
    keyed.cache.close(PATIENCE)
    (folder / "superblock").unlink()
    keyed.reopen()
    assert keyed.load(keys(1)).loaded == 0
    assert keyed.store(keys(1)).covered == 1


def test_a_vanished_folder_degrades_the_disk_and_the_cache_goes_on(make_keyed, folder):
    keyed = make_keyed(disk={"probe_after_seconds": 3600.0})
    keyed.store(keys(1, 4))
    assert keyed.cache.flush(PATIENCE)
    shutil.rmtree(folder)
    keyed.store(keys(11, 4))
    until(lambda: keyed.cache.poll() == 0 and keyed.cache.stats()["disk"]["degraded"])
    assert keyed.load(keys(11, 4)).loaded == 4
    assert keyed.cache.flush(PATIENCE) is False
    report = keyed.cache.close(PATIENCE)
    assert (report.quiet, report.unwritten > 0) == (True, True)


def test_a_vanished_folder_is_made_anew(make_keyed, folder):
    keyed = make_keyed(disk={"probe_after_seconds": 0.0})
    keyed.store(keys(1, 4))
    assert keyed.cache.flush(PATIENCE)
    shutil.rmtree(folder)
    keyed.store(keys(11, 4))
    until(lambda: keyed.cache.flush(PATIENCE), "writing to a new folder")
    keyed.reopen()
    assert keyed.load(keys(11, 4)).loaded == 4


def test_a_cache_that_is_dropped_without_close_leaves_the_disk_usable(keyed):
    keyed.store(keys(1, 4))
    until(lambda: keyed.cache.stats()["disk"]["blocks_written"] == 4)
    del keyed.cache
    gc.collect()
    keyed.open()
    assert keyed.load(keys(1, 4)).loaded == 4
