"""kvmem.bench.rounds: contenders in turn, and what is made of their times."""

from __future__ import annotations

import pytest

from kvmem.bench.rounds import Comparison, compare


def test_contenders_take_turns_and_who_begins_changes() -> None:
    ran: list[str] = []
    contenders = {name: lambda name=name: ran.append(name) for name in "abc"}
    found = compare(contenders, operations=1, rounds=3)
    rounds = ["".join(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    assert all(sorted(one) == list("abc") for one in rounds)
    assert len({one[0] for one in rounds}) == 3
    assert len(rounds) == 4  # one of them warmed up
    assert all(len(seconds) == 3 for seconds in found.seconds.values())


def test_each_round_is_told() -> None:
    told: list[int] = []
    compare({"a": int}, operations=1, rounds=4, on_round=lambda: told.append(1))
    assert len(told) == 5


def test_a_round_in_which_the_machine_was_slow_changes_no_ratio() -> None:
    found = Comparison(1, {"ours": [2.0, 20.0, 2.0], "theirs": [1.0, 10.0, 1.0]})
    assert found.ratio("ours", "theirs") == 2
    assert found.quartiles("ours", "theirs") == (2, 2, 2)


def test_a_ratio_is_the_median_over_the_rounds() -> None:
    found = Comparison(10, {"ours": [1.0, 2.0, 9.0], "theirs": [1.0, 1.0, 1.0]})
    assert found.ratio("ours", "theirs") == 2
    assert found.ratio("theirs", "ours") == 0.5
    assert found.quartiles("ours", "theirs") == (1.5, 2, 5.5)
    assert found.median_ns("ours") == pytest.approx(2e8)


def test_a_ratio_is_not_that_of_two_medians() -> None:
    found = Comparison(1, {"ours": [1.0, 4.0, 9.0], "theirs": [1.0, 2.0, 10.0]})
    assert found.median_ns("ours") == 2 * found.median_ns("theirs")
    assert found.ratio("ours", "theirs") == 1


def test_quartiles_of_a_single_round_are_its_ratio() -> None:
    assert Comparison(1, {"a": [3.0], "b": [2.0]}).quartiles("a", "b") == (1.5, 1.5, 1.5)
