"""Controls for tests of code that uses kvmem. Not for production."""

from __future__ import annotations

from ._core import Device, Event, Stream


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


def stall(device: Device, stream: Stream) -> Gate:
    """Stalls what is queued on `stream` from now on until the returned gate is opened.

    Host device only.
    """
    event = device.host_event()
    stream.wait(event)
    return Gate(event)
