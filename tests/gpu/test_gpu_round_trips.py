"""Bytes come back from a real GPU as they went, whatever the geometry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmem
from gpu_cache import PATIENCE, GpuCache

MakeCache = Callable[..., GpuCache]

GEOMETRIES = {
    "4 KiB": {"segment_bytes": 4 << 10, "blocks": 64},
    "16 KiB, a gap between blocks": {"segment_bytes": 16 << 10, "blocks": 32, "gap_bytes": 256},
    "28 KiB": {"segment_bytes": 28 << 10, "blocks": 32, "layers": 3},
    "odd size": {"segment_bytes": 5001, "blocks": 33, "layers": 3, "gap_bytes": 7},
    "odd size, interleaved": {
        "segment_bytes": 333,
        "blocks": 50,
        "layers": 5,
        "gap_bytes": 3,
        "interleaved": True,
    },
    "block by block": {"segment_bytes": 64 << 10, "layers": 8, "interleaved": True},
    "64 layers": {"segment_bytes": 32 << 10, "blocks": 16, "layers": 64},
    "1 MiB": {"segment_bytes": 1 << 20, "blocks": 16},
    "8 MiB": {"segment_bytes": 8 << 20, "blocks": 8},
}


@pytest.fixture(params=["batches", "one by one"])
def some_device(request: pytest.FixtureRequest, device: kvmem.Device) -> kvmem.Device:
    return device if request.param == "batches" else kvmem.open_device("cuda", batch=False)


def expect_round_trip(cache: GpuCache) -> None:
    """Half of the blocks, in random order, to the host, and back into the other half."""
    order = np.random.default_rng(7).permutation(cache.blocks)
    count = cache.blocks // 2
    sources, targets = order[:count], order[count : 2 * count]
    cache.fill_memory(0xEE)
    for block in sources:
        cache.write(int(block), version=1)
    transfer = cache.manager.offload(sources, after=kvmem.READY)
    transfer.wait(PATIENCE)
    copy = transfer.result()
    for number, block in enumerate(sources):
        assert np.array_equal(copy.blocks[number], cache.expected(int(block), 1)), (
            f"block {block}, offloaded"
        )
    cache.fill_memory(0xEE)
    cache.manager.restore(copy, targets, after=kvmem.READY).wait(PATIENCE)
    expected = [np.full(buffer.nbytes, 0xEE, np.uint8) for buffer in cache.buffers]
    for source, target in zip(sources, targets, strict=True):
        segments = cache.expected(int(source), 1).reshape(cache.layers, cache.segment_bytes)
        for layer, segment in enumerate(segments):
            piece = layer if len(cache.buffers) == cache.layers else 0
            at = cache.address(int(target), layer) - cache.buffers[piece].address
            expected[piece][at : at + cache.segment_bytes] = segment
    for buffer, want in zip(cache.buffers, expected, strict=True):
        found = cache.gpu.download(buffer.address, buffer.nbytes)
        assert np.array_equal(found, want), "restored, or beside it"


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=list(GEOMETRIES))
def test_blocks_come_back_byte_for_byte_and_nothing_beside_them_changes(
    make_cache: MakeCache, some_device: kvmem.Device, geometry: dict[str, Any]
) -> None:
    expect_round_trip(make_cache(on=some_device, **geometry))


def test_blocks_come_back_through_pieces_of_staging(make_cache: MakeCache) -> None:
    cache = make_cache(segment_bytes=3 << 20, blocks=16, pool={"pin": "never"})
    expect_round_trip(cache)
    assert cache.manager.stats()["offload"]["bytes_staged"] > 0


def test_a_pool_is_pinned_unless_that_is_called_off(make_cache: MakeCache) -> None:
    cache = make_cache()
    assert cache.pool.pinned
    cache.stored([0, 1])
    assert cache.manager.stats()["offload"]["bytes_staged"] == 0


def test_a_pool_that_is_still_being_pinned_can_be_used(make_cache: MakeCache) -> None:
    slots = 2 << 30 >> 21
    cache = make_cache(segment_bytes=1 << 20, blocks=32, slots=slots, pool={"pin": "background"})
    while not cache.pool.pinned:
        expect_round_trip(cache)
    expect_round_trip(cache)
    assert cache.pool.stats()["pinned_bytes"] == slots << 21


def test_a_hundred_thousand_segments_go_in_one_transfer(make_cache: MakeCache) -> None:
    layers, blocks = 4, 25_000
    # A gap behind each, so that neighbours do not become one descriptor.
    cache = make_cache(layers=layers, blocks=blocks, segment_bytes=512, gap_bytes=512)
    words = np.random.default_rng(7).integers(0, 2**32, (layers, blocks, 256), np.uint32)
    for buffer, piece in zip(cache.buffers, words, strict=True):
        cache.gpu.upload(buffer.address, piece)
    order = np.random.default_rng(8).permutation(blocks)
    transfer = cache.manager.offload(order, after=kvmem.READY)
    transfer.wait(PATIENCE)
    copy = transfer.result()
    found = copy.blocks.gather().view(np.uint32).reshape(blocks, layers, 128)
    assert np.array_equal(found, words[:, order, :128].transpose(1, 0, 2))
    cache.fill_memory(0)
    cache.manager.restore(copy, order, after=kvmem.READY).wait(PATIENCE)
    for buffer, piece in zip(cache.buffers, words, strict=True):
        back = cache.gpu.download(buffer.address, buffer.nbytes)
        back = back.view(np.uint32).reshape(blocks, 256)
        assert np.array_equal(back[:, :128], piece[:, :128])
        assert not back[:, 128:].any()
