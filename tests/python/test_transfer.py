"""Transfer: order, waiting, cancelling, results; and HostCopy."""

from __future__ import annotations

import ctypes
import enum
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvmem
from kvmem import READY, CancelOutcome
from kvmem.testing import now
from support import PATIENCE, Cache, free_slots, in_thread, until

MakeCache = Callable[..., Cache]


# ---- after


class CudaStream:
    """As torch has it."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle


class CudaEvent:
    def __init__(self, handle: int) -> None:
        self.cuda_event = handle


class Protocol:
    """As cuda.core has it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


class ProtocolAttribute:
    def __init__(self, handle: int) -> None:
        self.__cuda_stream__ = (0, handle)


class Ptr:
    """As CuPy has it."""

    def __init__(self, handle: int) -> None:
        self.ptr = handle


class PtrEvent(Ptr):
    """As CuPy has it; the name says what it is."""


class Handle:
    """As Numba has it: a ctypes pointer."""

    def __init__(self, handle: int) -> None:
        self.handle = ctypes.c_void_p(handle)


class HandleEvent(Handle):
    pass


def forms(stream: kvmem.Stream, event: kvmem.Event, before: kvmem.Transfer) -> dict[str, Any]:
    return {
        "a stream": stream,
        "an integer": stream.handle,
        "a NumPy integer": np.uint64(stream.handle),
        "a ctypes pointer": ctypes.c_void_p(stream.handle),
        "an event": event,
        "a transfer": before,
        "cuda_stream": CudaStream(stream.handle),
        "cuda_event": CudaEvent(event.handle),
        "__cuda_stream__()": Protocol(stream.handle),
        "__cuda_stream__": ProtocolAttribute(stream.handle),
        "ptr": Ptr(stream.handle),
        "ptr of an event": PtrEvent(event.handle),
        "handle": Handle(stream.handle),
        "handle of an event": HandleEvent(event.handle),
        "a list": [READY, event],
        "a tuple": (before, READY, stream),
    }


FORMS = [
    "a stream",
    "an integer",
    "a NumPy integer",
    "a ctypes pointer",
    "an event",
    "a transfer",
    "cuda_stream",
    "cuda_event",
    "__cuda_stream__()",
    "__cuda_stream__",
    "ptr",
    "ptr of an event",
    "handle",
    "handle of an event",
    "a list",
    "a tuple",
]


@pytest.mark.parametrize("form", FORMS)
def test_after_holds_a_transfer_back_in_every_form(cache: Cache, form: str) -> None:
    """The bytes that are written before the gate opens are the bytes that are stored."""
    stream, gate = cache.stalled_stream()
    before = cache.manager.offload([0], after=stream)
    event = stream.record()
    after = forms(stream, event, before)[form]
    transfer = cache.manager.offload([5], after=after, priority="demand")
    copy = cache.manager.offload([6], after=READY)
    copy.wait(PATIENCE)  # what is ready does not stand behind it
    assert not transfer.done()
    cache.fill(5, 10)
    gate.open()
    transfer.wait(PATIENCE)
    assert (transfer.result().blocks[0] == cache.expected(10)).all()


def test_ready_holds_nothing_back(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([5], after=READY)
    transfer.wait(PATIENCE)
    cache.fill(5, 10)
    assert (transfer.result().blocks[0] == 0).all()
    assert repr(READY) == "kvmem.READY"
    gate.open()
    stream.synchronize(PATIENCE)


def test_after_is_taken_when_the_call_is_made(cache: Cache) -> None:
    """What happens later to the stream or the event changes nothing."""
    first, first_gate = cache.stalled_stream()
    later, later_gate = cache.stalled_stream()
    event = first.record()
    behind_event = cache.manager.offload([0], after=event)
    behind_stream = cache.manager.offload([1], after=first)
    event.record(later)
    first.wait(event)
    del first
    gc.collect()
    first_gate.open()
    behind_event.wait(PATIENCE)
    behind_stream.wait(PATIENCE)
    assert not event.done()
    later_gate.open()
    until(event.done)


def self_holding() -> list[Any]:
    held: list[Any] = []
    held.append(held)
    return held


class Endless:
    @property
    def value(self) -> Endless:
        return self


NOT_AFTERS = [
    None,
    [],
    (),
    "x",
    b"x",
    1.5,
    True,
    0,
    3,
    -1,
    2**64,
    2**70,
    {},
    object(),
    [READY, None],
    [[]],
    [[READY]],
    self_holding(),
    Endless(),
    ctypes.c_void_p(5),
    ctypes.c_void_p(None),
    CudaStream(7),
    CudaStream("x"),  # type: ignore[arg-type]
    CudaEvent(7),
    CudaEvent(None),  # type: ignore[arg-type]
    Protocol("x"),  # type: ignore[arg-type]
    Ptr(7),
    Ptr(1.5),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("bad", NOT_AFTERS, ids=lambda bad: repr(bad)[:30].partition(" object")[0])
def test_an_after_that_is_none_is_refused(cache: Cache, bad: Any) -> None:
    copy = cache.stored(0)
    for call in (cache.manager.offload, cache.manager.try_offload):
        with pytest.raises(kvmem.InvalidArgument, match=r"after|stream|event"):
            call([1], after=bad)
    for call in (cache.manager.restore, cache.manager.try_restore):
        with pytest.raises(kvmem.InvalidArgument, match=r"after|stream|event"):
            call(copy, [1], after=bad)
    assert free_slots(cache.pool) == 7
    assert cache.manager.stats()["offload"]["queued_bytes"] == 0


def test_after_is_required(cache: Cache) -> None:
    with pytest.raises(TypeError, match="after"):
        cache.manager.offload([0])  # type: ignore[call-arg]


def test_streams_events_and_transfers_of_another_device_are_refused(cache: Cache) -> None:
    other = Cache(kvmem.open_device("host", workers=1))
    stream = other.device.stream()
    transfer = other.manager.offload([0], after=READY)
    for after in (stream, stream.handle, stream.record(), transfer):
        with pytest.raises(kvmem.InvalidArgument, match=r"not of this device|another device"):
            cache.manager.offload([0], after=after)
    with pytest.raises(kvmem.InvalidArgument, match="not of this device"):
        cache.device.stream().wait(stream.record())
    other.finish()


def test_a_handle_of_a_stream_that_is_gone_is_refused(cache: Cache) -> None:
    stream = cache.device.stream()
    handle = stream.handle
    del stream
    gc.collect()
    with pytest.raises(kvmem.InvalidArgument, match=str(handle)):
        cache.manager.offload([0], after=handle)


def test_an_event_that_was_never_recorded_is_refused(cache: Cache) -> None:
    """Every event of ours is recorded; the handle of one that was given back is not."""
    event = cache.device.stream().record()
    handle = event.handle
    until(event.done)
    del event
    gc.collect()
    with pytest.raises(kvmem.InvalidArgument, match="event"):
        cache.manager.offload([0], after=CudaEvent(handle + 10_000))


# ---- states and waiting


def test_a_transfer_goes_from_queued_to_done(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0, 1], after=stream)
    assert transfer.state in ("queued", "in_flight")
    assert transfer.done() is False
    assert (transfer.kind, transfer.staged) == ("offload", False)
    with pytest.raises(kvmem.NotDone, match=f"transfer {transfer.id}"):
        transfer.result()
    gate.open()
    transfer.wait(PATIENCE)
    assert (transfer.state, transfer.done()) == ("done", True)
    transfer.wait(0)
    transfer.wait()


def test_ids_are_different_and_rise(cache: Cache) -> None:
    ids = [cache.manager.offload([0], after=READY).id for _ in range(4)]
    assert ids == sorted(set(ids))


def test_wait_times_out_in_time_and_changes_nothing(cache: Cache) -> None:
    """Public failure 131: a wait had no limit."""
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    for timeout in (0, 0.1):
        started = now(cache.device)
        with pytest.raises(kvmem.TimedOut, match=f"transfer {transfer.id}") as refusal:
            transfer.wait(timeout)
        assert timeout <= now(cache.device) - started < timeout + 1
        assert isinstance(refusal.value, TimeoutError)
    gate.open()
    transfer.wait(PATIENCE)


def test_many_threads_may_wait_for_one_transfer(cache: Cache) -> None:
    """Public failure 165: many waited for one load, one after the other."""
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    waiting = [in_thread(transfer.wait) for _ in range(6)]
    gate.open()
    for each in waiting:
        each.result(PATIENCE)


def test_the_result_is_the_same_object_every_time(cache: Cache) -> None:
    transfer = cache.manager.offload([0], after=READY)
    transfer.wait(PATIENCE)
    copy = transfer.result()
    assert transfer.result() is copy
    copy.release()
    assert transfer.result() is copy
    assert copy.released
    assert free_slots(cache.pool) == 8


def test_a_restore_has_no_result(cache: Cache) -> None:
    transfer = cache.manager.restore(cache.stored(0), [1], after=READY)
    transfer.wait(PATIENCE)
    assert transfer.result() is None
    assert transfer.kind == "restore"


def test_a_result_that_nobody_asked_for_goes_home(cache: Cache) -> None:
    transfer = cache.manager.offload([0, 1], after=READY)
    transfer.wait(PATIENCE)
    assert free_slots(cache.pool) == 6
    del transfer
    gc.collect()
    assert free_slots(cache.pool) == 8


# ---- cancel


def test_cancelling_what_was_not_submitted_ends_it_at_once(make_cache: MakeCache) -> None:
    """Public failure 26: cancelling a request that had never run stopped the whole engine."""
    cache = make_cache(blocks=128, slots=128, segment_bytes=65536, window_bytes=65536)
    stream, gate = cache.stalled_stream()
    lanes = [cache.manager.offload([i], after=stream) for i in range(12)]
    last = lanes[-1]
    assert last.state == "queued"
    assert last.cancel() is CancelOutcome.not_submitted
    assert last.state == "cancelled"
    with pytest.raises(kvmem.Cancelled, match=f"transfer {last.id}"):
        last.wait(0)
    with pytest.raises(kvmem.Cancelled):
        last.result()
    assert free_slots(cache.pool) == 128 - 11
    assert last.cancel() is CancelOutcome.already_done
    gate.open()


def test_cancelling_what_is_in_flight_drains(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0, 1], after=stream)
    until(lambda: transfer.state == "in_flight")
    assert transfer.cancel() is CancelOutcome.draining
    assert transfer.cancel() is CancelOutcome.draining
    assert transfer.state == "in_flight"
    assert free_slots(cache.pool) == 6, "a copy may still write there"
    gate.open()
    with pytest.raises(kvmem.Cancelled):
        transfer.wait(PATIENCE)
    assert transfer.state == "cancelled"
    until(lambda: free_slots(cache.pool) == 8)


def test_cancelling_what_is_done_changes_nothing(cache: Cache) -> None:
    """Public failure 26: cancelling a request that had never run stopped the whole engine."""
    cache.fill(0, 10)
    transfer = cache.manager.offload([0], after=READY)
    transfer.wait(PATIENCE)
    assert transfer.cancel() is CancelOutcome.already_done
    assert transfer.state == "done"
    assert (transfer.result().blocks[0] == cache.expected(10)).all()


def test_cancelling_from_many_threads_ends_the_transfer_once(cache: Cache) -> None:
    for _ in range(50):
        stream, gate = cache.stalled_stream()
        transfer = cache.manager.offload([0], after=stream, tag=1)
        cancelling = [in_thread(transfer.cancel) for _ in range(4)]
        gate.open()
        outcomes = [each.result(PATIENCE) for each in cancelling]
        assert set(outcomes) <= set(CancelOutcome)
        assert cache.manager.drain(PATIENCE).quiet
        (report,) = cache.manager.poll()
        assert report.state == transfer.state
        assert outcomes.count(CancelOutcome.not_submitted) <= 1
        del transfer
    gc.collect()
    assert free_slots(cache.pool) == 8


def test_a_cancelled_restore_keeps_its_targets_busy_until_it_has_ended(cache: Cache) -> None:
    copy = cache.stored(0)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.restore(copy, [5], after=stream)
    until(lambda: transfer.state == "in_flight")
    transfer.cancel()
    copy.release()
    assert cache.manager.busy([5]) == [5]
    assert cache.pool.stats()["quarantined_slots"] == 1
    gate.open()
    assert cache.manager.drain(PATIENCE).quiet
    assert cache.manager.busy([5]) == []
    assert free_slots(cache.pool) == 8


def test_the_outcomes_are_an_enum() -> None:
    assert issubclass(CancelOutcome, enum.Enum)
    assert [each.name for each in CancelOutcome] == ["not_submitted", "draining", "already_done"]


# ---- wait_on


def test_work_behind_wait_on_reads_what_was_restored(cache: Cache) -> None:
    cache.fill(0, 10)
    copy = cache.stored(0)
    gated, gate = cache.stalled_stream()
    transfer = cache.manager.restore(copy, [5], after=gated)
    consumer = cache.device.stream()
    transfer.wait_on(consumer)
    seen = [np.zeros(2048, np.uint8) for _ in cache.arrays]
    for out, array in zip(seen, cache.arrays, strict=True):
        consumer.copy(out, array[5])
    assert not any(out.any() for out in seen)
    gate.open()
    consumer.synchronize(PATIENCE)
    assert [(out == 10 + layer).all() for layer, out in enumerate(seen)] == [True, True]


def test_work_behind_wait_on_of_an_offload_may_overwrite_the_source(cache: Cache) -> None:
    cache.fill(5, 10)
    gated, gate = cache.stalled_stream()
    transfer = cache.manager.offload([5], after=gated)
    writer = cache.device.stream()
    transfer.wait_on(writer)
    for array in cache.arrays:
        writer.copy(array[5], np.full(2048, 99, np.uint8))
    gate.open()
    writer.synchronize(PATIENCE)
    transfer.wait(PATIENCE)
    assert (transfer.result().blocks[0] == cache.expected(10)).all()
    assert (cache.arrays[0][5] == 99).all()


@pytest.mark.parametrize("stage", [0, 1, None])
def test_wait_on_a_stage_waits_for_it_and_those_before(cache: Cache, stage: int | None) -> None:
    cache.fill(0, 10)
    transfer = cache.manager.restore(cache.stored(0), [5], after=READY)
    consumer = cache.device.stream()
    transfer.wait_on(consumer, stage=stage)
    seen = np.zeros(2048, np.uint8)
    last = 1 if stage is None else stage
    consumer.copy(seen, cache.arrays[last][5])
    consumer.synchronize(PATIENCE)
    assert (seen == 10 + last).all()


@pytest.mark.parametrize("bad", [2, -1])
def test_a_stage_that_is_none_is_refused_by_number(cache: Cache, bad: int) -> None:
    transfer = cache.manager.restore(cache.stored(0), [5], after=READY)
    with pytest.raises(kvmem.InvalidArgument, match=f"stage {bad} is not one of the layout's 2"):
        transfer.wait_on(cache.device.stream(), stage=bad)


@pytest.mark.parametrize("bad", ["0", 0.5])
def test_a_stage_of_a_wrong_type_is_a_type_error(cache: Cache, bad: Any) -> None:
    transfer = cache.manager.restore(cache.stored(0), [5], after=READY)
    with pytest.raises(TypeError):
        transfer.wait_on(cache.device.stream(), stage=bad)


@pytest.mark.parametrize(
    "bad", [None, 3, 0, -1, 2**64, "x", [], READY, 1.5, True, object()], ids=lambda b: repr(b)[:12]
)
def test_wait_on_what_is_no_stream_is_refused(cache: Cache, bad: Any) -> None:
    transfer = cache.manager.offload([0], after=READY)
    with pytest.raises(kvmem.InvalidArgument, match="stream"):
        transfer.wait_on(bad)


def test_wait_on_an_event_or_a_stream_of_another_device_is_refused(cache: Cache) -> None:
    transfer = cache.manager.offload([0], after=READY)
    with pytest.raises(kvmem.InvalidArgument, match="stream"):
        transfer.wait_on(cache.device.stream().record())
    with pytest.raises(kvmem.InvalidArgument, match="stream"):
        transfer.wait_on(kvmem.open_device("host", workers=1).stream())


def test_wait_on_takes_streams_of_others(cache: Cache) -> None:
    transfer = cache.manager.offload([0], after=READY)
    stream = cache.device.stream()
    for form in (stream.handle, CudaStream(stream.handle), Protocol(stream.handle)):
        transfer.wait_on(form)
    stream.synchronize(PATIENCE)


def test_wait_on_raises_the_error_of_a_transfer_that_ended_badly(cache: Cache) -> None:
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([0], after=stream)
    transfer.cancel()
    gate.open()
    cache.manager.drain(PATIENCE)
    with pytest.raises(kvmem.Cancelled):
        transfer.wait_on(cache.device.stream())


# ---- HostCopy


def test_a_slice_of_a_copy_is_restored_alone(cache: Cache) -> None:
    for block in range(4):
        cache.fill(block, 10 * block)
    copy = cache.stored(0, 1, 2, 3)
    part = copy[1:3]
    assert (len(part), part.nbytes) == (2, 2 * 4096)
    cache.manager.restore(part, [6, 7], after=READY).wait(PATIENCE)
    assert cache.holds(6, 10)
    assert cache.holds(7, 20)


@pytest.mark.parametrize(
    ("index", "blocks"),
    [
        (0, [0]),
        (-1, [3]),
        (np.int8(2), [2]),
        (slice(None), [0, 1, 2, 3]),
        (slice(-2, None), [2, 3]),
        (slice(1, 99), [1, 2, 3]),
        (slice(0, 1, 1), [0]),
    ],
    ids=repr,
)
def test_indices_and_slices_are_those_of_a_list(
    cache: Cache, index: Any, blocks: list[int]
) -> None:
    copy = cache.stored(0, 1, 2, 3)
    slots = copy.blocks.indices.tolist()
    assert copy[index].blocks.indices.tolist() == [slots[i] for i in blocks]


def test_a_slice_holds_its_blocks_and_no_other(cache: Cache) -> None:
    """Public failure 178: what a lookup had promised was gone at the load."""
    copy = cache.stored(0, 1, 2, 3)
    part = copy[1:2]
    copy.release()
    assert free_slots(cache.pool) == 7
    part.release()
    assert free_slots(cache.pool) == 8


@pytest.mark.parametrize("bad", [4, -5, 2**70])
def test_an_index_out_of_range_is_an_index_error(cache: Cache, bad: int) -> None:
    with pytest.raises(IndexError):
        cache.stored(0, 1, 2, 3)[bad]


@pytest.mark.parametrize("bad", ["0", 1.0, None, (0, 1), [0]])
def test_an_index_of_a_wrong_type_is_a_type_error(cache: Cache, bad: Any) -> None:
    with pytest.raises(TypeError):
        cache.stored(0, 1)[bad]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (slice(None, None, 2), "step 1, not 2"),
        (slice(None, None, -1), "step 1, not -1"),
        (slice(1, 1), "at least one block"),
        (slice(2, 1), "at least one block"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(cache: Cache, bad: slice, words: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=words):
        cache.stored(0, 1)[bad]


def test_a_share_is_a_second_holder(cache: Cache) -> None:
    """Public failure 37: one holder of shared data took it away from the other."""
    cache.fill(0, 10)
    copy = cache.stored(0)
    second = copy.share()
    copy.release()
    assert free_slots(cache.pool) == 7
    cache.manager.restore(second, [5], after=READY).wait(PATIENCE)
    assert cache.holds(5, 10)
    second.release()
    assert free_slots(cache.pool) == 8


def test_concat_joins_copies_in_order_and_holds_them(cache: Cache) -> None:
    for block in range(3):
        cache.fill(block, 10 * block)
    first, second = cache.stored(0), cache.stored(1, 2)
    joined = kvmem.HostCopy.concat([second, first])
    first.release()
    second.release()
    assert len(joined) == 3
    assert free_slots(cache.pool) == 5
    cache.manager.restore(joined, [5, 6, 7], after=READY).wait(PATIENCE)
    assert cache.holds(5, 10)
    assert cache.holds(6, 20)
    assert cache.holds(7, 0)
    joined.release()
    assert free_slots(cache.pool) == 8


def test_concat_takes_a_copy_more_than_once(cache: Cache) -> None:
    copy = cache.stored(0)
    joined = kvmem.HostCopy.concat((copy, copy))
    copy.release()
    assert len(joined) == 2
    joined.release()
    assert free_slots(cache.pool) == 8


@pytest.mark.parametrize("bad", [[], [None], [3], ["x"]])
def test_concat_refuses_what_is_no_list_of_copies(cache: Cache, bad: Any) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=r"HostCopy|at least one"):
        kvmem.HostCopy.concat(bad)
    if bad:
        with pytest.raises(kvmem.InvalidArgument, match="HostCopy"):
            kvmem.HostCopy.concat([cache.stored(0), *bad])
    with pytest.raises(TypeError):
        kvmem.HostCopy.concat(3)  # type: ignore[arg-type]


def test_concat_refuses_copies_of_two_managers_and_released_ones(cache: Cache) -> None:
    other = Cache(cache.device)
    copy = cache.stored(0)
    with pytest.raises(kvmem.InvalidArgument, match="different managers"):
        kvmem.HostCopy.concat([copy, other.stored(0)])
    released = cache.stored(1)
    released.release()
    with pytest.raises(kvmem.AlreadyReleased):
        kvmem.HostCopy.concat([copy, released])
    assert free_slots(cache.pool) == 7
    other.finish()


def test_a_second_release_raises(cache: Cache) -> None:
    """Public failure 35: a second release freed the data of others."""
    copy = cache.stored(0)
    copy.release()
    assert copy.released
    for call in (
        copy.release,
        copy.share,
        lambda: copy[0],
        lambda: copy.blocks,
        lambda: cache.manager.restore(copy, [1], after=READY),
    ):
        with pytest.raises(kvmem.AlreadyReleased):
            call()
    assert (len(copy), copy.nbytes) == (1, 4096)  # facts that stay


def test_a_copy_is_a_context_manager(cache: Cache) -> None:
    with cache.stored(0) as copy:
        assert free_slots(cache.pool) == 7
    assert copy.released
    with cache.stored(0) as copy:
        copy.release()
    assert free_slots(cache.pool) == 8


def test_the_blocks_of_a_copy_are_a_further_holder(cache: Cache) -> None:
    cache.fill(0, 10)
    copy = cache.stored(0)
    blocks = copy.blocks
    copy.release()
    assert (blocks.gather() == cache.expected(10)).all()
    blocks.release()
    assert free_slots(cache.pool) == 8


def test_a_copy_may_be_released_while_it_is_being_restored(cache: Cache) -> None:
    """Public failure 6: the source of a copy went back to its pool with its last reference."""
    cache.fill(0, 10)
    copy = cache.stored(0)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.restore(copy, [5], after=stream)
    copy.release()
    with pytest.raises(kvmem.PoolExhausted) as refusal:
        cache.pool.acquire(8, timeout=0)
    assert refusal.value.quarantined == 1
    gate.open()
    transfer.wait(PATIENCE)
    assert cache.holds(5, 10)
    assert free_slots(cache.pool) == 8


def test_a_copy_outlives_its_transfer_and_its_manager(cache: Cache) -> None:
    cache.fill(0, 10)
    manager = kvmem.Manager(cache.device, cache.layout, cache.pool)
    transfer = manager.offload([0], after=READY)
    transfer.wait(PATIENCE)
    copy = transfer.result()
    del transfer, manager
    gc.collect()
    cache.manager.restore(copy, [5], after=READY).wait(PATIENCE)
    assert cache.holds(5, 10)


def test_a_copy_made_with_another_geometry_is_incompatible(cache: Cache) -> None:
    arrays = [np.zeros((8, 4096), np.uint8)]
    layout = kvmem.KVLayout.from_arrays(arrays, memory=cache.device.name)
    other = kvmem.Manager(cache.device, layout, cache.pool)
    with pytest.raises(kvmem.Incompatible, match="regions: 2 and 1") as refusal:
        other.restore(cache.stored(0), [0], after=READY)
    assert refusal.value.fields[0] == "regions: 2 and 1"
    assert other.close().quiet
