"""Drives the production code with a trace, several requests at once.

A request is started in four steps, in file order, and finished when its lane is needed again:

  1 settle   wait for the offloads that its hits still need, so that hit or miss is a fact
  2 plan     decide key by key what is restored and what is offloaded; evict on the way
  3 restore  submit, let the consumer stream wait and read; let go of the sources
  4 offload  compute the other blocks, then submit; this may wait for slots

Why step 4 cannot wait for ever. It needs at most as many slots as the plan made room for: the index
never exceeds the pool, and what a request itself pushed out again is never offloaded. The other
slots are the index's, or held by copies alone: evicted blocks whose offload is unsettled are
settled in step 2, and sources are let go in step 3. All those copies were submitted before and end
by themselves, since nothing that they are ordered behind waits for this thread.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import kvmem
from kvmem.devices import DeviceOptions
from kvmem.replay.device_cache import DeviceCache
from kvmem.replay.flight import Abort, Flight, Ledger, Offload
from kvmem.replay.index import HostIndex, Plan
from kvmem.replay.options import ReplayError, ReplayOptions
from kvmem.replay.result import Counts, Recorder, ReplayResult
from kvmem.replay.trace import Request

# Far beyond what any transfer here takes: reaching it means that something hangs. Virtual seconds
# cost nothing, and the slowest link takes many: in so many it moves 100 GB.
_STUCK_SECONDS = 120.0
_STUCK_VIRTUAL_SECONDS = 1e8
_SLOT_BYTES_UNIT = 4096


def run_replay(
    requests: Sequence[Request],
    options: ReplayOptions,
    progress: Callable[[int], None] = lambda started: None,
) -> ReplayResult:
    """Replay the requests; `progress` hears how many were started.

    Raises ReplayError when it cannot run as asked, KvmemError for what went wrong on the way.
    """
    total_blocks = sum(len(request.keys) for request in requests)
    if options.corrupt > total_blocks:
        raise ReplayError(
            f"--corrupt: {options.corrupt} is above {total_blocks}, the blocks of the trace"
        )
    engine = _Engine(requests, options)
    try:
        for number, request in enumerate(requests, start=1):
            engine.start(request)
            progress(number)
        return engine.end()
    finally:
        engine.manager.close(timeout=engine.stuck_seconds)


class _Engine:
    def __init__(self, requests: Sequence[Request], options: ReplayOptions) -> None:
        self._options = options
        distinct = len({key for request in requests for key in request.keys})
        capacity = options.host_blocks or max(distinct, 1)
        lane_blocks = max(1, *(len(request.keys) for request in requests))
        lanes = min(options.concurrency, len(requests))
        device = open_replay_device(options)
        self.stuck_seconds = stuck_seconds(device)
        try:
            expect_memory(device, options.block_bytes, capacity, lanes * lane_blocks)
            self._cache = DeviceCache(device, lanes, lane_blocks, options.block_bytes)
            self._pool = kvmem.BlockPool(
                device,
                block_bytes=options.block_bytes,
                capacity_bytes=capacity * slot_bytes(options.block_bytes),
            )
        except (kvmem.CapacityError, kvmem.InvalidArgument) as error:
            raise ReplayError(
                f"--host-blocks, --block-bytes, --concurrency: {capacity} host blocks and"
                f" {lanes * lane_blocks} device blocks of {options.block_bytes} bytes: {error}"
            ) from None
        self.manager = kvmem.Manager(
            device,
            self._cache.layout,
            self._pool,
            max_queued_bytes=max(lanes * lane_blocks * options.block_bytes, 64 << 20),
            max_reports=8 * lanes,
            timeline=True,
        )
        self._index = HostIndex(capacity, options.hit)
        self._ledger = Ledger(options.block_bytes)
        self._recorder = Recorder(device, self.manager, self._pool)
        self._counts = Counts()
        self._draw = random.Random(options.seed)
        self._corrupt_left = options.corrupt
        self._free_lanes = list(self._cache.lanes)
        self._flights: deque[Flight] = deque()

    # ---- start ---------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        if not self._free_lanes:
            self._finish(self._flights.popleft())
        abort = self._draw_abort()
        for offload in self._index.offloads_of(request.keys):
            self._settle(offload)
        plan = self._index.plan(request.keys)
        for entry in plan.evicted:
            if entry.offload is not None:
                self._settle(entry.offload)
        self._counts.add(request, plan)
        if request.keys:
            self._launch(request, plan, abort)
        self._recorder.sample()
        self._ledger.close(self.manager.poll())

    def _launch(self, request: Request, plan: Plan, abort: Abort | None) -> None:
        lane = self._free_lanes.pop()
        seeds = self._cache.pattern.seeds(request.keys)
        flight = Flight(lane, seeds, abort, plan.restores)
        if plan.restores:
            self._restore(flight, plan)
        restored = set(plan.restores)
        computed = [i for i in range(len(request.keys)) if i not in restored]
        lane.compute(computed, seeds)
        if abort is Abort.before_offload:
            self._index.discard(plan.stored)
        elif plan.stores:
            self._offload(flight, plan)
        if abort is Abort.after_submit:
            self._cancel(flight)
        elif abort is Abort.mid_restore:
            if flight.restore is not None:
                self._cancel_transfer(flight.restore)
            else:
                self._cancel(flight)
        self._flights.append(flight)

    def _restore(self, flight: Flight, plan: Plan) -> None:
        lane = flight.lane
        copies = [copy for copy in plan.sources if copy is not None]
        if self._corrupt_left and flight.abort is None:
            self._corrupt(flight, copies)
        lane.dirty(plan.restores)
        with kvmem.HostCopy.concat(copies) as source:
            flight.restore = self.manager.restore(
                source,
                lane.device_blocks(plan.restores),
                after=lane.producer,
                tag=self._ledger.next_tag(),
                timeout=self.stuck_seconds,
            )
        self._ledger.add(len(copies))
        if flight.abort is Abort.before_offload:
            self._cancel_transfer(flight.restore)
            flight.restored = []
        else:
            try:
                lane.consume(plan.restores, flight.restore)
            except kvmem.CopyFailed:
                flight.restored = []  # nothing to verify; its report counts it as failed
        # The copy holds its sources from here on; an evicted one is quarantined until it ends.
        plan.sources.clear()
        if flight.undo:
            self._verify(flight)

    def _offload(self, flight: Flight, plan: Plan) -> None:
        lane = flight.lane
        transfer = self.manager.offload(
            lane.device_blocks(plan.stores),
            after=lane.producer,
            tag=self._ledger.next_tag(),
            timeout=self.stuck_seconds,
        )
        self._ledger.add(len(plan.stores))
        self._index.count_stores(plan.stored)
        flight.offload_transfer = transfer
        flight.offload = Offload(transfer, plan.stored)
        for entry in plan.stored:
            entry.offload = flight.offload

    def _corrupt(self, flight: Flight, copies: list[kvmem.HostCopy]) -> None:
        """Flip one byte in blocks that are restored next.

        No other restore may read them meanwhile: those in flight are finished before, this one is
        verified at once, and then the bytes are flipped back. So each damage shows exactly once.
        """
        while self._flights:
            self._finish(self._flights.popleft())
        chosen = self._draw.sample(copies, min(self._corrupt_left, len(copies)))
        for copy in chosen:
            block = copy.blocks[0]
            place = self._draw.randrange(len(block))
            block[place] ^= 0xFF
            flight.undo.append((block, place))
        self._corrupt_left -= len(chosen)
        self._counts.corrupted += len(chosen)

    # ---- cancel --------------------------------------------------------------------------------

    def _draw_abort(self) -> Abort | None:
        if self._draw.random() >= self._options.abort_rate:
            return None
        self._counts.aborted_requests += 1
        return self._draw.choice(list(Abort))

    def _cancel(self, flight: Flight) -> None:
        if flight.restore is not None:
            self._cancel_transfer(flight.restore)
        if flight.offload is None:
            return
        # Its blocks leave the index even where the cancel came too late: what a replay counts must
        # not depend on how fast a copy was.
        for entry in flight.offload.entries:
            entry.offload = None
        self._index.discard(flight.offload.entries)
        self._cancel_transfer(flight.offload.transfer)
        flight.offload = None

    def _cancel_transfer(self, transfer: kvmem.Transfer) -> None:
        outcome = transfer.cancel()
        self._counts.cancel_outcomes[outcome.name] += 1
        if outcome == kvmem.CancelOutcome.already_done and self._ended_done(transfer):
            # Nobody wants the result. Without this its blocks stay held as long as the handle.
            copy = transfer.result()
            if copy is not None:
                copy.release()

    # ---- finish --------------------------------------------------------------------------------

    def _finish(self, flight: Flight) -> None:
        self._verify(flight)
        if flight.offload is not None:
            self._settle(flight.offload)
        # Cancelled ones too: the lane's blocks are theirs until they have ended.
        for transfer in flight.transfers():
            self._ended_done(transfer)
        if flight.abort is Abort.after_end:
            self._cancel_late(flight)
        self._free_lanes.append(flight.lane)

    def _verify(self, flight: Flight) -> None:
        """Compare what the consumer read with what the blocks must hold, once."""
        flight.lane.synchronize(self.stuck_seconds)
        ended = flight.restore is not None and flight.restored and self._ended_done(flight.restore)
        if ended and self._options.move_bytes:
            self._counts.verified += len(flight.restored)
            self._counts.mismatches += flight.lane.differing(flight.restored, flight.seeds)
        flight.restored = []
        for block, place in flight.undo:
            block[place] ^= 0xFF
        # The views hold their blocks too.
        flight.undo.clear()

    def _cancel_late(self, flight: Flight) -> None:
        for transfer in flight.transfers():
            outcome = transfer.cancel()
            self._counts.cancel_outcomes[outcome.name] += 1
            self._counts.cancelled_late += outcome != kvmem.CancelOutcome.already_done

    def _settle(self, offload: Offload) -> None:
        """Wait for an offload and give the index a holder of its own for each block."""
        entries = [entry for entry in offload.entries if entry.offload is offload]
        if not entries:
            return
        copy = offload.transfer.result() if self._ended_done(offload.transfer) else None
        for i, entry in enumerate(offload.entries):
            entry.offload = None
            if copy is not None and self._index.holds(entry):
                entry.copy = copy[i]
        if copy is None:
            self._index.discard(offload.entries)
        else:
            copy.release()

    def _ended_done(self, transfer: kvmem.Transfer) -> bool:
        """Wait for the end; say whether it is done, and not cancelled or failed."""
        try:
            transfer.wait(self.stuck_seconds)
        except (kvmem.Cancelled, kvmem.CopyFailed):
            return False
        return True

    # ---- end -----------------------------------------------------------------------------------

    def end(self) -> ReplayResult:
        while self._flights:
            self._finish(self._flights.popleft())
        # Should something not end in time, the ledger knows it by name.
        self.manager.drain(self.stuck_seconds)
        self._recorder.sample(last=True)
        self._counts.seconds = self._recorder.seconds()
        held = self._pool.stats()
        self._index.clear()
        self._ledger.close(self.manager.poll())
        # Closing ends the reaper, so that nobody is just giving slots back while they are counted.
        self.manager.close(self.stuck_seconds)
        return ReplayResult.make(
            options=self._options,
            counts=self._counts,
            ledger=self._ledger,
            recorder=self._recorder,
            reoffloaded=self._index.reoffloaded,
            run_slots=held,
            end_slots=self._pool.stats(),
        )


def open_replay_device(options: ReplayOptions) -> kvmem.Device:
    """Open the device of the options. Raises ReplayError."""
    try:
        if options.device != "virtual":
            return kvmem.open_device(options.device)
        chosen: DeviceOptions = {"seed": options.seed, "move_bytes": options.move_bytes}
        if options.gbps is not None:
            chosen["gbps"] = options.gbps
        if options.latency_us is not None:
            chosen["latency_us"] = options.latency_us
        return kvmem.open_device("virtual", **chosen)
    except (kvmem.DeviceUnavailable, kvmem.InvalidArgument) as error:
        raise ReplayError(f"--device: {error}") from None


def stuck_seconds(device: kvmem.Device) -> float:
    """Say for how long to wait for what must end by itself."""
    return _STUCK_VIRTUAL_SECONDS if device.info["virtual_time"] else _STUCK_SECONDS


def slot_bytes(block_bytes: int) -> int:
    """Give what a block takes in a pool."""
    return -(-block_bytes // _SLOT_BYTES_UNIT) * _SLOT_BYTES_UNIT


def expect_memory(
    device: kvmem.Device, block_bytes: int, host_blocks: int, device_blocks: int
) -> None:
    """Raise CapacityError unless pool and device fit together."""
    # Had as one piece and given back untouched: each part alone might fit where the sum does not.
    nbytes = host_blocks * slot_bytes(block_bytes) + device_blocks * block_bytes
    device.alloc(nbytes)
