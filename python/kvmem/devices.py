"""Opening a device."""

from __future__ import annotations

import numbers
import operator
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict

from . import _core
from ._shown import shown
from .errors import DeviceUnavailable, InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Unpack

_NO_CUDA = "this version of kvmem has no CUDA device"
_WORKERS_MOST = 256
_SEED_MOST = 2**64 - 1
_GBPS_LEAST, _GBPS_MOST = 1e-6, 1e6
_LATENCY_US_MOST = 1e9


class DeviceOptions(TypedDict, total=False):
    """Options of open_device()."""

    workers: int
    seed: int
    gbps: float
    latency_us: float
    shared_link: bool
    move_bytes: bool


_HOST_OPTIONS = {"workers": 0}
_VIRTUAL_OPTIONS = {
    "seed": 0,
    "gbps": 25.0,
    "latency_us": 10.0,
    "shared_link": False,
    "move_bytes": True,
}


class Device(_core.Device):
    """A device: its memory, streams and events. Made by open_device(). Any thread.

    kind: "host" or "virtual". name: what layouts call its memory.
    """

    _more_info: dict[str, Any] | None = None

    @property
    def info(self) -> dict[str, Any]:
        """What the device is: memory_bytes, copy_engines, copy_kernel, needs_pinned_host,
        virtual_time, has_bytes, chosen_why, ...; of a virtual device also seed, gbps, latency_us
        and shared_link.
        """
        return {**self._info, "chosen_why": "", **(self._more_info or {})}


def open_device(name: str = "auto", **options: Unpack[DeviceOptions]) -> Device:
    """Opens a device.

    name: "host", the CPU as a device; "virtual", a device in virtual time; or "auto", which falls
    back to the host where there is no other, `info["chosen_why"]` says why.

    Of the host device:
    workers = 0: copy threads; 0 is one for each core, at most 4.

    Of a virtual device, which has no thread and whose clock moves only while a thread waits for
    something or moves it (`kvmem.testing`). Awaiting moves nothing: a task must call
    testing.advance(). A wait with a time-out ends at once in real time when nothing on the device
    can end before it; other threads do not count. Equal calls with an equal seed end equally.
    seed = 0: draws the order of copies among those that streams and events allow; below 2^64.
    gbps = 25.0: what one link moves, in 10^9 bytes a second, 1e-6 to 1e6.
    latency_us = 10.0: microseconds from the last byte on the link to the end of the copy, at most
        1e9.
    shared_link = False: one link for both directions, instead of one for each.
    move_bytes = True: bytes move, as badly as hardware may move them; False: memory is addresses
        only, of which there are many terabytes, and touching one would crash.

    Raises DeviceUnavailable, or InvalidArgument for a name, an option or a value that is none.
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"device is {shown(name)}, not a name")
    if name == "cuda" or name.startswith("cuda:"):
        raise DeviceUnavailable(f"{name}: {_NO_CUDA}")
    if name == "virtual":
        return _open_virtual(_expect_options(name, options, _VIRTUAL_OPTIONS))
    if name not in ("auto", "host"):
        raise InvalidArgument(f"device is {name!r}, one of 'auto', 'host' and 'virtual'")
    device = _open_host(_expect_options(name, options, _HOST_OPTIONS))
    if name == "auto":
        device._more_info = {"chosen_why": f"auto: {_NO_CUDA}"}
    return device


def _expect_options(name: str, given: DeviceOptions, known: dict[str, Any]) -> dict[str, Any]:
    for option in given:
        if option not in _HOST_OPTIONS and option not in _VIRTUAL_OPTIONS:
            raise TypeError(f"open_device() got an unexpected keyword argument {option!r}")
        if option not in known:
            raise InvalidArgument(
                f"{option} is no option of device {name!r}, which takes {', '.join(known)}"
            )
    return {**known, **given}


def _open_host(options: dict[str, Any], gbps: float = 0.0) -> Device:
    workers = _integer("workers", options["workers"], _WORKERS_MOST)
    return Device(workers=workers, bytes_per_second=gbps * 1e9)


def _open_virtual(options: dict[str, Any]) -> Device:
    seed = _integer("seed", options["seed"], _SEED_MOST)
    gbps = _gbps(options["gbps"])
    latency_us = _number("latency_us", options["latency_us"], 0.0, _LATENCY_US_MOST)
    shared_link = _flag("shared_link", options["shared_link"])
    device = Device(
        seed=seed,
        bytes_per_second=gbps * 1e9,
        latency_seconds=latency_us * 1e-6,
        shared_link=shared_link,
        moves_bytes=_flag("move_bytes", options["move_bytes"]),
    )
    device._more_info = {
        "seed": seed,
        "gbps": gbps,
        "latency_us": latency_us,
        "shared_link": shared_link,
    }
    return device


def _gbps(value: object) -> float:
    return _number("gbps", value, _GBPS_LEAST, _GBPS_MOST)


def _integer(name: str, value: object, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise InvalidArgument(f"{name} is {shown(value)}: not an integer")
    number = operator.index(value)
    if not 0 <= number <= most:
        raise InvalidArgument(f"{name} is {shown(number)}, 0 to {most}")
    return number


def _number(name: str, value: object, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise InvalidArgument(f"{name} is {shown(value)}: not a number")
    try:
        number = float(value)
    except OverflowError:  # an integer beyond every float
        number = float("inf")
    if not least <= number <= most:  # also refuses NaN
        raise InvalidArgument(f"{name} is {number}, {least:g} to {most:g}")
    return number


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument(f"{name} is {shown(value)}: neither True nor False")
    return value
