"""Controls for tests of code that uses kvmem, and for measuring. Not for production.

`stall` holds back one stream of a host or a virtual device. The others make a virtual device show
what hardware shows rarely: they move its clock, keep copies from ending, and let calls fail. They
raise InvalidArgument for another kind of device.

A thread that waits for something on a virtual device moves its clock. Awaiting moves nothing: a
task must call advance().
"""

from __future__ import annotations

from typing import Literal, SupportsFloat, SupportsIndex, TypeVar

from . import _core
from ._core import Event, Stream
from ._shown import shown
from .devices import _HOST_OPTIONS, Device, _gbps, _open_host
from .errors import InvalidArgument

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

_Kind = TypeVar("_Kind")


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
    stream = _expect("stream", stream, Stream)
    event = _device(device).host_event()
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
    return _core._now(_device(device))


def advance(device: _core.Device, seconds: SupportsFloat | SupportsIndex) -> None:
    """Moves the clock of a virtual device.

    All that ends meanwhile ends and is reaped at its time, and what then has room is submitted.
    """
    _core._advance(_device(device), seconds)


def step(device: _core.Device) -> bool:
    """Moves the clock of a virtual device to the next end of a copy, and reaps.

    False, and nothing moves, when no copy can end: none is queued, or all are stalled or held.
    """
    return _core._step(_device(device))


def may_touch(device: _core.Device, address: SupportsIndex, nbytes: SupportsIndex) -> bool:
    """Whether a copy that is queued on a virtual device and has not ended may read or write there.

    While it may, nobody may be given that memory, on either side.
    """
    return _core._may_touch(_device(device), address, nbytes)


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
    the call says that it failed; "lost", the device is lost from then on. "in_flight" differs from
    "refused" for "record", "wait" and "copy" only; of the others nothing happens.
    """
    _core._fail_nth(_device(device), call, nth, how, times)


def forget_faults(device: _core.Device) -> None:
    """Calls off the failures that have not come yet."""
    _core._forget_faults(_device(device))


def lose(device: _core.Device) -> None:
    """Loses a virtual device: what is in flight is poisoned, calls raise DeviceLost."""
    _core._lose(_device(device))


def hold_copies(device: _core.Device, count: SupportsIndex) -> None:
    """Keeps the next `count` copies from ending until release_copies().

    A copy is what one submission hands to the device. It may be read and written all the time. A
    later call replaces the count that is left of an earlier one.
    """
    _core._hold_copies(_device(device), count)


def release_copies(device: _core.Device) -> None:
    """Lets held copies end, and keeps no more from it."""
    _core._release_copies(_device(device))


# ---- arguments


def _device(value: object) -> _core.Device:
    return _expect("device", value, _core.Device)


def _expect(name: str, value: object, kind: type[_Kind]) -> _Kind:
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} is {shown(value)}, not a {kind.__name__}")
    return value
