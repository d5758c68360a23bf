"""Forked children, and the end of the process."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from typing import Any

import pytest

import kvmem
from kvmem import READY
from support import PATIENCE, Cache, free_slots, in_thread, run_child, run_forked

MakeCache = Callable[..., Cache]

MAKE = """
    import asyncio, atexit, gc, os, sys, threading
    import numpy as np
    import kvmem
    from kvmem.testing import stall

    device = kvmem.open_device("host", workers=2)
    arrays = [np.zeros((8, 65536), np.uint8) for _ in range(2)]
    layout = kvmem.KVLayout.from_arrays(arrays)
    manager = kvmem.Manager(device, layout, host_bytes="1MiB")
    pool = manager.pool
    stream = device.stream()
    def stalled(*blocks):
        gate = stall(device, stream)
        return gate, manager.offload(list(blocks), after=stream)
"""


# ---- a forked child


def every_call(cache: Cache, transfer: kvmem.Transfer) -> dict[str, Callable[[], Any]]:
    """Every public call that does something with what belongs to the parent."""
    manager, pool, device = cache.manager, cache.pool, cache.device
    copy = cache.stored(7)
    blocks = pool.acquire(1)
    stream = device.stream()
    event = device.host_event()
    arrays = cache.arrays
    return {
        "Manager": lambda: kvmem.Manager(device, cache.layout, pool),
        "Manager.offload": lambda: manager.offload([0], after=READY),
        "Manager.try_offload": lambda: manager.try_offload([0], after=READY),
        "Manager.restore": lambda: manager.restore(copy, [0], after=READY),
        "Manager.try_restore": lambda: manager.try_restore(copy, [0], after=READY),
        "Manager.offload_async": lambda: manager.offload_async([0], after=READY),
        "Manager.restore_async": lambda: manager.restore_async(copy, [0], after=READY),
        "Manager.poll": manager.poll,
        "Manager.busy": lambda: manager.busy([0]),
        "Manager.stats": manager.stats,
        "Manager.timeline": manager.timeline,
        "Manager.drain": manager.drain,
        "Manager.rebind": lambda: manager.rebind(cache.layout),
        "Manager.close": manager.close,
        "Transfer.wait": transfer.wait,
        "Transfer.wait with a timeout": lambda: transfer.wait(0),
        "Transfer.cancel": transfer.cancel,
        "Transfer.result": transfer.result,
        "Transfer.wait_on": lambda: transfer.wait_on(stream),
        "await Transfer": lambda: asyncio.run(awaited(transfer)),
        "HostCopy.share": copy.share,
        "HostCopy[0]": lambda: copy[0],
        "HostCopy.blocks": lambda: copy.blocks,
        "HostCopy.concat": lambda: kvmem.HostCopy.concat([copy]),
        "HostCopy.release": copy.release,
        "BlockPool": lambda: kvmem.BlockPool(
            device, block_bytes=4096, capacity_bytes=4096, pin="required"
        ),
        "BlockPool.acquire": lambda: pool.acquire(1),
        "BlockPool.try_acquire": lambda: pool.try_acquire(1),
        "BlockPool.acquire_async": lambda: asyncio.run(pool.acquire_async(1)),
        "BlockPool.stats": pool.stats,
        "BlockPool.close": pool.close,
        "HostBlocks.indices": lambda: blocks.indices,
        "HostBlocks.release": blocks.release,
        "HostBlocks.share": blocks.share,
        "HostBlocks[0]": lambda: blocks[0],
        "HostBlocks.gather": blocks.gather,
        "HostBlocks.release(after=)": lambda: blocks.release(after=stream),
        "Device.alloc": lambda: device.alloc(4096),
        "Device.stream": device.stream,
        "Device.host_event": device.host_event,
        "Stream.copy": lambda: stream.copy(arrays[0], arrays[1]),
        "Stream.record": stream.record,
        "Stream.wait": lambda: stream.wait(event),
        "Stream.synchronize": stream.synchronize,
        "Event.record": lambda: event.record(stream),
        "Event.set": event.set,
    }


async def awaited(transfer: kvmem.Transfer) -> None:
    await transfer


@pytest.mark.parametrize("state", ["idle", "in flight"])
def test_every_call_says_forked_in_a_child_and_the_parent_works_on(
    cache: Cache, state: str
) -> None:
    """Public failure 152: a fork behind a first use made the children fail."""
    cache.fill(1, 10)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([1], after=stream)
    if state == "idle":
        gate.open()
        transfer.wait(PATIENCE)
    calls = every_call(cache, transfer)

    def child() -> None:
        wrong = []
        for name, call in calls.items():
            if name == "await Transfer" and state == "idle":
                continue  # it has ended, which is a fact
            try:
                call()
            except kvmem.Forked:
                continue
            except BaseException as error:
                wrong.append(f"{name}: {type(error).__name__} {error}")
            else:
                wrong.append(f"{name}: nothing")
        assert not wrong, "; ".join(wrong)

    started = time.monotonic()
    assert run_forked(child) == ""
    assert time.monotonic() - started < 10
    gate.open()
    transfer.wait(PATIENCE)
    assert (transfer.result().blocks[0] == cache.expected(10)).all()
    cache.stored(2)


def test_the_facts_stay_readable_in_a_child_and_leaving_blocks_is_silent(cache: Cache) -> None:
    copy, blocks = cache.stored(0), cache.pool.acquire(2)
    stream, gate = cache.stalled_stream()
    transfer = cache.manager.offload([1], after=stream)
    state = transfer.state

    def child() -> None:
        assert (transfer.state, transfer.done()) == (state, False)
        assert (len(copy), copy.nbytes, len(blocks)) == (1, cache.block_bytes, 2)
        assert cache.pool.capacity == 8
        assert not cache.manager.closed
        with blocks, copy:
            pass
        cache.__dict__.clear()  # every destructor

    assert run_forked(child) == ""
    assert free_slots(cache.pool) == 8 - 1 - 2 - 1
    assert cache.pool.try_acquire(1) is not None
    gate.open()
    transfer.wait(PATIENCE)


def test_views_of_host_memory_read_zeros_in_a_child(cache: Cache) -> None:
    blocks = cache.pool.acquire(1)
    blocks[0][:] = 7
    view, array = blocks[0], cache.pool.array

    def child() -> None:
        assert not view.any()
        assert not array.any()
        view[:] = 1  # its own memory now

    assert run_forked(child) == ""
    assert (view == 7).all()


def test_a_child_may_make_its_own(cache: Cache) -> None:
    cache.manager.offload([0], after=READY).wait(PATIENCE)

    def child() -> None:
        mine = Cache(kvmem.open_device("host", workers=1))
        mine.fill(3, 10)
        copy = mine.stored(3)
        mine.manager.restore(copy, [4], after=READY).wait(PATIENCE)
        assert mine.holds(4, 10)
        asyncio.run(awaited(mine.manager.offload([0], after=READY)))
        mine.finish()

    assert run_forked(child) == ""


def test_children_forked_while_other_threads_work_never_hang(cache: Cache) -> None:
    """A lock that another thread holds at the fork is never free again in the child."""
    over: list[bool] = []

    def work() -> None:
        while not over:
            with cache.stored(0) as copy, cache.pool.acquire(1, timeout=PATIENCE):
                cache.manager.restore(copy, [5], after=READY).wait(PATIENCE)
            cache.manager.poll()
            cache.manager.stats()

    working = in_thread(work)
    transfer = cache.manager.offload([1], after=READY)
    calls = every_call(cache, transfer)

    def child() -> None:
        for name, call in calls.items():
            try:
                call()
            except kvmem.Forked:
                continue
            except BaseException as error:
                raise AssertionError(name) from error

    try:
        for _ in range(15):
            assert run_forked(child) in ("", "AssertionError: await Transfer")
    finally:
        over.append(True)
        working.result(PATIENCE)


def test_a_child_of_multiprocessing_ends_well_with_transfers_in_flight() -> None:
    ran = run_child(
        MAKE
        + """
    import multiprocessing, warnings
    warnings.simplefilter("ignore", DeprecationWarning)

    def work(queue):
        try:
            manager.offload([0], after=kvmem.READY)
        except kvmem.Forked as error:
            queue.put(str(error))

    gate, transfer = stalled(0, 1)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=work, args=(queue,))
    child.start()
    child.join(20)
    assert child.exitcode == 0, child.exitcode
    assert "parent process" in queue.get()
    gate.open()
    transfer.wait(20)
    assert manager.close().quiet
    print("well")
    """
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("well\n", "", 0)


def test_a_child_that_runs_to_the_end_of_the_interpreter_is_silent() -> None:
    """Here the child leaves as a program does: atexit handlers, destructors and all."""
    ran = run_child(
        MAKE
        + """
    import warnings
    warnings.simplefilter("ignore", DeprecationWarning)
    atexit.register(lambda: None)
    gate, transfer = stalled(0, 1)
    view = pool.acquire(1)[0]
    pid = os.fork()
    if pid == 0:
        sys.exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    gate.open()
    transfer.wait(20)
    print("well")
    """
    )
    assert (ran.stdout, ran.stderr, ran.returncode) == ("well\n", "", 0)


# ---- the end of the process

ENDS = {
    "without anything": "",
    "without close": "manager.offload([0], after=kvmem.READY).wait(20)",
    "with transfers in flight": "kept = stalled(0, 1, 2)",
    "with transfers in flight and nobody interested": "gate = stalled(0)[0]; stalled(1)",
    "with a gate that is gone": "stalled(0)",
    "with transfers that copy": "many = [manager.offload(list(range(8)), after=kvmem.READY)]",
    "with views alive": "view = pool.acquire(1)[0]; array = pool.array; del pool, manager",
    "with blocks released behind a stalled stream": """
        gate = stall(device, stream)
        pool.acquire(2).release(after=stream)
    """,
    "with a user's copy queued": """
        gate = stall(device, stream)
        stream.copy(arrays[0], arrays[1])
    """,
    "with a closed manager": "manager.close()",
    "with a manager that could not close": "kept = stalled(0); manager.close(0)",
    "with a manager without a reaper": """
        other = kvmem.Manager(device, layout, host_bytes="1MiB", reaper=False)
        gate = stall(device, stream)
        kept = other.offload([0], after=stream)
    """,
    "with a cycle": "kept = stalled(0); manager.myself = manager; kept[1].myself = kept[1]",
    "with an awaiting loop": """
        kept = stalled(0)
        async def wait():
            await kept[1]
        loop = asyncio.new_event_loop()
        task = loop.create_task(wait())
        loop.run_until_complete(asyncio.sleep(0.01))
        task.cancel()
        loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
        loop.close()
    """,
    "out of a running loop": """
        kept = stalled(0)
        async def main():
            asyncio.ensure_future(kept[1])
            await asyncio.sleep(0.01)
        asyncio.run(main())
    """,
    "with a daemon thread in wait": """
        kept = stalled(0)
        threading.Thread(target=kept[1].wait, daemon=True).start()
        threading.Event().wait(0.1)
    """,
    "with a daemon thread in wait with a timeout": """
        kept = stalled(0)
        threading.Thread(target=kept[1].wait, args=(60,), daemon=True).start()
        threading.Event().wait(0.1)
    """,
    "with a daemon thread in acquire": """
        held = pool.acquire(pool.capacity)
        threading.Thread(target=pool.acquire, args=(1,), daemon=True).start()
        threading.Event().wait(0.1)
    """,
    "with a daemon thread in drain": """
        kept = stalled(0)
        threading.Thread(target=manager.drain, daemon=True).start()
        threading.Event().wait(0.1)
    """,
    "with a daemon thread in synchronize": """
        gate = stall(device, stream)
        threading.Thread(target=stream.synchronize, daemon=True).start()
        threading.Event().wait(0.1)
    """,
    "with daemon threads that work": """
        def work(block):
            while True:
                transfer = manager.offload([block], after=kvmem.READY)
                transfer.wait()
                transfer.result().release()
        for block in range(3):
            threading.Thread(target=work, args=(block,), daemon=True).start()
        threading.Event().wait(0.2)
    """,
    "with daemon threads that ask all the time": """
        def ask():
            while True:
                manager.poll()
        for _ in range(8):
            threading.Thread(target=ask, daemon=True).start()
        threading.Event().wait(0.2)
    """,
    "by sys.exit in a thread": """
        kept = stalled(0)
        thread = threading.Thread(target=sys.exit, args=(5,))
        thread.start()
        thread.join()
    """,
    "with an atexit handler that closes": """
        kept = stalled(0)
        def close():
            kept[0].open()
            assert manager.close(20).quiet
        atexit.register(close)
    """,
    "with an atexit handler that cannot close": """
        kept = stalled(0)
        atexit.register(manager.close, 0.1)
    """,
    "with a thread that outlives the main one": """
        kept = stalled(0)
        def late():
            threading.main_thread().join()
            kept[0].open()
            kept[1].wait(20)
            assert kept[1].state == "done"
        threading.Thread(target=late).start()
    """,
    "with a module that keeps everything": """
        sys.modules["os"].kept = (manager, pool, stalled(0), pool.acquire(1), pool.array)
    """,
}


@pytest.mark.parametrize(
    ("end", "status"),
    [(end, 0) for end in ENDS] + [(end, 7) for end in ENDS if "thread" in end or "flight" in end],
)
def test_the_process_ends_soon_and_silently_with_its_own_status(end: str, status: int) -> None:
    """Public failure 155: a process did not end, or could not be closed twice.
    Public failure 156: late destructors made noise at exit.
    """
    script = MAKE + dedent_to(ENDS[end], 4) + f"\n    sys.exit({status})\n"
    started = time.monotonic()
    ran = run_child(script, timeout=30)
    assert time.monotonic() - started < 5 + start_seconds()
    assert (ran.stderr, ran.stdout, ran.returncode) == ("", "", status)


def dedent_to(text: str, spaces: int) -> str:
    return textwrap.indent(textwrap.dedent(text).strip("\n"), " " * spaces)


_start_seconds: list[float] = []


def start_seconds() -> float:
    """What a child takes that does nothing: this machine may be busy with other things."""
    if not _start_seconds:
        started = time.monotonic()
        run_child(MAKE)
        _start_seconds.append(time.monotonic() - started)
    return _start_seconds[0]


def test_no_memory_is_copied_that_is_freed_while_the_process_ends() -> None:
    """Public failure 155: the arrays of a module go before the threads that copy them."""
    ran = run_child(
        """
    import atexit, time
    def free():
        before = transfer.state
        del arrays[:]
        time.sleep(0.2)
        print(before, transfer.state)
    atexit.register(free)  # runs when kvmem has heard of the end
    import numpy as np
    import kvmem
    from kvmem.testing import slow_host_device

    device = slow_host_device(gbps=0.1, workers=2)
    arrays = [np.ones((32, 2 << 20), np.uint8)]  # so large that it is unmapped when it is freed
    layout = kvmem.KVLayout.from_arrays(arrays)
    manager = kvmem.Manager(device, layout, host_bytes="64MiB")
    transfer = manager.offload(list(range(32)), after=kvmem.READY)
    """
    )
    assert (ran.stderr, ran.stdout, ran.returncode) == ("", "in_flight in_flight\n", 0)


def test_an_atexit_handler_that_was_there_before_kvmem_may_close_too() -> None:
    """It runs when nothing moves any more, and says so instead of waiting."""
    ran = run_child(
        """
    import atexit
    def close():
        report = manager.close(20)
        print(report.quiet, report.in_flight)
    atexit.register(close)
    """
        + MAKE
        + "\n    kept = stalled(0)\n"
    )
    assert (ran.stderr, ran.stdout, ran.returncode) == ("", "False 1\n", 0)


def test_a_daemon_thread_hears_nothing_of_the_end() -> None:
    """Its wait is cut short before the interpreter ends; that is nobody's error."""
    ran = run_child(
        """
    import atexit, threading
    atexit.register(threading.Event().wait, 0.3)  # runs after kvmem's own handler
    """
        + MAKE
        + """
    kept = stalled(0)
    threading.Thread(target=kept[1].wait, daemon=True).start()
    threading.Thread(target=kept[1].wait, args=(60,), daemon=True).start()
    threading.Event().wait(0.1)
    """
    )
    assert (ran.stderr, ran.stdout, ran.returncode) == ("", "", 0)


# ---- importing


def test_importing_needs_only_numpy_starts_no_thread_and_opens_nothing() -> None:
    """Public failure 152: a fork behind a first use made the children fail."""
    ran = run_child(
        """
    import os, sys
    import numpy.typing
    before = set(sys.modules)
    descriptors, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    import kvmem
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert len(os.listdir("/proc/self/task")) == threads
    roots = {name.partition(".")[0] for name in set(sys.modules) - before}
    of_python = set(sys.stdlib_module_names) | {"_xxsubinterpreters"}  # which that list leaves out
    print(sorted(roots - of_python))
    """
    )
    assert (ran.stdout, ran.stderr) == ("['kvmem']\n", "")


def test_errors_stay_what_they_are_beside_a_module_that_translates_them_all() -> None:
    """Other extension modules made with pybind11 may, wherever they are imported."""
    script = (
        MAKE
        + """
    from kvmem import _core

    blocks = pool.acquire(2)
    def raised():
        for call in (
            lambda: blocks[5],
            lambda: blocks["a"],
            lambda: blocks.__dlpack__(copy=True),
            lambda: pool.acquire(0),
        ):
            try:
                call()
            except Exception as error:
                yield type(error).__name__
    print(*raised())
    _core._translate_all_exceptions()
    print(*raised())
    """
    )
    ran = run_child(script)
    assert ran.stderr == ""
    assert ran.stdout == 2 * "IndexError TypeError BufferError InvalidArgument\n"


def test_importing_loads_nothing_of_cuda_and_takes_little_time() -> None:
    """In time of the processor: what else the machine does must not count."""
    script = """
    import sys, time
    before = time.process_time()
    import kvmem
    print(time.process_time() - before)
    with open("/proc/self/maps") as maps:
        print([line for line in maps if "libcuda" in line])
    """
    found = [run_child(script).stdout.splitlines() for _ in range(5)]
    assert {loaded for _, loaded in found} == {"[]"}
    assert min(float(seconds) for seconds, _ in found) < 0.3


def test_importing_does_not_bring_in_the_extras() -> None:
    extras = ("typer", "rich", "plotly", "hypothesis", "torch", "asyncio.windows_events")
    ran = run_child(
        f"""
    import sys
    import kvmem
    print([name for name in {extras} if name in sys.modules])
    """
    )
    assert (ran.stdout, ran.stderr) == ("[]\n", "")


def test_a_signal_that_kills_leaves_nothing_that_hangs() -> None:
    """Public failure 135: a signal left memory behind."""
    child = subprocess.Popen(
        [sys.executable, "-c", dedent_to(MAKE, 0) + "\n" + KILLED],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "in flight\n"
    child.terminate()
    assert child.wait(PATIENCE) == -15
    child.stdout.close()


KILLED = """
kept = stalled(0, 1)
print("in flight", flush=True)
kept[1].wait()
"""


def test_importing_in_another_interpreter_is_refused_and_does_not_hang():
    interpreters = pytest.importorskip("_xxsubinterpreters", reason="of another version of Python")
    ran = run_child(
        f"""
        import {interpreters.__name__} as interpreters
        try:
            interpreters.run_string(interpreters.create(), "import kvmem")
        except interpreters.RunFailedError as error:
            print(error)
        """
    )
    assert "ImportError" in ran.stdout, ran.stderr
