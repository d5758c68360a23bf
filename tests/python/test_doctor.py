"""`kvmem doctor`: facts from a made-up tree, findings from made-up facts, and what is printed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kvmem
from kvmem import _cuda
from kvmem.doctor import facts as doctor_facts
from kvmem.doctor.checks import Finding, check, size_text, version_text
from kvmem.doctor.facts import Cuda, CudaDevice, Facts, probe
from kvmem.doctor.host import (
    Host,
    HugePages,
    Link,
    NodePath,
    read_host,
    read_link,
    read_node_path,
)

GIB = 2**30
BUS = "0000:17:00.0"

MACHINE = {
    "proc/meminfo": "MemTotal:       65536000 kB\nMemAvailable:   32768000 kB\n",
    "proc/version": "Linux version 6.8.0-generic (buildd@lcy02) #1 SMP\n",
    "proc/self/limits": (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max locked memory         8388608              8388608              bytes\n"
    ),
    "proc/self/cgroup": "0::/system.slice/engine.service\n",
    "proc/self/status": "Name:\tpython\nCpus_allowed_list:\t0-3,8\nMems_allowed_list:\t0-1\n",
    "proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.105.08  Release Build\n"
        "GCC version:  gcc version 13.3.0\n"
    ),
    "sys/fs/cgroup/memory.max": "max\n",
    "sys/fs/cgroup/system.slice/memory.max": str(32 * GIB) + "\n",
    "sys/fs/cgroup/system.slice/engine.service/memory.max": str(48 * GIB) + "\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "512\n",
    "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "100\n",
    "sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages": "0\n",
    "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never\n",
    "sys/devices/system/node/online": "0-1\n",
    "sys/devices/system/node/node0/cpulist": "0-3,8-11\n",
    "sys/devices/system/node/node0/distance": "10 21\n",
    "sys/devices/system/node/node1/cpulist": "4-7,12-15\n",
    "sys/devices/system/node/node1/distance": "21 10\n",
    f"sys/bus/pci/devices/{BUS}/current_link_speed": "2.5 GT/s PCIe\n",
    f"sys/bus/pci/devices/{BUS}/max_link_speed": "32.0 GT/s PCIe\n",
    f"sys/bus/pci/devices/{BUS}/current_link_width": "8\n",
    f"sys/bus/pci/devices/{BUS}/max_link_width": "16\n",
}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for name, text in MACHINE.items():
        write(tmp_path, name, text)
    (tmp_path / "dev/shm").mkdir(parents=True)
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


# ---- from files to facts


def test_a_machine_is_read_from_the_files_of_its_kernel(machine: Path) -> None:
    host = read_host(machine)
    assert (host.memory_bytes, host.available_bytes) == (65536000 * 1024, 32768000 * 1024)
    assert host.memlock_bytes == 8 << 20
    assert host.cgroup_bytes == 32 * GIB  # the smallest of the groups above
    assert host.shm_bytes
    assert host.huge_pages == (HugePages(2 << 20, 512, 100), HugePages(1 << 30, 0, 0))
    assert (host.transparent_huge_pages, host.shmem_huge_pages) == ("madvise", "advise")
    assert (host.wsl, host.container, host.driver_release) == (False, "", "580.105.08")


def test_a_machine_that_says_nothing_is_no_error(tmp_path: Path) -> None:
    nothing = Host(None, None, None, None, None, None, (), "", "", False, "", "")
    assert read_host(tmp_path) == nothing
    assert read_link(tmp_path, BUS) == Link(None, None, None, None)
    assert read_link(tmp_path, "") == Link(None, None, None, None)
    assert read_node_path(tmp_path, 0) == NodePath(0, (), None)


def test_unlimited_is_no_limit(machine: Path) -> None:
    write(machine, "proc/self/limits", "Max locked memory         unlimited   unlimited   bytes\n")
    for group in ("", "system.slice/", "system.slice/engine.service/"):
        write(machine, f"sys/fs/cgroup/{group}memory.max", "max\n")
    host = read_host(machine)
    assert (host.memlock_bytes, host.cgroup_bytes) == (None, None)


@pytest.mark.parametrize(("limit", "expected"), [(4 * GIB, 4 * GIB), (9223372036854771712, None)])
def test_control_groups_of_version_1_are_read_too(
    machine: Path, limit: int, expected: int | None
) -> None:
    write(machine, "proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/box/job\n0::/\n")
    write(machine, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{limit}\n")
    assert read_host(machine).cgroup_bytes == expected


def test_a_group_that_is_not_mounted_is_that_of_the_container(machine: Path) -> None:
    write(machine, "proc/self/cgroup", "0::/kubepods.slice/pod1\n")
    write(machine, "sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
    host = read_host(machine)
    assert (host.cgroup_bytes, host.container) == (2 * GIB, "kubernetes")


@pytest.mark.parametrize(
    ("file", "text", "container"),
    [
        (".dockerenv", "", "docker"),
        ("run/.containerenv", "", "podman"),
        ("proc/1/cgroup", "0::/lxc/x\n", "lxc"),
    ],
)
def test_a_container_is_known_by_its_marks(
    machine: Path, file: str, text: str, container: str
) -> None:
    write(machine, file, text)
    assert read_host(machine).container == container


def test_wsl_is_known_by_its_kernel(machine: Path) -> None:
    write(machine, "proc/version", "Linux version 5.15.153.1-microsoft-standard-WSL2\n")
    assert read_host(machine).wsl


def test_a_link_has_a_generation_and_a_width_now_and_at_most(machine: Path) -> None:
    assert read_link(machine, BUS) == Link(1, 5, 8, 16)


@pytest.mark.parametrize(
    ("processors", "node", "expected"),
    [
        ("0-3,8", 0, NodePath(0, (0,), 10)),
        ("0-3,8", 1, NodePath(1, (0,), 21)),
        ("0-15", 1, NodePath(1, (0, 1), 10)),
        ("5", 1, NodePath(1, (1,), 10)),
    ],
)
def test_the_path_to_a_node_is_from_where_this_process_may_run(
    machine: Path, processors: str, node: int, expected: NodePath
) -> None:
    write(machine, "proc/self/status", f"Cpus_allowed_list:\t{processors}\n")
    assert read_node_path(machine, node) == expected


# ---- from facts to findings

HOST = Host(
    memory_bytes=64 * GIB,
    available_bytes=32 * GIB,
    memlock_bytes=None,
    cgroup_bytes=None,
    shm_bytes=32 * GIB,
    shm_free_bytes=32 * GIB,
    huge_pages=(HugePages(2 << 20, 512, 512),),
    transparent_huge_pages="madvise",
    shmem_huge_pages="advise",
    wsl=False,
    container="",
    driver_release="580.105.08",
)
CUDA = Cuda("usable", 0, "CUDA runtime 13.0, 1 device", "libcudart.so.13", "wheel", 13000, 13000, 1)
ABILITIES: dict[str, Any] = {
    "pci_bus_id": BUS,
    "compute_capability": "9.0",
    "copy_engines": 3,
    "numa_node": 0,
    "integrated": False,
    "exclusive_process": False,
    "concurrent_kernels": True,
    "unified_addressing": True,
    "stream_priorities": True,
    "pageable_memory_access": False,
    "uses_host_page_tables": False,
    "can_use_host_pointer": True,
    "host_register": True,
    "host_register_read_only": True,
    "mps": False,
}
DEVICE = CudaDevice(
    name="cuda:0",
    facts=ABILITIES,
    link=Link(5, 5, 16, 16),
    node_path=NodePath(0, (0,), 10),
    opened=True,
    copy_path="batch, 8 arguments",
    max_descriptors=4096,
    memory_bytes=80 * GIB,
)
WELL = Facts(CUDA, (DEVICE,), HOST, {})


def with_device(**changes: Any) -> Facts:
    abilities = {key: changes.pop(key) for key in list(changes) if key in ABILITIES}
    return replace(WELL, devices=(replace(DEVICE, facts=ABILITIES | abilities, **changes),))


def with_host(**changes: Any) -> Facts:
    return replace(WELL, host=replace(HOST, **changes))


def without(usability: str, error: int = 0, **host: Any) -> Facts:
    cuda = Cuda(usability, error, "the sentence of the core")
    return Facts(cuda, (), replace(HOST, **host), {})


def test_a_machine_where_all_is_well_has_one_finding() -> None:
    assert check(WELL) == [Finding("good", "cuda", "CUDA runtime 13.0, 1 device")]
    assert WELL.usable


@pytest.mark.parametrize(
    "usability", ["no_runtime", "no_driver", "no_device", "driver_too_old", "broken"]
)
def test_the_first_finding_is_why_cuda_cannot_be_used(usability: str) -> None:
    facts = without(usability)
    assert check(facts)[0] == Finding("bad", "cuda", "the sentence of the core")
    assert not facts.usable


FINDINGS = {
    "the driver's library is missing": (
        without("no_driver", 35, container="docker"),
        "note",
        "module 580.105.08, but the container does not see libcuda.so.1",
    ),
    "the same outside a container": (
        without("no_driver", 35),
        "note",
        "this process does not see libcuda.so.1",
    ),
    "a container without a module": (
        without("no_driver", 35, driver_release="", container="podman"),
        "note",
        "a container (podman)",
    ),
    "WSL without a driver": (without("no_driver", 35, wsl=True), "note", "/usr/lib/wsl/lib"),
    "a runtime without batches": (
        replace(WELL, cuda=replace(CUDA, runtime_version=12040)),
        "warning",
        "runtime 12.4 has no batched copies",
    ),
    "a device that cannot be opened": (
        with_device(opened=False, problem="out of memory"),
        "bad",
        "out of memory",
    ),
    "an exclusive device in use": (
        with_device(opened=False, problem="in use", exclusive_process=True),
        "note",
        "one process use it at a time",
    ),
    "no batches": (
        with_device(copy_path="one by one: batches are switched off"),
        "warning",
        "copies go out one by one: batches are switched off",
    ),
    "no copy engine": (with_device(copy_engines=0), "warning", "no copy engine"),
    "one copy engine": (with_device(copy_engines=1), "note", "take turns"),
    "no unified addressing": (with_device(unified_addressing=False), "warning", "unified"),
    "no pinning": (with_device(host_register=False), "warning", "staged"),
    "no read-only pinning": (with_device(host_register_read_only=False), "note", "read-only"),
    "an integrated device": (with_device(integrated=True), "note", "share one memory"),
    "page tables of the host": (with_device(uses_host_page_tables=True), "note", "page tables"),
    "MPS": (with_device(mps=True), "note", "MPS is on"),
    "a narrow link": (with_device(link=Link(5, 5, 8, 16)), "warning", "8 of 16 lanes"),
    "a slow link": (with_device(link=Link(1, 5, 16, 16)), "note", "generation 1 of 5 now"),
    "another node": (
        with_device(node_path=NodePath(1, (0,), 21)),
        "warning",
        "runs on node 0, at distance 21 (10 is no distance), and node 1 is the closest",
    ),
    "several nodes": (
        with_device(node_path=NodePath(1, (0, 1), 10)),
        "note",
        "may run on nodes 0, 1, and node 1 is the closest",
    ),
    "WSL": (with_host(wsl=True), "warning", "this is WSL"),
    "a limit of locked memory": (with_host(memlock_bytes=8 << 20), "note", "limited to 8 MiB"),
    "a control group": (with_host(cgroup_bytes=16 * GIB), "note", "may use 16 GiB"),
    "no transparent huge pages": (
        with_host(transparent_huge_pages="never"),
        "note",
        "transparent huge pages are off",
    ),
    "none for shared memory": (
        with_host(shmem_huge_pages="never"),
        "note",
        "shared memory gets no transparent huge pages",
    ),
    "no huge pages reserved": (
        with_host(huge_pages=(HugePages(2 << 20, 0, 0),)),
        "note",
        "no huge pages are reserved",
    ),
}


TWO_FINDINGS = ("an exclusive device in use", "WSL without a driver")


@pytest.mark.parametrize("what", FINDINGS)
def test_what_is_worth_knowing_is_found_and_nothing_else(what: str) -> None:
    facts, level, words = FINDINGS[what]
    first, *rest = check(facts)
    found = [finding for finding in rest if words in finding.text]
    assert [finding.level for finding in found] == [level]
    assert len(rest) == (2 if what in TWO_FINDINGS else 1), rest
    assert first.about == "cuda"


def test_what_is_not_known_is_no_finding() -> None:
    unknown = dict.fromkeys(ABILITIES, None) | {"pci_bus_id": ""}
    device = replace(DEVICE, facts=unknown, link=Link(None, None, None, None), node_path=None)
    nothing = Host(None, None, None, None, None, None, (), "", "", False, "", "")
    assert len(check(replace(WELL, devices=(device,), host=nothing))) == 1


def test_a_limit_above_the_memory_is_none() -> None:
    assert check(with_host(cgroup_bytes=128 * GIB)) == check(WELL)


def test_one_device_that_can_be_opened_is_enough() -> None:
    broken = replace(DEVICE, name="cuda:1", opened=False, problem="in use")
    assert replace(WELL, devices=(DEVICE, broken)).usable
    assert not replace(WELL, devices=(broken,)).usable


def test_versions_and_sizes_read_well() -> None:
    assert [version_text(version) for version in (12080, 13000, 13050)] == ["12.8", "13.0", "13.5"]
    assert [size_text(size) for size in (None, 0, 4096, 8 << 20, 3 * GIB // 2, 2**41)] == [
        "unlimited",
        "0 bytes",
        "4 KiB",
        "8 MiB",
        "1.5 GiB",
        "2 TiB",
    ]


# ---- looking


class FakeStatus:
    """As the core answers where there are two devices, of which one can be opened."""

    usability, absent, error, sentence = "usable", False, 0, "2 devices"
    runtime_path, runtime_found_by, runtime_version = "libcudart.so.13", "process", 13000
    driver_version, device_count = 13000, 2

    def device_facts(self, ordinal: int) -> dict[str, Any]:
        return ABILITIES | {"numa_node": ordinal}


class FakeDevice:
    def __init__(self) -> None:
        self.info = {
            "copy_path": "batch, 8 arguments",
            "max_descriptors": 4096,
            "memory_bytes": 80 * GIB,
        }


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_device(name: str) -> FakeDevice:
        if name == "cuda:1":
            raise kvmem.DeviceUnavailable("cuda:1: in use")
        return FakeDevice()

    monkeypatch.setattr(_cuda, "find", FakeStatus)
    monkeypatch.setattr(doctor_facts.kvmem, "open_device", open_device)


@pytest.mark.usefixtures("two_devices")
def test_each_device_is_opened_and_asked(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    facts = probe(machine)
    first, second = facts.devices
    assert (first.name, first.opened, first.copy_path) == ("cuda:0", True, "batch, 8 arguments")
    assert (first.max_descriptors, first.memory_bytes) == (4096, 80 * GIB)
    assert (second.name, second.opened, second.problem) == ("cuda:1", False, "cuda:1: in use")
    assert (first.link, first.node_path) == (Link(1, 5, 8, 16), NodePath(0, (0,), 10))
    assert second.node_path == NodePath(1, (0,), 21)
    assert facts.settings["CUDA_VISIBLE_DEVICES"] == "3,4"
    # What is free changes with whatever else is written there.
    assert facts.host == replace(read_host(machine), shm_free_bytes=facts.host.shm_free_bytes)
    assert facts.usable


@pytest.mark.parametrize("name", ["KVMEM_CUDA_BATCH", "KVMEM_CUDA_MAX_DESCRIPTORS"])
def test_a_setting_that_is_none_is_refused_before_looking(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "x")
    with pytest.raises(kvmem.InvalidArgument, match=name):
        probe()


# ---- the command


def printed(facts: Facts, width: int = 80) -> str:
    console = pytest.importorskip("rich.console", reason="tables need the extra 'cli'")
    table = pytest.importorskip("kvmem.doctor.table")
    file = io.StringIO()
    table.show(facts, check(facts), console.Console(file=file, width=width, markup=False))
    return file.getvalue()


def invoke(*arguments: str, **settings: str) -> Any:
    testing = pytest.importorskip("typer.testing", reason="the command needs the extra 'cli'")
    from kvmem.cli import make_app

    return testing.CliRunner().invoke(
        make_app(), ["doctor", *arguments], env={"COLUMNS": "100", **settings}
    )


def test_the_table_names_the_verdict_the_devices_and_the_findings() -> None:
    other = replace(
        DEVICE, name="cuda:1", opened=False, problem="in use", node_path=NodePath(1, (0,), 21)
    )
    text = printed(replace(WELL, devices=(DEVICE, other)), width=120)
    assert text.startswith("CUDA is usable: CUDA runtime 13.0, 1 device")
    for words in (
        "13.0, libcudart.so.13 (in a wheel)",
        "for CUDA 13.0, release 580.105.08",
        "cuda:0",
        "cuda:1",
        "batch, 8 arguments",
        "generation 5 x16",
        "node 0, as this process",
        "this process is elsewhere, distance 21",
        "bad, cuda:1",
        "in use",
        "80 GiB",
    ):
        assert words in text


def test_the_table_fits_into_80_columns_and_shows_names_as_they_are() -> None:
    cuda = replace(CUDA, runtime_path="/opt/[bold]/" + 10 * "a long folder/" + "libcudart.so.13")
    text = printed(replace(WELL, cuda=cuda))
    assert max(map(len, text.splitlines())) <= 80
    assert "[bold]" in text


def test_the_command_answers_with_its_status_and_one_object() -> None:
    result = invoke("--json")
    found = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == (0 if found["usable"] else 1)
    assert found["findings"][0]["text"] == found["cuda"]["sentence"]
    assert set(found) == {"usable", "cuda", "devices", "host", "settings", "findings"}
    assert invoke().exit_code == result.exit_code


@pytest.mark.usefixtures("two_devices")
def test_the_status_is_0_where_a_device_can_be_used() -> None:
    result = invoke("--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["usable"] is True
    assert "CUDA is usable" in invoke().stdout


def test_a_setting_that_is_none_cannot_run() -> None:
    result = invoke(KVMEM_CUDA_BATCH="maybe")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "KVMEM_CUDA_BATCH is 'maybe'" in result.stderr


def test_the_help_has_an_example() -> None:
    assert "Example: kvmem doctor" in " ".join(invoke("--help").stdout.split())
