"""Awaiting without a thread: one eventfd for each event loop wakes the tasks whose tickets or
transfers moved.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeVar

from . import _core

if TYPE_CHECKING:
    from ._core import CacheTransfer, HostBlocks, Transfer

_Started_co = TypeVar("_Started_co", covariant=True)


class _Wakes:
    """The tokens that tasks of one event loop wait for. The loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self.list = _core._WakeList()
        self._pending: dict[int, asyncio.Future[None]] = {}
        self._last_token = 0

    def token(self) -> int:
        self._last_token += 1
        return self._last_token

    def arm(self, token: int) -> asyncio.Future[None]:
        loop = self._loop()
        assert loop is not None  # it runs the caller
        if not self._pending:
            loop.add_reader(self.list.descriptor, self._drain)
        future: asyncio.Future[None] = loop.create_future()
        self._pending[token] = future
        return future

    def disarm(self, token: int) -> None:
        self._pending.pop(token, None)
        loop = self._loop()
        if not self._pending and loop is not None and not loop.is_closed():
            loop.remove_reader(self.list.descriptor)  # an idle loop watches nothing of ours

    def _drain(self) -> None:
        for token in self.list.drain():
            future = self._pending.get(token)
            if future is not None and not future.done():
                future.set_result(None)


_wakes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Wakes] = weakref.WeakKeyDictionary()


async def _until(ready: Callable[[_core._WakeList, int], bool]) -> None:
    """Asks `ready(list, token)` until it is true, each time that the token has fired."""
    loop = asyncio.get_running_loop()
    wakes = _wakes.get(loop)
    if wakes is None:
        wakes = _wakes[loop] = _Wakes(loop)
    token = wakes.token()
    try:
        while True:
            fired = wakes.arm(token)  # before asking: a wake in between is not lost
            if ready(wakes.list, token):
                return
            await fired
    finally:
        wakes.disarm(token)


async def wait(transfer: Transfer | CacheTransfer) -> None:
    """Waits for the transfer's end; raises its error.

    Cancelling the task does not cancel the transfer.
    """
    asked: tuple[_core._WakeList, int] | None = None

    def ended(wakes: _core._WakeList, token: int) -> bool:
        nonlocal asked
        if transfer.done():
            return True
        if asked is None:
            asked = (wakes, token)
            transfer._wake(*asked)
        return False

    try:
        await _until(ended)
    finally:
        if asked is not None:
            transfer._unwake(*asked)  # a cancelled task leaves nothing behind
    transfer._expect_done()


async def acquire(pool: _core.BlockPool, count: int) -> HostBlocks:
    """Waits in the pool's FIFO.

    Cancelling the task gives up the place, or the blocks that were just granted.
    """
    ticket: _core._PoolTicket | None = None

    def granted(wakes: _core._WakeList, token: int) -> bool:
        nonlocal ticket
        if ticket is None:
            ticket = pool._enqueue(count, wakes, token)
        return ticket.granted()

    try:
        await _until(granted)
        assert ticket is not None
        return ticket.take()
    finally:
        if ticket is not None:
            ticket.drop()  # now: the traceback of a cancelled task may live long


class _Draft(Protocol[_Started_co]):
    def granted(self, wakes: _core._WakeList, token: int, /) -> bool: ...
    def start(self) -> _Started_co: ...
    def drop(self) -> None: ...


async def start(draft: _Draft[_Started_co]) -> _Started_co:
    """Waits until the drafted transfer can be accepted, and accepts it."""
    try:
        await _until(draft.granted)
        return draft.start()
    finally:
        draft.drop()
