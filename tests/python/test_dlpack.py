"""Host blocks as tensors of other libraries: DLPack, read by NumPy and by hand."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvmem
from cuda_support import fake_cudart, run_cuda
from dlpack_abi import CPU, CUDA, CUDA_HOST, LEGACY, UNSIGNED, USED, VERSIONED, Taken, name_of
from kvmem.testing import advance, lose
from support import PATIENCE, Cache, free_slots, in_thread, run_child, run_forked, until

MakePool = Callable[..., kvmem.BlockPool]


def blocks_of(pool: kvmem.BlockPool, *slots: int) -> kvmem.HostBlocks:
    """Blocks of those slots, in that order: the pool hands out last what came home first."""
    holders = {int(each.indices[0]): each for each in (pool.acquire(1) for _ in range(4))}
    for slot in reversed(slots):
        holders[slot].release()
    blocks = pool.acquire(len(slots))
    assert blocks.indices.tolist() == list(slots)
    return blocks


# ---- what a library sees


def test_numpy_reads_and_writes_the_blocks_themselves(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(3)
    for i in range(3):
        blocks[i][:] = i + 1
    tensor = np.from_dlpack(blocks)
    assert (tensor.shape, tensor.dtype) == ((3, 4096), np.uint8)
    assert tensor.ctypes.data == blocks[0].ctypes.data
    assert (tensor == [[1], [2], [3]]).all()
    tensor[1] = 9
    assert (blocks[1] == 9).all()


def test_the_padding_of_a_slot_is_stepped_over(make_pool: MakePool) -> None:
    pool = make_pool(slots=3, block_bytes=5000)
    blocks = pool.acquire(3)
    tensor = np.from_dlpack(blocks)
    assert (tensor.shape, tensor.strides) == ((3, 5000), (8192, 1))
    blocks[2][-1] = 7
    assert tensor[2, -1] == 7


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 3), (2, 0)], ids=str)
def test_the_capsule_is_a_versioned_one_for_those_who_know_it(
    make_pool: MakePool, version: Any
) -> None:
    pool = make_pool(slots=2, block_bytes=5000)
    blocks = pool.acquire(2)
    capsule = blocks.__dlpack__(max_version=version)
    assert name_of(capsule) == (VERSIONED if version and version[0] >= 1 else LEGACY)
    taken = Taken(capsule)
    tensor = taken.tensor
    assert (tensor.data, tensor.byte_offset) == (blocks[0].ctypes.data, 0)
    assert (tensor.device_type, tensor.device_id) == (CPU, 0)
    assert (tensor.code, tensor.bits, tensor.lanes) == (UNSIGNED, 8, 1)
    assert (tensor.axes, tensor.shape[:2], tensor.strides[:2]) == (2, [2, 5000], [8192, 1])
    if version and version[0] >= 1:
        assert (taken.managed.major, taken.managed.minor, taken.managed.flags) == (1, 0, 0)
    taken.drop()


@pytest.mark.parametrize("pin", ["never", "required"])
def test_memory_that_cuda_has_not_pinned_is_the_cpus(device: kvmem.Device, pin: Any) -> None:
    pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=4096, pin=pin)
    assert pool.pinned == (pin == "required")
    blocks = pool.acquire(1)
    assert blocks.__dlpack_device__() == (CPU, 0)
    assert Taken(blocks.__dlpack__()).tensor.device_type == CPU


def test_memory_that_cuda_has_pinned_is_the_cpus_unless_it_is_asked_for(fakes: Path) -> None:
    """As torch and CuPy say it: torch takes no other."""
    script = """
        import json
        import kvmem
        import numpy as np
        from dlpack_abi import Taken

        def type_on(blocks, wanted):
            try:
                return Taken(blocks.__dlpack__(dl_device=wanted)).tensor.device_type
            except BufferError as refused:
                return str(refused)

        device = kvmem.open_device("cuda")
        said = {}
        for pin in ("auto", "never"):
            pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=8192, pin=pin)
            blocks = pool.acquire(2)
            blocks[0][:], blocks[1][:] = 3, 4
            types = [type_on(blocks, wanted) for wanted in (None, (1, 0), (3, 0))]
            read = np.from_dlpack(blocks)[:, -1].tolist()
            said[pin] = [pool.pinned, blocks.__dlpack_device__(), types, read]
        print(json.dumps(said))
    """
    refused = "dl_device is (3, 0): host blocks stay where they are, which is (1, 0)"
    assert run_cuda(script, KVMEM_CUDART_PATH=fake_cudart(13, fakes)) == {
        "auto": [True, [CPU, 0], [CPU, CPU, CUDA_HOST], [3, 4]],
        "never": [False, [CPU, 0], [CPU, CPU, refused], [3, 4]],
    }


def test_torch_takes_them_pinned_by_cuda(fakes: Path) -> None:
    pytest.importorskip("torch")
    script = """
        import json
        import kvmem
        import torch

        device = kvmem.open_device("cuda")
        pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=8192)
        blocks = pool.acquire(2)
        torch.from_dlpack(blocks)[1] = 5
        print(json.dumps([pool.pinned, int(blocks[1].min())]))
    """
    assert run_cuda(script, KVMEM_CUDART_PATH=fake_cudart(13, fakes)) == [True, 5]


def test_torch_takes_them(pool: kvmem.BlockPool) -> None:
    torch = pytest.importorskip("torch")
    blocks = pool.acquire(2)
    tensor = torch.from_dlpack(blocks)
    tensor[1] = 5
    assert (blocks[1] == 5).all()
    assert kvmem.KVLayout.from_arrays([tensor]).regions[0].address == blocks[0].ctypes.data


# ---- which blocks


@pytest.mark.parametrize("slots", [(2,), (0, 1, 2), (0, 2), (1, 3)], ids=str)
def test_evenly_spaced_blocks_are_one_tensor(pool: kvmem.BlockPool, slots: Any) -> None:
    blocks = blocks_of(pool, *slots)
    tensor = np.from_dlpack(blocks)
    for i, slot in enumerate(slots):
        blocks[i][:] = slot
    assert (tensor == np.array(slots)[:, None]).all()
    assert tensor.shape == (len(slots), 4096)


@pytest.mark.parametrize("slots", [(1, 0), (0, 1, 3), (0, 2, 3), (2, 1, 0)], ids=str)
def test_others_are_refused_and_exported_one_at_a_time(pool: kvmem.BlockPool, slots: Any) -> None:
    blocks = blocks_of(pool, *slots)
    with pytest.raises(BufferError, match=r"evenly spaced.*one at a time.*blocks\[i:i\+1\]"):
        np.from_dlpack(blocks)
    free = free_slots(pool)
    for i, slot in enumerate(slots):
        tensor = np.from_dlpack(blocks[i : i + 1])
        assert tensor.ctypes.data == pool.array[slot].ctypes.data
    assert free_slots(pool) == free  # the refusal held nothing


def test_blocks_that_were_pinned_in_several_pieces_are_exported_in_parts() -> None:
    """CUDA refuses a copy that crosses from one registration into the next, or ruins it."""
    device = kvmem.open_device("virtual")
    pool = kvmem.BlockPool(
        device, block_bytes=4096, capacity_bytes=256 * 4096, pin="required", pin_gbps=0.001
    )
    blocks = pool.acquire(pool.capacity)
    assert blocks.indices.tolist() == list(range(256))
    piece = 500_000 // 4096  # half a second
    with pytest.raises(BufferError, match="in more than one piece"):
        np.from_dlpack(blocks)
    with pytest.raises(BufferError, match="in more than one piece"):
        np.from_dlpack(blocks[piece - 1 : piece + 1])
    for start in (0, piece, 2 * piece):
        part = blocks[start : min(start + piece, 256)]
        assert np.from_dlpack(part).shape == (len(part), 4096)


def test_a_slot_that_stands_twice_is_refused(cache: Cache) -> None:
    copy = cache.stored(0)
    twice = kvmem.HostCopy.concat([copy, copy])
    with pytest.raises(BufferError, match="evenly spaced"):
        np.from_dlpack(twice.blocks)


def test_a_slice_is_a_further_holder_of_its_blocks(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(4)
    slots = blocks.indices
    middle, last = blocks[1:3], blocks[-1:]
    assert middle.indices.tolist() == slots[1:3].tolist()
    assert last.indices.tolist() == slots[3:].tolist()
    blocks.release()
    assert free_slots(pool) == 1
    middle.release()
    assert free_slots(pool) == 3
    last.release()
    assert free_slots(pool) == 4
    with pytest.raises(kvmem.AlreadyReleased):
        blocks[0:1]


def test_a_slice_has_step_one_and_at_least_one_block(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(2)
    for bad in (slice(None, None, 2), slice(None, None, -1)):
        with pytest.raises(kvmem.InvalidArgument, match="step 1"):
            blocks[bad]
    for bad in (slice(1, 1), slice(2, None), slice(1, 0)):
        with pytest.raises(kvmem.InvalidArgument, match="at least one block"):
            blocks[bad]
    assert blocks[:].indices.tolist() == blocks[0:99].indices.tolist() == blocks.indices.tolist()


def test_the_result_of_an_offload_is_exported_through_its_blocks(cache: Cache) -> None:
    cache.fill(3, 40)
    copy = cache.stored(3)
    tensor = np.from_dlpack(copy.blocks)
    copy.release()
    assert (tensor[0] == cache.expected(40)).all()
    free = free_slots(cache.pool)
    del tensor
    gc.collect()
    assert free_slots(cache.pool) == free + 1


# ---- who holds them, and until when


@pytest.mark.parametrize("version", [None, (1, 0)], ids=str)
def test_a_block_is_not_given_away_while_its_tensor_lives(
    make_pool: MakePool, version: Any
) -> None:
    pool = make_pool(slots=1)
    blocks = pool.acquire(1)
    taken = Taken(blocks.__dlpack__(max_version=version))
    blocks.release()
    del blocks
    gc.collect()
    assert pool.try_acquire(1) is None
    taken.drop()
    assert free_slots(pool) == 1


def test_the_memory_outlives_the_pool(make_pool: MakePool) -> None:
    pool = make_pool(slots=1)
    blocks = pool.acquire(1)
    blocks[0][:] = 6
    tensor = np.from_dlpack(blocks)
    del pool, blocks
    gc.collect()
    assert (tensor == 6).all()


@pytest.mark.parametrize("version", [None, (1, 0)], ids=str)
def test_a_capsule_that_nobody_took_gives_its_blocks_back(
    pool: kvmem.BlockPool, version: Any
) -> None:
    blocks = pool.acquire(2)
    capsule = blocks.__dlpack__(max_version=version)
    blocks.release()
    assert free_slots(pool) == 2
    del capsule
    assert free_slots(pool) == 4


@pytest.mark.parametrize("version", [None, (1, 0)], ids=str)
def test_blocks_go_home_once_whether_the_capsule_or_its_tensor_goes_first(
    pool: kvmem.BlockPool, version: Any
) -> None:
    """A pool that checks itself stops the process when a slot comes home twice."""
    blocks = pool.acquire(2)
    first, second = (blocks.__dlpack__(max_version=version) for _ in range(2))
    blocks.release()
    taken = Taken(first)
    del first
    assert free_slots(pool) == 2
    other = Taken(second)
    other.drop()
    assert name_of(second) == USED[VERSIONED if version else LEGACY]
    del second
    assert free_slots(pool) == 2
    taken.drop()
    assert free_slots(pool) == 4
    assert pool.stats()["held_slots"] == 0


def test_each_export_is_a_holder_of_its_own(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(4)
    tensors = [np.from_dlpack(blocks[i : i + 2]) for i in range(3)]
    blocks.release()
    for free in (1, 2, 4):
        tensors.pop(0)
        gc.collect()
        assert free_slots(pool) == free


def test_those_who_wait_for_a_block_get_the_one_of_a_tensor(make_pool: MakePool) -> None:
    pool = make_pool(slots=1)
    blocks = pool.acquire(1)
    taken = Taken(blocks.__dlpack__())
    blocks.release()
    waiting = in_thread(awaited, pool)
    until(lambda: pool.stats()["waiters"] == 1)
    taken.drop()
    assert waiting.result(PATIENCE) == 1


def awaited(pool: kvmem.BlockPool) -> int:
    async def main() -> int:
        with await pool.acquire_async(1) as blocks:
            return len(blocks)

    return asyncio.run(main())


def test_a_thread_that_python_does_not_know_may_drop_the_tensor_while_another_has_the_gil(
    pool: kvmem.BlockPool,
) -> None:
    """This thread keeps the GIL while it waits for the one that runs the deleter."""
    libc = ctypes.PyDLL(None)
    clock_gettime, join = libc.clock_gettime, libc.pthread_timedjoin_np
    join.argtypes = (ctypes.c_ulong, ctypes.c_void_p, ctypes.c_void_p)
    blocks = pool.acquire(1)
    taken = Taken(blocks.__dlpack__())
    blocks.release()
    deadline = (ctypes.c_long * 2)()
    clock_gettime(0, deadline)  # CLOCK_REALTIME
    deadline[0] += int(PATIENCE)
    thread = ctypes.c_ulong()
    start, argument = ctypes.c_void_p(taken.deleter), ctypes.c_void_p(taken.address)
    assert libc.pthread_create(ctypes.byref(thread), None, start, argument) == 0
    assert join(thread, None, deadline) == 0, "the deleter waits for the GIL"
    assert free_slots(pool) == 4


def test_many_threads_export_and_drop_at_once(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(4)

    def storm() -> None:
        for i in range(200):
            version = (1, 0) if i % 2 else None
            taken = Taken(blocks[i % 4 : i % 4 + 1].__dlpack__(max_version=version))
            taken.drop()  # without the GIL

    for each in [in_thread(storm) for _ in range(4)]:
        each.result(PATIENCE)
    blocks.release()
    assert free_slots(pool) == 4


# ---- the end of the process, and a fork


LEFT_BEHIND = """
    import ctypes
    import sys
    import kvmem

    device = kvmem.open_device("host")
    pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=4 * 4096)
    blocks = pool.acquire(4)
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
    used = b"used_dltensor"

    def take(capsule):
        address = api.PyCapsule_GetPointer(capsule, b"dltensor")
        api.PyCapsule_SetName(capsule, used)
        return address, ctypes.c_void_p.from_address(address + 56).value
"""


def test_a_tensor_may_be_dropped_when_the_interpreter_has_ended() -> None:
    """The C library calls the deleter at exit, after Python; `said` is written behind it."""
    child = run_child(
        LEFT_BEHIND
        + """
    libc = ctypes.CDLL(None)
    c_void = ctypes.c_void_p
    said = ctypes.create_string_buffer(b"dropped")
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(said))
    libc.__cxa_atexit(ctypes.cast(libc.puts, c_void), ctypes.cast(said, c_void), None)
    address, deleter = take(blocks.__dlpack__())
    libc.__cxa_atexit(c_void(deleter), c_void(address), None)
    """
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "dropped\n", "")


@pytest.mark.parametrize("keeper", ["sys.modules['kvmem'].left", "sys.left"])
def test_a_capsule_may_be_left_behind_in_a_module(keeper: str) -> None:
    child = run_child(
        LEFT_BEHIND
        + f"""
    {keeper} = [blocks.__dlpack__(), blocks[1:].__dlpack__(max_version=(1, 0))]
    print("left")
    """
    )
    assert (child.returncode, child.stdout, child.stderr) == (0, "left\n", "")


@pytest.mark.host_only("a fork shares no clock")
def test_a_forked_child_exports_nothing_and_drops_what_it_has_inherited_in_vain(
    pool: kvmem.BlockPool,
) -> None:
    blocks = pool.acquire(2)
    taken = Taken(blocks.__dlpack__())

    def child() -> None:
        for call in (blocks.__dlpack__, blocks.__dlpack_device__, lambda: blocks[0:1]):
            with pytest.raises(kvmem.Forked):
                call()
        taken.drop()

    assert run_forked(child) == ""
    blocks.release()
    assert free_slots(pool) == 2
    taken.drop()
    assert free_slots(pool) == 4


# ---- copies in flight


def test_the_target_of_an_offload_is_refused_until_its_end_was_observed(cache: Cache) -> None:
    cache.fill(2, 30)
    blocks = cache.pool.acquire(2)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([2], into=blocks[0:1], after=stream)
    with pytest.raises(kvmem.NotDone, match=rf"slot {blocks.indices[0]}\b.*not been observed"):
        np.from_dlpack(blocks)
    np.from_dlpack(blocks[1:2])[:] = 1  # the other one is nobody's target
    gate.open()
    transfer.wait(PATIENCE)
    assert (np.from_dlpack(blocks)[0] == cache.expected(30)).all()


def test_an_abandoned_offload_still_writes_and_is_refused(cache: Cache) -> None:
    blocks = cache.pool.acquire(1)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([2], into=blocks, after=stream)
    transfer.wait_on(cache.device.stream())  # submitted
    assert transfer.cancel() is kvmem.CancelOutcome.draining
    del transfer
    gc.collect()
    with pytest.raises(kvmem.NotDone):
        np.from_dlpack(blocks)
    gate.open()
    until(lambda: cache.manager.stats()["offload"]["active"] == 0)
    assert np.from_dlpack(blocks).shape == (1, cache.block_bytes)


def test_the_source_of_a_restore_is_refused_until_its_end_was_observed(cache: Cache) -> None:
    copy = cache.stored(1)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.restore(copy, [4], after=stream)
    with pytest.raises(kvmem.NotDone):
        np.from_dlpack(copy.blocks)
    gate.open()
    transfer.wait(PATIENCE)
    assert np.from_dlpack(copy.blocks).shape == (1, cache.block_bytes)


def test_blocks_that_are_released_behind_work_of_the_callers_are_refused(cache: Cache) -> None:
    blocks = cache.pool.acquire(1)
    stream, gate = cache.stalled_stream()
    blocks.share().release(after=stream)
    with pytest.raises(kvmem.NotDone):
        np.from_dlpack(blocks)
    gate.open()
    stream.synchronize(PATIENCE)
    assert np.from_dlpack(blocks).shape == (1, cache.block_bytes)


def test_an_end_that_nobody_has_seen_is_looked_for(
    make_cache: Callable[..., Cache],
) -> None:
    """Without a reaper only a call of kvmem's observes an end: here the export."""
    cache = make_cache(reaper=False)
    blocks = cache.pool.acquire(1)
    cache.fill(2, 30)
    transfer = cache.manager.offload([2], into=blocks, after=kvmem.READY)

    def exported() -> bool:
        if cache.device.info["virtual_time"]:
            advance(cache.device, 0.001)
        try:
            return bool((np.from_dlpack(blocks)[0] == cache.expected(30)).all())
        except kvmem.NotDone:
            return False

    until(exported)
    assert transfer.done()


def test_a_slot_that_a_lost_device_may_still_write_is_refused() -> None:
    device = kvmem.open_device("virtual")
    cache = Cache(device)
    blocks = cache.pool.acquire(2)
    stream, _ = cache.stalled_stream()
    transfer = cache.manager.offload([2], into=blocks[0:1], after=stream)
    lose(device)
    with pytest.raises(kvmem.DeviceLost):
        transfer.wait(PATIENCE)
    with pytest.raises(kvmem.DeviceLost, match=rf"slot {blocks.indices[0]} is poisoned"):
        np.from_dlpack(blocks)
    assert np.from_dlpack(blocks[1:2]).shape == (1, cache.block_bytes)


# ---- arguments


def test_released_blocks_are_refused(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(1)
    blocks.release()
    for call in (blocks.__dlpack__, blocks.__dlpack_device__, lambda: np.from_dlpack(blocks)):
        with pytest.raises(kvmem.AlreadyReleased):
            call()


@pytest.mark.parametrize(
    ("name", "bad", "error"),
    [
        ("stream", -1, kvmem.InvalidArgument),
        ("stream", 0, kvmem.InvalidArgument),
        ("stream", 1, kvmem.InvalidArgument),
        ("copy", True, BufferError),
        ("copy", 1, kvmem.InvalidArgument),
        ("dl_device", (CUDA, 0), BufferError),
        ("dl_device", (CPU, 1), BufferError),
        ("dl_device", (CUDA_HOST, 0), BufferError),
        ("dl_device", "cpu", BufferError),
        ("max_version", 1, kvmem.InvalidArgument),
        ("max_version", (1,), kvmem.InvalidArgument),
        ("max_version", ("1", 0), kvmem.InvalidArgument),
        ("max_version", (1, -1), kvmem.InvalidArgument),
        ("max_version", "10", kvmem.InvalidArgument),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_and_holds_nothing(
    pool: kvmem.BlockPool, name: str, bad: Any, error: Any
) -> None:
    blocks = pool.acquire(1)
    with pytest.raises(error, match=name):
        blocks.__dlpack__(**{name: bad})
    blocks.release()
    assert free_slots(pool) == 4


def test_what_says_nothing_new_is_fine(pool: kvmem.BlockPool) -> None:
    blocks = pool.acquire(1)
    for said in ({"copy": False}, {"copy": None}, {"dl_device": (CPU, 0)}, {"stream": None}):
        Taken(blocks.__dlpack__(**said)).drop()
    assert np.from_dlpack(blocks, device="cpu", copy=False).shape == (1, 4096)
    with pytest.raises(BufferError, match="gather"):
        np.from_dlpack(blocks, copy=True)


def test_addresses_without_bytes_are_not_exported() -> None:
    device = kvmem.open_device("virtual", move_bytes=False)
    pool = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=4096)
    blocks = pool.acquire(1)
    with pytest.raises(kvmem.InvalidArgument, match="no bytes move"):
        blocks.__dlpack__()
