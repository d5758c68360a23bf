"""A CUDA device from Python, over the fake runtime of both ABIs.

Each test is a process of its own. The fake looks on: what hardware would corrupt or refuse is a
violation, and there must be none.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from cuda_support import FAKE, fake_cudart, gated_cudart, run_cuda, start


@pytest.fixture(params=[12, 13])
def fake(request: pytest.FixtureRequest, fakes: Path) -> Path:
    return fake_cudart(request.param, fakes)


def run(fake: Path, script: str, **settings: object) -> dict[str, Any]:
    """Run the script behind the helpers of FAKE; give what it says."""
    code = textwrap.dedent(FAKE) + textwrap.dedent(script)
    said: dict[str, Any] = run_cuda(code, KVMEM_CUDART_PATH=fake, **settings)
    assert said.pop("violations") == []
    return said


# ---- opening


def test_the_device_says_what_it_is(fake: Path) -> None:
    info = run(fake, "say(info=kvmem.open_device('cuda').info)")["info"]
    assert (info["kind"], info["name"]) == ("cuda", "cuda:0")
    assert (info["needs_pinned_host"], info["max_descriptors"]) == (True, 4096)
    assert info["runtime_path"] == str(fake)
    assert info["copy_path"] == f"batch, {9 if fake.suffix == '.12' else 8} arguments"
    assert (info["copy_engines"], info["compute_capability"]) == (2, "9.0")
    assert info["pci_bus_id"]
    assert info["chosen_why"] == ""


def test_auto_is_the_first_device_where_there_is_one(fake: Path) -> None:
    script = "info = kvmem.open_device().info; say(name=info['name'], why=info['chosen_why'])"
    said = run(fake, script, KVMEM_FAKE_DEVICES=2)
    assert said["name"] == "cuda:0"
    assert said["why"].startswith("auto: CUDA runtime")
    assert "2 devices" in said["why"]


@pytest.mark.parametrize("settings", [{"KVMEM_FAKE_DEVICES": 0}, {"KVMEM_FAKE_DRIVER": 0}], ids=str)
def test_auto_is_the_host_where_there_is_none(fake: Path, settings: dict[str, int]) -> None:
    script = """
    why = refused(lambda: kvmem.open_device("cuda"), kvmem.DeviceUnavailable)
    say(kind=kvmem.open_device().kind, why=why)
    """
    said = run(fake, script, **settings)
    assert said["kind"] == "host"
    assert said["why"]


def test_a_broken_set_up_is_raised(fake: Path) -> None:
    script = "say(why=refused(kvmem.open_device, kvmem.DeviceUnavailable))"
    assert "(999)" in run(fake, script, KVMEM_FAKE_COUNT_ERROR=999)["why"]


def test_a_device_that_is_not_there_is_refused_by_its_number(fake: Path) -> None:
    script = """
    say(why=refused(lambda: kvmem.open_device('cuda:2'), kvmem.KvmemError))
    """
    assert "2" in run(fake, script, KVMEM_FAKE_DEVICES=2)["why"]


def test_what_needs_ordinary_memory_is_refused_and_says_what_to_do(fake: Path) -> None:
    said = run(
        fake,
        """
        device = kvmem.open_device("cuda")
        array = np.zeros(64, np.uint8)
        stream = device.stream()
        buffer = device.alloc(64)
        say(copy=refused(lambda: stream.copy(array, array)), array=refused(lambda: buffer.array),
            event=refused(device.host_event))
        """,
    )
    assert "Manager" in said["copy"]
    assert "host device" in said["array"]
    assert "host device" in said["event"]


# ---- working


def test_blocks_come_back_byte_for_byte(fake: Path) -> None:
    said = run(
        fake,
        """
        cache = Cache()
        same = cache.round_trip(after=cache.device.stream())
        say(same=same, pinned=cache.pool.pinned, quiet=cache.close(),
            batches=calls("cudaMemcpyBatchAsync"), singles=calls("cudaMemcpyAsync"))
        """,
    )
    assert said["batches"] > 0
    assert said["singles"] == 0
    assert (said["same"], said["pinned"], said["quiet"]) == (True, True, True)


@pytest.mark.parametrize("how", ["environment", "option"])
def test_with_batches_off_copies_go_out_one_by_one(fake: Path, how: str) -> None:
    options, setting = ("", 0) if how == "environment" else ("batch=False", 1)
    said = run(
        fake,
        f"""
        cache = Cache({options})
        say(same=cache.round_trip(), path=cache.device.info["copy_path"], quiet=cache.close(),
            batches=calls("cudaMemcpyBatchAsync"), singles=calls("cudaMemcpyAsync"))
        """,
        KVMEM_CUDA_BATCH=setting,
    )
    assert said["path"] == "one by one: batches are switched off"
    assert (said["same"], said["batches"]) == (True, 0)
    assert said["singles"] > 0


def test_an_option_wins_over_the_environment(fake: Path) -> None:
    script = """
    device = kvmem.open_device("cuda", batch=True, max_descriptors=7)
    say(path=device.info["copy_path"], most=device.info["max_descriptors"],
        other=kvmem.open_device("cuda").info["max_descriptors"])
    """
    said = run(fake, script, KVMEM_CUDA_BATCH=0, KVMEM_CUDA_MAX_DESCRIPTORS=100)
    assert said["path"].startswith("batch")
    assert (said["most"], said["other"]) == (7, 100)


def test_no_submission_is_larger_than_the_setting(fake: Path) -> None:
    script = """
    fake.kvmem_fake_set_most_descriptors.argtypes = [ctypes.c_size_t]
    fake.kvmem_fake_set_most_descriptors(2)
    cache = Cache()
    cache.memory[:] = 5
    copy = cache.manager.offload(list(range(0, 16, 2)), after=READY)
    copy.wait(PATIENCE)
    say(quiet=cache.close(), batches=calls("cudaMemcpyBatchAsync"))
    """
    said = run(fake, script, KVMEM_CUDA_MAX_DESCRIPTORS=2)
    assert said["quiet"]
    assert said["batches"] >= 8


def test_two_devices_work_side_by_side_and_take_nothing_of_the_other(fake: Path) -> None:
    said = run(
        fake,
        """
        first, second = Cache("cuda:0"), Cache("cuda:1")
        foreign = second.device.stream()
        say(names=[first.device.name, second.device.name],
            same=[first.round_trip(), second.round_trip()],
            stream=refused(lambda: first.manager.offload([1], after=foreign)),
            layout=refused(lambda: kvmem.Manager(first.device, second.layout, first.pool)),
            quiet=[first.close(), second.close()])
        """,
        KVMEM_FAKE_DEVICES=2,
    )
    assert said["names"] == ["cuda:0", "cuda:1"]
    assert said["same"] == said["quiet"] == [True, True]
    assert said["stream"] is not None
    assert "cuda:1" in said["layout"]


# ---- streams and events of others


def test_streams_and_events_of_others_are_taken_in_each_of_their_forms(fake: Path) -> None:
    said = run(
        fake,
        """
        class Holder:
            def __init__(self, **attributes):
                self.__dict__.update(attributes)

        class Protocol:
            def __init__(self, handle):
                self.handle_ = handle
            def __cuda_stream__(self):
                return (0, self.handle_)

        class EventHolder(Holder):
            pass

        cache = Cache()
        stream, event = foreign_stream(), foreign_event()
        assert fake.cudaEventRecord(event, stream) == 0
        forms = {
            "int": stream,
            "ctypes": ctypes.c_void_p(stream),
            "__cuda_stream__": Protocol(stream),
            "cuda_stream": Holder(cuda_stream=stream),
            "ptr": Holder(ptr=stream),
            "handle": Holder(handle=stream),
            "cuda_event": Holder(cuda_event=event),
            "ptr of an event": EventHolder(ptr=event),
            "the legacy default stream": Holder(cuda_stream=0),
            "several": [stream, Holder(cuda_event=event)],
        }
        same = {name: cache.round_trip(after=form) for name, form in forms.items()}
        copy = cache.manager.offload([1], after=stream)
        copy.wait_on(stream)
        copy.wait(PATIENCE)
        say(same=same, quiet=cache.close())
        """,
    )
    assert all(said["same"].values()), said["same"]
    assert len(said["same"]) == 10
    assert said["quiet"]


def test_an_event_that_was_never_recorded_is_refused(fake: Path) -> None:
    """An event of torch has the handle 0 until then."""
    said = run(
        fake,
        """
        class Event:
            cuda_event = 0
        cache = Cache()
        say(why=refused(lambda: cache.manager.offload([1], after=Event())), quiet=cache.close())
        """,
    )
    assert "never recorded" in said["why"]


def test_a_stream_that_captures_a_graph_is_refused_and_its_capture_goes_on(fake: Path) -> None:
    said = run(
        fake,
        """
        cache = Cache()
        stream = foreign_stream()
        fake.cudaStreamBeginCapture.argtypes = [ctypes.c_void_p, ctypes.c_int]
        fake.kvmem_fake_capture_invalidated.argtypes = [ctypes.c_void_p]
        assert fake.cudaStreamBeginCapture(stream, 0) == 0  # in global mode, the strictest
        why = refused(lambda: cache.manager.offload([1], after=stream))
        same = cache.round_trip()  # while it captures
        say(why=why, same=same, invalidated=fake.kvmem_fake_capture_invalidated(stream),
            quiet=cache.close())
        """,
    )
    assert "captur" in said["why"]
    assert (said["same"], said["invalidated"], said["quiet"]) == (True, 0, True)


# ---- errors


def test_a_sticky_error_loses_the_device_and_host_copies_stay_readable(fake: Path) -> None:
    said = run(
        fake,
        """
        cache = Cache()
        cache.fill(3, 30)
        kept = cache.manager.offload([3], after=READY)
        kept.wait(PATIENCE)
        blocks = kept.result().blocks
        fail("cudaEventQuery", 700)  # an illegal address in some kernel
        lost = cache.manager.offload([4], after=READY)
        first = refused(lambda: lost.wait(PATIENCE), kvmem.DeviceLost)
        then = refused(lambda: cache.manager.offload([5], after=READY), kvmem.DeviceLost)
        counts = cache.pool.stats()
        say(first=first, then=then, poisoned=counts["poisoned_slots"],
            kept=[int(blocks[0][0]), int(blocks[0][SEGMENT])])
        """,
    )
    assert said["first"] is not None
    assert said["then"] is not None
    assert said["kept"] == [30, 31]
    assert said["poisoned"] == 1


def test_an_error_that_is_not_sticky_fails_one_transfer(fake: Path) -> None:
    said = run(
        fake,
        """
        cache = Cache()
        fail("cudaMemcpyBatchAsync", 1)
        failed = cache.manager.offload([4], after=READY)
        why = refused(lambda: failed.wait(PATIENCE), kvmem.CopyFailed)
        say(why=why, same=cache.round_trip(), quiet=cache.close(),
            counts=cache.pool.stats()["quarantined_slots"])
        """,
    )
    assert said["why"] is not None
    assert (said["same"], said["quiet"], said["counts"]) == (True, True, 0)


# ---- the end, and forks

ENDS = {
    "without anything": "",
    "with a device": "device = kvmem.open_device('cuda'); stream = device.stream()",
    "without close": "cache = Cache(); cache.round_trip()",
    "with transfers in flight": """
        cache = Cache()
        fail("cudaEventQuery", 600, times=10**6)  # nothing ever ends
        kept = [cache.manager.offload([i], after=READY) for i in range(4)]
        assert not any(each.done() for each in kept)
    """,
    "with transfers that nobody wants": """
        cache = Cache()
        fail("cudaEventQuery", 600, times=10**6)
        cache.manager.offload([1, 2], after=READY)
        del cache
    """,
    "with a thread that waits": """
        cache = Cache()
        fail("cudaEventQuery", 600, times=10**6)
        kept = cache.manager.offload([1], after=READY)
        threading.Thread(target=kept.wait, daemon=True).start()
        threading.Event().wait(0.1)
    """,
    "with an event and a buffer in a cycle": """
        device = kvmem.open_device("cuda")
        held = [device.alloc(4096), device.stream(), device.stream().record()]
        held.append(held)
    """,
}


@pytest.mark.parametrize("end", ENDS)
def test_the_process_ends_silently_and_makes_no_call_from_then_on(fake: Path, end: str) -> None:
    script = textwrap.dedent(FAKE) + textwrap.dedent(ENDS[end])
    ran = start(script, KVMEM_CUDART_PATH=fake, KVMEM_FAKE_STRICT=1)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize("leaves", ["os._exit(3)", "sys.exit(3)"])
def test_a_forked_child_makes_no_call_and_the_parent_works_on(fake: Path, leaves: str) -> None:
    said = run(
        fake,
        f"""
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        cache = Cache()
        stream, event, buffer = cache.device.stream(), cache.device.stream().record(), None
        transfer = cache.manager.offload([2], after=READY)
        before = calls("*")
        pid = os.fork()
        if pid == 0:
            before = calls("*")
            forked = [
                refused(lambda: cache.manager.offload([1], after=READY), kvmem.Forked),
                refused(lambda: cache.device.stream(), kvmem.Forked),
                refused(lambda: cache.device.alloc(64), kvmem.Forked),
                refused(lambda: stream.record(), kvmem.Forked),
                refused(lambda: transfer.wait(1), kvmem.Forked),
            ]
            del stream, event, transfer
            if None in forked or calls("*") != before:
                print(forked, calls("*") - before, file=sys.stderr)
                os._exit(4)
            {leaves}
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        transfer.wait(PATIENCE)
        say(status=status, same=cache.round_trip(), quiet=cache.close())
        """,
        KVMEM_FAKE_STRICT=1,
    )
    assert said == {"status": 3, "same": True, "quiet": True}


# ---- the GIL

GATES = """
    gates = ctypes.CDLL(os.environ["KVMEM_CUDART_PATH"])

    def kept_the_gil(calls):  # or came to no gate
        kept = []
        for name, (function, call) in calls.items():
            opened, ended = threading.Event(), threading.Event()

            def open_when_somebody_waits():
                while not ended.wait(0.001):
                    if gates.kvmem_gate_waiting():
                        gates.kvmem_gate_open()
                        opened.set()
                        return

            thread = threading.Thread(target=open_when_somebody_waits)
            gates.kvmem_gate_close(function.encode())
            thread.start()
            call()
            ended.set()
            thread.join()
            gates.kvmem_gate_open()
            if not opened.is_set():
                kept.append(name)
        return kept

    def device_with_an_event():  # which ends with the device's runtime
        device = kvmem.open_device("cuda")
        event = device.stream().record()
        while not event.done():
            threading.Event().wait(0.001)
        return device

    def never_ending():
        fail("cudaEventQuery", 600, times=10**6)
"""


@pytest.fixture
def gates(fake: Path, tmp_path: Path) -> Path:
    """Give the runtime whose every call waits until another thread of Python's lets it go on."""
    return gated_cudart(fake, tmp_path)


def run_gated(gates: Path, script: str) -> dict[str, Any]:
    return run(gates, textwrap.dedent(GATES) + textwrap.dedent(script))


def test_no_call_of_a_driver_is_made_with_the_gil(gates: Path) -> None:
    said = run_gated(
        gates,
        """
        from kvmem import _cuda

        device = kvmem.open_device("cuda")
        held = {"buffer": device.alloc(4096), "stream": device.stream()}
        held["event"] = held["stream"].record()
        other = device.stream()

        def pool():
            held["pool"] = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=4096)

        calls = {
            "find": ("cudaGetDeviceCount", _cuda.find),
            "facts": ("cudaDeviceGetAttribute", lambda: _cuda.find().device_facts(0)),
            "open": ("cudaMemGetInfo", lambda: kvmem.open_device("cuda")),
            "alloc": ("*", lambda: device.alloc(4096)),
            "stream": ("*", device.stream),
            "record": ("*", other.record),
            "record again": ("*", lambda: held["event"].record(other)),
            "wait": ("*", lambda: other.wait(held["event"])),
            "done": ("*", lambda: held["event"].done()),
            "synchronize": ("*", lambda: other.synchronize(PATIENCE)),
            "pool": ("cudaHostRegister", pool),
            "release": ("cudaEventRecord", lambda: held["pool"].acquire(1).release(after=other)),
            "the end of a buffer": ("*", lambda: held.pop("buffer")),
            "the end of a stream": ("*", lambda: held.pop("stream")),
        }
        say(calls=len(calls), kept=kept_the_gil(calls))
        """,
    )
    assert said == {"calls": 14, "kept": []}


def test_no_transfer_calls_a_driver_with_the_gil(gates: Path) -> None:
    said = run_gated(
        gates,
        """
        cache = Cache()
        cache.close()  # and with it the reaper, which would ask the device as well
        blocks = cache.pool.acquire(BLOCKS - 1)
        manager = kvmem.Manager(
            cache.device, cache.layout, cache.pool, reaper=False, timeline=True
        )
        stream = cache.device.stream()
        held = {}

        def offload():
            held["transfer"] = manager.offload([1], into=blocks[:1], after=stream)

        never_ending()
        ask = "cudaEventQuery"
        calls = {
            "offload": ("cudaEventRecord", offload),
            "poll": (ask, manager.poll),
            "drain": (ask, lambda: manager.drain(0)),
            "result": (ask, lambda: refused(held["transfer"].result, kvmem.NotDone)),
            "try_acquire": (ask, lambda: cache.pool.try_acquire(2)),
            "export": (ask, lambda: refused(blocks[:1].__dlpack__, kvmem.NotDone)),
            "what is not begun": (
                "cudaEventDestroy", lambda: manager.try_offload([2, 3], after=stream)
            ),
            "wait": (
                ask,
                lambda: (fake.kvmem_fake_forget_faults(), held["transfer"].wait(PATIENCE)),
            ),
            "wait_on": ("cudaEventRecord", lambda: held["transfer"].wait_on(stream)),
            "timeline": (ask, manager.timeline),
            # What it ran behind was pending when it was submitted, and not asked again.
            "the end of a transfer": ("cudaEventDestroy", lambda: held.pop("transfer")),
        }
        say(calls=len(calls), kept=kept_the_gil(calls))
        """,
    )
    assert said == {"calls": 11, "kept": []}


def test_who_lets_go_of_a_device_last_keeps_no_gil(gates: Path) -> None:
    said = run_gated(
        gates,
        """
        from kvmem import _core

        def done(event):
            while not event.done():
                threading.Event().wait(0.001)
            return event

        def pool(device):
            return kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=4096)

        lasts = {
            "device": lambda device: device,
            "stream": lambda device: device.stream(),
            "event": lambda device: done(device.stream().record()),
            "buffer": lambda device: device.alloc(4096),
            "pool": pool,
            "ticket": lambda device: pool(device)._enqueue(1, _core._WakeList(), 1),
            "blocks": lambda device: pool(device).acquire(1),
            "a view of a block": lambda device: pool(device).acquire(1)[0],
        }
        kept = []
        for name, make in lasts.items():
            held = [make(device_with_an_event())]
            kept += kept_the_gil({name: ("cudaEventDestroy", held.clear)})
        say(lasts=len(lasts), kept=kept)
        """,
    )
    assert said == {"lasts": 8, "kept": []}


def test_who_lets_go_of_a_manager_last_keeps_no_gil(gates: Path) -> None:
    said = run_gated(
        gates,
        """
        cache = Cache()
        cache.close()  # and with it the reaper

        def transfer(manager):
            made = manager.offload([1], after=READY)
            made.wait(PATIENCE)
            return made

        lasts = {
            "manager": lambda manager: transfer(manager) and manager,
            "transfer": transfer,
            "host copy": lambda manager: transfer(manager).result(),
            "draft": lambda manager: transfer(manager)
            and manager._draft_offload([1], READY, "background", None, None),
        }
        kept = []
        for name, make in lasts.items():
            held = [make(kvmem.Manager(cache.device, cache.layout, cache.pool, reaper=False))]
            kept += kept_the_gil({name: ("cudaStreamDestroy", held.clear)})
        say(lasts=len(lasts), kept=kept)
        """,
    )
    assert said == {"lasts": 4, "kept": []}


def test_an_event_recorded_while_it_is_asked_counts_as_pending_again(gates: Path) -> None:
    """The question has its answer, of the old record, and is held up on its way back."""
    said = run_gated(
        gates,
        """
        stream = kvmem.open_device("cuda").stream()
        event = stream.record()
        stream.synchronize(PATIENCE)
        old = []
        asks = threading.Thread(target=lambda: old.append(event.done()))
        gates.kvmem_gate_close(b"cudaEventQuery")
        asks.start()
        while not gates.kvmem_gate_waiting():
            threading.Event().wait(0.001)
        never_ending()
        event.record(stream)
        gates.kvmem_gate_open()
        asks.join()
        new = event.done()
        fake.kvmem_fake_forget_faults()
        while not event.done():
            threading.Event().wait(0.001)
        say(old=old, new=new)
        """,
    )
    assert said == {"old": [True], "new": False}
