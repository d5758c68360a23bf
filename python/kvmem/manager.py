"""The manager: offload, restore, and the guarantee."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any, Literal, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from . import _async, _core
from ._units import parse_bytes
from .errors import InvalidArgument
from .pool import BlockPool

BlockIds = Sequence[int] | NDArray[np.integer[Any]]


class Manager(_core.Manager):
    """Moves blocks between the device cache that `layout` declares and a pool. Any thread.

    pool: where the host blocks come from; or host_bytes, for a pool of its own.
    max_queued_bytes, max_transfers: accepted and not ended, each direction; more waits.
    window_bytes, window_descriptors: handed to the device at a time, each direction; a demand
        transfer waits for at most that much.
    max_reports: tagged transfers accepted and not yet polled.
    checksum: "always" keeps a checksum of each block, "sampled" of some. Threads of its own compute
        it before the offload ends, and verify it before anything of a restore is copied: Corrupt,
        if somebody has written the block in host memory meanwhile.
    checksum_every: "sampled" takes the first block offloaded and each nth behind it.
    checksum_workers: how many threads; none when off.
    reaper: False for no thread at all, but for those of checksums: poll() and calls that wait drive
        everything, and what is accepted is submitted inside the call, unless it is verified first.
    timeline: also measure when copies started and completed on the device, and first uses.

    No block, on either side, is reused while a copy can still touch it: not after a cancel, a
    dropped handle, an error or an exit. Device blocks are safe to reuse only after the transfer
    that uses them has ended, in whichever way.
    """

    def __init__(
        self,
        device: _core.Device,
        layout: _core.KVLayout,
        pool: BlockPool | None = None,
        *,
        host_bytes: SupportsIndex | str | None = None,
        max_queued_bytes: SupportsIndex | str = "2GiB",
        max_transfers: int = 4096,
        window_bytes: SupportsIndex | str = "256MiB",
        window_descriptors: int = 8192,
        max_reports: int = 4096,
        checksum: Literal["off", "sampled", "always"] = "off",
        checksum_every: int = 16,
        checksum_workers: int = 2,
        reaper: bool = True,
        timeline: bool = False,
    ) -> None:
        if (pool is None) == (host_bytes is None):
            raise InvalidArgument("a manager takes either a pool or host_bytes")
        if pool is None:
            assert host_bytes is not None
            if not isinstance(layout, _core.KVLayout):
                raise InvalidArgument(f"layout is {layout!r}, not a KVLayout")
            capacity = parse_bytes("host_bytes", host_bytes)
            pool = BlockPool(device, block_bytes=layout.block_bytes, capacity_bytes=capacity)
        super().__init__(
            device,
            layout,
            pool,
            max_queued_bytes=parse_bytes("max_queued_bytes", max_queued_bytes),
            max_transfers=max_transfers,
            window_bytes=parse_bytes("window_bytes", window_bytes),
            window_descriptors=window_descriptors,
            max_reports=max_reports,
            checksum=checksum,
            checksum_every=checksum_every,
            checksum_workers=checksum_workers,
            reaper=reaper,
            timeline=timeline,
        )
        self._pool = pool

    @property
    def pool(self) -> BlockPool:
        """The pool that the host blocks come from."""
        return self._pool

    def offload_async(
        self,
        blocks: BlockIds,
        *,
        after: object,
        priority: Literal["demand", "background"] = "background",
        tag: int | str | None = None,
        into: object = None,
    ) -> Coroutine[Any, Any, _core._Offload]:
        """offload(), to be awaited instead of blocking.

        `after` is taken by the call, before any await.
        """
        return _async.start(self._draft_offload(blocks, after, priority, tag, into))

    def restore_async(
        self,
        copy: _core.HostCopy | _core.HostBlocks | BlockIds,
        blocks: BlockIds,
        *,
        after: object,
        priority: Literal["demand", "background"] = "demand",
        tag: int | str | None = None,
    ) -> Coroutine[Any, Any, _core._Restore]:
        """restore(), to be awaited instead of blocking.

        `after` is taken by the call, before any await.
        """
        return _async.start(self._draft_restore(copy, blocks, after, priority, tag))
