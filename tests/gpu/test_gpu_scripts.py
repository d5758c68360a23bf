"""What can be said of the tests on a GPU without one: that they can be collected and are skipped,
that the kernels compile, and that the scripts around them are no nonsense."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.mark.parametrize("script", ["pack.sh", "run.sh"])
def test_a_script_can_be_read_by_the_shell(script: str) -> None:
    checked = subprocess.run(["bash", "-n", HERE / script], check=False, capture_output=True)
    assert checked.returncode == 0, checked.stderr.decode()


def find_ptxas() -> str | None:
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]
    places = [os.environ.get("PATH", ""), *[os.path.join(home, "bin") for home in homes if home]]
    return shutil.which("ptxas", path=os.pathsep.join(places))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_the_kernels_compile(architecture: str, tmp_path: Path) -> None:
    ptxas = find_ptxas()
    if ptxas is None:
        pytest.skip("ptxas of the CUDA toolkit is not here")
    command = [ptxas, "--warning-as-error", f"-arch={architecture}", HERE / "kernels.ptx"]
    compiled = subprocess.run(
        [*command, "-o", tmp_path / "kernels.cubin"], check=False, capture_output=True
    )
    assert compiled.returncode == 0, compiled.stderr.decode()


@pytest.mark.parametrize("folder", ["tests/gpu", "bench/gpu"])
def test_without_a_gpu_all_is_skipped_and_says_why(folder: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    for name in ("KVMEM_TEST_GPU", "KVMEM_CUDART_PATH"):
        environment.pop(name, None)
    others = ["--ignore=tests/gpu/test_gpu_scripts.py", "--ignore=tests/gpu/test_gpu_rehearsal.py"]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rs", folder, *others],
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *_, reason, summary = ran.stdout.strip().splitlines()
    assert " skipped" in summary
    assert "passed" not in summary
    assert reason.startswith("SKIPPED [")
    assert "cuda: " in reason
