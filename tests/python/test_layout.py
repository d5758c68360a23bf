"""KVLayout and Region: geometry is declared, and what is wrong is refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvmem
from kvmem import KVLayout, Region

GOOD = {"address": 1 << 20, "stride_bytes": 128, "payload_bytes": 64, "block_count": 10}


def facts(region: Region) -> tuple[int, int, int, int, int]:
    return (
        region.address,
        region.stride_bytes,
        region.payload_bytes,
        region.block_count,
        region.stage,
    )


# ---- declared regions


def test_a_region_says_what_it_was_made_with() -> None:
    region = Region(4096, 128, 64, 10, memory="cuda:1", stage=3)
    assert facts(region) == (4096, 128, 64, 10, 3)
    assert region.memory == "cuda:1"


def test_memory_is_host_and_stage_zero_unless_said() -> None:
    region = Region(4096, 128, 64, 10)
    assert (region.memory, region.stage) == ("host", 0)


def test_cuda_is_the_first_cuda_device() -> None:
    assert Region(4096, 128, 64, 10, memory="cuda").memory == "cuda:0"


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        (name, bad)
        for name in (*GOOD, "stage")
        for bad in (0, -1, True, 1.5, "4", None, 2**63, 2**64, float("nan"))
        if (name, bad) != ("stage", 0)  # the first stage
    ],
)
def test_a_number_that_is_none_is_refused_by_name(name: str, bad: Any) -> None:
    """Public failure 174: a size of zero was accepted."""
    with pytest.raises(kvmem.InvalidArgument, match=name):
        Region(**{**GOOD, name: bad})


def test_a_layout_says_what_its_regions_add_up_to() -> None:
    """Public failure 86: bytes of a block came from a page size that not every layer had."""
    regions = [
        Region(1 << 20, 128, 64, 10, stage=5),
        Region(2 << 20, 300, 200, 10, stage=1),
        Region(3 << 20, 32, 32, 10, stage=5),
    ]
    layout = KVLayout(regions)
    assert [facts(each) for each in layout.regions] == [facts(each) for each in regions]
    assert layout.block_bytes == 64 + 200 + 32
    assert layout.block_count == 10
    assert layout.smallest_segment_bytes == 32
    assert layout.stages == [1, 5]
    assert layout.memory == "host"


def test_no_region_at_all_is_refused() -> None:
    with pytest.raises(kvmem.InvalidArgument, match="at least one region"):
        KVLayout([])


@pytest.mark.parametrize("bad", [None, 3, "x", [None], [3]])
def test_what_is_no_list_of_regions_is_a_type_error(bad: Any) -> None:
    with pytest.raises(TypeError):
        KVLayout(bad)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"stride_bytes": 63}, "region 1: stride_bytes 63 is smaller than payload_bytes 64"),
        ({"block_count": 9}, "region 1: block_count 9, region 0 has 10"),
        ({"memory": "cuda:0"}, "region 1 is in cuda:0 memory, region 0 in host"),
        ({"address": 2**63 - 64, "block_count": 10, "stride_bytes": 2**62}, "exceeds 2"),
    ],
)
def test_a_region_that_does_not_fit_is_refused_by_name(second: dict[str, Any], words: str) -> None:
    other = {**GOOD, "address": 2 << 20, **second}
    with pytest.raises(kvmem.InvalidArgument, match=words):
        KVLayout([Region(**GOOD), Region(**other)])


@pytest.mark.parametrize(
    ("address", "stride", "payload"),
    [
        (1 << 20, 128, 64),  # the same
        ((1 << 20) + 63, 128, 64),
        ((1 << 20) - 63, 128, 64),
        ((1 << 20) + 128 * 9 + 63, 128, 64),  # the last byte of all
        ((1 << 20) + 64, 128, 65),
        ((1 << 20) + 64, 100, 64),  # other strides meet somewhere
    ],
)
def test_regions_that_share_a_byte_are_refused(address: int, stride: int, payload: int) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=r"regions (0 and 1|1 and 0) overlap"):
        KVLayout([Region(**GOOD), Region(address, stride, payload, 10)])


def test_regions_may_interleave_as_long_as_they_share_no_byte() -> None:
    k, v = Region(1 << 20, 128, 64, 10), Region((1 << 20) + 64, 128, 64, 10)
    assert KVLayout([k, v]).block_bytes == 128
    assert KVLayout([v, k]).block_bytes == 128


def test_numbers_beyond_32_bits_are_exact() -> None:
    """Public failure 170: offsets were narrowed to 32 bits."""
    big = 2**40 + 4096
    layout = KVLayout([Region(big, 2**33, 2**32 + 1, 2**20), Region(2**60, 2**32, 2**31, 2**20)])
    assert facts(layout.regions[0]) == (big, 2**33, 2**32 + 1, 2**20, 0)
    assert layout.block_bytes == 2**32 + 1 + 2**31
    assert layout.block_count == 2**20
    assert layout.smallest_segment_bytes == 2**31


# ---- from arrays


def test_one_axis_is_one_number_a_block() -> None:
    array = np.zeros(16, np.uint64)
    layout = KVLayout.from_arrays([array])
    assert [facts(each) for each in layout.regions] == [(array.ctypes.data, 8, 8, 16, 0)]


@pytest.mark.parametrize("axes", [2, 3, 4])
def test_axes_behind_the_block_axis_are_the_payload(axes: int) -> None:
    array = np.zeros((6, 5, 4, 3)[:axes], np.float16)
    layout = KVLayout.from_arrays([array])
    payload = array[0].nbytes
    assert [facts(each) for each in layout.regions] == [(array.ctypes.data, payload, payload, 6, 0)]


def test_axes_before_the_block_axis_become_regions() -> None:
    array = np.zeros((2, 6, 5, 4), np.uint8)  # K and V first
    layout = KVLayout.from_arrays([array], block_axis=1)
    k, v = array[0].ctypes.data, array[1].ctypes.data
    assert [facts(each) for each in layout.regions] == [(k, 20, 20, 6, 0), (v, 20, 20, 6, 0)]


def test_two_axes_before_the_block_axis_become_their_product() -> None:
    array = np.zeros((2, 3, 6, 4), np.uint8)
    layout = KVLayout.from_arrays([array], block_axis=2)
    expected = [array[i, j].ctypes.data for i in range(2) for j in range(3)]
    assert [each.address for each in layout.regions] == expected
    assert {facts(each)[1:] for each in layout.regions} == {(4, 4, 6, 0)}


def test_each_array_is_a_stage() -> None:
    arrays = [np.zeros((2, 6, 8), np.uint8) for _ in range(3)]
    layout = KVLayout.from_arrays(arrays, block_axis=1)
    assert [each.stage for each in layout.regions] == [0, 0, 1, 1, 2, 2]
    assert layout.stages == [0, 1, 2]
    assert layout.block_bytes == 3 * 2 * 8


def test_a_padded_array_keeps_its_stride() -> None:
    array = np.zeros((6, 1024), np.uint8)[:, :576]
    layout = KVLayout.from_arrays([array])
    assert facts(layout.regions[0]) == (array.ctypes.data, 1024, 576, 6, 0)


def test_k_and_v_inside_one_block_interleave() -> None:
    array = np.zeros((6, 2, 8), np.uint8)
    layout = KVLayout.from_arrays([array[:, 0], array[:, 1]])
    assert [facts(each)[:3] for each in layout.regions] == [
        (array.ctypes.data, 16, 8),
        (array.ctypes.data + 8, 16, 8),
    ]


def test_a_block_axis_that_was_moved_to_the_front_is_followed() -> None:
    array = np.zeros((3, 6, 8), np.uint8)
    moved = np.moveaxis(array, 1, 0)  # blocks first in view, not in memory
    with pytest.raises(kvmem.InvalidArgument, match="axis 1"):
        KVLayout.from_arrays([moved])
    layout = KVLayout.from_arrays([array], block_axis=1)
    assert [each.address - array.ctypes.data for each in layout.regions] == [0, 48, 96]


def test_a_single_block_needs_no_stride() -> None:
    array = np.zeros((1, 40), np.uint8)
    assert facts(KVLayout.from_arrays([array]).regions[0])[1:4] == (40, 40, 1)


@pytest.mark.parametrize(
    ("array", "axis"),
    [
        (np.zeros((6, 8, 8), np.uint8)[:, :, ::2], 2),
        (np.zeros((6, 8, 8), np.uint8)[:, ::2], 1),
        (np.zeros((6, 8, 8), np.uint8).transpose(0, 2, 1), 2),
        (np.asfortranarray(np.zeros((6, 8), np.uint8)), 1),
        (np.broadcast_to(np.zeros((6, 1), np.uint8), (6, 8)), 1),
        (np.zeros((6, 8), np.uint8)[:, ::-1], 1),
    ],
    ids=["last", "middle", "swapped", "Fortran", "broadcast", "reversed"],
)
def test_an_axis_that_is_not_dense_is_refused_by_name(array: Any, axis: int) -> None:
    """Public failure 85: a layout was guessed from a shape that two layouts share."""
    with pytest.raises(kvmem.InvalidArgument, match=rf"arrays\[1\]: axis {axis}"):
        KVLayout.from_arrays([np.zeros((6, 8), np.uint8), array])


def test_overlapping_blocks_are_refused() -> None:
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(64, np.uint8), 16)
    with pytest.raises(kvmem.InvalidArgument, match=r"arrays\[0\].*overlap"):
        KVLayout.from_arrays([windows])


@pytest.mark.parametrize("bad", [2, -1, 10, True, 0.0, "0", None], ids=repr)
def test_a_block_axis_that_is_none_is_refused_by_name(bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="block_axis"):
        KVLayout.from_arrays([np.zeros((6, 8), np.uint8)], block_axis=bad)


@pytest.mark.parametrize(
    "bad",
    [[], (), np.zeros((6, 8)), [[1, 2]], [None], None, 3, [np.zeros((6, 8), object)]],
    ids=repr,
)
def test_what_is_no_sequence_of_arrays_is_refused(bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="arrays"):
        KVLayout.from_arrays(bad)


@pytest.mark.parametrize("shape", [(0, 8), (6, 0), ()])
def test_an_array_without_a_block_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(kvmem.InvalidArgument):
        KVLayout.from_arrays([np.zeros(shape, np.uint8)])


def test_arrays_of_unequal_block_counts_are_refused() -> None:
    with pytest.raises(kvmem.InvalidArgument, match="block_count 5, region 0 has 6"):
        KVLayout.from_arrays([np.zeros((6, 8), np.uint8), np.zeros((5, 8), np.uint8)])


def test_the_same_array_twice_is_refused() -> None:
    array = np.zeros((6, 8), np.uint8)
    with pytest.raises(kvmem.InvalidArgument, match="overlap"):
        KVLayout.from_arrays([array, array])


def test_memory_is_passed_on() -> None:
    layout = KVLayout.from_arrays([np.zeros((6, 8), np.uint8)], memory="cuda:3")
    assert layout.memory == "cuda:3"
