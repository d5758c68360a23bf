"""The pool of host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, SupportsIndex

from . import _async, _core
from ._units import parse_bytes
from .devices import _GBPS_LEAST, _GBPS_MOST, _number
from .errors import InvalidArgument

if TYPE_CHECKING:
    from typing_extensions import Self


class BlockPool(_core.BlockPool):
    """A bounded arena of host memory cut into slots of one block each. Any thread.

    block_bytes: payload of one block; a slot is that rounded up to 4 KiB.
    capacity_bytes: the budget; what is no whole slot is not used. Both sizes are integers or
        strings such as "8GiB".
    pin: "auto" pins where the device needs it, "required" in any case, both before the pool is
        there. "background" pins in any case, while the pool is in use: slots that are not pinned
        yet are handed out last. "never" not at all. Where the device needs pinned memory, copies
        of slots that are not pinned are staged. What fails in the background stays unpinned, and
        stats() has it as "pin_error"; how far it is, is "pinned_bytes". Closing the pool ends it.
    pin_gbps: at most so many 10^9 bytes are pinned a second; None is as fast as it goes. Pinning
        holds locks of the driver that copies, and other processes, wait for.
    hugepages: reserved huge pages "never", "try" or "required"; transparent ones are always asked
        for.
    numa_node: where the memory is to be; None is preferably close to the device, where it says.
    shared: a memfd that other processes can attach() by its fileno(), instead of private memory.
    progress: called with (done, all) bytes while the memory is made; returning False cancels. Each
        byte counts once as touched and, where that is waited for, once more as pinned.

    The memory is checked against what the machine and the control groups have left before any of it
    is touched. Raises CapacityError that names the limit, InvalidArgument, Cancelled.
    """

    def __init__(
        self,
        device: _core.Device,
        *,
        block_bytes: SupportsIndex | str,
        capacity_bytes: SupportsIndex | str,
        pin: Literal["auto", "required", "background", "never"] = "auto",
        pin_gbps: float | None = None,
        hugepages: Literal["never", "try", "required"] = "never",
        numa_node: int | None = None,
        shared: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        super().__init__(
            device,
            block_bytes=parse_bytes("block_bytes", block_bytes),
            capacity_bytes=parse_bytes("capacity_bytes", capacity_bytes),
            pin=pin,
            pin_bytes_per_second=_pin_bytes_per_second(pin_gbps),
            hugepages=hugepages,
            numa_node=numa_node,
            shared=shared,
            progress=progress,
            attach=None,
        )

    @classmethod
    def attach(
        cls,
        device: _core.Device,
        fd: SupportsIndex,
        *,
        block_bytes: SupportsIndex | str,
        capacity_bytes: SupportsIndex | str,
        pin: Literal["auto", "required", "background", "never"] = "auto",
        pin_gbps: float | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Self:
        """A pool over the memory of a shared one, which another process may have made.

        fd: fileno() of that pool, or a descriptor of the same memory that came with SCM_RIGHTS, by
            inheritance or from /proc/PID/fd. It stays the caller's.
        block_bytes, capacity_bytes: what that pool was made with.
        pin, pin_gbps, progress: as for a new pool; the memory is there, so only pinning takes time.

        It hands out no blocks: whoever made the memory does, or an Index, in numbers of slots. They
        are good for `into` of an offload and as what a restore reads. Nobody else sees who uses a
        slot here, so whoever hands them out has to be told when the copies have ended; the end of
        this process ends them too.

        Raises InvalidArgument for memory of another size, or that could be taken away.
        """
        if fd is None:  # which would mean a new one below
            raise InvalidArgument("fd is None, not a descriptor")
        pool = cls.__new__(cls)
        _core.BlockPool.__init__(
            pool,
            device,
            block_bytes=parse_bytes("block_bytes", block_bytes),
            capacity_bytes=parse_bytes("capacity_bytes", capacity_bytes),
            pin=pin,
            pin_bytes_per_second=_pin_bytes_per_second(pin_gbps),
            hugepages="never",
            numa_node=None,
            shared=False,
            progress=progress,
            attach=fd,
        )
        return pool

    async def acquire_async(self, count: int) -> _core.HostBlocks:
        """Awaits `count` blocks in the pool's FIFO. Cancelling the task loses nothing.

        Blocks come back when somebody reaps: a manager's reaper, its poll(), or a thread that
        waits.
        """
        return await _async.acquire(self, count)


def _pin_bytes_per_second(gbps: float | None) -> float:
    if gbps is None:
        return 0.0
    return _number("pin_gbps", gbps, _GBPS_LEAST, _GBPS_MOST) * 1e9
