"""What a replay is asked to do, checked once and refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvmem._shown import shown
from kvmem._units import parse_bytes
from kvmem.devices import _GBPS_LEAST, _GBPS_MOST, _LATENCY_US_MOST, _SEED_MOST
from kvmem.errors import InvalidArgument

HitRule = Literal["prefix", "blocks"]

BLOCK_TOKENS = 512
"""Tokens of one block of a trace."""

REGIONS = 4
"""Regions of the replayed device cache; each stands for one layer, its K and V together."""

# A segment is a whole number of cache lines, so that no two blocks share one on the device.
BLOCK_BYTES_UNIT = REGIONS * 64
BLOCK_BYTES_MOST = 1 << 30
CONCURRENCY_MOST = 256


class ReplayError(Exception):
    """The replay cannot run as asked; the message names what is wrong and where."""


@dataclass(frozen=True)
class ReplayOptions:
    """Options of one replay. Raises ReplayError that names the option, its value and its limit."""

    device: str = "host"
    host_blocks: int | None = None
    """Capacity of the host tier in blocks; None holds every distinct block of the trace."""
    block_bytes: int = 16384
    hit: HitRule = "prefix"
    abort_rate: float = 0.0
    """Share of the requests that are cancelled, 0 to 1."""
    corrupt: int = 0
    """Host blocks in which one byte is flipped just before they are restored."""
    concurrency: int = 4
    """Requests in flight at once."""
    seed: int = 0
    gbps: float | None = None
    """Of one link of the virtual device, in 10^9 bytes a second; None is the device's default."""
    latency_us: float | None = None
    """Of a copy on the virtual device; None is the device's default."""
    move_bytes: bool = True
    """False: memory is addresses only, virtual device only; nothing can then be verified."""

    def __post_init__(self) -> None:
        if self.host_blocks is not None:
            _expect("--host-blocks", self.host_blocks, 1)
        _expect("--block-bytes", self.block_bytes, BLOCK_BYTES_UNIT, BLOCK_BYTES_MOST)
        if self.block_bytes % BLOCK_BYTES_UNIT:
            raise ReplayError(
                f"--block-bytes: {self.block_bytes} is not a multiple of {BLOCK_BYTES_UNIT}"
                f" ({REGIONS} regions of whole 64-byte lines)"
            )
        if self.hit not in get_args(HitRule):
            raise ReplayError(f"--hit: {self.hit!r} is neither 'prefix' nor 'blocks'")
        _expect_within("--abort-rate", self.abort_rate, 0.0, 1.0)
        _expect("--corrupt", self.corrupt, 0)
        _expect("--concurrency", self.concurrency, 1, CONCURRENCY_MOST)
        _expect("--seed", self.seed, 0)
        if self.device == "virtual":
            self._expect_virtual_options()
        else:
            self._expect_no_virtual_options()
        if self.corrupt and not self.move_bytes:
            raise ReplayError("--corrupt: there is nothing to damage with --no-move-bytes")

    def _expect_virtual_options(self) -> None:
        _expect("--seed", self.seed, 0, _SEED_MOST)
        if self.gbps is not None:
            _expect_within("--gbps", self.gbps, _GBPS_LEAST, _GBPS_MOST)
        if self.latency_us is not None:
            _expect_within("--latency-us", self.latency_us, 0.0, _LATENCY_US_MOST)

    def _expect_no_virtual_options(self) -> None:
        given = {
            "--gbps": self.gbps is not None,
            "--latency-us": self.latency_us is not None,
            "--no-move-bytes": not self.move_bytes,
        }
        for name, is_given in given.items():
            if is_given:
                raise ReplayError(f"{name}: only with --device virtual")


def expect_limit(limit: int | None) -> None:
    """Check the number of requests to replay. Raises ReplayError below 1."""
    if limit is not None:
        _expect("--limit", limit, 1)


def parse_host_blocks(text: str) -> int | None:
    """Read "unbounded" (None) or a number of blocks. Raises ReplayError for anything else."""
    if text == "unbounded":
        return None
    try:
        return int(text)
    except ValueError:
        raise ReplayError(f"--host-blocks: {text!r} is neither a number nor 'unbounded'") from None


def parse_block_bytes(text: str) -> int:
    """Read bytes, plain or with a unit ("64KiB"). Raises ReplayError for anything else."""
    try:
        return int(parse_bytes("--block-bytes", text))
    except InvalidArgument as error:
        raise ReplayError(str(error)) from None


def _expect(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least:
        raise ReplayError(f"{name}: {shown(value)} is below {least}")
    if most is not None and value > most:
        raise ReplayError(f"{name}: {shown(value)} is above {most}")


def _expect_within(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # also refuses NaN
        raise ReplayError(f"{name}: {shown(value)} is outside {least:g} to {most:g}")
