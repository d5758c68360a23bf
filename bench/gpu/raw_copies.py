"""cudaMemcpyAsync without kvmem, over the same addresses: the baseline on a GPU."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from gpu_driver import Stream

SOURCE = Path(__file__).with_name("raw_copies.c")
TO_DEVICE, TO_HOST = 1, 2

# struct Copy of raw_copies.c
COPY = np.dtype(
    [
        ("target", np.uint64),
        ("source", np.uint64),
        ("bytes", np.uint64),
        ("stream", np.uint64),
        ("kind", np.int64),  # an int, and the padding behind it
    ]
)


def load_loop(folder: Path) -> Any:
    """The loop in C: KVMEM_RAW_COPIES, or compiled into the folder. None without a compiler."""
    built = os.environ.get("KVMEM_RAW_COPIES", "")
    if not built:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            return None
        built = str(folder / "raw_copies.so")
        subprocess.run([compiler, "-O2", "-shared", "-fPIC", SOURCE, "-o", built], check=True)
    loop = ctypes.CDLL(built).kvmem_raw_copies
    loop.argtypes = (c_void_p, c_void_p, c_size_t)
    return loop


def copies(
    host: np.ndarray[Any, Any],
    device: np.ndarray[Any, Any],
    segment_bytes: int,
    kind: int,
    stream: Stream,
) -> np.ndarray[Any, Any]:
    """One copy for each pair of addresses."""
    made = np.empty(host.size, COPY)
    made["target"], made["source"] = (device, host) if kind == TO_DEVICE else (host, device)
    made["bytes"], made["stream"], made["kind"] = segment_bytes, stream.handle, kind
    return made


def interleaved(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """Equally many of each in turn, so that no stream waits until another one's were submitted."""
    return np.stack(parts, axis=1).reshape(-1)


class RawCopies:
    """Submits the copies, and waits for their streams."""

    def __init__(
        self, loop: Any, runtime_path: str, copies: np.ndarray[Any, Any], streams: Sequence[Stream]
    ) -> None:
        self._loop = loop
        self._call = ctypes.cast(ctypes.CDLL(runtime_path).cudaMemcpyAsync, c_void_p)
        self._copies = np.ascontiguousarray(copies)
        self._streams = streams

    def submit(self) -> None:
        code: c_int = self._loop(self._call, self._copies.ctypes.data, self._copies.size)
        assert code == 0, f"cudaMemcpyAsync: {code}"

    def wait(self) -> None:
        for stream in self._streams:
            stream.synchronize()

    def run(self) -> None:
        self.submit()
        self.wait()
