"""The same bytes, moved between a GPU and pinned memory by kvmem and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from raw_copies import TO_DEVICE, TO_HOST, RawCopies, copies, interleaved

import kvmem
from gpu_cache import PATIENCE, GpuCache
from gpu_driver import Driver, Stream

LAYERS = 8
Ids = np.ndarray[Any, np.dtype[np.int64]]


class Moves:
    """All blocks of a cache, in random order, each with a slot of its own that it always uses.

    A block has LAYERS segments. What is moved by hand has the same addresses in the same order.
    """

    def __init__(
        self,
        gpu: Driver,
        device: kvmem.Device,
        loop: Any,
        segment_bytes: int,
        nbytes: int,
        **options: Any,  # of the cache: pool, and the manager's
    ) -> None:
        self.gpu, self.device, self.loop = gpu, device, loop
        blocks = nbytes // (LAYERS * segment_bytes)
        self.cache = GpuCache(
            gpu,
            device,
            blocks=blocks,
            layers=LAYERS,
            segment_bytes=segment_bytes,
            max_queued_bytes="8GiB",
            **options,
        )
        self.segment_bytes = segment_bytes
        self.segments = blocks * LAYERS
        self.nbytes = self.segments * segment_bytes
        self.order: Ids = np.random.default_rng(1).permutation(blocks)
        self.half = blocks // 2
        self.slots = self.cache.pool.acquire(blocks)
        self.indices = self.slots.indices
        offload = self.start("offload")
        offload.wait(PATIENCE)
        self.copy = offload.result()
        self._streams: list[Stream] = []

    # ---- kvmem's way

    def start(self, way: str, part: slice | None = None, priority: Any = "background") -> Any:
        part = part or slice(None)
        blocks = self.order[part]
        if way == "offload":
            slots = self.indices[part]
            return self.cache.manager.offload(
                blocks, after=kvmem.READY, priority=priority, into=slots
            )
        copy = self.copy[part]
        return self.cache.manager.restore(copy, blocks, after=kvmem.READY, priority=priority)

    def run(self, way: str) -> None:
        self.start(way).wait(PATIENCE)

    def run_both(self) -> None:
        """One half to the host and the other one back, at once."""
        started = [
            self.start("offload", slice(self.half)),
            self.start("restore", slice(self.half, None)),
        ]
        for transfer in started:
            transfer.wait(PATIENCE)

    def run_in_classes(self, way: str) -> None:
        """One half as demand and one as background."""
        started = [
            self.start(way, slice(self.half), "background"),
            self.start(way, slice(self.half, None), "demand"),
        ]
        for transfer in started:
            transfer.wait(PATIENCE)

    # ---- by hand

    def _stream(self) -> Stream:
        self._streams.append(Stream(self.gpu))
        return self._streams[-1]

    def _copies(self, way: str, part: slice, stream: Stream) -> np.ndarray[Any, Any]:
        cache = self.cache
        inside = np.arange(LAYERS, dtype=np.uint64) * np.uint64(self.segment_bytes)
        base, slot_bytes = cache.pool.array.ctypes.data, cache.pool.slot_bytes
        slots = self.indices[part].astype(np.uint64) * np.uint64(slot_bytes) + np.uint64(base)
        places = self.order[part].astype(np.uint64) * np.uint64(cache.stride)
        host = (slots[:, None] + inside).reshape(-1)
        device = (places[:, None] + np.array(cache.bases, np.uint64)).reshape(-1)
        kind = TO_HOST if way == "offload" else TO_DEVICE
        return copies(host, device, self.segment_bytes, kind, stream)

    def _raw(self, made: np.ndarray[Any, Any], streams: Sequence[Stream]) -> RawCopies | None:
        if self.loop is None:
            return None
        return RawCopies(self.loop, self.device.info["runtime_path"], made, streams)

    def by_hand(self, way: str, streams: int = 1) -> RawCopies | None:
        """One call a segment, shared by so many streams."""
        mine = [self._stream() for _ in range(streams)]
        share = self.order.size // streams
        made = [
            self._copies(way, slice(number * share, (number + 1) * share), stream)
            for number, stream in enumerate(mine)
        ]
        return self._raw(interleaved(made), mine)

    def both_by_hand(self) -> RawCopies | None:
        """A stream for each direction."""
        down, up = self._stream(), self._stream()
        made = [
            self._copies("offload", slice(self.half), down),
            self._copies("restore", slice(self.half, self.half * 2), up),
        ]
        return self._raw(interleaved(made), [down, up])

    def in_one_piece(self, way: str) -> RawCopies | None:
        """As few calls as the memory of the GPU has pieces: the ceiling."""
        stream, cache = self._stream(), self.cache
        bases = np.array(cache.bases, np.uint64)
        piece = self.nbytes // LAYERS
        host = np.uint64(cache.pool.array.ctypes.data) + np.arange(
            LAYERS, dtype=np.uint64
        ) * np.uint64(piece)
        kind = TO_HOST if way == "offload" else TO_DEVICE
        return self._raw(copies(host, bases, piece, kind, stream), [stream])

    def close(self) -> None:
        for stream in self._streams:
            stream.synchronize()
            stream.close()
        self.copy.release()
        self.slots.release()
        self.cache.finish()
