"""Finding CUDA, and the settings of a CUDA device that come from the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import _core
from ._shown import shown
from .errors import DeviceUnavailable, InvalidArgument

BATCH = "KVMEM_CUDA_BATCH"
MAX_DESCRIPTORS = "KVMEM_CUDA_MAX_DESCRIPTORS"
NO_BATCH_DRIVERS = "KVMEM_CUDA_NO_BATCH_DRIVERS"

# Where NVIDIA's wheels put the runtime, newest first.
_IN_WHEELS = (
    "nvidia/cu13/lib/libcudart.so.13",  # nvidia-cuda-runtime
    "nvidia/cuda_runtime/lib/libcudart.so.12",  # nvidia-cuda-runtime-cu12
)


def find() -> _core._CudaStatus:
    """Say whether CUDA can be used here; makes no context.

    It initialises the driver in this process: children that it forks from then on cannot use CUDA.

    Raises DeviceUnavailable for a KVMEM_CUDART_PATH that is no CUDA runtime.
    """
    return _core._find_cuda(wheels())


def expect_usable(name: str, status: _core._CudaStatus) -> None:
    """Raise DeviceUnavailable unless it is."""
    if status.usability != "usable":
        raise DeviceUnavailable(f"{name}: {status.sentence}")


def wheels() -> list[str]:
    """List the runtimes in installed wheels, newest first."""
    # Not through importlib: `nvidia` is a namespace of many packages, and importing one of them
    # may bring in whatever it likes.
    folders = [Path(entry or ".") for entry in sys.path]
    found = [str(folder / name) for name in _IN_WHEELS for folder in folders]
    return [path for path in dict.fromkeys(found) if os.path.isfile(path)]


def batch_setting() -> bool:
    """Whether copies may go out in batches. Raises InvalidArgument for a setting that is none."""
    value = os.environ.get(BATCH, "") or "1"
    if value not in ("0", "1"):
        raise InvalidArgument(f"{BATCH} is {shown(value)}, neither 0 nor 1")
    return value == "1"


def max_descriptors_setting(default: int, most: int) -> int:
    """Give the most descriptors of one submission. Raises InvalidArgument likewise."""
    value = os.environ.get(MAX_DESCRIPTORS, "") or str(default)
    if not (value.isascii() and value.isdigit() and len(value) < 20 and 1 <= int(value) <= most):
        raise InvalidArgument(f"{MAX_DESCRIPTORS} is {shown(value)}, not an integer of 1 to {most}")
    return int(value)


def no_batch_drivers_setting() -> list[str]:
    """Give the releases of the kernel module whose batches are not to be used."""
    parts = os.environ.get(NO_BATCH_DRIVERS, "").split(",")
    return [part.strip() for part in parts if part.strip()]
