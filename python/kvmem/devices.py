"""Opening a device."""

from __future__ import annotations

import numbers
import operator
import re
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict

from . import _core, _cuda
from ._shown import shown
from .errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CUDA_NAME = re.compile(r"cuda(?::(0|[1-9][0-9]{0,3}))?", re.ASCII)
_WORKERS_MOST = 256
_SEED_MOST = 2**64 - 1
_GBPS_LEAST, _GBPS_MOST = 1e-6, 1e6
_LATENCY_US_MOST = 1e9
_DESCRIPTORS = 4096
_DESCRIPTORS_MOST = 2**20


class DeviceOptions(TypedDict, total=False):
    """Options of open_device()."""

    workers: int
    batch: bool
    max_descriptors: int
    seed: int
    gbps: float
    latency_us: float
    shared_link: bool
    move_bytes: bool


_HOST_OPTIONS: dict[str, Any] = {"workers": 0}
_CUDA_OPTIONS: dict[str, Any] = {"batch": None, "max_descriptors": None}  # None: the environment's
_VIRTUAL_OPTIONS: dict[str, Any] = {
    "seed": 0,
    "gbps": 25.0,
    "latency_us": 10.0,
    "shared_link": False,
    "move_bytes": True,
}


class Device(_core.Device):
    """A device: its memory, streams and events. Made by open_device(). Any thread.

    kind: "host", "virtual" or "cuda". name: what layouts call its memory.
    """

    _more_info: dict[str, Any] | None = None

    @property
    def info(self) -> dict[str, Any]:
        """What the device is: memory_bytes, copy_engines, copy_kernel, needs_pinned_host,
        virtual_time, has_bytes, numa_node, chosen_why, ...; of a virtual device also seed, gbps,
        latency_us and shared_link; of a CUDA device copy_path (how copies go out now),
        pci_bus_id, compute_capability, runtime_path, runtime_version, ...
        """
        return {**self._info, "chosen_why": "", **(self._more_info or {})}


def open_device(name: str = "auto", **options: Unpack[DeviceOptions]) -> Device:
    """Opens a device.

    name: "cuda" or "cuda:0", "cuda:1", ...: a CUDA device, in the process's primary context, with
    the runtime that the process has loaded already, or that is found (docs/CUDA.md); "host", the
    CPU as a device; "virtual", a device in virtual time; or "auto": the first CUDA device, or the
    host where there is no CUDA runtime, no driver or no device, and `info["chosen_why"]` says
    which. A CUDA that is there and cannot be used is no reason to fall back: that raises. "auto"
    takes the options of either.

    Looking for CUDA, as "auto" and "cuda" do, initialises its driver in this process: children that
    it forks from then on cannot use CUDA. `import kvmem` does not look.

    Of the host device:
    workers = 0: copy threads; 0 is one for each core, at most 4.

    Of a CUDA device:
    batch = True: copies go out in batches where runtime and driver can; False: one by one. Default
        of KVMEM_CUDA_BATCH.
    max_descriptors = 4096: copies of one submission, at most 2^20. Default of
        KVMEM_CUDA_MAX_DESCRIPTORS.

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
    if name == "auto":
        return _open_auto(_expect_options(name, options, {**_HOST_OPTIONS, **_CUDA_OPTIONS}))
    if name == "host":
        return _open_host(_expect_options(name, options, _HOST_OPTIONS))
    if name == "virtual":
        return _open_virtual(_expect_options(name, options, _VIRTUAL_OPTIONS))
    ordinal = _CUDA_NAME.fullmatch(name)
    if ordinal is None:
        raise InvalidArgument(f"device is {name!r}, one of 'auto', 'cuda:N', 'host' and 'virtual'")
    chosen = _cuda_options(_expect_options(name, options, _CUDA_OPTIONS))
    return _open_cuda(name, int(ordinal[1] or 0), _cuda.find(), chosen)


def _expect_options(name: str, given: DeviceOptions, known: dict[str, Any]) -> dict[str, Any]:
    for option in given:
        if not any(option in kind for kind in (_HOST_OPTIONS, _CUDA_OPTIONS, _VIRTUAL_OPTIONS)):
            raise TypeError(f"open_device() got an unexpected keyword argument {option!r}")
        if option not in known:
            raise InvalidArgument(
                f"{option} is no option of device {name!r}, which takes {', '.join(known)}"
            )
    return {**known, **given}


def _open_host(options: dict[str, Any], gbps: float = 0.0) -> Device:
    workers = _integer("workers", options["workers"], _WORKERS_MOST)
    return Device(workers=workers, bytes_per_second=gbps * 1e9)


def _open_auto(options: dict[str, Any]) -> Device:
    chosen = _cuda_options(options)
    _integer("workers", options["workers"], _WORKERS_MOST)
    status = _cuda.find()
    device = _open_host(options) if status.absent else _open_cuda("auto", 0, status, chosen)
    device._more_info = {"chosen_why": f"auto: {status.sentence}"}
    return device


def _open_cuda(
    name: str, ordinal: int, status: _core._CudaStatus, options: dict[str, Any]
) -> Device:
    _cuda.expect_usable(name, status)
    return Device(cuda=status, ordinal=ordinal, **options)


def _cuda_options(options: dict[str, Any]) -> dict[str, Any]:
    batch, most = options["batch"], options["max_descriptors"]
    if batch is None:
        batch = _cuda.batch_setting()
    if most is None:
        most = _cuda.max_descriptors_setting(_DESCRIPTORS, _DESCRIPTORS_MOST)
    return {
        "batch": _flag("batch", batch),
        "max_descriptors": _integer("max_descriptors", most, _DESCRIPTORS_MOST, least=1),
        "no_batch_drivers": _cuda.no_batch_drivers_setting(),
    }


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


def _integer(name: str, value: object, most: int, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise InvalidArgument(f"{name} is {shown(value)}: not an integer")
    number = operator.index(value)
    if not least <= number <= most:
        raise InvalidArgument(f"{name} is {shown(number)}, {least} to {most}")
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
