"""The command line: exit status, the last line, and no traceback on bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

from typer.testing import CliRunner, Result

from kvmem.cli import make_app

SMALL = ("replay", "--limit", "40", "--block-bytes", "4096")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), arguments, env={"COLUMNS": "100"})


def test_the_main_job_ends_with_a_clean_table() -> None:
    result = invoke(*SMALL)
    assert result.exit_code == 0, result.output
    for row in ("block hit rate", "prefix hit rate", "restore latency", "queue", "quarantined"):
        assert row in result.stdout
    assert "every block as it was" in result.stdout


def test_json_is_the_last_line() -> None:
    result = invoke(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert (found["requests"], found["mismatches"], found["leaked_blocks"]) == (40, 0, 0)


def test_a_trace_is_replayed_unbounded_unless_told_otherwise(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(f"{json.dumps(line)}\n" * 3)
    for given, capacity in (((), 2), (("--host-blocks", "1"), 1)):
        result = invoke("replay", str(trace), "--json", *given)
        assert json.loads(result.stdout)["host_blocks"]["capacity"] == capacity


def test_a_damaged_block_is_a_bad_answer() -> None:
    result = invoke(*SMALL, "--corrupt", "1", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["mismatches"] == 1
    assert "1 restored blocks differ" in invoke(*SMALL, "--corrupt", "1").stdout


def test_cancelled_requests_are_no_bad_answer() -> None:
    result = invoke(*SMALL, "--abort-rate", "0.5", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["aborted_requests"] > 0


def test_damage_that_never_happened_is_no_good_answer() -> None:
    result = invoke("replay", "--limit", "1", "--corrupt", "1", "--json")
    assert result.exit_code == 2
    assert "only 0 could be damaged" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["/nonexistent.jsonl"], "No such file"),
        (["--host-blocks", "many"], "--host-blocks: 'many'"),
        (["--host-blocks", "-3"], "--host-blocks: -3 is below 1"),
        (["--host-blocks", "1000000000000"], "--host-blocks"),
        (["--block-bytes", "1000"], "--block-bytes: 1000 is not a multiple of 256"),
        (["--block-bytes", "big"], "--block-bytes"),
        (["--abort-rate", "1.5"], "--abort-rate: 1.5 is outside 0 to 1"),
        (["--abort-rate", "nan"], "--abort-rate"),
        (["--corrupt", "100000000"], "--corrupt"),
        (["--concurrency", "0"], "--concurrency: 0 is below 1"),
        (["--limit", "0"], "--limit: 0 is below 1"),
        (["--device", "nonsense"], "--device"),
        (["--hit", "some"], "--hit"),
        (["--plot", "/nonexistent/plot.html"], "--plot"),
        (["--nonsense"], "--nonsense"),
        (["--seed", "x"], "--seed"),
    ],
)
def test_what_cannot_run_says_why(arguments: list[str], expected: str) -> None:
    result = invoke("replay", *arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    # Unformatted, so that a frame drawn around the message does not matter.
    assert expected in " ".join(result.stderr.replace("│", " ").split())


def test_a_bad_line_of_a_trace_is_named(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    good = {"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [1]}
    trace.write_text(f"{json.dumps(good)}\n{json.dumps(good | {'input_length': 9000})}\n")
    result = invoke("replay", str(trace))
    assert result.exit_code == 2
    assert "trace.jsonl, line 2: block size: " in result.stderr


def test_a_plot_works_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("plotly", reason="plots need the extra 'plot'")
    plot = tmp_path / "plot.html"
    assert invoke(*SMALL, "--plot", str(plot)).exit_code == 0
    text = plot.read_text(encoding="utf-8")
    assert not re.search(r"<script[^>]* src=", text)
    for part in ("Host blocks by state", "Transfers not ended", "Restore latency", "quarantined"):
        assert part in text


def test_a_plot_without_plotly_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    result = invoke(*SMALL, "--plot", "plot.html")
    assert result.exit_code == 2
    assert "pip install 'kvmem[plot]'" in result.stderr


def test_help_has_an_example_and_version_a_number() -> None:
    assert "Example: kvmem replay" in " ".join(invoke("replay", "--help").stdout.split())
    assert invoke("--version").stdout.startswith("kvmem ")


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_importing_kvmem_brings_none_of_this() -> None:
    names = "typer", "rich", "plotly", "kvmem.replay", "kvmem.cli"
    code = f"import kvmem, sys; print([name for name in {names!r} if name in sys.modules])"
    assert run_python(code).stdout.strip() == "[]"


def test_without_typer_the_command_says_what_to_install() -> None:
    code = "import sys; sys.modules['typer'] = None; from kvmem.cli import main; main()"
    result = run_python(code)
    assert result.returncode == 2
    assert result.stderr.strip() == "kvmem: needs typer: pip install 'kvmem[cli]'"


def test_the_entry_point_shows_no_progress_to_a_pipe() -> None:
    command = [sys.executable, "-m", "kvmem.cli", *SMALL, "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert json.loads(result.stdout)["requests"] == 40
