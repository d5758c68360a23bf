"""What a replay on a cache found: counters, who they agree with, and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from kvmem.replay.cache_options import CacheReplayOptions
from kvmem.replay.index import HostIndex
from kvmem.replay.result import SLOT_STATES, slots_by_state
from kvmem.replay.trace import Request

if TYPE_CHECKING:
    from rich.table import Table


@dataclass
class CacheCounts:
    """Running counters of the engine's side of a replay."""

    requests: int = 0
    blocks: int = 0
    """Of all prompts: the keys that were asked for."""
    loads: int = 0
    """Begun, with something to copy; so are the stores."""
    stores: int = 0
    stores_without_room: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    """Loads and stores by kind and state."""
    delivered_keys: int = 0
    delivered_blocks: int = 0
    """Of all groups."""
    saved_seconds: float = 0.0
    """Predicted prefill of the delivered keys."""
    verified: int = 0
    mismatches: int = 0
    corrupted: int = 0
    aborted_requests: int = 0
    cancelled_late: int = 0
    """Transfers that had ended and could be cancelled all the same."""
    cancel_outcomes: Counter[str] = field(default_factory=Counter)


def file_order_prefix(requests: Sequence[Request], capacity: int) -> int:
    """Count the prefix hits of plain LRU, which uses the blocks of a prompt from first to last."""
    index = HostIndex(capacity, "prefix")
    return sum(index.plan(request.keys).prefix for request in requests)


@dataclass(frozen=True)
class CacheReplayResult:
    """A finished replay on a cache."""

    options: CacheReplayOptions
    counts: CacheCounts
    stats: dict[str, Any]
    """Of the cache, at its end."""
    file_order_prefix: int
    seconds: float
    unended: int
    """Transfers that had not ended when the cache was closed."""
    pools: Mapping[str, Mapping[str, int]]
    """By group, when the cache was gone."""

    @property
    def prefix_hit_rate(self) -> float:
        """Delivered keys, of all that were asked for."""
        return self.counts.delivered_keys / max(self.counts.blocks, 1)

    @property
    def file_order_rate(self) -> float | None:
        """The same for plain LRU in file order; None with aborts, which it knows nothing of."""
        if self.options.replay.abort_rate:
            return None
        return self.file_order_prefix / max(self.counts.blocks, 1)

    @property
    def unused_bytes(self) -> int | None:
        """Restored for requests that came to nothing; None where requests share an owner."""
        if self.options.thrash is not None:
            return None
        return int(self.stats["owners"]["unused_bytes"])

    @property
    def leaked_blocks(self) -> int:
        """Slots that did not come home although nobody holds them."""
        return sum(pool["capacity_slots"] - pool["free_slots"] for pool in self.pools.values())

    def faults(self) -> list[str]:
        """Say what is wrong; empty when every block and every counter is accounted for."""
        counts = self.counts
        faults = []
        if counts.mismatches:
            faults.append(f"{counts.mismatches} restored blocks differ")
        if self.leaked_blocks:
            faults.append(f"{self.leaked_blocks} host blocks did not come home")
        if self.stats["plans"]:
            faults.append(f"{self.stats['plans']} hits were never let go")
        for pool in self.pools.values():
            slots = slots_by_state(pool)
            if sum(slots[state] for state in SLOT_STATES) != slots["capacity"]:
                faults.append(f"slots by state do not add up: {slots}")
        if self.unended or self.stats["transfers"]:
            faults.append(f"{max(self.unended, self.stats['transfers'])} transfers did not end")
        if counts.cancelled_late:
            faults.append(f"{counts.cancelled_late} ended transfers could be cancelled")
        for what, mine, theirs in self._both_sides():
            if mine != theirs:
                faults.append(f"{what}: {mine} here, and the cache says {theirs}")
        if self.options.replay.move_bytes and counts.verified != counts.delivered_blocks:
            faults.append(f"{counts.verified} of {counts.delivered_blocks} blocks were verified")
        return faults

    def _both_sides(self) -> list[tuple[str, int, int]]:
        """List what engine and cache have counted each for itself."""
        counts, stats = self.counts, self.stats
        ended = counts.ended
        cancelled = ended["load cancelled"] + ended["store cancelled"]
        both = [
            ("keys asked for", counts.blocks, stats["keys_asked"]),
            ("keys delivered", counts.delivered_keys, stats["keys_loaded"]),
            ("loads done", ended["load done"], stats["loads"]),
            ("loads failed", ended["load failed"], stats["loads_failed"]),
            ("stores done", ended["store done"], stats["stores"]),
            ("stores failed", ended["store failed"], stats["stores_failed"]),
            ("cancelled", cancelled, stats["cancelled"]),
            ("loads and stores", counts.loads + counts.stores, ended.total()),
        ]
        if not stats["loads_failed"]:  # of such a one, blocks arrive behind the usable prefix too
            from_tiers = stats["blocks_from_host"] + stats["blocks_from_disk"]
            both.append(("blocks delivered", counts.delivered_blocks, from_tiers))
        return both

    def to_json(self) -> dict[str, object]:
        """Give plain values with a stable set of keys; units are in the names."""
        counts, stats, rate = self.counts, self.stats, self.file_order_rate
        owners, ended = stats["owners"], counts.ended
        return {
            "requests": counts.requests,
            "keys_asked": counts.blocks,
            "keys_delivered": counts.delivered_keys,
            "prefix_hit_rate": self.prefix_hit_rate,
            "file_order_prefix_hit_rate": rate,
            "beside_file_order": None if rate is None else self.prefix_hit_rate - rate,
            "blocks_from_host": stats["blocks_from_host"],
            "blocks_from_disk": stats["blocks_from_disk"],
            "blocks_stored": stats["blocks_stored"],
            "reoffloaded_blocks": owners["offloaded_again"],
            "bytes_offloaded": owners["offloaded_bytes"],
            "bytes_restored": owners["restored_bytes"],
            "bytes_unused": self.unused_bytes,
            "generated_tokens": owners["tokens"],
            "bytes_per_generated_token": owners["bytes_per_token"],
            "keys_refused_thrash": stats["keys_refused"],
            "keys_not_admitted": stats["keys_not_admitted"],
            "stores_without_room": counts.stores_without_room,
            "saved_prefill_seconds": counts.saved_seconds,
            "evicted": stats["evicted"],
            "occupancy": self.occupancy(),
            "disk": self._disk(),
            "verified_blocks": counts.verified,
            "mismatches": counts.mismatches,
            "corrupted_blocks": counts.corrupted,
            "leaked_blocks": self.leaked_blocks,
            "aborted_requests": counts.aborted_requests,
            "cancel_outcomes": dict(counts.cancel_outcomes),
            "ended": {
                f"{kind} {state}": ended[f"{kind} {state}"]
                for kind in ("load", "store")
                for state in ("done", "failed", "cancelled")
            },
            "seconds": self.seconds,
            "faults": self.faults(),
            "options": self._options(),
        }

    def occupancy(self) -> dict[str, dict[str, dict[str, int]]]:
        """Give slots by group and tier at the end: how many there are, readable and free."""
        return {
            name: {
                tier: {each: slots[each] for each in ("slots", "ready", "free")}
                for tier, slots in tiers.items()
            }
            for name, tiers in self.stats["groups"].items()
        }

    def _disk(self) -> dict[str, object] | None:
        disk = self.stats["disk"]
        names = ["blocks_written", "blocks_unwritten", "blocks_promoted", "reads_failed"]
        names += ["recovered", "blocks_foreign", "degraded", "direct"]
        return None if disk is None else {name: disk[name] for name in names}

    def _options(self) -> dict[str, object]:
        options = asdict(self.options)
        replay: dict[str, object] = options.pop("replay")
        path = options["disk_path"]
        return replay | options | {"disk_path": None if path is None else str(path)}


def make_table(result: CacheReplayResult, source: str) -> Table:
    """Lay out what the replay of `source` found."""
    from rich.table import Table

    title = f"kvmem replay on a cache: {source}"
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for rows in (_hits(result), _moved(result), _slots(result), _verdict(result)):
        for name, value in rows:
            table.add_row(name, value)
        table.add_section()
    return table


def _hits(result: CacheReplayResult) -> list[tuple[str, str]]:
    counts, stats, rate = result.counts, result.stats, result.file_order_rate
    rows = [
        ("requests, prompt blocks", f"{counts.requests:,}, {counts.blocks:,}"),
        ("delivered as prefixes", f"{counts.delivered_keys:,}"),
        ("prefix hit rate", f"{result.prefix_hit_rate:.4f}"),
    ]
    if rate is not None:
        gain = result.prefix_hit_rate - rate
        rows += [
            ("  of plain LRU in file order", f"{rate:.4f}"),
            ("  beside that", f"{gain:+.4f}"),
        ]
    from_host, from_disk = stats["blocks_from_host"], stats["blocks_from_disk"]
    return [
        *rows,
        ("blocks from host, from disk", f"{from_host:,}, {from_disk:,}"),
        ("prefill saved, predicted", f"{counts.saved_seconds:,.1f} s"),
    ]


def _moved(result: CacheReplayResult) -> list[tuple[str, str]]:
    from kvmem.replay.table import shown_bytes

    counts, stats = result.counts, result.stats
    owners, unused = stats["owners"], result.unused_bytes
    virtual = result.options.replay.device == "virtual"
    return [
        ("offloaded", shown_bytes(owners["offloaded_bytes"])),
        ("restored", shown_bytes(owners["restored_bytes"])),
        ("  and never used", "-" if unused is None else shown_bytes(unused)),
        ("per generated token", f"{owners['bytes_per_token']:,.0f} bytes"),
        ("re-offloaded blocks", f"{owners['offloaded_again']:,}"),
        (
            "keys refused: thrash, admission",
            f"{stats['keys_refused']:,}, {stats['keys_not_admitted']:,}",
        ),
        ("stores without room", f"{counts.stores_without_room:,}"),
        ("run time, virtual" if virtual else "run time", f"{result.seconds:.2f} s"),
    ]


def _slots(result: CacheReplayResult) -> list[tuple[str, str]]:
    rows = [
        (f"{name}, {tier}: readable of", f"{slots['ready']:,} of {slots['slots']:,}")
        for name, tiers in result.occupancy().items()
        for tier, slots in tiers.items()
    ]
    disk = result.stats["disk"]
    if disk is not None:
        rows += [
            (
                "disk: written, promoted, failed reads",
                f"{disk['blocks_written']:,}, {disk['blocks_promoted']:,},"
                f" {disk['reads_failed']:,}",
            ),
            ("disk: direct", "yes" if disk["direct"] else str(disk["why_not_direct"])),
        ]
    return rows


def _verdict(result: CacheReplayResult) -> list[tuple[str, str]]:
    counts, ended, faults = result.counts, result.counts.ended, result.faults()
    cancelled = ended["load cancelled"] + ended["store cancelled"]
    failed = ended["load failed"] + ended["store failed"]
    rows = [
        ("loads, stores done", f"{ended['load done']:,}, {ended['store done']:,}"),
        ("cancelled, failed", f"{cancelled:,}, {failed:,}"),
        ("leaked blocks", f"{result.leaked_blocks:,}"),
        ("verified blocks, differing", f"{counts.verified:,}, {counts.mismatches:,}"),
    ]
    if counts.corrupted:
        rows.append(("corrupted on purpose", f"{counts.corrupted:,}"))
    if faults:
        verdict = f"[red]{'; '.join(faults)}[/]"
    elif result.options.replay.move_bytes:
        verdict = "[green]every block as it was[/]"
    else:
        verdict = "[yellow]no bytes were moved[/]"
    return [*rows, ("verification", verdict)]
