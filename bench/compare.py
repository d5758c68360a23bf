"""Is one tree slower than another? Builds both, runs their benchmarks in turn, and says so.

    python bench/compare.py BASE HEAD

BASE, HEAD: a git revision or a folder with a source tree. Each is built in an environment of its
own, as the wheel is, with the native module beside it. Then processes take turns, base, head, base,
head: each runs the quick set of its own tree's bench/. A benchmark has regressed when the median of
the head-to-base ratios exceeds 1 by more than five per cent and by more than three times the noise;
the noise is how much neighbouring processes of the same tree differ.

Exits 0, 1 when something has regressed, 2 when nothing can be said. Standard library only; needs
git, cmake, ninja and a compiler, and uses ccache where it is there.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

PROCESSES_LEAST = 5
TOLERANCE = 0.05
NOISE_FACTOR = 3.0
ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = (".git", "build", "dist", ".venv*", "__pycache__", ".*_cache", "*.egg-info", "*.so")


class CannotRun(Exception):
    """Nothing can be said."""


@dataclass(frozen=True)
class Verdict:
    ratio: float  # head to base, above 1 is slower
    noise: float  # how far apart two runs of one tree are
    limit: float  # what the ratio may be

    @property
    def regressed(self) -> bool:
        return self.ratio > self.limit

    @property
    def word(self) -> str:
        if self.regressed:
            return "SLOWER"
        if self.ratio < 2 - self.limit:
            return "faster"
        return "same" if self.limit < 1.3 else "too noisy to tell 30 %"


def judge(base: Sequence[float], head: Sequence[float]) -> Verdict:
    """Of one benchmark: a figure a process, in the order in which they took turns."""
    if len(base) != len(head) or len(base) < 2:
        raise CannotRun(f"{len(base)} runs of base and {len(head)} of head say nothing")
    ratio = statistics.median(ours / theirs for theirs, ours in zip(base, head, strict=True))
    steps = [abs(b / a - 1) for side in (base, head) for a, b in pairwise(side)]
    noise = statistics.median(steps)
    return Verdict(ratio, noise, 1 + max(NOISE_FACTOR * noise, TOLERANCE))


@dataclass(frozen=True)
class Tree:
    """A built source tree and the interpreter that runs it."""

    name: str
    source: Path
    python: Path


def fetch(name: str, into: Path) -> Path:
    """A copy of the tree: a build must not write into anybody's folder."""
    if Path(name).is_dir():
        shutil.copytree(name, into, ignore=shutil.ignore_patterns(*NOT_COPIED), symlinks=True)
        return into
    into.mkdir(parents=True)
    archive = into.parent / "tree.tar"
    run(["git", "-C", str(ROOT), "archive", "--output", str(archive), name], "no such revision")
    run(["tar", "-x", "-f", str(archive), "-C", str(into)], "cannot unpack it")
    return into


def build(name: str, source: Path) -> Tree:
    """The wheel in an environment of its own, and the native module."""
    if not (source / "bench" / "conftest.py").exists():
        raise CannotRun(f"{name} has no benchmarks")
    folder = source.parent / "venv"
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    environment = {"VIRTUAL_ENV": str(folder)}
    if shutil.which("ccache"):
        environment["CMAKE_CXX_COMPILER_LAUNCHER"] = "ccache"
        # Seen from there all paths are the same, whichever side it is and wherever the scratch is.
        environment |= {"CCACHE_BASEDIR": str(source.parent), "CCACHE_NOHASHDIR": "1"}
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, "scikit-build-core>=0.11", "pybind11>=3,<4"], "pip install failed")
    package = [*pip, "--no-build-isolation", f"{source}[bench]"]
    run(package, f"{name}: pip install failed", environment)
    workflow = ["cmake", "--workflow", "--preset", "bench"]
    run(workflow, f"{name}: the native module does not build", environment, source)
    return Tree(name, source, python)


def measure(tree: Tree, only: str, under: Sequence[str]) -> dict[str, float]:
    """Seconds of one round by benchmark, medians: one process."""
    found = tree.source.parent / "found.json"
    found.unlink(missing_ok=True)
    command = [*under, str(tree.python), "-m", "pytest", "bench", "--benchmark-only", "--quick"]
    command += ["--quiet", "-p", "no:cacheprovider", f"--benchmark-json={found}"]
    if only:
        command += ["-k", only]
    environment = {"KVMEM_BENCH_NATIVE": str(tree.source / "build" / "bench")}
    run(command, f"{tree.name}: the benchmarks failed", environment, tree.source)
    benchmarks = json.loads(found.read_text())["benchmarks"]
    if not benchmarks:
        raise CannotRun(f"{tree.name}: no benchmark ran")
    return {one["fullname"]: one["stats"]["median"] for one in benchmarks}


def run(
    command: Sequence[str],
    otherwise: str,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> None:
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command,
        check=False,
        cwd=folder,
        env={**kept, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        raise CannotRun(f"{otherwise}: {shlex.join(command)}\n{done.stdout[-4000:]}")


def compare(trees: Sequence[Tree], processes: int, only: str, under: Sequence[str]) -> bool:
    """Prints the table; whether anything has regressed."""
    base, head = trees
    figures: dict[str, tuple[list[float], list[float]]] = {}
    for number in range(processes):
        for side, tree in enumerate(trees):
            print(f"{tree.name}: process {number + 1} of {processes}", file=sys.stderr, flush=True)
            for name, seconds in measure(tree, only, under).items():
                figures.setdefault(name, ([], []))[side].append(seconds)
    both = {name: found for name, found in figures.items() if all(map(len, found))}
    if not both:
        raise CannotRun("the two trees have no benchmark in common")
    verdicts = {name: judge(*found) for name, found in both.items()}
    width = max(map(len, verdicts))
    print(f"{'benchmark'.ljust(width)}  ratio  noise  limit")
    for name, verdict in verdicts.items():
        print(
            f"{name.ljust(width)}  {verdict.ratio:5.3f}  {verdict.noise:5.3f}  "
            f"{verdict.limit:5.3f}  {verdict.word}"
        )
    for name in figures.keys() - both.keys():
        print(f"{name}: only in {base.name if figures[name][0] else head.name}")
    slower = [name for name, verdict in verdicts.items() if verdict.regressed]
    print(f"{len(slower)} of {len(verdicts)} benchmarks are slower in {head.name}")
    return bool(slower)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("base", metavar="BASE", help="a git revision or a folder")
    parser.add_argument("head", metavar="HEAD", help="a git revision or a folder")
    parser.add_argument("--only", default="", metavar="EXPR", help="as pytest -k takes it")
    parser.add_argument(
        "--processes",
        type=int,
        default=PROCESSES_LEAST,
        metavar="N",
        help="of each tree (%(default)s)",
    )
    parser.add_argument(
        "--under", default="", metavar="COMMAND", help="run each process under it: 'taskset -c 2,3'"
    )
    given = parser.parse_args(arguments)
    if given.processes < PROCESSES_LEAST:
        parser.error(
            f"--processes: {PROCESSES_LEAST} or more, for there is no noise to see in fewer"
        )
    with tempfile.TemporaryDirectory(prefix="kvmem-compare-") as scratch:
        try:
            trees = []
            for side, name in (("base", given.base), ("head", given.head)):
                print(f"building {name}", file=sys.stderr, flush=True)
                trees.append(build(f"{side} ({name})", fetch(name, Path(scratch) / side / "tree")))
            slower = compare(trees, given.processes, given.only, shlex.split(given.under))
        except CannotRun as error:
            print(f"cannot compare: {error}", file=sys.stderr)
            return 2
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
