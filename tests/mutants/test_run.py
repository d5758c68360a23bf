"""The runner finds what is wrong with a mutant. On a tree of one file, so that it takes seconds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import run

ROOT = Path(__file__).resolve().parents[2]
PATCHES = sorted(Path(__file__).parent.glob("*.patch"))

CMAKE = """\
cmake_minimum_required(VERSION 3.20)
project(fake LANGUAGES CXX)
add_executable(fake csrc/fake.cpp)
"""
PROGRAM = """\
extern "C" int puts(const char*);
extern "C" unsigned sleep(unsigned);
extern "C" int fflush(void*);
extern "C" void abort();

int answer() { return 42; }

int main(int count, char**) {
  puts("[ RUN      ] Fake.Answers");
  fflush(nullptr);
  if (answer() == 43) abort();
  while (answer() == 44) sleep(1);
  if (answer() == 42) return 0;
  if (count == 1) puts("[  FAILED  ] Fake.Answers, where nothing is (0 ms)");
  return 1;
}
"""


def patch(
    answer: str = "41", old: str = "42", header: str = "A wrong answer.\nSuite: fake\n"
) -> str:
    return f"""{header}
--- a/csrc/fake.cpp
+++ b/csrc/fake.cpp
@@ -5,3 +5,3 @@

-int answer() {{ return {old}; }}
+int answer() {{ return {answer}; }}

"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not all(map(shutil.which, ("cmake", "ninja", "git"))):
        pytest.skip("needs cmake, ninja and git")
    return tmp_path_factory.mktemp("work")


def plant(root: Path, mutants: dict[str, str], program: str = PROGRAM) -> Path:
    tree = {"CMakeLists.txt": CMAKE, "pyproject.toml": "", "csrc/fake.cpp": program}
    tree |= {f"tests/mutants/{name}.patch": text for name, text in mutants.items()}
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def run_on(root: Path, work: Path, *arguments: str) -> int:
    status = run.main(["--root", str(root), "--work", str(work), "--limit", "5", *arguments])
    assert (work / "tree/csrc/fake.cpp").read_text() == (root / "csrc/fake.cpp").read_text()
    return status


# what is planted, whether that is good, what the runner says
CASES = {
    "a failed test": (patch(), True, "caught by Fake.Answers\n"),
    "a crash": (patch("43"), True, "caught by Fake.Answers (signal SIGABRT)\n"),
    "no word": (patch(header="Wrong.\nSuite: fake 1\n"), True, "Fake.Answers (exit 1)\n"),
    "two suites": (
        patch(header="Wrong.\nSuite: fake\nSuite: fake 1\n"),
        True,
        "Fake.Answers, Fake.Answers (exit 1)\n",
    ),
    "no fault": (patch("42 + 0"), False, "SURVIVED fake\n"),
    "other lines": (patch(old="7"), False, "BROKEN: git failed\n"),
    "no C++": (patch("no_such_name"), False, "BROKEN: cmake failed\n"),
    "no such program": (
        patch(header="Wrong.\nSuite: fake\nSuite: none\n"),
        False,
        "mutants: cmake failed\n",
    ),
}


@pytest.mark.parametrize(("text", "good", "said"), CASES.values(), ids=CASES)
def test_each_mutant_is_caught_or_an_error(
    tmp_path: Path,
    work: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    good: bool,
    said: str,
) -> None:
    assert run_on(plant(tmp_path, {"01-it": text}), work) == (0 if good else 1)
    assert said in capsys.readouterr().out


def test_a_hang_is_an_error_unless_the_mutant_says_that_it_may(
    tmp_path: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = "Never answers.\nSuite: fake\n"
    mutants = {
        "01-bad": patch("44", header=hangs),
        "02-good": patch("44", header=f"{hangs}May-hang: yes\n"),
    }
    assert run_on(plant(tmp_path, mutants), work, "--limit", "1") == 1
    said = capsys.readouterr().out
    assert "BROKEN: fake hung" in said
    assert "02-good" in said
    assert "2 mutants: 1 caught, 0 survived, 1 broken in" in said


def test_one_survivor_among_many_is_found_and_only_takes_some(
    tmp_path: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mutants = {"01-wrong": patch(), "02-right": patch("42 + 0"), "03-wrong": patch("40")}
    root = plant(tmp_path, mutants)
    assert run_on(root, work) == 1
    assert "3 mutants: 2 caught, 1 survived in" in capsys.readouterr().out
    assert run_on(root, work, "--only", "wrong") == 0
    assert "2 mutants: 2 caught, 0 survived in" in capsys.readouterr().out
    assert run_on(root, work, "--only", "nobody") == 1


def test_a_suite_that_fails_without_any_fault_is_an_error(
    tmp_path: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = plant(tmp_path, {"01-it": patch()}, PROGRAM.replace("return 42", "return 41"))
    assert run_on(root, work) == 1
    assert "fake fails without any fault: Fake.Answers" in capsys.readouterr().out


def test_a_fault_that_was_left_in_the_copy_is_mended(tmp_path: Path, work: Path) -> None:
    root = plant(tmp_path, {"01-it": patch()})
    assert run_on(root, work) == 0
    (work / "tree/csrc/fake.cpp").write_text(PROGRAM.replace("42", "41"), encoding="utf-8")
    (work / "tree/csrc/new.cpp").write_text("no C++", encoding="utf-8")
    assert run_on(root, work) == 0
    assert not (work / "tree/csrc/new.cpp").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (patch(header="A wrong answer.\n"), "names no suite"),
        (patch(header="Suite: fake\n"), "does not say what it plants"),
        (patch(header="Wrong.\nSuite: fake\nMay-hang: no\n"), "May-hang is yes"),
        (patch().replace("csrc/", "tests/"), "must change files of csrc/"),
        ("Nothing.\nSuite: fake\n", "must change files of csrc/"),
    ],
)
def test_a_header_that_lacks_something_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "01-it.patch"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(run.Broken, match=said):
        run.read_mutant(path)


def test_a_header_is_read(tmp_path: Path) -> None:
    path = tmp_path / "01-it.patch"
    header = "Suites are named: like this.\nSuite: a --x=1\nSuite: b\nMay-hang: yes\n"
    path.write_text(patch(header=header), encoding="utf-8")
    mutant = run.read_mutant(path)
    assert mutant.name == "01-it"
    assert mutant.suites == ["a --x=1", "b"]
    assert mutant.programs() == ["a", "b"]
    assert mutant.files == ["csrc/fake.cpp"]
    assert mutant.may_hang


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_each_mutant_of_the_tree_applies(path: Path) -> None:
    run.apply(run.read_mutant(path), ROOT, "--check")
