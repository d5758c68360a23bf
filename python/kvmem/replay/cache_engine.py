"""Drives `kvmem.Cache` with a trace, several requests at once.

A request is started in four steps, in file order, and finished when its lane is needed again:

  1 reserve  the longest usable prefix, also of what an earlier request is still storing
  2 load     into the lane; the consumer waits stage by stage and reads
  3 compute  the rest
  4 store    the whole prompt: what is there already counts as used, tail first

Nothing is waited for but what a request needs itself: keys in flight that its load attached to, and
a load from disk, whose blocks have their places in host memory before the store looks for them. A
store that finds no room, because everything is held, is not tried again.
"""

from __future__ import annotations

import random
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import kvmem
from kvmem.replay.cache_flight import KEY_BYTES, CacheFlight, GroupLane, GroupMemory, key_rows
from kvmem.replay.cache_options import CacheReplayOptions
from kvmem.replay.cache_result import CacheCounts, CacheReplayResult, file_order_prefix
from kvmem.replay.engine import expect_memory, open_replay_device, slot_bytes, stuck_seconds
from kvmem.replay.flight import Abort
from kvmem.replay.options import REGIONS, ReplayError
from kvmem.replay.policies import block_seconds
from kvmem.replay.trace import Request
from kvmem.testing import now

_LANDING_BLOCKS = 16
# Of the thrash guard: blocks that are moved before anything is judged.
_BLOCKS_LEAST = 64
_TRACE_OWNER = "trace"


def run_cache_replay(
    requests: Sequence[Request],
    options: CacheReplayOptions,
    progress: Callable[[int], None] = lambda started: None,
) -> CacheReplayResult:
    """Replay the requests; `progress` hears how many were started.

    Raises ReplayError when it cannot run as asked, KvmemError for what went wrong on the way.
    """
    total_blocks = sum(len(request.keys) for request in requests)
    if options.replay.corrupt > total_blocks:
        raise ReplayError(
            f"--corrupt: {options.replay.corrupt} is above {total_blocks}, the blocks of the trace"
        )
    with ExitStack() as stack:
        path = options.disk_path
        if options.disk_bytes is not None and path is None:
            folder = tempfile.TemporaryDirectory(prefix="kvmem-replay-")
            path = Path(stack.enter_context(folder)) / "disk"
        engine = _Engine(requests, options, path)
        stack.callback(engine.close)
        for number, request in enumerate(requests):
            engine.start(number, request)
            progress(number + 1)
        return engine.end()


class _Engine:
    def __init__(
        self, requests: Sequence[Request], options: CacheReplayOptions, path: Path | None
    ) -> None:
        self._options = options
        distinct = len({key for request in requests for key in request.keys})
        self._capacity = options.replay.host_blocks or max(distinct, 1)
        lane_blocks = max(1, *(len(request.keys) for request in requests))
        lanes = min(options.replay.concurrency, len(requests))
        self._device = open_replay_device(options.replay)
        self._stuck_seconds = stuck_seconds(self._device)
        self._groups = self._make_groups(lanes, lane_blocks)
        self._cache: kvmem.Cache | None = self._make_cache(path)
        self._counts = CacheCounts()
        self._file_order = file_order_prefix(requests, self._capacity)
        self._seconds = block_seconds(np.arange(lane_blocks), options.prefill_tokens_per_s)
        self._draw = random.Random(options.replay.seed)
        self._corrupt_left = options.replay.corrupt
        self._free_lanes = [
            [GroupLane(memory, memory.device_cache.lanes[number]) for memory in self._groups]
            for number in range(lanes)
        ]
        self._flights: deque[CacheFlight] = deque()
        self._began = now(self._device)

    def _make_groups(self, lanes: int, lane_blocks: int) -> list[GroupMemory]:
        replay = self._options.replay
        groups = self._options.cache_groups()
        sizes = [replay.block_bytes] + [replay.block_bytes // REGIONS] * (len(groups) - 1)
        landing = 0 if self._options.disk_bytes is None else _LANDING_BLOCKS
        made: list[GroupMemory] = []
        try:
            together = sum(map(slot_bytes, sizes))
            expect_memory(self._device, together, self._capacity + landing, lanes * lane_blocks)
            for kind, (group, block_bytes) in enumerate(zip(groups, sizes, strict=True)):
                made.append(
                    GroupMemory(
                        self._device,
                        group,
                        lanes,
                        lane_blocks,
                        block_bytes,
                        self._capacity + landing,
                        kind,
                        made[0].device_cache if made else None,
                    )
                )
        except (kvmem.CapacityError, kvmem.InvalidArgument) as error:
            raise ReplayError(
                f"--host-blocks, --block-bytes, --concurrency: {self._capacity} host blocks and"
                f" {lanes * lane_blocks} device blocks of {replay.block_bytes} bytes: {error}"
            ) from None
        return made

    def _make_cache(self, path: Path | None) -> kvmem.Cache:
        options = self._options
        disk = thrash = None
        if options.thrash is not None:
            least = _BLOCKS_LEAST * options.replay.block_bytes
            thrash = kvmem.ThrashBudget(max_bytes_per_token=options.thrash, least_bytes=least)
        try:
            if options.disk_bytes is not None:
                disk = kvmem.Disk(
                    str(path),
                    capacity_bytes=options.disk_bytes,
                    write=options.disk_write,
                    landing_blocks=_LANDING_BLOCKS,
                )
            return kvmem.Cache(
                {memory.group.name: memory.manager for memory in self._groups},
                options.manifest(),
                groups=[memory.group for memory in self._groups],
                policy=options.policy,
                admit_after=options.admit_after,
                disk=disk,
                thrash=thrash,
                key_bytes=KEY_BYTES,
            )
        except (kvmem.CapacityError, kvmem.InvalidArgument) as error:
            if disk is None:
                raise
            raise ReplayError(f"--disk, --disk-path: {error}") from None

    @property
    def cache(self) -> kvmem.Cache:
        """The cache, until end() or close()."""
        assert self._cache is not None
        return self._cache

    # ---- start ---------------------------------------------------------------------------------

    def start(self, number: int, request: Request) -> None:
        if not self._free_lanes:
            self._finish(self._flights.popleft())
        abort = self._draw_abort()
        self._counts.requests += 1
        self._counts.blocks += len(request.keys)
        if not request.keys:
            return
        # With a budget all requests are one owner: alone, each is over before it could thrash.
        owner = str(number) if self._options.thrash is None else _TRACE_OWNER
        lanes = self._free_lanes.pop()
        seeds = [each.memory.device_cache.pattern.seeds(request.keys) for each in lanes]
        flight = CacheFlight(request, owner, lanes, seeds, key_rows(request.keys), abort)
        self._load(flight)
        computed = range(flight.on_device, len(request.keys))
        for each, its_seeds in zip(lanes, seeds, strict=True):
            each.lane.compute(computed, its_seeds)
        if abort is not Abort.before_offload:
            self._store(flight)
        self._cancel(flight)
        self._flights.append(flight)

    def _load(self, flight: CacheFlight) -> None:
        hit = self.cache.reserve(flight.keys, owner=flight.owner, pending="attach")
        length = len(hit)
        if length == 0:
            return
        if self._corrupt_left and flight.abort is None:
            self._corrupt(flight, length)
        flight.from_disk = hit.tiers["disk"] > 0
        # All of them: should a store fail that it attached to, a shorter hit needs others.
        blocks = {}
        for each in flight.lanes:
            each.lane.dirty(range(length))
            blocks[each.memory.group.name] = each.lane.device_blocks(range(length))
        stream = flight.lanes[0].lane
        flight.on_device = length
        flight.load = self.cache.load(hit, blocks, after=stream.producer)
        self._counts.loads += 1
        if flight.abort is Abort.before_offload:
            self._cancel_transfer(flight.load)
            return
        try:
            for stage in range(REGIONS):
                flight.load.wait_on(stream.consumer, stage=stage)
                self._read(flight, stage, length)
            flight.consumed = length
            flight.load.wait_on(stream.producer)  # the rest of the prompt attends to it
        except (kvmem.CopyFailed, kvmem.Corrupt, kvmem.Cancelled):
            self._ended_done(flight.load)
            flight.on_device = flight.load.loaded
        if flight.undo:
            self._verify(flight)

    def _read(self, flight: CacheFlight, stage: int, length: int) -> None:
        for each in flight.lanes:
            each.lane.read(stage, each.needed(length))

    def _store(self, flight: CacheFlight) -> None:
        if flight.from_disk and flight.load is not None:
            self._ended_done(flight.load)
        count = len(flight.request.keys)
        blocks = {
            each.memory.group.name: each.blocks(count, each.needed(flight.on_device))
            for each in flight.lanes
        }
        # Where each block has the value of its own place, the head of a prompt goes first.
        value = float(np.mean(self._seconds[:count]))
        flight.store = self.cache.try_store(
            flight.keys,
            blocks,
            after=flight.lanes[0].lane.producer,
            owner=flight.owner,
            value=value,
        )
        if flight.store is None:
            self._counts.stores_without_room += 1
        elif flight.store.id:
            self._counts.stores += 1

    def _corrupt(self, flight: CacheFlight, length: int) -> None:
        """Flip one byte in blocks that are loaded next.

        No other load may read them meanwhile: those in flight are finished before, this one is
        verified at once, and then the bytes are flipped back. So each damage shows exactly once.
        """
        while self._flights:
            self._finish(self._flights.popleft())
        memory = flight.lanes[0].memory
        distinct = list(dict.fromkeys(flight.request.keys[:length]))
        chosen = self._draw.sample(distinct, min(self._corrupt_left, len(distinct)))
        for key in chosen:
            place = self._draw.randrange(self._options.replay.block_bytes)
            for slot in memory.slots_of(memory.device_cache.pattern.seeds([key])[0]):
                block = memory.pool.array[slot]
                block[place] ^= 0xFF
                flight.undo.append((block, place))
        self._corrupt_left -= len(chosen)
        self._counts.corrupted += len(chosen)

    # ---- cancel --------------------------------------------------------------------------------

    def _draw_abort(self) -> Abort | None:
        if self._draw.random() >= self._options.replay.abort_rate:
            return None
        self._counts.aborted_requests += 1
        return self._draw.choice(list(Abort))

    def _cancel(self, flight: CacheFlight) -> None:
        if flight.abort is Abort.after_submit:
            unwanted = flight.transfers()
        elif flight.abort is Abort.mid_restore:
            unwanted = flight.transfers()[:1]
        else:
            return
        for transfer in unwanted:
            self._cancel_transfer(transfer)

    def _cancel_transfer(self, transfer: kvmem.CacheTransfer) -> kvmem.CancelOutcome:
        outcome = transfer.cancel()
        self._counts.cancel_outcomes[outcome.name] += 1
        return outcome

    # ---- finish --------------------------------------------------------------------------------

    def _finish(self, flight: CacheFlight) -> None:
        self._verify(flight)
        # Cancelled ones too: the lane's blocks are theirs until they have ended.
        for transfer in flight.transfers():
            self._ended_done(transfer)
            if transfer.id:
                self._counts.ended[f"{transfer.kind} {transfer.state}"] += 1
            if flight.abort is Abort.after_end:
                late = self._cancel_transfer(transfer)
                self._counts.cancelled_late += late != kvmem.CancelOutcome.already_done
        if flight.abort is None:
            self.cache.note_tokens(flight.owner, flight.request.output_length)
        if self._options.thrash is None:
            self.cache.drop_owner(flight.owner)
        self._free_lanes.append(flight.lanes)

    def _verify(self, flight: CacheFlight) -> None:
        """Compare what the consumer read with what the blocks must hold, once."""
        lane = flight.lanes[0].lane
        lane.synchronize(self._stuck_seconds)
        load, counts = flight.load, self._counts
        if load is None or flight.verified:
            return
        flight.verified = True
        self._ended_done(load)
        delivered = load.loaded
        counts.delivered_keys += delivered
        counts.saved_seconds += float(self._seconds[:delivered].sum())
        counts.delivered_blocks += sum(len(each.needed(delivered)) for each in flight.lanes)
        if delivered and self._options.replay.move_bytes:
            self._compare(flight, delivered)
        for block, place in flight.undo:
            block[place] ^= 0xFF
        flight.undo.clear()

    def _compare(self, flight: CacheFlight, delivered: int) -> None:
        lane = flight.lanes[0].lane
        if flight.consumed != delivered:  # another length than the consumer was made to read
            for stage in range(REGIONS):
                self._read(flight, stage, delivered)
            lane.synchronize(self._stuck_seconds)
        for each, seeds in zip(flight.lanes, flight.seeds, strict=True):
            positions = each.needed(delivered)
            self._counts.verified += len(positions)
            self._counts.mismatches += each.lane.differing(positions, seeds)

    def _ended_done(self, transfer: kvmem.CacheTransfer) -> bool:
        """Wait for the end; say whether it is done, and not cancelled or failed."""
        try:
            transfer.wait(self._stuck_seconds)
        except (kvmem.Cancelled, kvmem.CopyFailed, kvmem.Corrupt):
            return False
        return True

    # ---- end -----------------------------------------------------------------------------------

    def end(self) -> CacheReplayResult:
        while self._flights:
            self._finish(self._flights.popleft())
        seconds = now(self._device) - self._began
        if self._options.disk_bytes is not None:
            self.cache.flush(self._stuck_seconds)
        stats = self.cache.stats()
        unended = self.close()
        return CacheReplayResult(
            options=self._options,
            counts=self._counts,
            stats=stats,
            file_order_prefix=self._file_order,
            seconds=seconds,
            unended=unended,
            pools={memory.group.name: memory.pool.stats() for memory in self._groups},
        )

    def close(self) -> int:
        """Close everything; how many transfers have not ended. Twice is fine."""
        cache, self._cache = self._cache, None
        if cache is None:
            return 0
        self._flights.clear()  # a transfer keeps its cache, and that the slots
        report = cache.close(self._stuck_seconds)
        del cache
        for memory in self._groups:
            memory.manager.close(self._stuck_seconds)
        return report.in_flight
