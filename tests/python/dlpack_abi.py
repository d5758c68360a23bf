"""DLPack by hand: a library that makes tensors, and one that takes them, in ctypes."""

from __future__ import annotations

import ctypes
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_int32,
    c_int64,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any

import numpy as np

LEGACY, VERSIONED = b"dltensor", b"dltensor_versioned"
USED = {LEGACY: b"used_dltensor", VERSIONED: b"used_dltensor_versioned"}
READ_ONLY, IS_COPIED = 1, 2
CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
INTEGER, UNSIGNED, FLOAT, OPAQUE, BFLOAT, FLOAT8, FLOAT4 = 0, 1, 2, 3, 4, 10, 17

Deleter = CFUNCTYPE(None, c_void_p)


class DLTensor(Structure):
    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("axes", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


class Legacy(Structure):
    _fields_ = (("tensor", DLTensor), ("context", c_void_p), ("deleter", c_void_p))


class Versioned(Structure):
    _fields_ = (
        ("major", c_uint32),
        ("minor", c_uint32),
        ("context", c_void_p),
        ("deleter", c_void_p),
        ("flags", c_uint64),
        ("tensor", DLTensor),
    )


STRUCTURES: dict[bytes, Any] = {LEGACY: Legacy, VERSIONED: Versioned}

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = (c_void_p, ctypes.c_char_p, c_void_p)
_api.PyCapsule_GetName.restype = ctypes.c_char_p
_api.PyCapsule_GetName.argtypes = (ctypes.py_object,)
_api.PyCapsule_GetPointer.restype = c_void_p
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)


def name_of(capsule: object) -> bytes:
    name = _api.PyCapsule_GetName(capsule)
    assert isinstance(name, bytes)
    return name


class Taken:
    """The tensor of a capsule, taken as a library takes it: who has it calls drop() once."""

    def __init__(self, capsule: object) -> None:
        name = name_of(capsule)
        self.address = _api.PyCapsule_GetPointer(capsule, name)
        self.managed = STRUCTURES[name].from_address(self.address)
        _api.PyCapsule_SetName(capsule, USED[name])

    @property
    def tensor(self) -> DLTensor:
        tensor = self.managed.tensor
        assert isinstance(tensor, DLTensor)
        return tensor

    @property
    def deleter(self) -> int:
        deleter = self.managed.deleter
        assert isinstance(deleter, int)
        return deleter

    def drop(self) -> None:
        """A call from ctypes is one without the GIL."""
        Deleter(self.deleter)(self.address)


class Tensor:
    """A tensor of another library: the bytes of `array`, described as one likes.

    `tensor` are fields of DLTensor, `managed` of the structure around it. `version`: of DLPack that
    the library speaks; None is one from before version 1.
    """

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        *,
        device: tuple[int, int] = (CPU, 0),
        strides: bool = True,
        version: tuple[int, int] | None = (1, 0),
        managed: dict[str, Any] | None = None,
        **tensor: Any,
    ) -> None:
        self.array = array
        self.device_pair = device
        self.version = version
        self.asked: list[dict[str, Any]] = []
        self.dropped = 0
        kind = LEGACY if version is None else VERSIONED
        self.kind = kind
        in_elements = [each // array.itemsize for each in array.strides]
        self._shape = (c_int64 * max(array.ndim, 1))(*array.shape)
        self._strides = (c_int64 * max(array.ndim, 1))(*in_elements)
        self._deleter = Deleter(self._drop)
        self.managed = STRUCTURES[kind]()
        if version is not None:
            self.managed.major, self.managed.minor = version
        self.managed.deleter = ctypes.cast(self._deleter, c_void_p)
        facts: dict[str, Any] = {
            "data": array.ctypes.data,
            "device_type": device[0],
            "device_id": device[1],
            "axes": array.ndim,
            "code": UNSIGNED,
            "bits": array.itemsize * 8,
            "lanes": 1,
            "shape": self._shape,
            "strides": self._strides if strides else None,
            **tensor,
        }
        for name, value in facts.items():
            setattr(self.managed.tensor, name, value)
        for name, value in (managed or {}).items():
            setattr(self.managed, name, value)

    def _drop(self, managed: int) -> None:
        assert managed == ctypes.addressof(self.managed)
        self.dropped += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device_pair

    def __dlpack__(self, **asked: Any) -> object:
        self.asked.append(asked)
        if self.version is None and "max_version" in asked:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.capsule = _api.PyCapsule_New(ctypes.addressof(self.managed), self.kind, None)
        return self.capsule


class CudaArray:
    """An array with `__cuda_array_interface__`: the bytes of `array`, described as one likes."""

    def __init__(self, array: np.ndarray[Any, Any], device: object = None, **facts: Any) -> None:
        if device is not None:
            self.device = device
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "strides": array.strides,
            "data": (array.ctypes.data, False),
            "version": 3,
            **facts,
        }
