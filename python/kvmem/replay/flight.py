"""A request in flight, and the book of its transfers' ends."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import kvmem
from kvmem.replay.device_cache import Lane
from kvmem.replay.index import Entry

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Abort(enum.Enum):
    """Where in its life a request is cancelled."""

    before_offload = enum.auto()
    """Right after its restore was submitted; its offload never is."""
    after_submit = enum.auto()
    """Right after both were submitted."""
    mid_restore = enum.auto()
    """While the restore is under way, the offload goes on; without a restore, the offload."""
    after_end = enum.auto()
    """When both have ended: there is nothing left to cancel."""


@dataclass
class Offload:
    """An offload that has not been settled: its blocks are not the index's own yet."""

    transfer: kvmem.Transfer
    entries: list[Entry]


@dataclass
class Flight:
    """One request that was started and has not been finished."""

    lane: Lane
    seeds: NDArray[np.uint64]
    abort: Abort | None
    restored: list[int]
    """Positions of the restored blocks."""
    restore: kvmem.Transfer | None = None
    offload: Offload | None = None
    offload_transfer: kvmem.Transfer | None = None
    undo: list[tuple[NDArray[np.uint8], int]] = field(default_factory=list)
    """Host bytes to flip back when the restore has ended: block and place in it."""

    def transfers(self) -> list[kvmem.Transfer]:
        """List what was submitted for this request."""
        both = (self.restore, self.offload_transfer)
        return [transfer for transfer in both if transfer is not None]


class Ledger:
    """Every transfer by its tag: submitted once, reported as ended exactly once."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._blocks: list[int] = []
        self._ends = bytearray()
        self.ended_twice = 0
        self.states = {"done": 0, "failed": 0, "cancelled": 0}
        self.bytes = {"offload": 0, "restore": 0}
        """Bytes of the transfers that ended done."""

    @property
    def submitted(self) -> int:
        """How many transfers were accepted."""
        return len(self._blocks)

    @property
    def unended(self) -> int:
        """How many of them have not been reported yet."""
        return self._ends.count(0)

    def next_tag(self) -> int:
        """Give the tag of the transfer that is submitted next."""
        return len(self._blocks)

    def add(self, blocks: int) -> None:
        """Note that the transfer with the last given tag was accepted."""
        self._blocks.append(blocks)
        self._ends.append(0)

    def close(self, reports: Iterable[kvmem.Report]) -> None:
        """Take the reports of a poll."""
        for report in reports:
            tag = report.tag
            # A tag that nobody gave out is an end too many as well.
            if not isinstance(tag, int) or not 0 <= tag < len(self._ends) or self._ends[tag]:
                self.ended_twice += 1
                continue
            self._ends[tag] = 1
            self.states[report.state] += 1
            if report.state == "done":
                self.bytes[report.kind] += self._blocks[tag] * self._block_bytes
