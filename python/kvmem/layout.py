"""Geometry of the device cache, declared by the engine."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

from . import _core
from ._arrays import Array, describe
from ._core import Region
from .errors import InvalidArgument


class KVLayout(_core.KVLayout):
    """Where each block's segments are. Immutable.

    Made of regions: one for each piece of memory in which block i stands at address + i *
    stride_bytes. All regions have the same block_count and memory; segments may interleave but not
    overlap. Raises InvalidArgument.
    """

    @classmethod
    def from_arrays(
        cls, arrays: Sequence[Any], block_axis: int = 0, memory: str | None = None
    ) -> KVLayout:
        """Declares the regions of one array for each layer (stage), blocks along `block_axis`.

        arrays: NumPy's, or tensors of any library that has `__dlpack__` or
            `__cuda_array_interface__`: torch, CuPy, JAX. Axes before the block axis become regions
            (K and V, say); axes behind it must be dense.
        memory: where they are, "host" or "cuda:1"; None is what they say themselves, and "host" for
            NumPy's, which do not say. Contradicting them is refused.

        The arrays must outlive every transfer; the layout does not keep them. Nothing waits for
        work that is pending on them.
        """
        if not isinstance(arrays, Sequence):
            raise InvalidArgument(f"arrays is {type(arrays).__name__}, not a sequence of arrays")
        if not arrays:
            raise InvalidArgument("arrays is empty: a layout needs at least one region")
        if isinstance(block_axis, bool) or not isinstance(block_axis, SupportsIndex):
            raise InvalidArgument(f"block_axis is {block_axis!r}: not an integer")
        if memory is not None and not isinstance(memory, str):
            raise InvalidArgument(f"memory is {memory!r}: not a name such as 'cuda:0'")
        regions: list[Region] = []
        for stage, array in enumerate(arrays):
            try:
                described = describe(array)
                where = described.memory_as(memory)
                regions += _regions_of(described, operator.index(block_axis), where, stage)
            except InvalidArgument as error:
                raise InvalidArgument(f"arrays[{stage}]: {error}") from error
            if where != regions[0].memory:
                raise InvalidArgument(
                    f"arrays[{stage}] is in {where} memory, arrays[0] in {regions[0].memory}"
                )
        return cls(regions)


def _regions_of(array: Array, block_axis: int, memory: str, stage: int) -> list[Region]:
    shape, strides = array.shape, array.strides_bytes
    if not 0 <= block_axis < len(shape):
        raise InvalidArgument(f"block_axis is {block_axis}, and it has {len(shape)} axes")
    if min(shape) <= 0:
        raise InvalidArgument(f"it is empty, of shape {shape}")
    inner_bytes = array.item_bytes
    for axis in range(len(shape) - 1, block_axis, -1):
        if shape[axis] != 1 and strides[axis] != inner_bytes:
            raise InvalidArgument(f"axis {axis} behind the block axis is not dense")
        inner_bytes *= shape[axis]
    blocks, stride = shape[block_axis], strides[block_axis]
    if blocks > 1 and stride < inner_bytes:
        raise InvalidArgument(
            f"blocks overlap or run backwards: stride {stride}, payload {inner_bytes} bytes"
        )
    for axis in range(block_axis):
        if shape[axis] > 1 and strides[axis] == 0:
            raise InvalidArgument(f"axis {axis} has the same bytes {shape[axis]} times")
    if array.read_only:
        raise InvalidArgument(
            "it is read-only, and a restore would write it: declare a Region if none is meant"
        )
    regions = []
    for index in itertools.product(*(range(n) for n in shape[:block_axis])):
        offset = sum(i * s for i, s in zip(index, strides[:block_axis], strict=True))
        regions.append(
            Region(
                array.address + offset,
                max(stride, inner_bytes) if blocks == 1 else stride,
                inner_bytes,
                blocks,
                memory=memory,
                stage=stage,
            )
        )
    return regions
