"""`kvmem bench`: what its figures follow from, and the command line around it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvmem
from kvmem.bench import measures, rounds
from kvmem.bench.contenders import Handoff, KvmemPool, ListPool, ScatteredCopy, Submission
from kvmem.bench.measures import MEASURES, Bench, run_bench
from kvmem.bench.options import FULL, QUICK, BenchError, BenchOptions
from kvmem.bench.result import BenchResult, Row, rows_of
from kvmem.bench.rounds import Comparison, compare

TINY = replace(QUICK, churn=20, copy_bytes=8 << 20, handoff_blocks=2, idle_seconds=0.01)

MACHINE = {
    "kvmem": "1.2.3",
    "copy_kernel": "plain",
    "cpu": "Abacus",
    "cores": 3,
    "memory_bytes": 5 << 30,
    "linux": "6.1",
    "python": "3.10.0",
    "numpy": "2.0.0",
}
ROWS = [
    Row("pool", "a block", "a list", "ns", 1200.0, 2400.0, 2.0, 1.5, 2.5, 9, (1.25, 1.5)),
    Row("pool", "a block", "a heap", "ns", 1200.0, 600.0, 0.5, 0.25, 0.75, 9, (1.25, 1.5)),
    Row("copy", "64 KiB", "take", "GB/s", 12.5, 6.25, 2.0, 1.0, 3.0, 3, (1.5, 1.5)),
]
RESULT = BenchResult(ROWS, MACHINE, seconds=12.0, peak_bytes=300 << 20)


class Clock:
    """Stands for the module `time` and moves only when told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(rounds, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


# ---- from times to figures


def test_settling_comes_behind_each_contender_and_is_not_timed(clock: Clock) -> None:
    said: list[str] = []

    def settle() -> None:
        said.append("settle")
        clock.pass_by(100)

    def take(name: str, seconds: float) -> None:
        said.append(name)
        clock.pass_by(seconds)

    found = compare(
        {"a": lambda: take("a", 1), "b": lambda: take("b", 2)},
        operations=1,
        rounds=2,
        settle=settle,
    )
    assert found.seconds == {"a": [1, 1], "b": [2, 2]}
    assert said[1::2] == ["settle"] * 6
    assert sorted(said[::2]) == ["a"] * 3 + ["b"] * 3


def test_a_row_says_how_many_times_as_long_its_baseline_took() -> None:
    seconds = {"kvmem": [1.0, 2.0, 1.0], "slow": [3.0, 4.0, 4.0], "fast": [0.5, 0.5, 0.5]}
    slow, fast = rows_of(Comparison(10, seconds, [1.0, 2.0]), "x", "what", "ns", lambda ns: ns)
    assert (slow.baseline, fast.baseline) == ("slow", "fast")
    assert slow.kvmem_figure == fast.kvmem_figure == pytest.approx(1e8)
    assert slow.baseline_figure == pytest.approx(4e8)
    assert (slow.ratio_low, slow.ratio, slow.ratio_high) == (2.5, 3, 3.5)
    assert fast.ratio == 0.5
    assert (slow.rounds, slow.load) == (3, (1.0, 2.0))


def test_rounds_are_as_many_as_there_is_time_for() -> None:
    options = BenchOptions(replace(FULL, budget_seconds=10.0, rounds_most=20))
    assert options.rounds_for(1.0) == 10
    assert options.rounds_for(0.001) == 20
    assert options.rounds_for(60.0) == 3
    assert options.rounds_for(0.0) == 20
    assert replace(options, rounds=7).rounds_for(60.0) == 7


def test_a_slow_comparison_has_fewer_rounds_and_the_bar_gets_to_its_end(clock: Clock) -> None:
    told: list[tuple[str, float]] = []
    options = BenchOptions(replace(FULL, budget_seconds=10.0, rounds_most=20))
    bench = Bench(options, 2, lambda *given: told.append(given))
    contenders = {"kvmem": lambda: clock.pass_by(0.5), "other": lambda: clock.pass_by(1.5)}
    assert len(bench.compare("first", contenders, operations=1).seconds["kvmem"]) == 5
    assert told[0] == ("first", 0.0)
    assert told[-1] == ("first", pytest.approx(0.5))
    bench.compare("second", contenders, operations=1)
    shares = [share for _, share in told]
    assert shares == sorted(shares)
    assert told[-1] == ("second", pytest.approx(1.0))


def test_a_comparison_of_single_calls_has_so_many_times_as_many_rounds(clock: Clock) -> None:
    bench = Bench(BenchOptions(replace(FULL, budget_seconds=10.0, rounds_most=20)))
    contenders = {"kvmem": lambda: clock.pass_by(0.1), "other": lambda: clock.pass_by(0.1)}
    found = bench.compare("calls", contenders, operations=1, times=4)
    assert len(found.seconds["other"]) == 12 * 4


def test_copies_are_shown_as_bytes_over_time(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def take_ms(milliseconds: float) -> Any:
        return lambda _: clock.pass_by(milliseconds / 1e3)

    ways = {"offload": 1, "loop_out": 4, "take": 2, "restore": 2, "loop_in": 3, "put": 1}
    for way, milliseconds in ways.items():
        monkeypatch.setattr(ScatteredCopy, way, take_ms(milliseconds))
    rows = list(measures.measure_copy(Bench(BenchOptions(TINY, rounds=3))))
    gbps = TINY.copy_bytes / 1e6
    found = [(row.kvmem_figure, row.baseline_figure, row.ratio) for row in rows[-4:]]
    assert found == [
        pytest.approx(one)
        for one in (
            (gbps, gbps / 4, 4),
            (gbps, gbps / 2, 2),
            (gbps / 2, gbps / 3, 1.5),
            (gbps / 2, gbps, 0.5),
        )
    ]
    assert {row.unit for row in rows} == {"GB/s"}


def test_an_idle_manager_is_shown_as_a_share_of_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([0.0, 0.001, 1.0, 1.02] * 3)
    slept: list[float] = []
    clock = SimpleNamespace(process_time=lambda: next(readings), sleep=slept.append)
    monkeypatch.setattr(measures, "time", clock)
    bench = Bench(BenchOptions(replace(TINY, idle_seconds=0.5)))
    (row,) = measures.measure_idle(bench)
    assert slept == [0.5] * 6
    assert (row.kvmem_figure, row.baseline_figure) == (pytest.approx(0.2), pytest.approx(4))
    assert row.ratio == pytest.approx(20)


# ---- what is measured does the same as what it stands beside


def fill(words: np.ndarray[Any, np.dtype[np.int64]], seed: int) -> None:
    words[:] = np.random.default_rng(seed).integers(0, 1 << 60, words.shape)


@pytest.fixture
def host() -> kvmem.Device:
    return kvmem.open_device("host")


@pytest.fixture
def copied(host: kvmem.Device) -> Iterator[ScatteredCopy]:
    with closing(ScatteredCopy(host, 16 << 10, 1 << 20)) as work:
        fill(work.cache.layers, 1)
        yield work


def test_the_ways_out_of_the_cache_copy_the_same_segments(copied: ScatteredCopy) -> None:
    wanted = copied.cache.layers[:, copied.picked]
    assert wanted.nbytes == copied.nbytes == 1 << 20
    copied.loop_out()
    assert (copied.slots == wanted.swapaxes(0, 1)).all()
    copied.take()
    assert (copied.taken == wanted).all()
    copied.slots[:] = 0
    copied.offload()
    # Whichever slot a block got.
    assert sorted(copied.slots[:, 0, 0]) == sorted(wanted[0, :, 0])
    assert sorted(copied.slots[:, -1, -1]) == sorted(wanted[-1, :, -1])


@pytest.mark.parametrize("way", ["restore", "loop_in", "put"])
def test_the_ways_into_the_cache_copy_the_same_segments(copied: ScatteredCopy, way: str) -> None:
    layers = copied.cache.layers
    before = layers.copy()
    prepare = {"restore": copied.restore, "loop_in": copied.loop_out, "put": copied.take}
    prepare[way]()
    others = np.setdiff1d(np.arange(layers.shape[1]), copied.picked)
    layers[:] = 0
    getattr(copied, way)()
    assert (layers[:, copied.picked] == before[:, copied.picked]).all()
    assert (layers[:, others] == 0).all()


def test_a_submission_lists_what_the_baselines_list(host: kvmem.Device) -> None:
    with closing(Submission(host)) as work:
        for one, other in zip(work.list_with_python(), work.list_with_numpy(), strict=True):
            assert one == other.tolist()
            assert len(one) == Submission.BLOCKS * Submission.REGIONS
        pool = work._cache.manager.pool
        work.offload()
        assert pool.stats()["free_slots"] == 0
        work.settle()
        assert pool.stats()["free_slots"] == pool.capacity


def test_the_ways_to_hand_a_block_off_copy_it(host: kvmem.Device) -> None:
    with closing(Handoff(host, 2)) as work:
        fill(work._cache.layers, 2)
        work.copy_each()
        assert (work._target == work._cache.layers[:, 1]).all()
        work.submit_to_executor()
        work.settle()
        assert (work._target == work._cache.layers[:, 0]).all()
        done = work._cache.manager.stats()["offload"]["blocks_done"]
        work.submit()
        work.settle()
        work.offload_each()
        assert work._cache.manager.stats()["offload"]["blocks_done"] == done + 3


@pytest.mark.parametrize("pool", [KvmemPool, ListPool])
def test_a_pool_loses_nothing(pool: type[KvmemPool] | type[ListPool]) -> None:
    one = pool()
    one.churn([0, 5, 0, 511])
    one.batches(3)
    if isinstance(one, KvmemPool):
        assert one._pool.stats()["free_slots"] == 512
    else:
        assert sorted([*one._free, *one._held]) == list(range(1024))


# ---- the run


def test_every_measurement_makes_as_many_comparisons_as_it_says() -> None:
    for name, one in MEASURES.items():
        bench = Bench(BenchOptions(TINY, rounds=1))
        rows = list(one.run(bench))
        assert {row.name for row in rows} == {name}
        assert bench._done == one.comparisons == len({row.what for row in rows})


def test_memory_that_is_not_there_is_refused_with_the_numbers() -> None:
    options = BenchOptions(replace(QUICK, copy_bytes=1 << 50))
    with pytest.raises(BenchError, match=r"needs 3,221,225,536 MiB of memory.*MemAvailable.*free"):
        run_bench(options)


def test_memory_that_is_not_chosen_is_not_asked_for() -> None:
    sizes = replace(TINY, copy_bytes=1 << 50)
    result = run_bench(BenchOptions(sizes, rounds=1, only=("pool",)))
    assert {row.name for row in result.rows} == {"pool"}


def test_measuring_needs_only_numpy() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('rich', 'typer', 'plotly')));"
        " from kvmem.bench.measures import run_bench;"
        " from kvmem.bench.options import QUICK, BenchOptions;"
        " print(len(run_bench(BenchOptions(QUICK, 1, ('pool',))).rows))"
    )
    assert run_python("-c", code).stdout.strip() == "2"


def test_importing_kvmem_brings_no_benchmarks() -> None:
    code = "import kvmem, sys; print('kvmem.bench' in sys.modules)"
    assert run_python("-c", code).stdout.strip() == "False"


# ---- the command line


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def invoke(*arguments: str) -> Any:
    pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
    from typer.testing import CliRunner

    from kvmem.cli import make_app

    return CliRunner().invoke(make_app(), ("bench", *arguments), env={"COLUMNS": "80"})


def test_a_quick_run_measures_everything() -> None:
    pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
    ran = run_python("-m", "kvmem.cli", "bench", "--quick", "--json")
    assert (ran.returncode, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    assert ran.stdout.count("\n") == 1
    assert {row["name"] for row in found["rows"]} == set(MEASURES)
    for row in found["rows"]:
        assert row["kvmem_figure"] > 0
        assert row["baseline_figure"] > 0
        assert 0 < row["ratio_low"] <= row["ratio"] <= row["ratio_high"] < float("inf")
    assert found["machine"]["kvmem"] == kvmem.__version__
    assert found["machine"]["copy_kernel"] == kvmem.open_device("host").info["copy_kernel"]
    assert found["peak_bytes"] > QUICK.copy_bytes


FEW = ("--quick", "--only", "pool", "--rounds", "2")


def test_only_what_was_named_is_measured() -> None:
    result = invoke("--quick", "--only", "idle", "--only", "pool", "--rounds", "2", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert {(row["name"], row["rounds"]) for row in rows} == {("pool", 2), ("idle", 2)}


def test_the_table_names_machine_contenders_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "run_bench", lambda *_: RESULT)
    result = invoke()
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(result.stdout.split())
    for part in (
        "kvmem 1.2.3, copy kernel plain: Abacus, 3 cores, 5.0 GiB of memory",
        "a block 1.20 µs 1.2 a list 2.40 µs 2.00 1.50 to 2.50 a heap 600.0 ns 0.50 0.25 to 0.75",
        "64 KiB 12.5 GB/s 1.5 take 6.25 GB/s 2.00 1.00 to 3.00",
        "It took 12 s and at most 300 MiB",
    ):
        assert part in said


def test_a_terminal_that_is_narrow_and_knows_no_unicode_gets_its_table() -> None:
    pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
    ran = run_python(
        "-m",
        "kvmem.cli",
        "bench",
        *FEW,
        "--only",
        "handoff",
        COLUMNS="30",
        PYTHONIOENCODING="ascii",
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert " us" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--rounds", "0"], "--rounds: 0 is outside 1 to 1000"),
        (["--rounds", "1001"], "--rounds: 1001 is outside 1 to 1000"),
        (["--rounds", "some"], "--rounds"),
        (["--only", "nonsense"], "--only: 'nonsense' is none of pool, submit, copy, handoff"),
        (["--plot", "/nonexistent/plot.html"], "--plot /nonexistent/plot.html: No such file"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_what_cannot_run_says_why(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: str
) -> None:
    monkeypatch.setattr(measures, "run_bench", lambda *_: pytest.fail("it ran"))
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    # Unformatted, so that a frame drawn around the message does not matter.
    assert expected in " ".join(result.stderr.replace("│", " ").split())


def test_too_little_memory_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
    from kvmem.bench import command

    monkeypatch.setattr(command, "QUICK", replace(QUICK, copy_bytes=1 << 50))
    result = invoke("--quick")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("kvmem bench: needs 3,221,225,536 MiB of memory")


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measures, "run_bench", interrupt)
    result = invoke()
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr == "kvmem bench: interrupted\n"


def test_a_plot_works_without_a_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plots need the extra 'plot'")
    monkeypatch.setattr(measures, "run_bench", lambda *_: RESULT)
    plot = tmp_path / "plot.html"
    assert invoke("--plot", str(plot)).exit_code == 0
    text = plot.read_text(encoding="utf-8")
    assert re.search(r"<script[^>]* src=", text) is None
    for part in (
        '"base":1',
        '"x":[1.0,-0.5]',
        '"array":[0.5,0.25]',
        '"arrayminus":[0.5,0.25]',
        "Abacus",
    ):
        assert part in text.replace(" ", "")


def test_a_plot_without_plotly_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "run_bench", lambda *_: pytest.fail("it ran"))
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = invoke("--plot", "plot.html")
    assert result.exit_code == 2
    assert "pip install 'kvmem[plot]'" in result.stderr


def test_help_has_an_example() -> None:
    assert "Example: kvmem bench" in " ".join(invoke("--help").stdout.split())
