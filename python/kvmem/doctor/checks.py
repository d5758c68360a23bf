"""From facts to findings: what is the matter, and what to do about it. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvmem.doctor.facts import CudaDevice, Facts
from kvmem.doctor.host import Host

_BATCH_SINCE = 12080


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing.

    level: "good"; "note", as it may be; "warning", it costs speed or memory; "bad", it cannot be
        used.
    about: "cuda", "cuda:0", ... or "host".
    """

    level: Literal["good", "note", "warning", "bad"]
    about: str
    text: str


def check(facts: Facts) -> list[Finding]:
    """List what is worth knowing; first whether CUDA can be used."""
    found = [*_check_cuda(facts)]
    for device in facts.devices:
        found += _check_opening(device)
        found += _check_abilities(device)
        found += _check_place(device)
    return [*found, *_check_limits(facts.host), *_check_pages(facts.host)]


def version_text(version: int) -> str:
    """Show a version as CUDA counts them: 12.8 of 12080."""
    return f"{version // 1000}.{version % 1000 // 10}"


def size_text(size: int | None) -> str:
    """Show a size; None is no limit."""
    if size is None:
        return "unlimited"
    for unit, bytes_of_unit in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_of_unit:
            return f"{size / bytes_of_unit:,.1f}".removesuffix(".0") + f" {unit}"
    return f"{size} bytes"


# ---- CUDA


def _check_cuda(facts: Facts) -> Iterator[Finding]:
    cuda, host = facts.cuda, facts.host
    yield Finding("good" if cuda.usability == "usable" else "bad", "cuda", cuda.sentence)
    if cuda.usability == "no_driver":
        if host.wsl:
            text = (
                "this is WSL: the driver is that of Windows, and its library is in"
                " /usr/lib/wsl/lib, where the loader must find it"
            )
            yield Finding("note", "cuda", text)
        elif host.driver_release:
            where = "the container" if host.container else "this process"
            text = (
                f"the kernel has the NVIDIA module {host.driver_release}, but {where} does not see"
                " libcuda.so.1: start the container with its GPUs (docker run --gpus all), or"
                " install the driver's libraries of that release"
            )
            yield Finding("note", "cuda", text)
        elif host.container:
            text = (
                f"this is a container ({host.container}): if the machine has a GPU, start it with"
                " its GPUs (docker run --gpus all)"
            )
            yield Finding("note", "cuda", text)
    if cuda.usability == "usable" and cuda.runtime_version < _BATCH_SINCE:
        text = (
            f"runtime {version_text(cuda.runtime_version)} has no batched copies, which came with"
            " 12.8: copies go out one by one, at some microseconds each"
        )
        yield Finding("warning", "cuda", text)


# ---- a device


def _check_opening(device: CudaDevice) -> Iterator[Finding]:
    if not device.opened:
        yield Finding("bad", device.name, device.problem)
        if device.facts["exclusive_process"]:
            text = "its compute mode lets one process use it at a time (nvidia-smi -c DEFAULT)"
            yield Finding("note", device.name, text)
    elif not device.copy_path.startswith("batch"):
        text = f"copies go out {device.copy_path}; small segments are slow that way"
        yield Finding("warning", device.name, text)


def _check_abilities(device: CudaDevice) -> Iterator[Finding]:
    facts = device.facts
    if facts["copy_engines"] == 0:
        yield Finding("warning", device.name, "no copy engine: copies do not overlap with kernels")
    elif facts["copy_engines"] == 1:
        text = "one copy engine: offloads and restores take turns"
        yield Finding("note", device.name, text)
    if facts["unified_addressing"] is False:
        yield Finding("warning", device.name, "no unified addressing: kvmem is not made for that")
    if facts["host_register"] is False:
        text = "memory cannot be pinned for it: transfers are staged, at the cost of one more copy"
        yield Finding("warning", device.name, text)
    elif facts["host_register_read_only"] is False:
        text = "read-only memory cannot be pinned for it: restores from such are staged"
        yield Finding("note", device.name, text)
    if facts["integrated"]:
        text = "device and host share one memory: offloading frees none of it"
        yield Finding("note", device.name, text)
    if facts["uses_host_page_tables"]:
        text = "it reads host memory through the host's page tables: pinning only makes it resident"
        yield Finding("note", device.name, text)
    if facts["mps"]:
        text = "MPS is on: an error of one client can lose the device for all of them"
        yield Finding("note", device.name, text)


def _check_place(device: CudaDevice) -> Iterator[Finding]:
    link, path = device.link, device.node_path
    if link.width and link.width_most and link.width < link.width_most:
        text = (
            f"its PCIe link has {link.width} of {link.width_most} lanes: see which slot it is in,"
            " and what it shares"
        )
        yield Finding("warning", device.name, text)
    if link.generation and link.generation_most and link.generation < link.generation_most:
        text = (
            f"its PCIe link is at generation {link.generation} of {link.generation_most} now: an"
            " idle GPU lowers it, so look again under load"
        )
        yield Finding("note", device.name, text)
    if path is None or path.is_same or not path.here:
        return
    bind = f"numactl --cpunodebind={path.node} --membind={path.node}"
    if path.node in path.here:
        text = (
            f"this process may run on nodes {_listed(path.here)}, and node {path.node} is the"
            f" closest to the device: give pools numa_node={path.node}, or start it with {bind}"
        )
        yield Finding("note", device.name, text)
    else:
        far = "" if path.distance is None else f", at distance {path.distance} (10 is no distance)"
        text = (
            f"this process runs on node {_listed(path.here)}{far}, and node {path.node} is the"
            f" closest to the device: start it with {bind}"
        )
        yield Finding("warning", device.name, text)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


# ---- the host


def _check_limits(host: Host) -> Iterator[Finding]:
    if host.wsl:
        text = (
            "this is WSL: how much memory can be pinned is limited, so keep pools small, and see"
            " docs/CUDA.md"
        )
        yield Finding("warning", "host", text)
    if host.memlock_bytes is not None:
        text = (
            f"locked memory is limited to {size_text(host.memlock_bytes)}. Pinning for CUDA does"
            ' not count against that; pin="required" on the host device, which uses mlock, does'
            " (ulimit -l)"
        )
        yield Finding("note", "host", text)
    if host.cgroup_bytes is not None and host.cgroup_bytes < (host.memory_bytes or 0):
        text = (
            f"the control group may use {size_text(host.cgroup_bytes)} of memory, and pools count"
            " against that"
        )
        yield Finding("note", "host", text)


def _check_pages(host: Host) -> Iterator[Finding]:
    if host.transparent_huge_pages == "never":
        text = (
            "transparent huge pages are off: making and pinning a pool takes longer"
            " (echo madvise > /sys/kernel/mm/transparent_hugepage/enabled)"
        )
        yield Finding("note", "host", text)
    if host.shmem_huge_pages in ("never", "deny"):
        text = (
            "shared memory gets no transparent huge pages: pools with shared=True take longer to"
            " make (echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled)"
        )
        yield Finding("note", "host", text)
    if host.huge_pages and not any(each.total for each in host.huge_pages):
        text = (
            'no huge pages are reserved: hugepages="required" needs some (sysctl vm.nr_hugepages)'
        )
        yield Finding("note", "host", text)
