"""Is there CUDA, and which? NVIDIA's real runtimes, without a driver and over one of our own.

Each test is a process of its own: a runtime that was loaded stays, and so does what it found.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvmem
from cuda_support import LIBRARIES, TESTS, TRY, compiler, environment, in_wheel, run_cuda
from kvmem import _cuda

Stub = Callable[..., dict[str, str]]

FIND = """
    import json
    from kvmem import _cuda
    found = _cuda.find()
    print(json.dumps({name: getattr(found, name) for name in dir(found) if name[0] != "_"
                      and name != "device_facts"}))
"""

MAJORS = pytest.mark.parametrize("major", [12, 13])


@pytest.fixture(scope="session")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    """The environment in which the driver is ours: how it initialises, the version it supports."""
    folder = tmp_path_factory.mktemp("driver")
    source = TESTS / "fakes" / "stub_libcuda.c"
    options = ["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command = [compiler("cc"), *options, "-o", str(folder / "libcuda.so.1"), str(source)]
    subprocess.run(command, check=True)

    def settings(init: int, version: int) -> dict[str, str]:
        return {
            "LD_LIBRARY_PATH": str(folder),
            "KVMEM_STUB_INIT": str(init),
            "KVMEM_STUB_VERSION": str(version),
        }

    return settings


def expect_no_driver() -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    pytest.skip("this machine has a driver")


# ---- no driver, no device


@MAJORS
def test_without_a_driver_auto_is_the_host_and_says_why(major: int) -> None:
    expect_no_driver()
    library = in_wheel(LIBRARIES, major)
    said = run_cuda(TRY, KVMEM_CUDART_PATH=library)
    assert said["auto"]["kind"] == "host"
    sentence = said["doctor"]["cuda"]["sentence"]
    assert sentence.startswith("no NVIDIA driver")
    assert said["auto"]["chosen_why"] == f"auto: {sentence}"
    assert said["cuda"] == f"cuda: {sentence}"
    assert said["first"] == sentence
    found = said["doctor"]["cuda"]
    assert (found["usability"], found["error"], found["driver_version"]) == ("no_driver", 35, 0)
    assert (found["runtime_path"], found["runtime_version"] // 1000) == (str(library), major)
    assert found["runtime_found_by"] == "KVMEM_CUDART_PATH"
    assert said["doctor"]["usable"] is False


@MAJORS
def test_a_driver_without_a_device_is_the_host_and_says_why(major: int, stub: Stub) -> None:
    driver = stub(100, 13050)
    said = run_cuda(TRY, KVMEM_CUDART_PATH=in_wheel(LIBRARIES, major), **driver)
    sentence = said["doctor"]["cuda"]["sentence"]
    assert "no GPU" in sentence
    assert "CUDA_VISIBLE_DEVICES is not set" in sentence
    assert said["auto"]["kind"] == "host"
    assert said["auto"]["chosen_why"] == f"auto: {sentence}"
    assert said["cuda"] == f"cuda: {sentence}"
    found = said["doctor"]["cuda"]
    assert (found["usability"], found["error"]) == ("no_device", 100)
    assert found["driver_version"] == 13050


def test_hidden_devices_are_named_as_a_reason(stub: Stub) -> None:
    settings = stub(100, 13050) | {"CUDA_VISIBLE_DEVICES": "-1"}
    said = run_cuda(TRY, KVMEM_CUDART_PATH=in_wheel(LIBRARIES, 13), **settings)
    assert "CUDA_VISIBLE_DEVICES is '-1'" in said["cuda"]
    assert said["doctor"]["settings"]["CUDA_VISIBLE_DEVICES"] == "-1"


# ---- broken set-ups

BROKEN = {
    3: "fork",
    34: "stub",
    46: "in use by another process",
    802: "fabric manager",
    803: "different releases",
    999: "nvidia-uvm",
}


@MAJORS
@pytest.mark.parametrize("error", BROKEN)
def test_a_broken_set_up_is_raised_with_the_sentence_of_the_doctor(
    major: int, error: int, stub: Stub
) -> None:
    said = run_cuda(TRY, KVMEM_CUDART_PATH=in_wheel(LIBRARIES, major), **stub(error, 13050))
    found = said["doctor"]["cuda"]
    assert (found["usability"], found["error"]) == ("broken", error)
    assert said["auto"] == f"auto: {found['sentence']}"
    assert said["cuda"] == f"cuda: {found['sentence']}"
    assert said["first"] == found["sentence"]
    assert f"({error})" in found["sentence"]
    assert BROKEN[error] in found["sentence"]


@pytest.mark.parametrize(("major", "driver"), [(12, 11080), (13, 12080), (13, 12090)])
def test_a_driver_that_is_too_old_is_raised_and_says_what_to_do(
    major: int, driver: int, stub: Stub
) -> None:
    said = run_cuda(TRY, KVMEM_CUDART_PATH=in_wheel(LIBRARIES, major), **stub(0, driver))
    found = said["doctor"]["cuda"]
    assert (found["usability"], found["error"]) == ("driver_too_old", 35)
    assert said["auto"] == f"auto: {found['sentence']}"
    assert said["cuda"] == f"cuda: {found['sentence']}"
    assert "too old" in found["sentence"]
    assert "update the driver" in found["sentence"]


def test_each_case_has_a_sentence_of_its_own(stub: Stub) -> None:
    library = in_wheel(LIBRARIES, 13)
    cases = [(100, 13050), (3, 13050), (34, 13050), (803, 13050), (999, 13050), (0, 12080)]
    said = {run_cuda(TRY, KVMEM_CUDART_PATH=library, **stub(*case))["cuda"] for case in cases}
    assert len(said) == len(cases)


# ---- which runtime


def test_the_newest_wheel_comes_first(stub: Stub) -> None:
    newest = in_wheel(LIBRARIES, 13)
    in_wheel(LIBRARIES, 12)
    found = run_cuda(FIND, **stub(100, 13050))
    assert (found["runtime_path"], found["runtime_found_by"]) == (str(newest), "wheel")


@MAJORS
def test_a_runtime_that_the_process_has_loaded_is_the_one(major: int, stub: Stub) -> None:
    library = in_wheel(LIBRARIES, major)
    found = run_cuda(f"    import ctypes; ctypes.CDLL({str(library)!r})" + FIND)
    assert (found["runtime_path"], found["runtime_found_by"]) == (str(library), "process")


def test_a_runtime_that_is_too_new_for_the_driver_makes_room_for_an_older_one(stub: Stub) -> None:
    in_wheel(LIBRARIES, 13)
    older = in_wheel(LIBRARIES, 12)
    found = run_cuda(FIND, **stub(100, 12080))
    assert (found["usability"], found["runtime_path"]) == ("no_device", str(older))


def test_where_no_runtime_is_new_enough_the_first_is_named(stub: Stub) -> None:
    newest = in_wheel(LIBRARIES, 13)
    in_wheel(LIBRARIES, 12)
    found = run_cuda(FIND, **stub(0, 11080))
    assert (found["usability"], found["runtime_path"]) == ("driver_too_old", str(newest))


def test_both_runtimes_live_in_one_process() -> None:
    libraries = [str(in_wheel(LIBRARIES, major)) for major in (12, 13)]
    script = f"""
    import json, os
    from kvmem import _cuda
    found = []
    for path in {libraries!r} * 2:
        os.environ["KVMEM_CUDART_PATH"] = path
        status = _cuda.find()
        found.append([status.runtime_path, status.runtime_version // 1000])
    print(json.dumps(found))
    """
    assert run_cuda(script) == [[libraries[0], 12], [libraries[1], 13]] * 2


def test_without_any_runtime_auto_is_the_host_and_says_what_to_install(tmp_path: Path) -> None:
    for soname in ("libcudart.so.13", "libcudart.so.12"):  # in front of those of the system
        (tmp_path / soname).write_text("not a library")
    script = f"""
    from kvmem import _cuda
    _cuda._IN_WHEELS = ()
    {TRY}
    """
    said = run_cuda(script, LD_LIBRARY_PATH=tmp_path)
    assert said["doctor"]["cuda"]["usability"] == "no_runtime"
    assert said["auto"]["kind"] == "host"
    for words in (said["auto"]["chosen_why"], said["cuda"]):
        assert "install nvidia-cuda-runtime" in words
        assert "KVMEM_CUDART_PATH" in words
        assert "libcudart.so.12" in words


# ---- KVMEM_CUDART_PATH


def test_a_named_runtime_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "libcudart.so.13"
    said = run_cuda(TRY, KVMEM_CUDART_PATH=missing)
    for words in (said["auto"], said["cuda"], said["first"]):
        assert str(missing) in words
    assert said["doctor"]["usable"] is False


def test_a_named_library_that_is_no_runtime_is_named(tmp_path: Path) -> None:
    other = tmp_path / "libother.so"
    command = [compiler("cc"), "-shared", "-fPIC", "-x", "c", "-o", str(other), "/dev/null"]
    subprocess.run(command, check=True)
    said = run_cuda(TRY, KVMEM_CUDART_PATH=other)
    for words in (said["auto"], said["cuda"], said["first"]):
        assert str(other) in words
        assert "cudaRuntimeGetVersion" in words


def test_a_named_file_that_is_no_library_is_named(tmp_path: Path) -> None:
    other = tmp_path / "libcudart.so.13"
    other.write_text("not a library")
    said = run_cuda(TRY, KVMEM_CUDART_PATH=other)
    assert str(other) in said["auto"]


def test_the_command_of_the_doctor_says_the_same(stub: Stub) -> None:
    pytest.importorskip("typer", reason="the command line needs the extra 'cli'")
    settings = stub(803, 13050) | {"KVMEM_CUDART_PATH": str(in_wheel(LIBRARIES, 12))}
    said = run_cuda(TRY, **settings)
    for extra in ([], ["--json"]):
        ran = subprocess.run(
            [sys.executable, "-m", "kvmem.cli", "doctor", *extra],
            check=False,
            capture_output=True,
            text=True,
            env=environment(**settings, COLUMNS="100"),
        )
        assert (ran.returncode, ran.stderr) == (1, "")
        assert "different releases" in ran.stdout
    found = json.loads(ran.stdout.splitlines()[-1])
    assert f"cuda: {found['cuda']['sentence']}" == said["cuda"]


# ---- what is asked without a process of its own


def test_wheels_are_looked_for_along_the_path_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / folder / name for name in _cuda._IN_WHEELS for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path / "a"), "", str(tmp_path / "b"), "zip.zip"])
    assert _cuda.wheels() == [str(path) for path in paths]
    paths[1].unlink()
    assert _cuda.wheels() == [str(paths[0]), *map(str, paths[2:])]


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("KVMEM_CUDA_BATCH", "2"),
        ("KVMEM_CUDA_BATCH", "yes"),
        ("KVMEM_CUDA_MAX_DESCRIPTORS", "0"),
        ("KVMEM_CUDA_MAX_DESCRIPTORS", "-1"),
        ("KVMEM_CUDA_MAX_DESCRIPTORS", "4k"),
        ("KVMEM_CUDA_MAX_DESCRIPTORS", "9" * 400),
    ],
)
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_setting_that_is_none_is_refused_by_name(
    name: str, setting: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(setting, value)
    with pytest.raises(kvmem.InvalidArgument, match=setting):
        kvmem.open_device(name)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch": 1}, "batch is 1"),
        ({"batch": "no"}, "batch is 'no'"),
        ({"max_descriptors": 0}, "max_descriptors is 0, 1 to"),
        ({"max_descriptors": 2**20 + 1}, "max_descriptors"),
        ({"max_descriptors": True}, "max_descriptors is True"),
        ({"seed": 3}, "seed is no option of device"),
    ],
)
@pytest.mark.parametrize("name", ["auto", "cuda:1"])
def test_an_option_that_is_none_is_refused_by_name(
    name: str, options: dict[str, Any], match: str
) -> None:
    with pytest.raises(kvmem.InvalidArgument, match=match):
        kvmem.open_device(name, **options)


@pytest.mark.parametrize("kind", ["host", "virtual"])
def test_the_options_of_cuda_are_for_cuda(kind: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="batch is no option of device"):
        kvmem.open_device(kind, batch=False)


@pytest.mark.parametrize(
    "name", ["cuda:", "cuda:x", "cuda:-1", "cuda:01", "cuda:1.0", "cuda:٣", "CUDA"]
)
def test_a_number_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="device is"):
        kvmem.open_device(name)
