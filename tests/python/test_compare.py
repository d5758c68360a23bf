"""bench/compare.py: what it makes of figures."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture(scope="module")
def compare() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kvmem_bench_compare", BENCH / "compare.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def figures(seed: int, count: int, spread: float, factor: float = 1.0) -> list[float]:
    draw = random.Random(seed)
    return [factor * 0.01 * draw.uniform(1 - spread, 1 + spread) for _ in range(count)]


def test_equal_figures_pass(compare: ModuleType) -> None:
    verdict = compare.judge([0.01] * 5, [0.01] * 5)
    assert not verdict.regressed
    assert verdict.ratio == 1
    assert verdict.noise == 0
    assert verdict.limit == pytest.approx(1.05)


def test_a_quiet_slow_down_of_30_per_cent_is_found(compare: ModuleType) -> None:
    verdict = compare.judge(figures(1, 5, 0.02), figures(2, 5, 0.02, 1.3))
    assert verdict.regressed
    assert verdict.word == "SLOWER"


def test_a_slow_down_just_above_the_tolerance_is_found_when_it_is_quiet(
    compare: ModuleType,
) -> None:
    assert compare.judge([0.01] * 5, [0.0106] * 5).regressed
    assert not compare.judge([0.01] * 5, [0.0104] * 5).regressed


def test_what_is_no_more_than_the_noise_passes(compare: ModuleType) -> None:
    base, head = [0.010, 0.013, 0.010, 0.013, 0.010], [0.013, 0.010, 0.013, 0.010, 0.013]
    assert compare.judge(base, [1.2 * one for one in base]).limit > 1.3
    assert not compare.judge(base, head).regressed


def test_equal_but_noisy_figures_pass_whatever_the_seed(compare: ModuleType) -> None:
    regressed = sum(
        compare.judge(figures(seed, 5, 0.1), figures(seed + 1000, 5, 0.1)).regressed
        for seed in range(300)
    )
    assert regressed <= 3


def test_a_slow_down_well_above_the_noise_is_found_whatever_the_seed(compare: ModuleType) -> None:
    found = sum(
        compare.judge(figures(seed, 5, 0.03), figures(seed + 1000, 5, 0.03, 1.3)).regressed
        for seed in range(300)
    )
    assert found >= 290


def test_one_disturbed_process_changes_nothing(compare: ModuleType) -> None:
    base = [0.01, 0.01, 0.05, 0.01, 0.01]
    assert not compare.judge(base, [0.01] * 5).regressed
    assert compare.judge(base, [0.013] * 5).regressed
    assert not compare.judge([0.01] * 5, base).regressed


def test_a_drift_of_the_whole_machine_is_no_regression(compare: ModuleType) -> None:
    base = [0.010, 0.012, 0.014, 0.016, 0.018]
    assert not compare.judge(base, base).regressed


def test_what_is_faster_is_called_so(compare: ModuleType) -> None:
    assert compare.judge([0.01] * 5, [0.005] * 5).word == "faster"
    assert compare.judge([0.01] * 5, [0.01] * 5).word == "same"


def test_too_few_or_unequal_runs_say_nothing(compare: ModuleType) -> None:
    for base, head in (([0.01], [0.01]), ([0.01] * 5, [0.01] * 4), ([], [])):
        with pytest.raises(compare.CannotRun):
            compare.judge(base, head)


def test_what_cannot_run_exits_with_2(
    compare: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert compare.main([str(empty), str(empty)]) == 2
    assert "has no benchmarks" in capsys.readouterr().err
