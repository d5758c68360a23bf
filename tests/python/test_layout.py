"""KVLayout and Region: geometry is declared, and what is wrong is refused by name."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvmem
from dlpack_abi import (
    BFLOAT,
    CPU,
    CUDA,
    CUDA_HOST,
    CUDA_MANAGED,
    FLOAT4,
    FLOAT8,
    IS_COPIED,
    OPAQUE,
    READ_ONLY,
    ROCM,
    UNSIGNED,
    USED,
    CudaArray,
    Tensor,
    name_of,
)
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


# ---- from tensors of other libraries


SPEAKERS: dict[str, Callable[..., Any]] = {
    "DLPack 1": Tensor,
    "DLPack before 1": functools.partial(Tensor, version=None),
    "CUDA arrays": CudaArray,
}
speakers = pytest.mark.parametrize("speak", SPEAKERS.values(), ids=SPEAKERS)


@speakers
@pytest.mark.parametrize(
    ("array", "axis"),
    [
        (np.zeros(6, np.uint64), 0),
        (np.zeros((6, 5, 4), np.float16), 0),
        (np.zeros((2, 3, 6, 4), np.uint8), 2),
        (np.zeros((6, 1024), np.uint8)[:, :576], 0),
        (np.zeros((3, 6, 8), np.uint8)[::-1], 1),
        (np.zeros((1, 40), np.uint8), 0),
        (np.zeros((9, 8), np.uint16)[3:], 0),
    ],
    ids=["one axis", "payload", "regions", "padded", "regions downwards", "one block", "part"],
)
def test_a_tensor_is_described_as_numpy_describes_its_bytes(
    speak: Any, array: np.ndarray[Any, Any], axis: int
) -> None:
    expected = KVLayout.from_arrays([array], block_axis=axis)
    layout = KVLayout.from_arrays([speak(array)], block_axis=axis)
    assert [facts(each) for each in layout.regions] == [facts(each) for each in expected.regions]


@speakers
@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros((6, 8, 8), np.uint8)[:, :, ::2], "axis 2 behind the block axis is not dense"),
        (np.zeros((6, 8), np.uint8)[:, ::-1], "axis 1 behind the block axis is not dense"),
        (np.lib.stride_tricks.sliding_window_view(np.zeros(64, "B"), 16), "blocks overlap"),
        (np.zeros((6, 8), np.uint8)[::-1], "run backwards: stride -8, payload 8 bytes"),
        (np.broadcast_to(np.zeros(8, np.uint8), (6, 8)), "overlap.*stride 0"),
        (np.zeros((0, 8), np.uint8), r"it is empty, of shape \(0, 8\)"),
        (np.zeros((6, 0), np.uint8), r"it is empty, of shape \(6, 0\)"),
        (np.zeros((), np.uint8), "block_axis is 0, and it has 0 axes"),
    ],
    ids=["not dense", "reversed", "windows", "backwards", "one for all", "none", "nothing", "0-d"],
)
def test_a_tensor_that_is_no_cache_is_refused_by_its_place(
    speak: Any, array: np.ndarray[Any, Any], words: str
) -> None:
    good = np.zeros((6, 8), np.uint8)
    for bad in (array, speak(array)):
        with pytest.raises(kvmem.InvalidArgument, match=rf"arrays\[1\]: .*{words}"):
            KVLayout.from_arrays([good, bad])


@speakers
def test_an_axis_of_regions_that_are_all_the_same_is_refused(speak: Any) -> None:
    array = np.broadcast_to(np.zeros((6, 8), np.uint8), (1 << 40, 6, 8))
    for bad in (array, speak(array)):
        with pytest.raises(kvmem.InvalidArgument, match=r"arrays\[0\]: axis 0 has the same bytes"):
            KVLayout.from_arrays([bad], block_axis=1)


@pytest.mark.parametrize("speak", [Tensor, CudaArray])
def test_without_strides_a_tensor_is_dense(speak: Any) -> None:
    array = np.zeros((2, 6, 5), np.uint16)
    said: Any = {"strides": False} if speak is Tensor else {"strides": None}
    layout = KVLayout.from_arrays([speak(array, **said)], block_axis=1)
    expected = [(array[i].ctypes.data, 10, 10, 6, 0) for i in range(2)]
    assert [facts(each) for each in layout.regions] == expected


def test_a_tensor_may_begin_behind_its_memory() -> None:
    array = np.zeros((6, 8), np.uint8)
    (region,) = KVLayout.from_arrays([Tensor(array, byte_offset=4096)]).regions
    assert region.address == array.ctypes.data + 4096


@pytest.mark.parametrize(
    ("code", "bits", "lanes", "item_bytes"),
    [
        (BFLOAT, 16, 1, 2),
        (FLOAT8, 8, 1, 1),
        (FLOAT4, 4, 2, 1),
        (UNSIGNED, 4, 8, 4),
        (5, 128, 1, 16),
    ],
    ids=["bfloat16", "float8", "two of float4", "eight of 4 bits", "complex128"],
)
def test_elements_that_numpy_does_not_have_are_bytes(
    code: int, bits: int, lanes: int, item_bytes: int
) -> None:
    array = np.zeros((6, 8, item_bytes), np.uint8).view(f"V{item_bytes}")[..., 0]
    layout = KVLayout.from_arrays([Tensor(array, code=code, bits=bits, lanes=lanes)])
    payload = 8 * item_bytes
    assert facts(layout.regions[0])[1:4] == (payload, payload, 6)


@pytest.mark.parametrize(
    ("element", "words"),
    [
        ({"bits": 4}, "elements have 4 bits, which are no whole bytes: view it as bytes"),
        ({"bits": 4, "lanes": 3}, "elements have 12 bits"),
        ({"bits": 0}, "elements have 0 bits"),
        ({"bits": 64, "code": OPAQUE}, "opaque handles"),
    ],
)
@pytest.mark.parametrize("version", [None, (1, 0)], ids=str)
def test_elements_that_are_no_bytes_are_refused(version: Any, element: Any, words: str) -> None:
    tensor = Tensor(np.zeros((6, 8), np.uint8), version=version, **element)
    with pytest.raises(kvmem.InvalidArgument, match=rf"arrays\[0\]: .*{words}"):
        KVLayout.from_arrays([tensor])
    assert tensor.dropped == 1


# ---- how a capsule is taken


@pytest.mark.parametrize("version", [None, (1, 0), (1, 3)], ids=str)
@pytest.mark.parametrize("place", [(CPU, 0), (CUDA_HOST, 0), (CUDA, 1)], ids=str)
def test_a_capsule_is_asked_for_without_waiting_and_given_back_at_once(
    version: Any, place: tuple[int, int]
) -> None:
    tensor = Tensor(np.zeros((6, 8), np.uint8), version=version, device=place)
    KVLayout.from_arrays([tensor])
    stream = {"stream": -1} if place[0] == CUDA else {}
    asked = [{"max_version": (1, 0), **stream}]
    assert tensor.asked == (asked if version else [*asked, stream])
    assert name_of(tensor.capsule) == USED[tensor.kind]
    assert tensor.dropped == 1


@pytest.mark.parametrize("version", [None, (1, 0)], ids=str)
def test_a_tensor_without_a_deleter_is_fine(version: Any) -> None:
    tensor = Tensor(np.zeros((6, 8), np.uint8), version=version, managed={"deleter": None})
    assert KVLayout.from_arrays([tensor]).block_count == 6


@pytest.mark.parametrize("version", [None, (1, 0)], ids=str)
def test_a_capsule_that_was_taken_before_is_refused(version: Any) -> None:
    tensor = Tensor(np.zeros((6, 8), np.uint8), version=version)
    KVLayout.from_arrays([tensor])

    class Again:
        __dlpack_device__ = tensor.__dlpack_device__

        def __dlpack__(self, **asked: Any) -> object:
            return tensor.capsule

    with pytest.raises(kvmem.InvalidArgument, match=r"arrays\[0\]: .*consumed before"):
        KVLayout.from_arrays([Again()])
    assert tensor.dropped == 1


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"version": (2, 1)}, r"DLPack version is 2\.1, not 1\.x"),
        ({"managed": {"flags": IS_COPIED}}, "gives a copy"),
        ({"managed": {"flags": READ_ONLY}}, "read-only.*declare a Region"),
        ({"device": (ROCM, 0)}, r"device is \(10, 0\): neither host nor CUDA"),
        ({"device": (CUDA_MANAGED, 0)}, r"device is \(13, 0\): neither host nor CUDA"),
        ({"axes": -1}, "it has -1 axes"),
        ({"shape": None}, "2 axes and no shape"),
        ({"data": None}, "address is 0"),
    ],
)
def test_a_tensor_that_is_not_to_be_trusted_is_refused_and_given_back(
    said: dict[str, Any], words: str
) -> None:
    tensor = Tensor(np.zeros((6, 8), np.uint8), **said)
    with pytest.raises(kvmem.InvalidArgument, match=rf"arrays\[0\]: .*{words}"):
        KVLayout.from_arrays([tensor])
    assert tensor.dropped == 1


@pytest.mark.parametrize("bad", [None, 3, "dltensor", object()], ids=lambda bad: str(bad)[:9])
def test_what_is_no_capsule_is_refused(bad: object) -> None:
    class Wrong:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (CPU, 0)

        def __dlpack__(self, **asked: Any) -> object:
            return bad

    with pytest.raises(kvmem.InvalidArgument, match=r"arrays\[0\]: .*no DLPack capsule"):
        KVLayout.from_arrays([Wrong()])


def test_the_reason_of_a_library_that_refuses_is_passed_on() -> None:
    class NeedsGrad:
        def __dlpack_device__(self) -> tuple[int, int]:
            return (CUDA, 0)

        def __dlpack__(self, **asked: Any) -> object:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

        @property
        def __cuda_array_interface__(self) -> object:
            raise RuntimeError("it requires grad")

    with pytest.raises(kvmem.InvalidArgument, match=r"arrays\[0\]: .*detach\(\)") as refusal:
        KVLayout.from_arrays([NeedsGrad()])
    cause = refusal.value.__cause__
    assert cause is not None
    assert isinstance(cause.__cause__, BufferError)


def test_a_library_that_refuses_dlpack_is_asked_for_a_cuda_array() -> None:
    """Torch gives no capsule of a tensor that is not on the current CUDA device."""

    class Elsewhere(CudaArray):
        def __dlpack_device__(self) -> tuple[int, int]:
            return (CUDA, 1)

        def __dlpack__(self, **asked: Any) -> object:
            raise BufferError("Can't export tensors on a different CUDA device index.")

    layout = KVLayout.from_arrays([Elsewhere(np.zeros((6, 8), "B"), SimpleNamespace(index=1))])
    assert layout.memory == "cuda:1"


def test_dlpack_goes_first() -> None:
    class Both(Tensor):
        @property
        def __cuda_array_interface__(self) -> object:
            raise AssertionError("asked for nothing")

    assert KVLayout.from_arrays([Both(np.zeros((6, 8), "B"), device=(CUDA, 1))]).memory == "cuda:1"


# ---- arrays of CUDA


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"mask": np.zeros((6, 8), bool)}, "mask"),
        ({"version": 1}, "version 1, not 2"),
        ({"typestr": "|O"}, "Python objects"),
        ({"typestr": "huh"}, "huh"),
        ({"typestr": None}, "None"),
        ({"strides": (64,)}, "2 axes and 1 strides"),
        ({"shape": None}, "NoneType"),
        ({"data": (4096, True)}, "read-only"),
        ({"data": (0, False)}, "address is 0"),
        ({"data": 4096}, "int"),
    ],
)
def test_an_array_of_cuda_that_is_no_cache_is_refused(said: dict[str, Any], words: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=rf"arrays\[0\]: .*({words})"):
        KVLayout.from_arrays([CudaArray(np.zeros((6, 8), np.uint64), **said)])


def test_version_2_and_a_type_without_a_name_are_fine() -> None:
    array = CudaArray(np.zeros((6, 8), np.uint16), typestr="<V2", version=2)
    assert KVLayout.from_arrays([array]).block_bytes == 16


# ---- where an array is


@pytest.mark.parametrize(
    ("make", "memory"),
    [
        (lambda array: array, "host"),
        (Tensor, "host"),
        (lambda array: Tensor(array, device=(CUDA_HOST, 0)), "host"),
        (lambda array: Tensor(array, device=(CUDA, 3)), "cuda:3"),
        (CudaArray, "cuda:0"),
        (lambda array: CudaArray(array, SimpleNamespace(index=2)), "cuda:2"),
        (lambda array: CudaArray(array, SimpleNamespace(id=1)), "cuda:1"),
        (lambda array: CudaArray(array, "cuda"), "cuda:0"),
    ],
    ids=["NumPy", "CPU", "pinned", "CUDA", "CUDA array", "torch's", "CuPy's", "a word"],
)
def test_an_array_says_where_it_is(make: Any, memory: str) -> None:
    array = make(np.zeros((6, 8), np.uint8))
    layout = KVLayout.from_arrays([array])
    assert layout.memory == memory
    assert KVLayout.from_arrays([array], memory=memory).memory == memory


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda array: array, "virtual"),
        (lambda array: array, "cuda:3"),
        (Tensor, "virtual"),
        (CudaArray, "cuda:3"),
        (lambda array: Tensor(array, device=(CUDA, 0)), "cuda"),
    ],
    ids=["NumPy virtual", "NumPy cuda", "virtual", "CUDA array", "the first one"],
)
def test_memory_says_what_the_array_does_not(make: Any, said: str) -> None:
    layout = KVLayout.from_arrays([make(np.zeros((6, 8), np.uint8))], memory=said)
    assert layout.memory == ("cuda:0" if said == "cuda" else said)


@pytest.mark.parametrize(
    ("make", "said", "words"),
    [
        (Tensor, "cuda", "it is in host memory, and memory is 'cuda:0'"),
        (lambda array: Tensor(array, device=(CUDA_HOST, 0)), "cuda:0", "in host memory"),
        (lambda array: Tensor(array, device=(CUDA, 1)), "cuda", "in cuda:1 .* is 'cuda:0'"),
        (lambda array: Tensor(array, device=(CUDA, 1)), "host", "in cuda:1 .* is 'host'"),
        (lambda array: Tensor(array, device=(CUDA, 1)), "virtual", "in cuda:1"),
        (CudaArray, "host", "in cuda memory, and memory is 'host'"),
        (lambda array: CudaArray(array, SimpleNamespace(id=1)), "cuda:0", "in cuda:1"),
        (lambda array: array, 3, "memory is 3"),
    ],
)
def test_memory_that_contradicts_the_array_is_refused(make: Any, said: Any, words: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=words):
        KVLayout.from_arrays([make(np.zeros((6, 8), np.uint8))], memory=said)


def test_arrays_on_two_devices_are_refused_by_name() -> None:
    arrays = [Tensor(np.zeros((6, 8), np.uint8), device=(CUDA, i)) for i in (0, 0, 1)]
    with pytest.raises(kvmem.InvalidArgument, match=r"arrays\[2\] is in cuda:1 .*\[0\] in cuda:0"):
        KVLayout.from_arrays(arrays)
    with pytest.raises(kvmem.InvalidArgument, match=r"arrays\[1\] is in cuda:0 .*\[0\] in host"):
        KVLayout.from_arrays([np.zeros((6, 8), np.uint8), arrays[0]])


def test_a_read_only_array_is_refused() -> None:
    array = np.zeros((6, 8), np.uint8)
    array.flags.writeable = False
    with pytest.raises(kvmem.InvalidArgument, match=r"arrays\[0\]: .*read-only"):
        KVLayout.from_arrays([array])


@pytest.mark.parametrize("speak", [None, *SPEAKERS.values()])
def test_a_layout_keeps_nothing(speak: Any) -> None:
    array = np.zeros((6, 8), np.uint8)
    gone = weakref.ref(array)
    layout = KVLayout.from_arrays([array if speak is None else speak(array)])
    del array
    gc.collect()
    assert gone() is None
    assert layout.block_count == 6
