"""What an array of any library says of itself, without its bytes being touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from . import _core
from .errors import InvalidArgument

_IS_READ_ONLY, _IS_COPIED = 1, 2  # flags of DLPack
_HOST_TYPES, _CUDA_TYPE = (1, 3), 2  # device types of DLPack: the CPU's, pinned by CUDA; CUDA's


class Array(NamedTuple):
    address: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    read_only: bool
    memory: str | None
    """Such as "cuda:1"; "cuda" is a device that it does not name, None: it does not say."""

    def memory_as(self, said: str | None) -> str:
        """The memory that a layout names: what its caller said, unless the array contradicts."""
        if said is None:
            return "cuda:0" if self.memory == "cuda" else self.memory or "host"
        said = "cuda:0" if said == "cuda" else said
        if self.memory is None:
            agrees = True
        elif self.memory == "host":
            agrees = not said.startswith("cuda")  # a virtual device's memory is host memory
        elif self.memory == "cuda":
            agrees = said.startswith("cuda:")
        else:
            agrees = said == self.memory
        if not agrees:
            raise InvalidArgument(f"it is in {self.memory} memory, and memory is {said!r}")
        return said


def describe(array: Any) -> Array:
    """Of a NumPy array, or of what has `__dlpack__` or `__cuda_array_interface__`.

    DLPack goes first: it names the device and knows types that NumPy has not. But torch refuses it
    for a tensor that is not on the current CUDA device, and then the other one will do. Raises
    InvalidArgument.
    """
    if isinstance(array, np.ndarray):
        return _of_numpy(array)
    refused: Exception | None = None
    for attribute, read in (("__dlpack__", _of_dlpack), ("__cuda_array_interface__", _of_cuda)):
        try:
            if hasattr(array, attribute):
                return read(array)
        except InvalidArgument:
            raise
        except Exception as error:  # each library has its own
            refused = refused or error
    if refused is not None:
        raise InvalidArgument(repr(refused)) from refused
    raise InvalidArgument(
        f"it is {type(array).__name__}, not an array: NumPy's, or one with __dlpack__ or "
        "__cuda_array_interface__"
    )


def _of_numpy(array: np.ndarray[Any, Any]) -> Array:
    if array.dtype.hasobject:
        raise InvalidArgument("it holds Python objects, which cannot be copied as bytes")
    read_only = not array.flags.writeable
    return Array(
        array.ctypes.data, array.shape, array.strides, array.itemsize, read_only, memory=None
    )


def _of_dlpack(array: Any) -> Array:
    # Nobody waits for anything here: what is pending is named in `after` of each transfer.
    on_host = array.__dlpack_device__()[0] in _HOST_TYPES
    no_wait = {} if on_host else {"stream": -1}
    try:
        capsule = array.__dlpack__(max_version=(1, 0), **no_wait)
    except TypeError:  # a library from before version 1
        capsule = array.__dlpack__(**no_wait)
    # The capsule is consumed at once. The memory is the array's, and stays as long as that does.
    address, shape, strides, item_bytes, device, number, flags = _core._read_dlpack(capsule)
    if flags & _IS_COPIED:
        raise InvalidArgument("its __dlpack__ gives a copy, not the array itself")
    if device != _CUDA_TYPE and device not in _HOST_TYPES:
        raise InvalidArgument(f"its DLPack device is {(device, number)}: neither host nor CUDA")
    memory = f"cuda:{number}" if device == _CUDA_TYPE else "host"
    return Array(
        address,
        shape,
        _dense(shape, item_bytes) if strides is None else tuple(s * item_bytes for s in strides),
        item_bytes,
        bool(flags & _IS_READ_ONLY),
        memory,
    )


def _of_cuda(array: Any) -> Array:
    facts = array.__cuda_array_interface__
    if facts["version"] < 2:
        raise InvalidArgument(f"its __cuda_array_interface__ is version {facts['version']}, not 2")
    if facts.get("mask") is not None:
        raise InvalidArgument("it has a mask, which would not be copied")
    dtype = np.dtype(str(facts["typestr"]))  # of None it would make float64
    if dtype.hasobject:
        raise InvalidArgument("it holds Python objects, which cannot be copied as bytes")
    address, read_only = facts["data"]
    shape, strides = tuple(map(int, facts["shape"])), facts.get("strides")
    strides = _dense(shape, dtype.itemsize) if strides is None else tuple(map(int, strides))
    if len(strides) != len(shape):
        raise InvalidArgument(f"it has {len(shape)} axes and {len(strides)} strides")
    device = getattr(array, "device", None)
    numbers = (getattr(device, name, None) for name in ("index", "id"))  # torch's, CuPy's
    number = next((each for each in numbers if isinstance(each, int)), None)
    memory = "cuda" if number is None else f"cuda:{number}"
    return Array(int(address), shape, strides, dtype.itemsize, bool(read_only), memory)


def _dense(shape: Sequence[int], item_bytes: int) -> tuple[int, ...]:
    strides = [item_bytes]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides[: len(shape)])
