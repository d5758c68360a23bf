"""Controls for tests of code that uses kvmem, and for measuring. Not for production.

`stall` holds back one stream of a host or a virtual device. The others make a virtual device show
what hardware shows rarely: they move its clock, keep copies from ending, and let calls fail. They
raise InvalidArgument for another kind of device.
"""

from __future__ import annotations

from typing import Literal, SupportsFloat, SupportsIndex

from . import _core
from ._core import Event, Stream
from .devices import _HOST_OPTIONS, Device, _gbps, _open_host

Call = Literal[
    "allocate",
    "pin",
    "create_stream",
    "stream_id",
    "create_event",
    "record",
    "wait",
    "query",
    "event_time",
    "copy",
    "any",
]
"""Calls that kvmem makes to a device."""


class Gate:
    """Holds a stream back until it is opened.

    Opening twice is fine. Leaving a `with` block opens it.
    """

    def __init__(self, event: Event) -> None:
        self._event: Event | None = event

    def open(self) -> None:
        """Lets the stream go on."""
        event, self._event = self._event, None
        if event is not None:
            event.set()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *exc: object) -> None:
        self.open()


def stall(device: _core.Device, stream: Stream) -> Gate:
    """Stalls what is queued on `stream` from now on until the returned gate is opened.

    Host and virtual device only.
    """
    event = device.host_event()
    stream.wait(event)
    return Gate(event)


def slow_host_device(*, gbps: float, workers: int = 1) -> Device:
    """A host device on which copies can be seen in flight.

    gbps: the most that each thread that copies moves, in 10^9 bytes a second; a thread that waits
    for something copies too. workers: as for open_device().
    """
    return _open_host({**_HOST_OPTIONS, "workers": workers}, _gbps(gbps))


# ---- the clock


def now(device: _core.Device) -> float:
    """Seconds on the device's clock, any kind of device: the clock of TimelineRecord.

    Monotonic from an arbitrary beginning; a virtual device begins at 0.
    """
    return _core._now(device)


def advance(device: _core.Device, seconds: SupportsFloat | SupportsIndex) -> None:
    """Moves the clock of a virtual device.

    All that ends meanwhile ends and is reaped at its time, and what then has room is submitted.
    """
    _core._advance(device, seconds)


def step(device: _core.Device) -> bool:
    """Moves the clock of a virtual device to the next end of a copy, and reaps.

    False, and nothing moves, when no copy can end: none is queued, or all are stalled or held.
    """
    return _core._step(device)


def may_touch(device: _core.Device, address: SupportsIndex, nbytes: SupportsIndex) -> bool:
    """Whether a copy that is queued on a virtual device and has not ended may read or write there.

    While it may, nobody may be given that memory, on either side.
    """
    return _core._may_touch(device, address, nbytes)


# ---- faults


def fail_nth(
    device: _core.Device,
    call: Call,
    nth: SupportsIndex,
    how: Literal["refused", "in_flight", "lost"] = "refused",
    times: SupportsIndex = 1,
) -> None:
    """Lets the nth call of that kind from now on (counted from 1), and `times` - 1 behind it, fail.

    how: "refused", nothing happened and the call says that it failed; "in_flight", it happened and
    the call says that it failed; "lost", the device is lost from then on.
    """
    _core._fail_nth(device, call, nth, how, times)


def forget_faults(device: _core.Device) -> None:
    """Calls off the failures that have not come yet."""
    _core._forget_faults(device)


def lose(device: _core.Device) -> None:
    """Loses a virtual device: what is in flight is poisoned, calls raise DeviceLost."""
    _core._lose(device)


def hold_copies(device: _core.Device, count: SupportsIndex) -> None:
    """Keeps the next `count` copies from ending until release_copies().

    A copy is what one submission hands to the device. It may be read and written all the time.
    """
    _core._hold_copies(device, count)


def release_copies(device: _core.Device) -> None:
    """Lets held copies end, and keeps no more from it."""
    _core._release_copies(device)
