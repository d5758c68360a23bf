"""An engine of several processes: the scheduler has an index, each worker a manager, and all of
them map one shared pool. Slots travel as integers.
"""

import array
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvmem
from shared_pool_worker import BLOCK_BYTES
from support import PATIENCE, in_thread

RANKS = 2
SLOTS = 4
"""Of the index; the pool has one for each rank."""


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "little") for number in numbers]


class Process:
    """A worker, by its pipes."""

    def __init__(self, memory: str, capacity_bytes: int, inherited: tuple[int, ...] = ()) -> None:
        program = Path(__file__).with_name("shared_pool_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(program), memory, str(capacity_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=inherited,
        )

    def say(self, *command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        line = in_thread(self.process.stdout.readline)
        assert wait([line], PATIENCE).done, "the worker says nothing"
        return json.loads(line.result())

    def ask(self, *command: Any) -> Any:
        self.say(*command)
        return self.hear()

    def kill(self) -> None:
        """Returns when the process is gone, and its copies with it."""
        exit_of = os.pidfd_open(self.process.pid)
        self.process.send_signal(signal.SIGKILL)
        gone, _, _ = select.select([exit_of], [], [], PATIENCE)
        os.close(exit_of)
        assert gone
        self.end()
        assert self.process.returncode == -signal.SIGKILL

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(PATIENCE)


class Scheduler:
    """The index says which slot, and slot `s` of it is slots `s * RANKS + rank` of the pool."""

    def __init__(self) -> None:
        self.pool = kvmem.BlockPool(
            kvmem.open_device("host"),
            block_bytes=BLOCK_BYTES,
            capacity_bytes=SLOTS * RANKS * BLOCK_BYTES,
            shared=True,
        )
        self.lease = self.pool.acquire(SLOTS * RANKS)  # the index has all of it
        self.index = kvmem.Index(slots=SLOTS, ranks=RANKS)
        fd = self.pool.fileno()
        self.workers = [Process(str(fd), self.capacity_bytes, (fd,)) for _ in range(RANKS)]
        for worker in self.workers:
            assert worker.hear() == "ready"

    @property
    def capacity_bytes(self) -> int:
        return SLOTS * RANKS * BLOCK_BYTES

    def replace(self, rank: int) -> None:
        memory = f"/proc/{os.getpid()}/fd/{self.pool.fileno()}"
        self.workers[rank] = Process(memory, self.capacity_bytes)
        assert self.workers[rank].hear() == "ready"

    def slots(self, plan: kvmem.Plan, rank: int) -> list[int]:
        return [int(slot) * RANKS + rank for slot in plan.slots["full"]]

    def say(self, rank: int, what: str, plan: kvmem.Plan, *more: Any) -> None:
        self.workers[rank].say(what, self.slots(plan, rank), *more)

    def finish(self, rank: int, plan: kvmem.Plan, *, ok: bool) -> bool:
        return self.index.finish(plan.id, rank, ok)

    def free(self) -> int:
        free = self.index.stats()["groups"]["full"]["free"]
        assert isinstance(free, int)
        return free

    def states(self, names: list[bytes]) -> set[str]:
        return {self.index.state(name) for name in names}

    def store(self, names: list[bytes]) -> None:
        """As it should go: each rank stores its own part."""
        plan = self.index.plan_store(names)
        assert len(plan) == len(names)
        for rank in range(RANKS):
            self.say(rank, "store", plan, values(rank, names))
        for rank in range(RANKS):
            assert self.workers[rank].hear() == "done"
            assert self.finish(rank, plan, ok=True) == (rank == RANKS - 1)

    def load(self, names: list[bytes]) -> list[list[int]]:
        """What each rank finds."""
        plan = self.index.plan_load(names)
        assert len(plan) == len(names)
        for rank in range(RANKS):
            self.say(rank, "load", plan)
        found = [worker.hear() for worker in self.workers]
        for rank in range(RANKS):
            self.finish(rank, plan, ok=True)
        return found

    def expect_no_leak(self) -> None:
        self.index.clear()
        stats = self.index.stats()
        assert stats["plans"] == stats["reservations"] == 0
        assert stats["groups"]["full"]["writing"] == stats["groups"]["full"]["leaving"] == 0
        assert self.free() == SLOTS

    def close(self) -> None:
        for worker in self.workers:
            if worker.process.returncode is None:
                worker.end()


def values(rank: int, names: list[bytes]) -> list[int]:
    """Each rank has bytes of its own for a key."""
    return [name[0] * 10 + rank * 100 for name in names]


@pytest.fixture
def scheduler() -> Iterator[Scheduler]:
    scheduler = Scheduler()
    try:
        yield scheduler
    finally:
        scheduler.close()


def test_a_key_is_readable_when_the_last_rank_has_stored_it_and_each_rank_loads_its_own(
    scheduler: Scheduler,
) -> None:
    names = keys(1, 2, 3)
    plan = scheduler.index.plan_store(names, owner="request")
    for rank in (1, 0):
        assert scheduler.states(names) == {"writing"}
        assert scheduler.index.peek(names) == 0
        assert len(scheduler.index.reserve(names)) == 0
        scheduler.say(rank, "store", plan, values(rank, names))
        assert scheduler.workers[rank].hear() == "done"
        assert scheduler.finish(rank, plan, ok=True) == (rank == 0)
    assert scheduler.states(names) == {"ready"}
    # The same bytes through the scheduler's own mapping: both layers of each block, one by one.
    for rank in range(RANKS):
        rows = scheduler.pool.array[scheduler.slots(plan, rank)]
        first = np.array(values(rank, names), np.uint8)[:, None]
        assert (rows[:, : BLOCK_BYTES // 2] == first).all()
        assert (rows[:, BLOCK_BYTES // 2 :] == first + 1).all()
    assert scheduler.load(names) == [values(rank, names) for rank in range(RANKS)]
    assert [worker.ask("close") for worker in scheduler.workers] == [True] * RANKS
    scheduler.expect_no_leak()


def test_a_store_of_which_one_rank_fails_is_never_published_and_frees_when_both_have_ended(
    scheduler: Scheduler,
) -> None:
    scheduler.store(keys(9))
    names = keys(1, 2)
    plan = scheduler.index.plan_store(names)
    for rank in range(RANKS):
        scheduler.say(rank, "begin_store", plan, values(rank, names))
        assert scheduler.workers[rank].hear() in ("queued", "in_flight")
    assert scheduler.workers[1].ask("end_store", True) == "cancelled"
    assert scheduler.finish(1, plan, ok=False) is False
    # Rank 0 may still write: not found any more, and nobody else's yet.
    assert scheduler.states(names) == {"missing"}
    assert scheduler.free() == 1
    other = scheduler.index.plan_store(keys(5, 6, 7))  # all that may be taken: one, and the old key
    assert not set(other.slots["full"]) & set(plan.slots["full"])
    for rank in range(RANKS):
        scheduler.finish(rank, other, ok=False)
    assert scheduler.workers[0].ask("end_store", False) == "done"
    assert scheduler.finish(0, plan, ok=True) is True
    assert scheduler.index.peek(names) == 0
    assert scheduler.states(names) == {"missing"}
    assert scheduler.free() == SLOTS - scheduler.index.peek(keys(9))
    scheduler.store(names)
    assert scheduler.load(names) == [values(rank, names) for rank in range(RANKS)]
    scheduler.expect_no_leak()


def test_a_worker_killed_in_the_middle_of_a_store_publishes_nothing_and_leaks_nothing(
    scheduler: Scheduler,
) -> None:
    names = keys(1, 2, 3)
    plan = scheduler.index.plan_store(names)
    for rank in range(RANKS):
        scheduler.say(rank, "begin_store", plan, values(rank, names))
        assert scheduler.workers[rank].hear() in ("queued", "in_flight")
    assert scheduler.workers[0].ask("end_store", False) == "done"
    assert scheduler.finish(0, plan, ok=True) is False
    assert scheduler.states(names) == {"writing"}
    scheduler.workers[1].kill()
    # Its copies ended with it, but the scheduler has to hear so before it gives the slots away.
    assert scheduler.free() == SLOTS - len(names)
    assert scheduler.states(names) == {"writing"}
    assert scheduler.finish(1, plan, ok=False) is True
    assert scheduler.states(names) == {"missing"}
    assert scheduler.index.peek(names) == 0
    assert scheduler.free() == SLOTS
    with pytest.raises(kvmem.InvalidArgument):
        scheduler.finish(1, plan, ok=True)  # late, from whoever was killed
    scheduler.replace(1)
    scheduler.store(names)
    assert scheduler.load(names) == [values(rank, names) for rank in range(RANKS)]
    scheduler.expect_no_leak()


# ---- what a process gets


def shared_pool(slots: int = 4) -> kvmem.BlockPool:
    device = kvmem.open_device("host")
    return kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=slots * 4096, shared=True)


def test_an_attached_pool_gives_no_blocks_and_says_so_at_once() -> None:
    pool = shared_pool()
    device = kvmem.open_device("host")
    other = kvmem.BlockPool.attach(device, pool.fileno(), block_bytes=4096, capacity_bytes="16KiB")
    assert isinstance(other, kvmem.BlockPool)
    assert other.try_acquire(1) is None
    with pytest.raises(kvmem.CapacityError, match="attached pool gives no blocks"):
        other.acquire(1)
    cache = np.zeros((2, 4096), np.uint8)
    layout = kvmem.KVLayout.from_arrays([cache], memory=device.name)
    with kvmem.Manager(device, layout, other) as manager:
        with pytest.raises(kvmem.CapacityError, match="can never be accepted"):
            manager.offload([0], after=kvmem.READY)
        manager.offload([0], after=kvmem.READY, into=[3]).wait(PATIENCE)
    stats = other.stats()
    assert (stats["held_slots"], stats["free_slots"], stats["waiters"]) == (4, 0, 0)
    assert pool.stats()["free_slots"] == 4


def test_a_descriptor_that_came_over_a_socket_outlives_the_pool_that_it_is_of() -> None:
    pool = shared_pool()
    pool.array[2] = 7
    ours, theirs = socket.socketpair()
    with ours, theirs:
        rights = array.array("i", [pool.fileno()]).tobytes()
        ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        _, [(_, _, data)], _, _ = theirs.recvmsg(1, socket.CMSG_SPACE(4))
    (fd,) = array.array("i", data)
    del pool
    device = kvmem.open_device("host")
    try:
        other = kvmem.BlockPool.attach(device, fd, block_bytes=4096, capacity_bytes=16384)
    finally:
        os.close(fd)
    assert (other.array[2] == 7).all()
    assert other.fileno() != fd


def test_what_cannot_be_attached_is_refused_by_name() -> None:
    pool = shared_pool()
    device = kvmem.open_device("host")

    def attach(fd: Any, **changed: Any) -> None:
        sizes: dict[str, Any] = {"block_bytes": 4096, "capacity_bytes": 16384}
        kvmem.BlockPool.attach(device, fd, **(sizes | changed))

    with pytest.raises(kvmem.InvalidArgument, match=r"16384 bytes.*take 20480"):
        attach(pool.fileno(), capacity_bytes=20480)
    with pytest.raises(kvmem.InvalidArgument, match="is no memfd"):
        attach(0xFFFF)
    unsealed = os.memfd_create("plain")
    with pytest.raises(kvmem.InvalidArgument, match="F_SEAL_SHRINK"):
        attach(unsealed)
    os.close(unsealed)
    for bad in (-1, 2**31, None, "3", 1.0):
        with pytest.raises(kvmem.InvalidArgument, match="fd is "):
            attach(bad)
    private = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=16384)
    with pytest.raises(kvmem.InvalidArgument, match="shared=True"):
        private.fileno()


def test_a_restore_reads_blocks_by_number_or_by_their_handle() -> None:
    device = kvmem.open_device("host")
    cache = np.zeros((4, 4096), np.uint8)
    layout = kvmem.KVLayout.from_arrays([cache], memory=device.name)
    with kvmem.Manager(device, layout, host_bytes=4 * 4096) as manager:
        blocks = manager.pool.acquire(2)
        blocks[0][:], blocks[1][:] = 3, 4
        first, second = (int(slot) for slot in blocks.indices)
        for copy, expected in (
            (blocks, [3, 4]),
            ([second, first], [4, 3]),
            (blocks.indices[1:], [4]),
            ((first, first), [3, 3]),
        ):
            cache[:] = 0
            targets = list(range(len(expected)))
            manager.restore(copy, targets, after=kvmem.READY).wait(PATIENCE)
            assert [set(cache[target].tolist()) for target in targets] == [{n} for n in expected]
        free = next(slot for slot in range(4) if slot not in (first, second))
        with pytest.raises(kvmem.InvalidArgument, match=f"slot {free}"):
            manager.restore([free], [0], after=kvmem.READY)
        with pytest.raises(kvmem.InvalidArgument, match="copy: slot 4 is out of range"):
            manager.restore([4], [0], after=kvmem.READY)
        with pytest.raises(kvmem.InvalidArgument, match="has 1 blocks, the restore names 2"):
            manager.restore([first], [0, 1], after=kvmem.READY)
        other = kvmem.BlockPool(device, block_bytes=4096, capacity_bytes=4096).acquire(1)
        with pytest.raises(kvmem.InvalidArgument, match="of another pool"):
            manager.restore(other, [0], after=kvmem.READY)
        blocks.release()  # nobody holds them: not to be read by number any more
        with pytest.raises(kvmem.InvalidArgument):
            manager.restore([first], [0], after=kvmem.READY)
