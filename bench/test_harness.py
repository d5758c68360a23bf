"""The harness itself: who runs when, and what is made of it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from harness import AtMost, AtMostNs, Faster, Timed, Versus, percentile
from kvmem.bench.rounds import Comparison
from table import Row, markdown_table, show, show_ns, text_table


class FakeBenchmark:
    """pytest-benchmark, as far as Versus uses it; each run of the target takes one second."""

    disabled = False

    def __init__(self) -> None:
        self.extra_info: dict[str, object] = {}
        self.stats = self
        self.data: list[float] = []

    def pedantic(self, target, setup, teardown, rounds, warmup_rounds):  # type: ignore[no-untyped-def]
        for number in range(warmup_rounds + rounds):
            setup()
            target()
            teardown()
            if number >= warmup_rounds:
                self.data.append(1.0)


FOUND = Comparison(10, {"ours": [2.0] * 3, "slow": [4.0] * 3, "fast": [3.0] * 3})


def run(rounds: int) -> tuple[list[str], FakeBenchmark, list[Row]]:
    ran: list[str] = []
    benchmark, rows = FakeBenchmark(), []

    def noted(name: str) -> Timed:
        return Timed(
            lambda: ran.append(name),
            before=lambda: ran.append(f"<{name}"),
            after=lambda: ran.append(f"{name}>"),
        )

    versus = Versus(benchmark, "question", rows, rounds)
    baselines = {"a": noted("a"), "b": noted("b"), "c: gone": None}
    versus(noted("us"), baselines, operations=1, goals=[AtMost(1, "a"), AtMost(1, "c")], name="us")
    return ran, benchmark, rows


def test_the_subject_runs_once_behind_all_baselines_in_every_round() -> None:
    ran, _, _ = run(rounds=40)
    each_round = ["".join(ran[i : i + 9]) for i in range(0, len(ran), 9)]
    assert len(each_round) == 41
    assert set(each_round) == {"<aaa><bbb><ususus>", "<bbb><aaa><ususus>"}


def test_the_order_of_the_baselines_is_drawn_and_the_same_in_each_run() -> None:
    ran, _, _ = run(rounds=40)
    first = [ran[i + 1] for i in range(0, len(ran), 9)]
    assert any(one == following for one, following in pairwise(first))
    assert run(rounds=40)[0] == ran


def test_the_round_that_warms_up_does_not_count() -> None:
    _, benchmark, _ = run(rounds=2)
    seconds = benchmark.extra_info["seconds"]
    assert isinstance(seconds, dict)
    assert {name: len(found) for name, found in seconds.items()} == {"us": 2, "a": 2, "b": 2}


def test_a_baseline_that_is_not_here_has_a_row_and_drops_its_goals() -> None:
    _, _, rows = run(rounds=2)
    assert [row.contender for row in rows] == ["us", "a", "b", "c: gone"]
    assert [row.goal for row in rows if row.goal] == ["<= 1 x a"]
    assert rows[-1].figure == "not here"


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        (AtMost(0.5, "slow"), True),
        (AtMost(0.49, "slow"), False),
        (Faster(2, "slow"), True),
        (Faster(2, "slow", "fast"), False),  # the best of them
        (Faster(1.5, "slow", "fast"), True),
        (AtMostNs(0.2e9), True),
        (AtMostNs(0.19e9), False),
    ],
    ids=str,
)
def test_a_goal_is_met_or_not(goal: AtMost | Faster | AtMostNs, met: bool) -> None:
    assert goal.judge(FOUND, "ours")[0] == met


def test_a_time_is_shown_in_the_unit_that_fits() -> None:
    assert [show_ns(ns) for ns in (0.5, 28.44, 999, 1200, 77.1e6, 3.2e9)] == [
        "0.50 ns",
        "28.4 ns",
        "999.0 ns",
        "1.20 µs",
        "77.1 ms",
        "3.20 s",
    ]


def test_what_is_no_time_is_shown_with_its_unit() -> None:
    assert [show(value, "MiB") for value in (0.0813766, 12.345, 64, 1234567)] == [
        "0.0814 MiB",
        "12.3 MiB",
        "64 MiB",
        "1,234,567 MiB",
    ]
    assert show(1200, "ns") == "1.20 µs"


def test_tables_say_a_question_once() -> None:
    rows = [Row("why", "us", "1 ns", "1", "<= 2 ns", True, "1 ns"), Row("why", "them", "3 ns", "3")]
    assert list(markdown_table(rows))[2:] == [
        "| why | us | 1 ns | 1 | <= 2 ns | yes: 1 ns |",
        "|  | them | 3 ns | 3 |  |  |",
    ]
    assert sum("why" in line for line in text_table(rows)) == 1


def test_a_percentile_is_a_value_that_was_found() -> None:
    assert percentile(range(100), 0.5) == 50
    assert percentile(range(100), 0.99) == 99
    assert percentile([7], 0.99) == 7
