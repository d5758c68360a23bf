"""What kvmem declares of CUDA is what NVIDIA's headers declare, release by release.

Headers come from the runtime wheels that are installed, from a toolkit if one is found, and from
the folders that KVMEM_CUDA_HEADERS names, separated by ':'.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from cuda_support import INCLUDES, REPOSITORY, TESTS, compiler, in_wheel

Replacement = str | Callable[[re.Match[str]], str]

CHECK = TESTS / "cuda_abi" / "abi_check.cpp"
CSRC = REPOSITORY / "csrc"
HEADER = CSRC / "device" / "cuda" / "cuda_abi.hpp"
LOADER = CSRC / "device" / "cuda" / "cudart.cpp"
TABLE = CSRC / "device" / "cuda" / "cudart.hpp"

NAMED = [path for path in os.environ.get("KVMEM_CUDA_HEADERS", "").split(":") if path]
TOOLKITS = [os.environ.get("CUDA_HOME", ""), os.environ.get("CUDA_PATH", ""), "/usr/local/cuda"]


def toolkit() -> Path:
    """Find the folder of an installed toolkit; without one the test is skipped."""
    nvcc = shutil.which("nvcc")
    for folder in [*TOOLKITS, str(Path(nvcc).parents[1]) if nvcc else ""]:
        if folder and (Path(folder) / "include" / "cuda_runtime_api.h").exists():
            return Path(folder)
    pytest.skip("no CUDA toolkit here")


def compile_check(headers: Path, *folders: Path) -> str:
    """Check against these headers; give what the compiler says, empty if all is well."""
    if not (headers / "cuda_runtime_api.h").exists():
        pytest.fail(f"{headers} has no cuda_runtime_api.h")
    command = [compiler("g++"), "-std=c++20", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    command += [f"-I{folder}" for folder in (*folders, CSRC)]
    command += ["-isystem", str(headers)]
    command += ["-idirafter", str(TESTS / "cuda_abi" / "stand_in"), "-fmax-errors=0", str(CHECK)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ran.returncode == 0) == (ran.stderr == ""), ran.stderr
    return ran.stderr


def changed(folder: Path, pattern: str, replacement: Replacement) -> Path:
    """Make a folder with a changed copy of the header, to be found before the real one."""
    text, count = re.subn(pattern, replacement, HEADER.read_text(encoding="utf-8"), flags=re.M)
    assert count > 0, f"nothing in {HEADER.name} is {pattern}"
    copy = folder / HEADER.relative_to(CSRC)
    copy.parent.mkdir(parents=True)
    copy.write_text(text, encoding="utf-8")
    return folder


# ---- it is the same


@pytest.mark.parametrize("major", [12, 13])
def test_the_declarations_are_those_of_an_installed_wheel(major: int) -> None:
    assert compile_check(in_wheel(INCLUDES, major)) == ""


def test_the_declarations_are_those_of_an_installed_toolkit() -> None:
    assert compile_check(toolkit() / "include") == ""


@pytest.mark.skipif(not NAMED, reason="KVMEM_CUDA_HEADERS names no folders")
@pytest.mark.parametrize("headers", NAMED)
def test_the_declarations_are_those_of_named_headers(headers: str) -> None:
    assert compile_check(Path(headers)) == ""


@pytest.mark.parametrize("order", ["kvmem first", "CUDA first"])
def test_the_header_stands_beside_those_of_cuda_in_a_program_for_nvcc(
    order: str, tmp_path: Path
) -> None:
    nvcc = toolkit() / "bin" / "nvcc"
    if not nvcc.exists():
        pytest.skip("no nvcc here")
    command = [str(nvcc), "-std=c++20", f"-I{CSRC}", "-c", str(TESTS / "cuda_abi" / "beside.cu")]
    command += ["-DKVMEM_FIRST"] if order == "kvmem first" else []
    ran = subprocess.run(
        [*command, "-o", str(tmp_path / "beside.o")], check=False, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")


# ---- and would be found different

VALUE = re.compile(r"^inline constexpr \w+ (\w+) = \d+;", re.M)
FUNCTION = re.compile(r"^using (\w+) =\s+(?:Error|const char\*)\(", re.M)


def test_every_value_is_checked(tmp_path: Path) -> None:
    wrong = changed(tmp_path, r"^(inline constexpr \w+ \w+ = \d+);", r"\1 + 1000;")
    said = compile_check(in_wheel(INCLUDES, 13), wrong)
    assert set(re.findall(r"value (\w+) is not", said)) == set(VALUE.findall(HEADER.read_text()))


def test_every_function_is_checked(tmp_path: Path) -> None:
    def one_argument_more(match: re.Match[str]) -> str:
        return f"{match[1]}char***" + (")" if match[2] else ", ")

    pattern = r"^(using \w+ =\s+(?:Error|const char\*)\()(\)?)"
    wrong = changed(tmp_path, pattern, one_argument_more)
    found: set[str] = set()
    for major in (12, 13):  # each has one of the two batches
        said = compile_check(in_wheel(INCLUDES, major), wrong)
        found |= set(re.findall(r"function (\w+) is not", said))
    assert found == set(FUNCTION.findall(HEADER.read_text()))


WRONG = {
    "a batch without its index": (r"std::size_t\*\s+failed,\s*", ""),
    "a batch with one": (
        r"std::size_t attributes, Stream\);",
        "std::size_t, std::size_t*, Stream);",
    ),
    "a size that is narrower": (
        r"\(void\*, std::size_t, unsigned\)",
        "(void*, unsigned, unsigned)",
    ),
    "a stream for an event": (
        r"EventRecord = Error\(Event, Stream\)",
        "EventRecord = Error(Stream, Event)",
    ),
    "a pointer to const": (r"Malloc = Error\(void\*\*", "Malloc = Error(const void**"),
    "a structure that is smaller": (r"  unsigned flags = 0;", ""),
    "members in another order": (
        r"  int source_access_order = 0;\n(.*)\n(.*)",
        r"  unsigned flags = 0;\n\1\n  int source_access_order = 0;",
    ),
    "room that is too small": (r"room\[256 - 24\]", "room[8]"),
    "a member that moved": (
        r"  int device = 0;\n  void\* device_pointer",
        "  void* device_pointer",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_declaration_is_found(what: str, tmp_path: Path) -> None:
    majors = {"a batch without its index": 12, "a batch with one": 13}
    wrong = changed(tmp_path, *WRONG[what])
    said = compile_check(in_wheel(INCLUDES, majors.get(what, 13)), wrong)
    assert "static assertion failed" in said or "has no member" in said or "is not a member" in said


def test_the_loader_gives_each_symbol_the_type_that_is_checked() -> None:
    """By text: a table of pointers to void has no types to check."""
    rows = re.findall(r'"(cu\w+)",\s*store<&Functions::(\w+)>', LOADER.read_text())
    members = dict(re.findall(r"^  (\w+)\* (\w+) = nullptr;", TABLE.read_text(), re.M))
    types = {member: name for name, member in members.items()}
    checked = re.findall(r"SAME_FUNCTION\((\w+), (\w+)\)", CHECK.read_text())
    assert len(rows) >= 30
    for symbol, member in rows:
        assert (types[member], symbol) in checked
