"""Plants one fault at a time in a copy of the tree and expects the tests that it names to fail.

A mutant is a patch in this folder, tests/mutants/NN-name.patch. Before the diff stand a sentence on
what is planted and why that matters, and the suites that must find it:

    Cancelling lets go of the copy's hold too: the next owner gets somebody else's bytes.
    Suite: kvmem-test-offload --gtest_filter=TransferTest.Cancel*

    --- a/csrc/offload/manager_calls.cpp
    +++ b/csrc/offload/manager_calls.cpp
    ...

`Suite:` is a program of the test build with its arguments; there may be several, and each must
fail. With `May-hang: yes` a suite that hangs counts as one that fails. What does not apply, does
not compile or goes unnoticed is an error, and so is a suite that fails without any fault.

The copy is kept between runs (build/mutants), so that only what changed is built again. Standard
library only; needs cmake, ninja and git, and uses ccache where it is there.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("CMakeLists.txt", "pyproject.toml", "csrc", "tests")
CONFIGURE = (
    "-GNinja",
    "-DKVMEM_BUILD_TESTS=ON",
    "-DKVMEM_CHECKED=ON",
    "-DCMAKE_BUILD_TYPE=Debug",
    "-DCMAKE_CXX_FLAGS_DEBUG=-O1",  # and no -g: it would only take time
)

DIFF = re.compile(r"^(?:diff |--- )", re.MULTILINE)
HEADER = re.compile(r"^(Suite|May-hang): *(.*)$", re.MULTILINE)
PATCHED = re.compile(r"^--- a/(\S+)\n\+\+\+ b/(\S+)$", re.MULTILINE)
FAILED = re.compile(r"^\[  FAILED  \] ([^\s,]+)", re.MULTILINE)
STARTED = re.compile(r"^\[ RUN      \] (\S+)$", re.MULTILINE)


class Broken(Exception):
    """Nothing can be said of the mutant, or of any."""


class Mutant(NamedTuple):
    name: str
    patch: Path
    suites: list[str]
    files: list[str]
    may_hang: bool

    def programs(self) -> list[str]:
        return sorted({shlex.split(suite)[0] for suite in self.suites})


class Outcome(NamedTuple):
    passed: bool
    what: str  # the first test that failed, or how the suite ended
    output: str
    hung: bool = False


def read_mutant(patch: Path) -> Mutant:
    text = patch.read_text(encoding="utf-8")
    diff = DIFF.search(text)
    header = text[: diff.start()] if diff else text
    lines = HEADER.findall(header)
    suites = [value for key, value in lines if key == "Suite" and value]
    hangs = [value for key, value in lines if key == "May-hang"]
    files = PATCHED.findall(text)
    if not suites:
        raise Broken("names no suite")
    if not HEADER.sub("", header).strip():
        raise Broken("does not say what it plants")
    if hangs not in ([], ["yes"]):
        raise Broken("May-hang is yes, or is not there")
    if not files or any(old != new or not new.startswith("csrc/") for old, new in files):
        raise Broken("must change files of csrc/ in place")
    return Mutant(patch.stem, patch, suites, sorted({new for _, new in files}), hangs == ["yes"])


def sync(root: Path, tree: Path) -> None:
    """Makes the copy equal to the root. What is equal is not touched, so that ninja leaves it."""
    wanted = set()
    for top in COPIED:
        found = (root / top).rglob("*") if (root / top).is_dir() else [root / top]
        wanted |= {p.relative_to(root) for p in found if p.is_file() and p.suffix != ".pyc"}
    for path in [p for p in tree.rglob("*") if p.is_file()]:
        if path.relative_to(tree) not in wanted:
            path.unlink()
    for name in wanted:
        content = (root / name).read_bytes()
        target = tree / name
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)


def call(command: Sequence[str | Path], cwd: Path) -> None:
    # Where the copy stands in a repository, git would take its paths for those of that one.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(cwd.parent)}
    run = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise Broken(f"{command[0]} failed\n{(run.stdout + run.stderr).strip()[-4000:]}")


def apply(mutant: Mutant, tree: Path, *options: str) -> None:
    call(["git", "apply", "--whitespace=nowarn", *options, mutant.patch.resolve()], tree)


@contextmanager
def planted(mutant: Mutant, tree: Path) -> Iterator[None]:
    before = {tree / name: (tree / name).read_bytes() for name in mutant.files}
    try:
        apply(mutant, tree)
        yield
    finally:
        for path, content in before.items():
            if path.read_bytes() != content:
                path.write_bytes(content)


def first_failure(output: str, status: int) -> str:
    """For a program without GoogleTest: its last line."""
    failed = FAILED.search(output)
    if failed:
        return failed[1]
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit {status}"
    started = STARTED.findall(output)
    if started:
        return f"{started[-1]} ({how})"
    lines = output.strip().splitlines()
    return f"{lines[-1][:100] if lines else 'no output'} ({how})"


def run_suite(suite: str, build: Path, limit_seconds: float) -> Outcome:
    program, *arguments = shlex.split(suite)
    env = {**os.environ, "GTEST_FAIL_FAST": "1", "GTEST_COLOR": "no"}
    # A group of its own: the tests have children.
    with subprocess.Popen(
        [build / program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=env,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Outcome(False, first_failure(output, -signal.SIGKILL), output, hung=True)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode == 0:
        return Outcome(True, "passed", output)
    return Outcome(False, first_failure(output, process.returncode), output)


class Bench:
    """The copy, its build, and what is asked of them."""

    def __init__(self, options: argparse.Namespace) -> None:
        work = (options.work or options.root / "build" / "mutants").resolve()
        self.tree = work / "tree"
        self.build = work / "build"
        self.options = options
        self.tree.mkdir(parents=True, exist_ok=True)
        sync(options.root, self.tree)
        if not (self.build / "build.ninja").exists():
            ccache = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
            call(["cmake", "-S", self.tree, "-B", self.build, *CONFIGURE, *ccache], self.tree)

    def make(self, programs: Sequence[str]) -> None:
        command = ["cmake", "--build", self.build, "--parallel", str(self.options.jobs)]
        call([*command, "--target", *programs], self.tree)

    def run(self, suite: str) -> Outcome:
        return run_suite(suite, self.build, self.options.limit)

    def baseline(self, mutants: Sequence[Mutant]) -> None:
        self.make(sorted({program for mutant in mutants for program in mutant.programs()}))
        for suite in sorted({suite for mutant in mutants for suite in mutant.suites}):
            outcome = self.run(suite)
            if not outcome.passed:
                raise Broken(f"{suite} fails without any fault: {outcome.what}\n{outcome.output}")

    def try_mutant(self, mutant: Mutant) -> tuple[bool, str]:
        """Whether each of its suites failed, and where."""
        with planted(mutant, self.tree):
            self.make(mutant.programs())
            outcomes = [self.run(suite) for suite in mutant.suites]
        for suite, outcome in zip(mutant.suites, outcomes, strict=True):
            if self.options.show:
                print(f"--- {mutant.name}: {suite}\n{outcome.output}")
            if outcome.passed:
                return False, f"SURVIVED {suite}"
            if outcome.hung and not mutant.may_hang:
                raise Broken(f"{suite} hung: {outcome.what}")
        return True, "caught by " + ", ".join(outcome.what for outcome in outcomes)


def part(text: str) -> tuple[int, int]:
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise argparse.ArgumentTypeError(f"{text!r} is no part, such as 0/3")
    return int(first), int(step)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="NAME", help="mutants whose name contains NAME")
    parser.add_argument(
        "--part", metavar="I/N", type=part, default=(0, 1), help="every Nth from the Ith (from 0)"
    )
    parser.add_argument("--work", metavar="DIR", type=Path, help="default: build/mutants")
    parser.add_argument("--jobs", metavar="N", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--limit", metavar="SECONDS", type=float, default=60, help="a suite may take (default: 60)"
    )
    parser.add_argument("--show", action="store_true", help="print what the suites say too")
    parser.add_argument("--root", metavar="DIR", type=Path, default=ROOT, help="the tree to test")
    return parser.parse_args(arguments)


def run_all(options: argparse.Namespace) -> int:
    begin = time.monotonic()
    patches = sorted((options.root / "tests" / "mutants").glob("*.patch"))
    first, step = options.part
    patches = [patch for patch in patches if (options.only or "") in patch.stem][first::step]
    if not patches:
        raise Broken("no such mutant")
    mutants = []
    broken = 0
    for patch in patches:
        try:
            mutants.append(read_mutant(patch))
        except Broken as reason:
            broken += 1
            print(f"{patch.stem}: BROKEN: {reason}", flush=True)
    bench = Bench(options)
    bench.baseline(mutants)
    print(f"without any fault everything passes, {time.monotonic() - begin:.0f} s", flush=True)
    caught = survived = 0
    width = max(len(patch.stem) for patch in patches)
    # By file: one that was restored is compiled again, best together with the next fault in it.
    for mutant in sorted(mutants, key=lambda each: (each.files, each.name)):
        start = time.monotonic()
        try:
            found, what = bench.try_mutant(mutant)
            caught += found
            survived += not found
        except Broken as reason:
            broken += 1
            what = f"BROKEN: {reason}"
        seconds = time.monotonic() - start
        print(f"{mutant.name:{width}} {seconds:5.1f} s  {what}", flush=True)
    total = f"{len(patches)} mutants: {caught} caught, {survived} survived"
    if broken:
        total += f", {broken} broken"
    print(f"{total} in {time.monotonic() - begin:.0f} s")
    return 0 if caught == len(patches) else 1


def main(arguments: Sequence[str]) -> int:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # many will crash
    try:
        return run_all(parse(arguments))
    except Broken as reason:
        print(f"mutants: {reason}")
        return 1
    except KeyboardInterrupt:
        print("mutants: interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
