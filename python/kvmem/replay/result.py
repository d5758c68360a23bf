"""What a replay found: counters, latencies, slots by state, and whether all of it is right."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvmem.replay.options import ReplayOptions
from kvmem.testing import now

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    import kvmem
    from kvmem.replay.flight import Ledger
    from kvmem.replay.index import Plan
    from kvmem.replay.trace import Request

SLOT_STATES = ("free", "held", "quarantined", "poisoned")
LATENCY_PARTS = ("queue", "copy", "observe")

_SAMPLE_SECONDS = 0.002
# The core keeps the records of the last 65536 transfers; a request makes two at most.
_REQUESTS_A_READING = 16384


@dataclass
class Counts:
    """Running counters of a replay; blocks unless they say otherwise."""

    requests: int = 0
    blocks: int = 0
    generated_tokens: int = 0
    present: int = 0
    prefix: int = 0
    passed_over: int = 0
    verified: int = 0
    mismatches: int = 0
    corrupted: int = 0
    aborted_requests: int = 0
    seconds: float = 0.0
    cancelled_late: int = 0
    """Transfers that had ended and could be cancelled all the same."""
    cancel_outcomes: Counter[str] = field(default_factory=Counter)
    """Calls of cancel() by what they found."""

    def add(self, request: Request, plan: Plan) -> None:
        """Count a request as planned."""
        self.requests += 1
        self.blocks += len(request.keys)
        self.generated_tokens += request.output_length
        self.present += plan.present
        self.prefix += plan.prefix
        self.passed_over += plan.passed_over


@dataclass(frozen=True)
class Transfers:
    """Ended transfers by time, one row each; seconds since the first sample."""

    restore: NDArray[np.bool_]
    done: NDArray[np.bool_]
    requested: NDArray[np.float64]
    started: NDArray[np.float64]
    completed: NDArray[np.float64]
    observed: NDArray[np.float64]
    """NaN in any of the last three: not reached or not measured."""

    def restore_parts(self) -> dict[str, NDArray[np.float64]]:
        """Split the latency of each restore that ended done, in seconds; the whole is "total"."""
        rows = self.restore & self.done
        requested, started = self.requested[rows], self.started[rows]
        completed, observed = self.completed[rows], self.observed[rows]
        return {
            "total": observed - requested,
            "queue": started - requested,
            "copy": completed - started,
            "observe": observed - completed,
        }


class Recorder:
    """Collects slots by state and the manager's timeline, on the device's clock."""

    def __init__(self, device: kvmem.Device, manager: kvmem.Manager, pool: kvmem.BlockPool) -> None:
        self._device = device
        self._manager = manager
        self._pool = pool
        self._start = now(device)
        self._samples: list[tuple[float, ...]] = []
        self._rows = array("d")
        """Six of each ended transfer, as in Transfers; flat, for there are many."""
        self._recorded: set[int] = set()
        self._calls = 0

    def sample(self, last: bool = False) -> None:
        """Look at the pool, unless it was looked at just now."""
        self._calls += 1
        if last or self._calls % _REQUESTS_A_READING == 0:
            self._read_timeline()
        time = self.seconds()
        if self._samples and not last and time - self._samples[-1][0] < _SAMPLE_SECONDS:
            return
        stats = self._pool.stats()
        self._samples.append((time, *(stats[f"{state}_slots"] for state in SLOT_STATES)))

    def seconds(self) -> float:
        """Seconds since the recorder was made."""
        return now(self._device) - self._start

    def occupancy(self) -> NDArray[np.float64]:
        """One row a sample: seconds since the first, then slots in the order of SLOT_STATES."""
        samples = np.array(self._samples, dtype=np.float64).reshape(-1, 1 + len(SLOT_STATES))
        samples[:, 0] -= samples[0, 0] if len(samples) else 0.0
        return samples

    def transfers(self) -> Transfers:
        """Give all transfers whose end was observed, in the order of their requests."""
        unsorted = np.array(self._rows).reshape(-1, 6)
        rows = unsorted[np.argsort(unsorted[:, 2], kind="stable")]
        rows[:, 2:] -= rows[0, 2] if len(rows) else 0.0
        flags = rows[:, :2].astype(np.bool_)
        return Transfers(flags[:, 0], flags[:, 1], *rows[:, 2:].T)

    def _read_timeline(self) -> None:
        for record in self._manager.timeline():
            if record.id not in self._recorded:
                self._recorded.add(record.id)
                stamps = (record.requested, record.started, record.completed, record.observed)
                self._rows.append(record.kind == "restore")
                self._rows.append(record.state == "done")
                self._rows.extend(np.nan if stamp is None else stamp for stamp in stamps)


@dataclass(frozen=True)
class ReplayResult:
    """A finished replay. Latencies are in microseconds, None without a restore to measure."""

    options: ReplayOptions
    counts: Counts
    reoffloaded_blocks: int
    cancelled: int
    failed: int
    bytes_offloaded: int
    bytes_restored: int
    restore_us: dict[str, float | None]
    run_slots: dict[str, int]
    """Slots by state when all requests had been replayed, and their peaks."""
    end_slots: dict[str, int]
    """Slots by state when the index had let go of everything."""
    transfers: dict[str, int]
    """Transfers submitted, ended, ended twice, and never ended."""
    occupancy: NDArray[np.float64]
    timeline: Transfers

    @classmethod
    def make(
        cls,
        options: ReplayOptions,
        counts: Counts,
        ledger: Ledger,
        recorder: Recorder,
        reoffloaded: int,
        run_slots: Mapping[str, int],
        end_slots: Mapping[str, int],
    ) -> ReplayResult:
        """Put together what the parts of the engine counted."""
        timeline = recorder.transfers()
        return cls(
            options=options,
            counts=counts,
            reoffloaded_blocks=reoffloaded,
            cancelled=ledger.states["cancelled"],
            failed=ledger.states["failed"],
            bytes_offloaded=ledger.bytes["offload"],
            bytes_restored=ledger.bytes["restore"],
            restore_us=percentiles_us(timeline.restore_parts()),
            run_slots=slots_by_state(run_slots, peaks=True),
            end_slots=slots_by_state(end_slots),
            transfers={
                "submitted": ledger.submitted,
                "ended": ledger.submitted - ledger.unended,
                "ended_twice": ledger.ended_twice,
                "unended": ledger.unended,
            },
            occupancy=recorder.occupancy(),
            timeline=timeline,
        )

    @property
    def leaked_blocks(self) -> int:
        """Slots that did not come home although nobody holds them."""
        return self.end_slots["capacity"] - self.end_slots["free"]

    @property
    def block_hit_rate(self) -> float:
        """Share of all blocks that were on the host when their turn came."""
        return self.counts.present / max(self.counts.blocks, 1)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of all blocks that were on the host with all blocks before them."""
        return self.counts.prefix / max(self.counts.blocks, 1)

    @property
    def bytes_per_generated_token(self) -> float:
        """Bytes moved, both ways, for each token that the trace generated."""
        moved = self.bytes_offloaded + self.bytes_restored
        return moved / max(self.counts.generated_tokens, 1)

    def faults(self) -> list[str]:
        """Say what is wrong; empty when every block and every transfer is accounted for."""
        faults = []
        if self.counts.mismatches:
            faults.append(f"{self.counts.mismatches} restored blocks differ")
        if self.leaked_blocks:
            faults.append(f"{self.leaked_blocks} host blocks did not come home")
        if sum(self.end_slots[state] for state in SLOT_STATES) != self.end_slots["capacity"]:
            faults.append(f"slots by state do not add up: {self.end_slots}")
        if self.transfers["unended"] or self.transfers["ended_twice"]:
            faults.append(f"transfers did not end exactly once: {self.transfers}")
        if self.counts.cancelled_late:
            faults.append(f"{self.counts.cancelled_late} ended transfers could be cancelled")
        return faults

    def to_json(self) -> dict[str, object]:
        """Give plain values with a stable set of keys; units are in the names."""
        counts = self.counts
        return {
            "requests": counts.requests,
            "blocks": counts.blocks,
            "block_hit_rate": self.block_hit_rate,
            "prefix_hit_rate": self.prefix_hit_rate,
            "mismatches": counts.mismatches,
            "leaked_blocks": self.leaked_blocks,
            "reoffloaded_blocks": self.reoffloaded_blocks,
            "cancelled": self.cancelled,
            "failed": self.failed,
            "bytes_offloaded": self.bytes_offloaded,
            "bytes_restored": self.bytes_restored,
            "restore_us": self.restore_us,
            "host_blocks": self.end_slots,
            "host_blocks_before_release": self.run_slots,
            "verified_blocks": counts.verified,
            "corrupted_blocks": counts.corrupted,
            "passed_over_blocks": counts.passed_over,
            "aborted_requests": counts.aborted_requests,
            "cancel_outcomes": dict(counts.cancel_outcomes),
            "transfers": self.transfers,
            "generated_tokens": counts.generated_tokens,
            "bytes_per_generated_token": self.bytes_per_generated_token,
            "seconds": counts.seconds,
            "faults": self.faults(),
            "options": asdict(self.options),
        }


def percentiles_us(parts: Mapping[str, NDArray[np.float64]]) -> dict[str, float | None]:
    """Median and 99th percentile of each part, from seconds to microseconds."""
    found: dict[str, float | None] = {}
    for part, seconds in parts.items():
        prefix = "" if part == "total" else f"{part}_"
        known = seconds[~np.isnan(seconds)]
        for percent in (50, 99):
            value = round(float(np.percentile(known, percent)) * 1e6, 3) if len(known) else None
            found[f"{prefix}p{percent}"] = value
    return found


def slots_by_state(stats: Mapping[str, int], peaks: bool = False) -> dict[str, int]:
    """Take the slots by state from the statistics of a pool."""
    slots = {state: stats[f"{state}_slots"] for state in (*SLOT_STATES, "capacity")}
    if peaks:
        slots["peak_held"] = stats["peak_held_slots"]
        slots["peak_quarantined"] = stats["peak_quarantined_slots"]
    return slots
