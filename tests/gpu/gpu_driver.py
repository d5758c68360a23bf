"""The CUDA driver through ctypes: what an engine does beside kvmem, in tests and benchmarks.

Streams, the kernels of kernels.ptx, plain copies, captures. Not through kvmem and not through the
runtime, so that what is tested and what tests it share nothing but the GPU. Any thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

KERNELS = Path(__file__).with_name("kernels.ptx")
SPIN_LIMIT_S = 20.0
"""Seconds after which a held stream goes on by itself: a failed test must not hang the GPU."""

_MULTIPLIER = np.uint32(0x9E3779B1)  # of kvmem_fill
_NON_BLOCKING = 1
_PORTABLE_AND_MAPPED = 1 | 2
_GLOBAL_MODE = 0

_PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetPCIBusId": (c_char_p, c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuLaunchKernel": (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemHostAlloc": (POINTER(c_void_p), c_size_t, c_uint),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemcpyHtoD_v2": (c_uint64, c_void_p, c_size_t),
    "cuMemcpyDtoH_v2": (c_void_p, c_uint64, c_size_t),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamQuery": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuGraphDestroy": (c_void_p,),
}


class NoGpu(Exception):
    """There is none that this process can use; the message says why."""


class DriverError(Exception):
    def __init__(self, call: str, code: int, text: str) -> None:
        super().__init__(f"{call}: {text} ({code})")
        self.code = code


def pattern(nbytes: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """What fill() writes."""
    words = np.arange(-(-nbytes // 4), dtype=np.uint32) * _MULTIPLIER + np.uint32(seed)
    return words.view(np.uint8)[:nbytes]


class Stream:
    """A stream of the engine's own, which kvmem takes by its handle."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        handle = c_void_p()
        driver.call("cuStreamCreate", byref(handle), _NON_BLOCKING)
        assert handle.value is not None
        self.handle: int = handle.value

    def synchronize(self) -> None:
        self._driver.call("cuStreamSynchronize", self.handle)

    def idle(self) -> bool:
        return self._driver.call("cuStreamQuery", self.handle, but=600) == 0

    def record(self) -> Event:
        event = Event(self._driver)
        self._driver.call("cuEventRecord", event.handle, self.handle)
        return event

    def close(self) -> None:
        self._driver.call("cuStreamDestroy_v2", self.handle)


class Event:
    """An event of the engine's own. Never destroyed: tests make few."""

    def __init__(self, driver: Driver) -> None:
        handle = c_void_p()
        without_timing = 2
        driver.call("cuEventCreate", byref(handle), without_timing)
        assert handle.value is not None
        self.handle: int = handle.value


class Spin:
    """Holds a stream back until it is opened. Leaving a `with` block opens it."""

    def __init__(self, words: Any) -> None:
        self._words = words

    def open(self) -> None:
        self._words[0] = 1

    def ran_out(self) -> bool:
        """Whether it went on by itself, because nobody opened it in time."""
        return bool(self._words[1] == 2)

    def __enter__(self) -> Spin:
        return self

    def __exit__(self, *exc: object) -> None:
        self.open()


class Driver:
    """One device's primary context, which is kvmem's too."""

    def __init__(self, ordinal: int = 0) -> None:
        # Streams share hardware queues, of which there are 8 unless told otherwise; and a kernel
        # that is loaded when it is first launched waits for those that run.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise NoGpu(f"no driver: {error}") from None
        for name, arguments in _PROTOTYPES.items():
            getattr(self._library, name).argtypes = arguments
        try:
            self._call("cuInit", 0)
            count = c_int()
            self._call("cuDeviceGetCount", byref(count))
            if count.value <= ordinal:
                raise NoGpu(f"the driver shows {count.value} devices")
            self._device = c_int()
            self._call("cuDeviceGet", byref(self._device), ordinal)
            self._context = c_void_p()
            self._call("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        except DriverError as error:
            raise NoGpu(str(error)) from None
        self._kernels = self._load_kernels()
        self._spins = self._make_spins()
        self._launch_once()

    # ---- calls

    def _call(self, name: str, *arguments: Any, but: int = 0) -> int:
        code = int(getattr(self._library, name)(*arguments))
        if code in (0, but):
            return code
        text = c_char_p()
        self._library.cuGetErrorString(code, byref(text))
        raise DriverError(name, code, (text.value or b"an unknown error").decode())

    def call(self, name: str, *arguments: Any, but: int = 0) -> int:
        """A call with the context; raises DriverError for all codes but 0 and `but`."""
        with self.current():
            return self._call(name, *arguments, but=but)

    @contextmanager
    def current(self) -> Iterator[None]:
        """The context is this thread's current one meanwhile."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(byref(c_void_p()))

    @property
    def pci_bus_id(self) -> str:
        text = ctypes.create_string_buffer(32)
        self._call("cuDeviceGetPCIBusId", text, len(text), self._device)
        return text.value.decode().lower()

    # ---- memory, through the driver's own copies; they wait for nothing but themselves

    def upload(self, address: int, data: np.ndarray[Any, Any]) -> None:
        data = np.ascontiguousarray(data)
        with self.current():
            self._call("cuMemcpyHtoD_v2", address, data.ctypes.data, data.nbytes)
            # It returns when the data were taken; streams that do not block see them later.
            self._call("cuStreamSynchronize", None)

    def download(self, address: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        data = np.empty(nbytes, np.uint8)
        self.call("cuMemcpyDtoH_v2", data.ctypes.data, address, nbytes)
        return data

    # ---- kernels

    def spin(self, stream: Any, limit_s: float = SPIN_LIMIT_S) -> Spin:
        """Holds back what is queued on `stream` from now on."""
        words, address = next(self._spins)
        words[0] = words[1] = 0
        self.launch("kvmem_spin", stream, c_uint64(address), c_uint64(int(limit_s * 1e9)))
        return Spin(words)

    def fill(self, stream: Any, address: int, nbytes: int, seed: int) -> None:
        """The GPU writes pattern(nbytes, seed), whole words of 4 bytes."""
        words = c_uint64(nbytes // 4)
        self.launch("kvmem_fill", stream, c_uint64(address), words, c_uint32(seed), wide=True)

    def read(self, stream: Any, target: int, source: int, nbytes: int) -> None:
        """The GPU reads nbytes, whole words of 4, and writes down what it saw."""
        arguments = c_uint64(target), c_uint64(source), c_uint64(nbytes // 4)
        self.launch("kvmem_read", stream, *arguments, wide=True)

    def poke(self, stream: Any, address: int = 0x10) -> None:
        """Loses the device for this process."""
        self.launch("kvmem_poke", stream, c_uint64(address))

    def launch(self, kernel: str, stream: Any, *arguments: Any, wide: bool = False) -> None:
        blocks, threads = (64, 256) if wide else (1, 1)
        places = (c_void_p * len(arguments))(*[ctypes.addressof(each) for each in arguments])
        function = self._kernels[kernel]
        shape = blocks, 1, 1, threads, 1, 1, 0
        self.call("cuLaunchKernel", function, *shape, stream.handle, places, None)

    def _load_kernels(self) -> dict[str, c_void_p]:
        module = c_void_p()
        self.call("cuModuleLoadData", byref(module), KERNELS.read_bytes())
        kernels = {}
        for name in ("kvmem_spin", "kvmem_fill", "kvmem_read", "kvmem_poke"):
            kernels[name] = c_void_p()
            self.call("cuModuleGetFunction", byref(kernels[name]), module, name.encode())
        return kernels

    def _make_spins(self) -> Iterator[tuple[Any, int]]:
        """Pairs of words in pinned memory, flag and outcome, and where the GPU sees them."""
        pairs, pair_bytes = 4096, 8
        page, address = c_void_p(), c_uint64()
        nbytes = pairs * pair_bytes
        self.call("cuMemHostAlloc", byref(page), nbytes, _PORTABLE_AND_MAPPED)
        self.call("cuMemHostGetDevicePointer_v2", byref(address), page, 0)
        start = page.value or 0

        def each() -> Iterator[tuple[Any, int]]:
            while True:  # a pair comes again after so many spins
                for offset in range(0, nbytes, pair_bytes):
                    words = (c_uint32 * 2).from_address(start + offset)
                    yield words, address.value + offset

        return each()

    def _launch_once(self) -> None:
        """So that nothing is left to be loaded when a kernel is launched beside a spinning one."""
        stream, place = Stream(self), c_uint64()
        self.call("cuMemAlloc_v2", byref(place), 4096)
        self.spin(stream).open()
        self.fill(stream, place.value, 1024, 0)
        self.read(stream, place.value + 2048, place.value, 1024)
        stream.synchronize()
        stream.close()

    # ---- captures

    @contextmanager
    def capture(self, stream: Stream) -> Iterator[None]:
        """Captures in global mode. Raises DriverError at its end if it did not stay valid."""
        self.call("cuStreamBeginCapture_v2", stream.handle, _GLOBAL_MODE)
        try:
            yield
        finally:
            graph = c_void_p()
            self.call("cuStreamEndCapture", stream.handle, byref(graph))
            self.call("cuGraphDestroy", graph)
