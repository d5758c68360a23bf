"""What can go wrong, as types. Every error of kvmem is a KvmemError.

A full pool or queue is not an error: `try_` calls answer it with None. The errors at a bound are
for callers who asked to wait, or who asked for more than can ever be given; they carry the numbers
as fields.
"""

from __future__ import annotations


class KvmemError(Exception):
    """Base of all errors of kvmem."""


class InvalidArgument(KvmemError, ValueError):
    """An argument is wrong; the message names it, its value and the limit. Nothing has changed."""


class AlreadyReleased(KvmemError):
    """The holder was released before."""


class Busy(KvmemError):
    """A device block is in use by an unfinished transfer that `after` does not name."""

    block: int
    """The device block."""
    transfer: int
    """The id of the transfer that uses it."""


class Closed(KvmemError):
    """The object was closed."""


class Forked(KvmemError):
    """The object belongs to the parent process of this forked child."""


class NotDone(KvmemError):
    """The transfer has not ended, or a copy still holds the blocks."""


class Cancelled(KvmemError):
    """The transfer was cancelled."""


class AtBound(KvmemError):
    """A request met a bound. All numbers are in the unit of that bound: slots, bytes or reports."""

    bound: str = ""
    """Name of the bound; empty where a wait for something else ran out of time."""
    wanted: int = 0
    free: int = 0
    largest: int = 0
    """The largest request that could ever be served."""
    held: int = 0
    quarantined: int = 0


class TimedOut(AtBound, TimeoutError):
    """The wait ran out of time. Nothing is lost: what was waited for goes on."""


class PoolExhausted(AtBound):
    """The pool did not have the blocks in time."""


class CapacityError(AtBound):
    """The request can never be served, or the machine does not have the memory."""


class CopyFailed(KvmemError):
    """The device refused or failed a copy. Its blocks are kept until its end was observed."""


class DeviceLost(KvmemError):
    """Nothing on the device can be trusted any more. Host copies observed before stay readable."""


class DeviceUnavailable(KvmemError):
    """The device cannot be opened; the message says why."""


class Corrupt(KvmemError):
    """The bytes of a stored block are not those that its checksum is of. Nothing was restored."""

    block: int
    """Its position in the call."""
    slot: int
    expected: int
    found: int
    """What the bytes sum to now."""


class Incompatible(KvmemError):
    """Stored state does not fit the layout."""

    fields: list[str]
    """What differs."""
