"""Opening a device."""

from __future__ import annotations

from typing import Any, SupportsIndex

from . import _core
from .errors import DeviceUnavailable, InvalidArgument

_NO_CUDA = "this version of kvmem has no CUDA device"


class Device(_core.Device):
    """A device: its memory, streams and events. Made by open_device(). Any thread.

    kind: "host". name: what layouts call its memory.
    """

    _chosen_why = ""

    @property
    def info(self) -> dict[str, Any]:
        """What the device is: memory_bytes, copy_engines, copy_kernel, needs_pinned_host,
        chosen_why, ...
        """
        return {**self._info, "chosen_why": self._chosen_why}


def open_device(name: str = "auto", *, workers: int = 0) -> Device:
    """Opens a device.

    name: "host", the CPU as a device; or "auto", which falls back to it where there is no other,
    `info["chosen_why"]` says why. workers: copy threads of the host device; 0 is one for each core,
    at most 4.

    Raises DeviceUnavailable, or InvalidArgument for a name that is none.
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"device is {name!r}, not a name")
    if name == "cuda" or name.startswith("cuda:"):
        raise DeviceUnavailable(f"{name}: {_NO_CUDA}")
    if name not in ("auto", "host"):
        raise InvalidArgument(f"device is {name!r}, one of 'auto' and 'host'")
    if isinstance(workers, bool) or not isinstance(workers, SupportsIndex):
        raise InvalidArgument(f"workers is {workers!r}: not an integer")
    if not 0 <= workers <= 256:
        raise InvalidArgument(f"workers is {workers}, 0 to 256")
    device = Device(workers)
    device._chosen_why = f"auto: {_NO_CUDA}" if name == "auto" else ""
    return device
