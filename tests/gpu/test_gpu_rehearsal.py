"""What runs on a GPU, rehearsed without one: on the fake runtime and a driver of our own.

It shows that the tests, the benchmarks and the contract's stall do what they mean to, and that the
checker has nothing against kvmem under them. It says nothing about hardware.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fakes() -> Path:
    """Where the fake runtimes and the test programs of a build are: KVMEM_BUILD names it."""
    build = Path(os.environ.get("KVMEM_BUILD", ROOT / "build" / "release"))
    if not (build / "fakes" / "libcudart.so.13").exists():
        pytest.skip("the fake runtime is not built: cmake --workflow --preset release")
    return build / "fakes"


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a libcuda.so.1."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("driver")
    flags = ["-std=c++20", "-O1", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
    places = [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'tests'}", "-o", folder / "libcuda.so.1"]
    source = HERE / "rehearsal_driver.cpp"
    subprocess.run([compiler, *flags, source, *places], check=True, timeout=300)
    return folder


def run(command: list[str | Path], fakes: Path, driver: Path, major: int, **more: str) -> str:
    places = [str(driver), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, places)),
        "KVMEM_CUDART_PATH": str(fakes / f"libcudart.so.{major}"),
        "KVMEM_TEST_GPU": "1",
        **more,
    }
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, f"status {ran.returncode}\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def run_tests(folder: str, *arguments: str) -> list[str | Path]:
    pytest_alone = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    return [*pytest_alone, folder, "-m", "not slow", *arguments]


@pytest.mark.parametrize("major", [12, 13])
def test_the_tests_pass(fakes: Path, driver: Path, major: int) -> None:
    command = run_tests("tests/gpu", "-k", "not not_careful and not scripts")
    said = run(command, fakes, driver, major, KVMEM_FAKE_STRICT="1")
    assert " passed" in said.splitlines()[-1]
    # Whose violation is the point of it.
    said = run(run_tests("tests/gpu", "-k", "not_careful"), fakes, driver, major)
    assert "2 passed" in said.splitlines()[-1]


def test_the_benchmarks_run(fakes: Path, driver: Path) -> None:
    said = run(run_tests("bench/gpu"), fakes, driver, 13, KVMEM_FAKE_STRICT="1")
    assert " passed" in said.splitlines()[-1]


def test_the_facts_hold_where_a_kernel_holds_a_stream_back(fakes: Path, driver: Path) -> None:
    program = fakes.parent / "kvmem-test-contract"
    said = run([program, "--gtest_filter=Cuda/*/Gpu*"], fakes, driver, 13)
    assert "[  PASSED  ]" in said
