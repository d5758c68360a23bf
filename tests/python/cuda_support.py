"""Real CUDA runtimes, and a driver of our own under them: for tests in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent

LIBRARIES = {12: "cuda_runtime/lib/libcudart.so.12", 13: "cu13/lib/libcudart.so.13"}
INCLUDES = {12: "cuda_runtime/include", 13: "cu13/include"}
WHEELS = {12: "nvidia-cuda-runtime-cu12", 13: "nvidia-cuda-runtime"}
# What a test starts without, whoever runs it.
NOT_INHERITED = ("KVMEM_", "CUDA_", "LD_LIBRARY_PATH", "NVIDIA_")


def in_wheel(names: dict[int, str], major: int) -> Path:
    """Find a file of an installed runtime wheel; without it the test is skipped."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / names[major]).exists():
            return Path(folder) / names[major]
    pytest.skip(f"no wheel of CUDA {major} is installed: {WHEELS[major]}")


def compiler(name: str = "c++") -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} here")
    return found


def environment(**settings: object) -> dict[str, str]:
    """Give the environment of a child: nothing about CUDA but these settings."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(NOT_INHERITED)}
    return kept | {key: str(value) for key, value in settings.items()}


def run_cuda(script: str, timeout: float = 60.0, **settings: object) -> Any:
    """Run `script` in a fresh interpreter, which must say nothing but one JSON value."""
    ran = start(script, timeout, **settings)
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stderr + ran.stdout
    return json.loads(ran.stdout)


def start(
    script: str, timeout: float = 60.0, **settings: object
) -> subprocess.CompletedProcess[str]:
    """Run `script` in a fresh interpreter, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment(**settings),
        cwd=TESTS / "python",
    )


# Opens "auto" and "cuda", and asks the doctor; prints what each said.
TRY = """
    import json
    import kvmem
    from kvmem.doctor.checks import check
    from kvmem.doctor.facts import probe

    def said(name):
        try:
            return kvmem.open_device(name).info
        except kvmem.DeviceUnavailable as error:
            return str(error)

    facts = probe()
    print(json.dumps({
        "auto": said("auto"),
        "cuda": said("cuda"),
        "doctor": facts.to_json(),
        "first": check(facts)[0].text,
    }))
"""


# ---- the fake runtime

FAKE_VERSIONS = {12: 12090, 13: 13000}
# Of what the fake stands on; the host device is no part of that.
NOT_IN_FAKE = ("host_copy.cpp", "host_device.cpp")


def fake_cudart(major: int, folder: Path) -> Path:
    """Find the fake runtime of tests/fakes, or build it into the folder, which takes some seconds.

    KVMEM_FAKE_CUDART_DIR names a folder where CMake has built both.
    """
    name = f"libcudart.so.{major}"
    given = os.environ.get("KVMEM_FAKE_CUDART_DIR")
    if given:
        return Path(given) / name
    if (folder / name).exists():
        return folder / name
    folder.mkdir(parents=True, exist_ok=True)
    csrc = REPOSITORY / "csrc"
    core = [path for room in ("base", "device") for path in sorted((csrc / room).glob("*.cpp"))]
    core = [path for path in core if path.name not in NOT_IN_FAKE]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: _compile(source, folder, "core"), core))
        define = f"-DKVMEM_FAKE_CUDART={FAKE_VERSIONS[major]}"
        fakes = sorted((TESTS / "fakes").glob("*.cpp"))
        objects += pool.map(lambda source: _compile(source, folder, str(major), define), fakes)
    link = [compiler("g++"), "-shared", "-Wl,--no-undefined", "-o", str(folder / name)]
    subprocess.run([*link, *map(str, objects), "-ldl", "-lpthread"], check=True)
    return folder / name


def gated_cudart(fake: Path, folder: Path) -> Path:
    """Build the library that lets calls of the fake wait at a gate."""
    library = folder / "libgated.so"
    command = [compiler("cc"), "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    command += ["-o", str(library), str(TESTS / "fakes" / "gated_cudart.c")]
    command += [
        "-Wl,--no-as-needed",
        f"-L{fake.parent}",
        f"-l:{fake.name}",
        f"-Wl,-rpath,{fake.parent}",
    ]
    subprocess.run([*command, "-ldl", "-lpthread"], check=True)
    return library


FAKE = """
    import ctypes, json, os, sys, threading
    import numpy as np
    import kvmem
    from kvmem import READY

    PATIENCE = 20.0
    BLOCKS, LAYERS, SEGMENT = 16, 2, 4096

    fake = ctypes.CDLL(os.environ["KVMEM_CUDART_PATH"])
    fake.kvmem_fake_violations.restype = ctypes.c_size_t
    fake.kvmem_fake_violation.argtypes = [ctypes.c_size_t]
    fake.kvmem_fake_violation.restype = ctypes.c_char_p
    fake.kvmem_fake_calls.restype = ctypes.c_ulonglong
    for name in ("cudaStreamDestroy", "cudaEventDestroy"):
        getattr(fake, name).argtypes = [ctypes.c_void_p]
    fake.cudaEventRecord.argtypes = [ctypes.c_void_p] * 2

    def calls(name):
        return fake.kvmem_fake_calls(name.encode())

    def fail(name, error, times=1, nth=1, happens=0):
        fake.kvmem_fake_fail(name.encode(), nth, times, error, happens)

    def foreign_stream():
        handle = ctypes.c_void_p()
        assert fake.cudaStreamCreateWithFlags(ctypes.byref(handle), 1) == 0
        return handle.value

    def foreign_event():
        handle = ctypes.c_void_p()
        assert fake.cudaEventCreateWithFlags(ctypes.byref(handle), 2) == 0
        return handle.value

    class Cache:
        def __init__(self, name="cuda", **options):
            self.device = kvmem.open_device(name, **options)
            self.buffer = self.device.alloc(LAYERS * BLOCKS * SEGMENT)
            raw = (ctypes.c_uint8 * self.buffer.nbytes).from_address(self.buffer.address)
            self.memory = np.ctypeslib.as_array(raw).reshape(LAYERS, BLOCKS, SEGMENT)
            self.layout = kvmem.KVLayout([
                kvmem.Region(self.buffer.address + layer * BLOCKS * SEGMENT, SEGMENT, SEGMENT,
                             BLOCKS, memory=self.device.name, stage=layer)
                for layer in range(LAYERS)
            ])
            block_bytes = LAYERS * SEGMENT
            self.pool = kvmem.BlockPool(
                self.device, block_bytes=block_bytes, capacity_bytes=BLOCKS * block_bytes
            )
            self.manager = kvmem.Manager(self.device, self.layout, self.pool)

        def fill(self, block, value):
            self.memory[:, block] = np.arange(LAYERS, dtype=np.uint8)[:, None] + value

        def holds(self, block, value):
            expected = np.arange(LAYERS, dtype=np.uint8)[:, None] + value
            return bool((self.memory[:, block] == expected).all())

        def round_trip(self, after=READY):
            self.fill(3, 30)
            self.fill(7, 70)
            kept = self.manager.offload([3, 7], after=after)
            kept.wait(PATIENCE)
            self.memory[:] = 0
            back = self.manager.restore(kept.result(), [10, 11], after=after)
            back.wait(PATIENCE)
            return self.holds(10, 30) and self.holds(11, 70)

        def close(self):
            return self.manager.close(PATIENCE).quiet

    def refused(call, kind=kvmem.InvalidArgument):
        try:
            call()
        except kind as error:
            return str(error)
        return None

    def say(**said):
        said["violations"] = [
            fake.kvmem_fake_violation(i).decode() for i in range(fake.kvmem_fake_violations())
        ]
        print(json.dumps(said))
"""


def _compile(source: Path, folder: Path, kind: str, *defines: str) -> Path:
    target = folder / f"{kind}-{source.stem}.o"
    if target.exists():
        return target
    command = [compiler("g++"), "-std=c++20", "-O0", "-fPIC", "-DKVMEM_CHECKED=1", *defines]
    command += ["-fvisibility=hidden", "-fvisibility-inlines-hidden"]
    command += [f"-I{REPOSITORY / 'csrc'}", f"-I{TESTS}", "-c", str(source), "-o", str(target)]
    cache = shutil.which("ccache")
    subprocess.run(
        [cache, *command] if cache else command,
        check=True,
        env={**os.environ, "CCACHE_BASEDIR": str(REPOSITORY), "CCACHE_NOHASHDIR": "1"},
    )
    return target
