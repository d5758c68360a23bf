"""Request traces in the Mooncake format: one JSON object a line.

`{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`, where each
hash id names a block of 512 tokens together with all that stands before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvmem._shown import shown
from kvmem.replay.options import BLOCK_TOKENS, ReplayError

_KEY_LIMIT = 1 << 64


class TraceError(ReplayError):
    """A trace that cannot be replayed; the message names the file, the line and the field."""


@dataclass(frozen=True)
class Request:
    """One request. Its keys are the blocks of its prompt, in order; lengths are in tokens."""

    timestamp_ms: float
    input_length: int
    output_length: int
    keys: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """Read the first `limit` requests of a trace, all of them by default.

    Raises TraceError for an unreadable or empty file and, with the line number, for a line that is
    no request, a time before the one above it, and another block size than 512 tokens.
    """
    try:
        with path.open(encoding="utf-8") as lines:
            requests = list(islice(_requests(lines, path.name), limit))
    except OSError as error:
        raise TraceError(f"trace {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TraceError(f"trace {path}: is not a text file in UTF-8") from None
    if not requests:
        raise TraceError(f"trace {path}: holds no request")
    return requests


def _requests(lines: Iterable[str], name: str) -> Iterator[Request]:
    before = 0.0
    known: dict[int, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"trace {name}, line {number}"
        request = _parse(line, where, known)
        if request.timestamp_ms < before:
            raise TraceError(
                f"{where}: timestamp {request.timestamp_ms:g} is before {before:g} of the request"
                " above it"
            )
        before = request.timestamp_ms
        yield request


def _parse(line: str, where: str, known: dict[int, int]) -> Request:
    try:
        record = json.loads(line)
    # A RecursionError is what deeply nested brackets give.
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise TraceError(f"{where}: is not a JSON object")
    request = Request(
        timestamp_ms=_time(record, where),
        input_length=_count(record, "input_length", 1, where),
        output_length=_count(record, "output_length", 0, where),
        keys=_keys(record, where, known),
    )
    _expect_block_size(request, where)
    return request


def _field(record: dict[str, object], name: str, where: str) -> object:
    if name not in record:
        raise TraceError(f"{where}: has no {name}")
    return record[name]


def _time(record: dict[str, object], where: str) -> float:
    value = _field(record, "timestamp", where)
    # A bool is an int in Python, but no time. The comparison also refuses NaN.
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e15:
        raise TraceError(f"{where}: timestamp: {shown(value)} is no time in milliseconds")
    return float(value)


def _count(record: dict[str, object], name: str, least: int, where: str) -> int:
    value = _field(record, name, where)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TraceError(f"{where}: {name}: {shown(value)} is no whole number")
    if value < least:
        raise TraceError(f"{where}: {name}: {shown(value)} is below {least}")
    return value


def _keys(record: dict[str, object], where: str, known: dict[int, int]) -> tuple[int, ...]:
    """Equal keys are one object, which `known` finds: most of a trace's memory is keys."""
    ids = _field(record, "hash_ids", where)
    if not isinstance(ids, list):
        raise TraceError(f"{where}: hash_ids: {shown(ids)} is no list")
    for value in ids:
        if type(value) is not int or not 0 <= value < _KEY_LIMIT:
            raise TraceError(f"{where}: hash_ids: {shown(value)} is no whole number of 64 bits")
    return tuple(known.setdefault(value, value) for value in ids)


def _expect_block_size(request: Request, where: str) -> None:
    wanted = -(-request.input_length // BLOCK_TOKENS)
    given = len(request.keys)
    if wanted == given:
        return
    guess = ""
    for tokens in (1 << power for power in range(16)):
        if given and -(-request.input_length // tokens) == given:
            guess = f"; {given} would fit blocks of {tokens} tokens"
    # A wrong block size shrinks or stretches every prompt and would otherwise go unnoticed.
    raise TraceError(
        f"{where}: block size: input_length {request.input_length} in blocks of {BLOCK_TOKENS}"
        f" tokens makes {wanted} hash_ids, the line has {given}{guess}"
    )
