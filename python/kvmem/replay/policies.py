"""What each eviction policy would hit in a host tier of each size, and what that saves.

One access a block, in the order of the trace; nothing is held and nothing is in flight. The replay
proper moves bytes and holds blocks, so its hits differ a little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvmem._shown import shown
from kvmem.policies import PolicyName, hits_of
from kvmem.replay.options import BLOCK_TOKENS, ReplayError
from kvmem.replay.trace import Request

if TYPE_CHECKING:
    from rich.table import Table

WITH_COST = "gdsf+cost"
"""GDSF whose value of a block is the time that recomputing it would take. It keeps the ends of
prompts, which cost more, and evicts what they are of no use without."""

WITH_PROMPT_COST = "gdsf+prompt"
"""GDSF whose value of a block is the mean of that time over its prompt, as an Index has it where
plan_store() is told one value for all keys."""

POLICIES = ("lru", "arc", "gdsf", WITH_COST, WITH_PROMPT_COST)
SHARES = (0.01, 0.05, 0.1, 0.25, 0.5)
"""Default capacities, of the distinct blocks of the trace."""

TOKENS_PER_SECOND = 1 / 67e-6
"""Prefill of Llama-3-8B on an A100, 67 us a token without attention (profiles of Vidur)."""
RATE_LEAST, RATE_MOST = 1e-3, 1e12

# Of Llama-3-8B: parameters, layers, hidden size.
_PARAMETERS, _LAYERS, _HIDDEN = 8.03e9, 32, 4096


@dataclass(frozen=True)
class PolicyResult:
    """One policy at one capacity."""

    policy: str
    capacity_blocks: int
    hits: int
    hit_rate: float
    """Of all accesses."""
    saved_seconds: float
    """Prefill that the hits save, if each block that hits is restored in no time."""
    prefix_saved_seconds: float
    """The same of hits that no miss of their prompt stands before: all that most engines use."""


def block_seconds(position: int | NDArray[np.int64], tokens_per_second: float) -> Any:
    """Predict the seconds that it takes to compute the block at a position of its prompt.

    A token costs 2 N floating-point operations for N parameters, and for attention over a context
    of c tokens another 4 * layers * hidden * c: two products of one query with c keys and values.
    The first part takes 1 / tokens_per_second.
    """
    context = (position + 0.5) * BLOCK_TOKENS
    attention = 4 * _LAYERS * _HIDDEN * context / (2 * _PARAMETERS)
    return BLOCK_TOKENS * (1 + attention) / tokens_per_second


def expect_rate(tokens_per_second: float) -> None:
    """Check the rate of prefill. Raises ReplayError."""
    if not RATE_LEAST <= tokens_per_second <= RATE_MOST:  # also refuses NaN
        limits = f"{RATE_LEAST:g} to {RATE_MOST:g}"
        raise ReplayError(f"--prefill-tokens-per-s: {tokens_per_second} is outside {limits}")


def parse_policies(given: str) -> list[str]:
    """Read "all" or names with commas between. Raises ReplayError."""
    if given == "all":
        return list(POLICIES)
    names = given.split(",")
    for name in names:
        if name not in POLICIES:
            known = ", ".join(POLICIES)
            raise ReplayError(f"--policies: {shown(name)} is none of all, {known}")
    return list(dict.fromkeys(names))


def parse_capacities(given: str | None) -> list[int] | None:
    """Read numbers of blocks with commas between. Raises ReplayError."""
    if given is None:
        return None
    try:
        capacities = [int(part) for part in given.split(",")]
    except ValueError:
        raise ReplayError(f"--capacities: {shown(given)} is no list of numbers") from None
    for capacity in capacities:
        if not 1 <= capacity < 1 << 31:
            raise ReplayError(f"--capacities: {capacity} is not 1 to {(1 << 31) - 1} blocks")
    return capacities


def compare_policies(
    requests: Sequence[Request],
    policies: Sequence[str],
    capacities: Sequence[int] | None,
    tokens_per_second: float,
    advance: Callable[[int], None],
) -> Iterator[PolicyResult]:
    """Drive each policy at each capacity; `advance` is told how many are done."""
    expect_rate(tokens_per_second)
    keys = np.array([key for request in requests for key in request.keys], np.uint64)
    lengths = np.array([len(request.keys) for request in requests])
    starts = np.cumsum(lengths) - lengths
    first = np.repeat(starts, lengths)
    seconds: NDArray[np.float64] = block_seconds(np.arange(len(keys)) - first, tokens_per_second)
    mean = np.repeat(np.add.reduceat(seconds, starts) / lengths, lengths)
    values = {WITH_COST: seconds, WITH_PROMPT_COST: mean}
    if capacities is None:
        distinct = len(np.unique(keys))
        capacities = [max(1, round(share * distinct)) for share in SHARES]
    done = 0
    for capacity in capacities:
        for policy in policies:
            name: PolicyName = "gdsf" if policy in values else policy  # type: ignore[assignment]
            hit = hits_of(name, capacity, keys, values.get(policy))
            yield PolicyResult(
                policy,
                capacity,
                hits=int(np.count_nonzero(hit)),
                hit_rate=float(np.mean(hit)),
                saved_seconds=float(seconds[hit].sum()),
                prefix_saved_seconds=float(seconds[in_prefix(hit, first)].sum()),
            )
            advance(done := done + 1)


def in_prefix(hit: NDArray[np.bool_], first: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell which hits no miss of their prompt stands before, given where the prompt of each begins.

    Prompts are one behind the other.
    """
    misses: NDArray[np.int64] = np.cumsum(~hit)
    before_prompt: NDArray[np.int64] = misses[first] - ~hit[first]
    within: NDArray[np.bool_] = misses == before_prompt
    return within


def to_json(results: Sequence[PolicyResult], source: str) -> dict[str, Any]:
    """Lay out all results as one object."""
    return {"source": source, "policies": [asdict(result) for result in results]}


def make_table(results: Sequence[PolicyResult], source: str) -> Table:
    """Lay out all results for people; saved seconds stand beside those of LRU."""
    from rich.table import Table

    table = Table(title=f"kvmem replay --policies: {source}", title_justify="left")
    table.add_column("blocks", justify="right")
    table.add_column("policy")
    for name in ("hits", "hit rate", "prefill saved", "beside lru", "by prefixes", "beside lru"):
        table.add_column(name, justify="right")
    lru = {result.capacity_blocks: result for result in results if result.policy == "lru"}
    before = None
    for result in results:
        if before not in (None, result.capacity_blocks):
            table.add_section()
        before = result.capacity_blocks
        beside = lru.get(result.capacity_blocks)
        table.add_row(
            f"{result.capacity_blocks:,}",
            result.policy,
            f"{result.hits:,}",
            f"{result.hit_rate:.4f}",
            f"{result.saved_seconds:,.1f} s",
            _change(result.saved_seconds, beside.saved_seconds if beside else 0),
            f"{result.prefix_saved_seconds:,.1f} s",
            _change(result.prefix_saved_seconds, beside.prefix_saved_seconds if beside else 0),
        )
    return table


def _change(value: float, base: float) -> str:
    return f"{value / base - 1:+.2%}" if base else "-"
