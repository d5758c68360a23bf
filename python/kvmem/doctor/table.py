"""The doctor's report for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvmem.doctor.checks import Finding, size_text, version_text
from kvmem.doctor.facts import Cuda, CudaDevice, Facts
from kvmem.doctor.host import Host, Link, NodePath

_DEVICES_ABREAST = 3
_STYLES = {"good": "green", "note": "cyan", "warning": "yellow", "bad": "bold red"}
_FOUND_BY = {
    "KVMEM_CUDART_PATH": "named in KVMEM_CUDART_PATH",
    "process": "loaded by this process already",
    "wheel": "in a wheel",
    "system": "found by the system's loader",
}


def show(facts: Facts, findings: Sequence[Finding], console: Console) -> None:
    """Print the verdict, what was found, and what is worth knowing about it."""
    verdict, *rest = findings
    word = "usable" if facts.usable else "not usable"
    style = _STYLES["good" if facts.usable else "bad"]
    console.print(Text.assemble(("CUDA is ", "bold"), (word, style), f": {verdict.text}"))
    console.print(_two_columns("cuda", _cuda_rows(facts.cuda, facts.host, facts.settings)))
    for first in range(0, len(facts.devices), _DEVICES_ABREAST):
        console.print(_device_table(facts.devices[first : first + _DEVICES_ABREAST]))
    console.print(_two_columns("host", _host_rows(facts.host)))
    if rest:
        console.print(_finding_table(rest))


def _finding_table(findings: Sequence[Finding]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column("worth knowing", no_wrap=True)
    table.add_column("", overflow="fold")
    for finding in findings:
        table.add_row(
            Text(f"{finding.level}, {finding.about}", _STYLES[finding.level]), finding.text
        )
    return table


def _two_columns(title: str, rows: Iterator[tuple[str, str]]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.add_column(title, no_wrap=True)
    table.add_column("", overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def _cuda_rows(cuda: Cuda, host: Host, settings: dict[str, str]) -> Iterator[tuple[str, str]]:
    if cuda.runtime_path:
        found = _FOUND_BY.get(cuda.runtime_found_by, cuda.runtime_found_by)
        yield "runtime", f"{version_text(cuda.runtime_version)}, {cuda.runtime_path} ({found})"
    else:
        yield "runtime", "none"
    driver = f"for CUDA {version_text(cuda.driver_version)}" if cuda.driver_version else "none"
    yield "driver", driver + (f", release {host.driver_release}" if host.driver_release else "")
    yield from settings.items()


def _device_table(devices: Sequence[CudaDevice]) -> Table:
    """One column a device: there are more rows than devices."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("device", no_wrap=True)
    for device in devices:
        table.add_column(device.name, overflow="fold")
    columns = [dict(_device_rows(device)) for device in devices]
    for name in columns[0]:
        table.add_row(name, *(column[name] for column in columns))
    return table


def _device_rows(device: CudaDevice) -> Iterator[tuple[str, str]]:
    facts = device.facts
    yield "opened", "yes" if device.opened else "no"
    yield "copies", device.copy_path or "unknown"
    yield "at most", f"{device.max_descriptors} a submission" if device.opened else "unknown"
    yield "memory", size_text(device.memory_bytes) if device.opened else "unknown"
    yield "PCI", facts["pci_bus_id"] or "unknown"
    yield "PCIe link", _link_text(device.link)
    yield "NUMA", _path_text(device.node_path)
    yield "compute capability", _shown(facts["compute_capability"])
    yield "copy engines", _shown(facts["copy_engines"])
    yield "concurrent kernels", _shown(facts["concurrent_kernels"])
    yield "unified addressing", _shown(facts["unified_addressing"])
    yield "pinned pointers as they are", _shown(facts["can_use_host_pointer"])
    yield "pins host memory", _shown(facts["host_register"])
    yield "pins read-only memory", _shown(facts["host_register_read_only"])
    yield "integrated", _shown(facts["integrated"])
    yield "MPS", _shown(facts["mps"])


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _link_text(link: Link) -> str:
    if link.generation is None or link.width is None:
        return "unknown"
    text = f"generation {link.generation} x{link.width}"
    most = f"generation {link.generation_most} x{link.width_most}"
    return text if text == most else f"{text}, at most {most}"


def _path_text(path: NodePath | None) -> str:
    if path is None:
        return "unknown"
    if path.node in path.here:
        return f"node {path.node}" + (", as this process" if path.is_same else ", and others")
    far = "" if path.distance is None else f", distance {path.distance}"
    return f"node {path.node}; this process is elsewhere{far}"


def _host_rows(host: Host) -> Iterator[tuple[str, str]]:
    memory = _size(host.memory_bytes)
    yield "memory", f"{memory}, {_size(host.available_bytes)} available"
    yield "limit of the control group", size_text(host.cgroup_bytes)
    yield "limit of locked memory", size_text(host.memlock_bytes)
    yield "/dev/shm", f"{_size(host.shm_bytes)}, {_size(host.shm_free_bytes)} free"
    pages = [
        f"{each.total} of {size_text(each.page_bytes)}, {each.free} free"
        for each in host.huge_pages
    ]
    yield "reserved huge pages", "; ".join(pages) or "none"
    yield "transparent huge pages", host.transparent_huge_pages or "unknown"
    yield "the same of shared memory", host.shmem_huge_pages or "unknown"
    if host.wsl:
        yield "WSL", "yes"
    if host.container:
        yield "container", host.container


def _size(size: int | None) -> str:
    return "unknown" if size is None else size_text(size)
