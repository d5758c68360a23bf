"""kvmem.testing, and the streams and events that it is made of."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

import kvmem
from kvmem.testing import now, slow_host_device, stall
from support import PATIENCE, until


def test_what_is_queued_behind_a_stall_waits_for_the_gate(device: kvmem.Device) -> None:
    stream = device.stream()
    before, after = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    ones = np.ones(8, np.uint8)
    stream.copy(before, ones)
    gate = stall(device, stream)
    stream.copy(after, ones)
    until(before.all)
    with pytest.raises(kvmem.TimedOut, match="stream"):
        stream.synchronize(timeout=0.02)
    assert not after.any()
    gate.open()
    stream.synchronize(PATIENCE)
    assert after.all()


def test_a_stalled_stream_holds_no_other_back(device: kvmem.Device) -> None:
    with stall(device, device.stream()):
        other = device.stream()
        target = np.zeros(8, np.uint8)
        other.copy(target, np.ones(8, np.uint8))
        other.synchronize(PATIENCE)
        assert target.all()


def test_opening_a_gate_twice_is_fine(device: kvmem.Device) -> None:
    stream = device.stream()
    with stall(device, stream) as gate:
        gate.open()
        gate.open()
    stream.synchronize(PATIENCE)


def test_leaving_the_block_opens_the_gate_also_on_an_error(device: kvmem.Device) -> None:
    stream = device.stream()
    with pytest.raises(ZeroDivisionError), stall(device, stream):
        raise ZeroDivisionError
    stream.synchronize(PATIENCE)


def test_stalls_add_up(device: kvmem.Device) -> None:
    stream = device.stream()
    first, second = stall(device, stream), stall(device, stream)
    event = stream.record()
    second.open()
    assert not event.done()
    first.open()
    until(event.done)


# ---- events


def test_a_host_event_is_pending_until_it_is_set(device: kvmem.Device) -> None:
    event = device.host_event()
    assert not event.done()
    event.set()
    assert event.done()


def test_a_host_event_is_set_once(device: kvmem.Device) -> None:
    event = device.host_event()
    event.set()
    with pytest.raises(kvmem.InvalidArgument):
        event.set()


def test_an_event_of_a_stream_cannot_be_set(device: kvmem.Device) -> None:
    event = device.stream().record()
    with pytest.raises(kvmem.InvalidArgument):
        event.set()


def test_a_pending_host_event_cannot_be_recorded(device: kvmem.Device) -> None:
    event = device.host_event()
    with pytest.raises(kvmem.InvalidArgument):
        event.record(device.stream())
    event.set()
    event.record(device.stream())
    until(event.done)


def test_a_wait_keeps_the_point_that_the_event_stood_for(device: kvmem.Device) -> None:
    first, second, waiting = (device.stream() for _ in range(3))
    event = first.record()
    waiting.wait(event)
    with stall(device, second):
        event.record(second)
        assert not event.done()
        waiting.synchronize(PATIENCE)  # not held back by the later record
    until(event.done)


def test_an_event_that_is_dropped_while_pending_leaves_what_waits_for_it_in_order(
    device: kvmem.Device,
) -> None:
    stream, waiting = device.stream(), device.stream()
    target = np.zeros(8, np.uint8)
    with stall(device, stream):
        stream.copy(target, np.ones(8, np.uint8))
        event = stream.record()
        waiting.wait(event)
        del event
        gc.collect()
        with pytest.raises(kvmem.TimedOut):
            waiting.synchronize(0.02)
    waiting.synchronize(PATIENCE)
    assert target.all()


def test_a_stream_that_is_dropped_still_does_its_work(device: kvmem.Device) -> None:
    stream = device.stream()
    target = np.zeros(8, np.uint8)
    gate = stall(device, stream)
    stream.copy(target, np.ones(8, np.uint8))
    event = stream.record()
    del stream
    gc.collect()
    gate.open()
    until(event.done)
    assert target.all()


def test_streams_have_handles_and_ids_of_their_own(device: kvmem.Device) -> None:
    streams = [device.stream() for _ in range(5)]
    assert len({each.handle for each in streams}) == len({each.id for each in streams}) == 5
    other = kvmem.open_device("host", workers=1).stream()
    assert other.handle not in {each.handle for each in streams}
    assert other.id not in {each.id for each in streams}


# ---- clocks, and a slow host device


def test_the_clock_of_the_host_device_is_the_monotonic_one() -> None:
    before = time.monotonic()
    seen = now(kvmem.open_device("host", workers=1))
    assert before <= seen <= time.monotonic()


def test_the_clock_never_goes_back(device: kvmem.Device) -> None:
    seen = [now(device)]
    for _ in range(5):
        stream = device.stream()
        stream.copy(np.zeros(1 << 16, np.uint8), np.ones(1 << 16, np.uint8))
        stream.synchronize(PATIENCE)
        seen.append(now(device))
    assert seen == sorted(seen)
    assert seen[-1] > seen[0]


def test_a_slow_host_device_holds_to_its_speed() -> None:
    device = slow_host_device(gbps=0.02)
    assert (device.kind, device.info["copy_engines"]) == ("host", 1)
    source = np.ones(2_000_000, np.uint8)
    target = np.zeros_like(source)
    stream = device.stream()
    began = now(device)
    stream.copy(target, source)
    event = stream.record()
    assert not event.done()
    stream.synchronize(PATIENCE)
    assert target.all()
    threads = 2  # its worker, and this one, which helps
    assert now(device) - began >= source.nbytes / (0.02e9 * threads)


@pytest.mark.parametrize("bad", [0, -1.0, float("nan"), float("inf"), True, "1", None], ids=repr)
def test_a_speed_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="gbps"):
        slow_host_device(gbps=bad)


@pytest.mark.parametrize("bad", [-1, 257, True, 1.5, None], ids=repr)
def test_a_number_of_slow_workers_that_is_none_is_refused(bad: int) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="workers"):
        slow_host_device(gbps=1.0, workers=bad)


# ---- devices


@pytest.mark.usefixtures("no_gpu")
def test_auto_is_the_host_device_and_says_why() -> None:
    device = kvmem.open_device()
    assert (device.kind, device.name) == ("host", "host")
    assert device.info["chosen_why"] == "auto: no GPU"
    assert kvmem.open_device("host").info["chosen_why"] == ""


def test_a_device_says_what_it_is() -> None:
    info = kvmem.open_device("host", workers=3).info
    assert (info["kind"], info["name"], info["copy_engines"]) == ("host", "host", 3)
    assert info["needs_pinned_host"] is False
    assert info["memory_bytes"] > 1 << 20
    assert info["max_descriptors"] > 0
    assert info["copy_kernel"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:7"])
def test_a_device_that_is_not_there_is_unavailable(name: str) -> None:
    with pytest.raises(kvmem.DeviceUnavailable, match=name):
        kvmem.open_device(name)


@pytest.mark.parametrize("bad", ["", "HOST", "gpu", "host:1", None, 3, b"host"], ids=repr)
def test_a_name_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="device is"):
        kvmem.open_device(bad)


@pytest.mark.parametrize("bad", [-1, 257, 2**40, True, 1.5, "2", None, float("nan")], ids=repr)
def test_a_number_of_workers_that_is_none_is_refused(bad: int) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="workers"):
        kvmem.open_device("host", workers=bad)


def test_device_memory_is_an_array_that_keeps_it_alive(device: kvmem.Device) -> None:
    buffer = device.alloc(10_000)
    array = buffer.array
    assert (array.nbytes, array.ctypes.data) == (buffer.nbytes, buffer.address)
    assert buffer.address % 4096 == 0
    del buffer
    gc.collect()
    array[:] = 5
    assert (array == 5).all()


@pytest.mark.parametrize("bad", [0, -1, True, 1.5, "4096", 2**63, 2**64, None], ids=repr)
def test_a_size_that_is_none_is_refused(device: kvmem.Device, bad: int) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="nbytes"):
        device.alloc(bad)


def test_more_memory_than_there_is_is_a_capacity_error_with_numbers(device: kvmem.Device) -> None:
    with pytest.raises(kvmem.CapacityError, match=r"wanted 1125899906842624, free \d+") as refusal:
        device.alloc(2**50)
    assert 0 < refusal.value.free < 2**50
