"""Order between kvmem's copies and kernels of the engine, on streams of the engine's own.

A kernel that spins holds the engine's stream back. Each test has a twin without the barrier, in
which the bytes come out wrong: so the barrier is what makes them right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmem
from gpu_cache import PATIENCE, GpuCache, Reader, open_and_end
from gpu_driver import Driver, Stream

MakeCache = Callable[..., GpuCache]
MakeStream = Callable[[], Stream]


def host_bytes(copy: kvmem.HostCopy, block: int = 0) -> Any:
    return copy.blocks[block]


# ---- read after write: an offload behind the kernel that computes the block


def computed_behind_a_spin(gpu: Driver, cache: GpuCache, stream: Stream) -> Any:
    cache.write(3, version=1)
    spin = gpu.spin(stream)
    cache.compute(stream, 3, version=2)
    return spin


@pytest.mark.parametrize("by", ["stream", "event"])
def test_an_offload_reads_what_its_stream_has_yet_to_write(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream, by: str
) -> None:
    cache, stream = make_cache(), make_stream()
    with computed_behind_a_spin(gpu, cache, stream) as spin:
        after = stream if by == "stream" else stream.record()
        transfer = cache.manager.offload([3], after=after)
        cache.stored([1, 2])  # others go past it meanwhile
        assert not transfer.done()
        open_and_end(spin, stream)
    transfer.wait(PATIENCE)
    assert np.array_equal(host_bytes(transfer.result()), cache.expected(3, version=2))


def test_an_offload_that_waits_for_nothing_reads_too_early(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache, stream = make_cache(), make_stream()
    with computed_behind_a_spin(gpu, cache, stream) as spin:
        copy = cache.stored([3])
        open_and_end(spin, stream)
    assert np.array_equal(host_bytes(copy), cache.expected(3, version=1))


# ---- write after read: a restore behind the kernel that still reads the block


def read_behind_a_spin(
    gpu: Driver, cache: GpuCache, stream: Stream
) -> tuple[kvmem.HostCopy, Reader, Any]:
    """Block 5 is version 2, and about to be overwritten by a copy of version 1."""
    cache.write(5, version=1)
    copy = cache.stored([5])
    cache.write(5, version=2)
    reader = Reader(cache)
    spin = gpu.spin(stream)
    reader.read(stream, 5)
    return copy, reader, spin


def test_a_restore_writes_behind_the_last_reader(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache, stream = make_cache(), make_stream()
    copy, reader, spin = read_behind_a_spin(gpu, cache, stream)
    with spin:
        transfer = cache.manager.restore(copy, [5], after=[stream])
        cache.stored([1, 2])
        assert not transfer.done()
        open_and_end(spin, stream)
    transfer.wait(PATIENCE)
    assert reader.saw(5, version=2)
    assert cache.holds(5, of=5, version=1)


def test_a_restore_that_waits_for_nothing_pulls_the_bytes_from_under_the_reader(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache, stream = make_cache(), make_stream()
    copy, reader, spin = read_behind_a_spin(gpu, cache, stream)
    with spin:
        cache.manager.restore(copy, [5], after=kvmem.READY).wait(PATIENCE)
        open_and_end(spin, stream)
    assert reader.saw(5, version=1)


# ---- a kernel behind a restore


@pytest.mark.parametrize("stage", [None, 1])
def test_a_kernel_behind_wait_on_reads_what_was_restored(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream, stage: int | None
) -> None:
    cache, stream, consumer = make_cache(), make_stream(), make_stream()
    consumed = Reader(cache)
    copy, _, spin = read_behind_a_spin(gpu, cache, stream)
    with spin:
        transfer = cache.manager.restore(copy, [5], after=stream)
        transfer.wait_on(consumer, stage)
        consumed.read(consumer, 5)
        assert not consumer.idle()
        open_and_end(spin, stream)
    consumer.synchronize()
    if stage is None:
        assert consumed.saw(5, version=1)
    else:
        last = slice(stage * cache.segment_bytes, None)
        found = gpu.download(consumed.seen.address, cache.block_bytes)
        assert np.array_equal(found[last], cache.expected(5, version=1)[last])
    transfer.wait(PATIENCE)


def test_a_kernel_that_waits_for_nothing_reads_what_was_there_before(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache, stream, consumer = make_cache(), make_stream(), make_stream()
    consumed = Reader(cache)
    copy, _, spin = read_behind_a_spin(gpu, cache, stream)
    with spin:
        transfer = cache.manager.restore(copy, [5], after=stream)
        consumed.read(consumer, 5)
        consumer.synchronize()
        open_and_end(spin, stream)
    assert consumed.saw(5, version=2)
    transfer.wait(PATIENCE)


# ---- a kernel behind an offload, that overwrites its source


def overwritten(
    gpu: Driver, cache: GpuCache, make_stream: MakeStream, wait: bool
) -> kvmem.HostCopy:
    """An offload of version 1 waits; another stream computes version 2 into the block."""
    held, overwriting = make_stream(), make_stream()
    cache.write(4, version=1)
    with gpu.spin(held) as spin:
        transfer = cache.manager.offload([4], after=held)
        if wait:
            transfer.wait_on(overwriting)
        cache.compute(overwriting, 4, version=2)
        if not wait:
            overwriting.synchronize()
        open_and_end(spin, held)
    overwriting.synchronize()
    transfer.wait(PATIENCE)
    return transfer.result()


def test_a_kernel_behind_wait_on_overwrites_only_what_was_offloaded(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache = make_cache()
    copy = overwritten(gpu, cache, make_stream, wait=True)
    assert np.array_equal(host_bytes(copy), cache.expected(4, version=1))
    assert cache.holds(4, of=4, version=2)


def test_a_kernel_that_waits_for_nothing_overwrites_what_is_yet_to_be_offloaded(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache = make_cache()
    copy = overwritten(gpu, cache, make_stream, wait=False)
    assert np.array_equal(host_bytes(copy), cache.expected(4, version=2))


# ---- two transfers


def test_a_restore_behind_an_offload_of_the_same_block_does_not_spoil_it(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache, held = make_cache(), make_stream()
    cache.write(1, version=1)
    old = cache.stored([1])
    with gpu.spin(held) as spin:
        cache.compute(held, 1, version=2)
        offload = cache.manager.offload([1], after=held)
        restore = cache.manager.restore(old, [1], after=offload)
        open_and_end(spin, held)
    restore.wait(PATIENCE)
    offload.wait(PATIENCE)
    assert np.array_equal(host_bytes(offload.result()), cache.expected(1, version=2))
    assert cache.holds(1, of=1, version=1)


def test_a_handle_that_is_no_stream_is_refused_and_a_stream_that_captures_too(
    gpu: Driver, make_cache: MakeCache, make_stream: MakeStream
) -> None:
    cache, stream = make_cache(), make_stream()
    with pytest.raises(kvmem.InvalidArgument):
        cache.manager.offload([0], after=12)
    with (
        gpu.capture(stream),
        pytest.raises(kvmem.InvalidArgument, match="captur"),
    ):
        cache.manager.offload([0], after=stream)
    assert not cache.manager.busy([0])
