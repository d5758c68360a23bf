"""Geometry of the device cache, declared by the engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from . import _core
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
        cls, arrays: Sequence[NDArray[Any]], block_axis: int = 0, memory: str = "host"
    ) -> KVLayout:
        """Declares the regions of one array for each layer (stage), blocks along `block_axis`.

        Axes before the block axis become regions (K and V, say); axes behind it must be dense. The
        arrays must outlive every transfer; the layout does not keep them.
        """
        if not isinstance(arrays, Sequence):
            raise InvalidArgument(f"arrays is {type(arrays).__name__}, not a sequence of arrays")
        if not arrays:
            raise InvalidArgument("arrays is empty: a layout needs at least one region")
        regions: list[Region] = []
        for stage, array in enumerate(arrays):
            regions += _regions_of(array, block_axis, memory, stage)
        return cls(regions)


def _regions_of(array: NDArray[Any], block_axis: int, memory: str, stage: int) -> list[Region]:
    if not isinstance(array, np.ndarray):
        raise InvalidArgument(f"arrays[{stage}] is {type(array).__name__}, not a NumPy array")
    if array.dtype.hasobject:
        raise InvalidArgument(
            f"arrays[{stage}] holds Python objects, which cannot be copied as bytes"
        )
    if isinstance(block_axis, bool) or not isinstance(block_axis, SupportsIndex):
        raise InvalidArgument(f"block_axis is {block_axis!r}: not an integer")
    if not 0 <= block_axis < array.ndim:
        raise InvalidArgument(f"block_axis is {block_axis}: arrays[{stage}] has {array.ndim} axes")
    inner_bytes = array.itemsize
    for axis in range(array.ndim - 1, block_axis, -1):
        if array.shape[axis] != 1 and array.strides[axis] != inner_bytes:
            raise InvalidArgument(
                f"arrays[{stage}]: axis {axis} behind the block axis is not dense"
            )
        inner_bytes *= array.shape[axis]
    blocks, stride = array.shape[block_axis], array.strides[block_axis]
    if array.size and blocks > 1 and stride < inner_bytes:
        raise InvalidArgument(
            f"arrays[{stage}]: blocks overlap, stride {stride} of {inner_bytes} bytes"
        )
    regions = []
    for index in itertools.product(*(range(n) for n in array.shape[:block_axis])):
        offset = sum(i * s for i, s in zip(index, array.strides[:block_axis], strict=True))
        regions.append(
            Region(
                array.ctypes.data + offset,
                max(stride, inner_bytes) if blocks == 1 else stride,
                inner_bytes,
                blocks,
                memory=memory,
                stage=stage,
            )
        )
    return regions
