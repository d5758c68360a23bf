"""Comparing eviction policies on a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kvmem.cli import make_app
from kvmem.replay.policies import (
    TOKENS_PER_SECOND,
    block_seconds,
    compare_policies,
    in_prefix,
)
from kvmem.replay.trace import Request
from kvmem.replay.workload import generate_chat
from test_replay_shared import TRACES, golden_hits, shared_file


def run(*arguments: str) -> Any:
    return CliRunner().invoke(make_app(), ["replay", *arguments], env={"COLUMNS": "100"})


def in_json(*arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout.splitlines()[-1])["policies"]
    return found


def test_a_later_block_costs_more_to_recompute() -> None:
    first, later = block_seconds(0, TOKENS_PER_SECOND), block_seconds(100, TOKENS_PER_SECOND)
    assert first == pytest.approx(512 * 67e-6, rel=0.01)
    # 51,456 tokens of context: 4 * 32 * 4096 * 51,456 operations of attention beside 1.606e10.
    assert later / (512 * 67e-6) == pytest.approx(1 + 2.698e10 / 1.606e10, rel=0.01)
    assert block_seconds(0, 2 * TOKENS_PER_SECOND) == pytest.approx(first / 2)


def test_each_policy_is_counted_at_each_capacity() -> None:
    rows = in_json("--policies", "all", "--capacities", "10,100", "--limit", "200")
    assert [(row["capacity_blocks"], row["policy"]) for row in rows] == [
        (capacity, policy)
        for capacity in (10, 100)
        for policy in ("lru", "arc", "gdsf", "gdsf+cost", "gdsf+prompt")
    ]
    assert all(row["hits"] > 0 for row in rows[5:])
    table = run("--policies", "lru,gdsf", "--limit", "50")
    assert table.exit_code == 0
    assert "gdsf" in table.output
    assert "arc" not in table.output


def test_the_rate_scales_seconds_and_the_device_decides_nothing() -> None:
    arguments = ["--policies", "all", "--capacities", "200", "--limit", "60"]
    rows = in_json(*arguments, "--prefill-tokens-per-s", "1")
    assert in_json(*arguments, "--prefill-tokens-per-s", "1", "--device", "virtual") == rows
    for rate in (0.001, 1e12):
        scaled = in_json(*arguments, "--prefill-tokens-per-s", str(rate))
        assert [row["hits"] for row in scaled] == [row["hits"] for row in rows]
        assert [row["saved_seconds"] * rate for row in scaled] == pytest.approx(
            [row["saved_seconds"] for row in rows]
        )


def test_room_for_everything_saves_the_same_under_every_policy() -> None:
    requests = generate_chat(3, 100)
    accesses = [key for request in requests for key in request.keys]
    results = list(
        compare_policies(
            requests, ["lru", "arc", "gdsf+cost", "gdsf+prompt"], [10**6], 1.0, lambda _: None
        )
    )
    expected = len(accesses) - len(set(accesses))
    assert [result.hits for result in results] == [expected] * 4
    assert len({result.saved_seconds for result in results}) == 1
    # A block that was seen before was seen behind all that stands before it.
    assert all(result.prefix_saved_seconds == result.saved_seconds for result in results)


def test_a_prefix_ends_at_the_first_miss_of_its_prompt() -> None:
    prompts = ["hhh", "hmh", "mhh", "h", "m", "hhmm"]
    hit = np.array([each == "h" for each in "".join(prompts)])
    starts = np.cumsum([0, *map(len, prompts[:-1])])
    expected = [
        all(each == "h" for each in prompt[: i + 1])
        for prompt in prompts
        for i in range(len(prompt))
    ]
    assert in_prefix(hit, np.repeat(starts, list(map(len, prompts)))).tolist() == expected


def test_where_prefixes_count_the_blocks_of_a_prompt_are_worth_the_same() -> None:
    """A long prompt that comes back, and others between that do not fit beside it."""
    requests = []
    for turn in range(0, 60, 2):
        requests.append(Request(turn, 100 * 512, 1, tuple(range(100))))
        other = 1000 + 100 * turn
        requests.append(Request(turn + 1, 30 * 512, 1, tuple(range(other, other + 30))))
    policies = ["lru", "gdsf+cost", "gdsf+prompt"]
    lru, own, prompt = compare_policies(requests, policies, [120], 1.0, lambda _: None)
    assert lru.hits == 0
    assert own.hits > 0
    assert own.prefix_saved_seconds == 0, "its first blocks are the cheapest and go first"
    assert prompt.hits == 29 * 100
    assert prompt.prefix_saved_seconds == prompt.saved_seconds > own.saved_seconds


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--policies", "fifo"], "'fifo' is none of all, lru"),
        (["--policies", ""], "'' is none of all"),
        (["--policies", "all", "--capacities", "0"], "0 is not 1 to"),
        (["--policies", "all", "--capacities", "many"], "'many' is no list"),
        (["--policies", "all", "--prefill-tokens-per-s", "0"], "0.0 is outside 0.001 to 1e+12"),
        (["--policies", "all", "--prefill-tokens-per-s", "nan"], "nan is outside"),
        (["--policies", "all", "--prefill-tokens-per-s", "1e-320"], "1e-320 is outside"),
        (["--policies", "all", "--device", "tape"], "--device: 'tape' is neither host nor virtual"),
        (["--policies", "all", "--limit", "0"], "--limit"),
        (["--policies", "all", "--plot", "plot.html"], "--plot: not with --policies"),
        (["--capacities", "5"], "--capacities: only with --policies"),
        (["--prefill-tokens-per-s", "5"], "--prefill-tokens-per-s: only with --policies"),
        ([str(Path("/nowhere/trace")), "--policies", "all"], "trace"),
    ],
)
def test_what_cannot_run_says_so(arguments: list[str], what: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert what in result.output
    assert "Traceback" not in result.output


@pytest.mark.shared
@pytest.mark.parametrize("name", TRACES)
def test_lru_hits_are_the_published_ones(name: str) -> None:
    golden = golden_hits(name)
    sizes = ",".join(map(str, golden))
    path = str(shared_file(f"traces/mooncake/{name}.jsonl"))
    rows = in_json(path, "--policies", "lru", "--capacities", sizes)
    assert {row["capacity_blocks"]: row["hits"] for row in rows} == golden
