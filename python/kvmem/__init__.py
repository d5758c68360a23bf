"""kvmem: a memory manager for offloading LLM KV caches.

It moves KV blocks between a device and bounded host memory, and guarantees that no block is reused
while a copy can still touch it. Start with the example in the README; the classes here are
documented one by one.
"""

import atexit
import sys

if sys.version_info < (3, 12):  # from there on the extension module says so itself; here it hangs
    import _xxsubinterpreters as _interpreters  # type: ignore[import-not-found]

    if _interpreters.get_current() != _interpreters.get_main():
        raise ImportError("kvmem works in the main interpreter of a process only")

from . import _core, errors
from ._core import (
    READY,
    CancelOutcome,
    CloseReport,
    DeviceBuffer,
    Event,
    HostBlocks,
    HostCopy,
    Region,
    Report,
    Stream,
    TimelineRecord,
    Transfer,
)
from .cache import (
    Advice,
    Cache,
    CacheCloseReport,
    CacheHit,
    CacheTransfer,
    Disk,
    Miss,
    ThrashBudget,
)
from .devices import Device, open_device
from .errors import (
    AlreadyReleased,
    AtBound,
    Busy,
    Cancelled,
    CapacityError,
    Closed,
    CopyFailed,
    Corrupt,
    DeviceLost,
    DeviceUnavailable,
    Forked,
    Incompatible,
    InvalidArgument,
    KvmemError,
    NotDone,
    PoolExhausted,
    TimedOut,
)
from .index import Group, Index, Plan, Reservation, last
from .layout import KVLayout
from .manager import Manager
from .manifest import Difference, Manifest
from .policies import count_hits, hits_of
from .pool import BlockPool

__version__ = _core.__version__

# From then on destructors leak rather than wait or call a device: the process takes it all.
atexit.register(_core._set_exiting)

__all__ = [
    "READY",
    "Advice",
    "AlreadyReleased",
    "AtBound",
    "BlockPool",
    "Busy",
    "Cache",
    "CacheCloseReport",
    "CacheHit",
    "CacheTransfer",
    "CancelOutcome",
    "Cancelled",
    "CapacityError",
    "CloseReport",
    "Closed",
    "CopyFailed",
    "Corrupt",
    "Device",
    "DeviceBuffer",
    "DeviceLost",
    "DeviceUnavailable",
    "Difference",
    "Disk",
    "Event",
    "Forked",
    "Group",
    "HostBlocks",
    "HostCopy",
    "Incompatible",
    "Index",
    "InvalidArgument",
    "KVLayout",
    "KvmemError",
    "Manager",
    "Manifest",
    "Miss",
    "NotDone",
    "Plan",
    "PoolExhausted",
    "Region",
    "Report",
    "Reservation",
    "Stream",
    "ThrashBudget",
    "TimedOut",
    "TimelineRecord",
    "Transfer",
    "count_hits",
    "errors",
    "hits_of",
    "last",
    "open_device",
]
