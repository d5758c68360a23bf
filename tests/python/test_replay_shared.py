"""Published traces against published numbers; they stay outside the project."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvmem.replay.engine import run_replay
from kvmem.replay.index import HostIndex
from kvmem.replay.options import ReplayOptions
from kvmem.replay.trace import Request, read_trace

pytestmark = pytest.mark.shared

TRACES = ["conversation_trace", "synthetic_trace"]


def shared_file(name: str) -> Path:
    beside = Path(__file__).resolve().parents[3] / "shared"
    path = Path(os.environ.get("KVMEM_SHARED", beside)) / name
    if not path.is_file():
        pytest.skip(f"no {name} in $KVMEM_SHARED or in ../shared")
    return path


def trace(name: str, limit: int | None = None) -> list[Request]:
    return read_trace(shared_file(f"traces/mooncake/{name}.jsonl"), limit)


def golden_hits(name: str) -> dict[int, int]:
    golden = json.loads(shared_file("golden/mooncake_policy_hits.json").read_text())
    return dict(golden["data"][f"{name}/LRU"]["rows"])


@pytest.mark.parametrize("name", TRACES)
def test_decisions_give_the_published_hits(name: str) -> None:
    requests = trace(name)
    for capacity, hits in golden_hits(name).items():
        index = HostIndex(capacity, "blocks")
        assert sum(index.plan(request.keys).present for request in requests) == hits


def test_the_start_of_a_trace_replays_with_real_bytes() -> None:
    requests = trace("conversation_trace", 300)
    index = HostIndex(1000, "blocks")
    hits = sum(index.plan(request.keys).present for request in requests)
    result = run_replay(requests, ReplayOptions(hit="blocks", host_blocks=1000, block_bytes=4096))
    assert result.counts.present == result.counts.verified == hits
    assert result.faults() == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.parametrize("capacity", [1000, 10_000])
def test_a_whole_trace_replays_with_real_bytes(name: str, capacity: int) -> None:
    options = ReplayOptions(hit="blocks", host_blocks=capacity, block_bytes=4096)
    result = run_replay(trace(name), options)
    assert result.counts.present == result.counts.verified == golden_hits(name)[capacity]
    assert result.faults() == []
