"""The pool of host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, SupportsIndex

from . import _async, _core
from ._units import parse_bytes


class BlockPool(_core.BlockPool):
    """A bounded arena of host memory cut into slots of one block each. Any thread.

    block_bytes: payload of one block; a slot is that rounded up to 4 KiB.
    capacity_bytes: the budget; what is no whole slot is not used. Both sizes are integers or
        strings such as "8GiB".
    pin: "auto" pins where the device needs it, "required" in any case, "never" not at all: copies
        are then staged where the device needs pinned memory.
    hugepages: reserved huge pages "never", "try" or "required"; transparent ones are always asked
        for.
    numa_node: where the memory is to be; None is wherever it comes.
    shared: a memfd that other processes can map, instead of private memory.
    progress: called with (touched, all) bytes while the memory is made; returning False cancels.

    The memory is checked against what the machine and the control groups have left before any of it
    is touched. Raises CapacityError that names the limit, InvalidArgument, Cancelled.
    """

    def __init__(
        self,
        device: _core.Device,
        *,
        block_bytes: SupportsIndex | str,
        capacity_bytes: SupportsIndex | str,
        pin: Literal["auto", "required", "never"] = "auto",
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
            hugepages=hugepages,
            numa_node=numa_node,
            shared=shared,
            progress=progress,
        )

    async def acquire_async(self, count: int) -> _core.HostBlocks:
        """Awaits `count` blocks in the pool's FIFO. Cancelling the task loses nothing.

        Blocks come back when somebody reaps: a manager's reaper, its poll(), or a thread that
        waits.
        """
        return await _async.acquire(self, count)
