"""What the kernel says of this machine and of the limits of this process.

Everything is read from files below a root folder, so that a made-up tree stands for a machine. What
the kernel does not say is None, or empty.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvmem import _core

# Above this a control group of version 1 has no limit: it then says the largest page count.
_CGROUP_UNLIMITED = 1 << 60
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6, "128.0": 7}
_CONTAINER_MARKS = {"kubepods": "kubernetes", "docker": "docker", "libpod": "podman", "lxc": "lxc"}


@dataclass(frozen=True)
class HugePages:
    """Reserved huge pages of one size."""

    page_bytes: int
    total: int
    free: int


@dataclass(frozen=True)
class Link:
    """A PCIe link, now and at most. An idle GPU lowers its generation."""

    generation: int | None
    generation_most: int | None
    width: int | None
    width_most: int | None


@dataclass(frozen=True)
class NodePath:
    """How far this process is from the memory that is closest to a device.

    here: the nodes whose processors it may run on.
    distance: from the nearest of them, as the kernel counts: 10 is the node itself.
    """

    node: int
    here: tuple[int, ...]
    distance: int | None

    @property
    def is_same(self) -> bool:
        return self.here == (self.node,)


@dataclass(frozen=True)
class Host:
    """This machine, as far as it matters to host memory. Sizes in bytes; None: no limit."""

    memory_bytes: int | None
    available_bytes: int | None
    memlock_bytes: int | None
    cgroup_bytes: int | None
    shm_bytes: int | None
    shm_free_bytes: int | None
    huge_pages: tuple[HugePages, ...]
    transparent_huge_pages: str
    shmem_huge_pages: str
    wsl: bool
    container: str
    driver_release: str


def read_host(root: Path) -> Host:
    """Read the files."""
    memory = _text(root / "proc/meminfo")
    shm_bytes, shm_free_bytes = _space(root / "dev/shm")
    return Host(
        memory_bytes=_kib(memory, "MemTotal"),
        available_bytes=_kib(memory, "MemAvailable"),
        memlock_bytes=_memlock(root),
        cgroup_bytes=_cgroup(root),
        shm_bytes=shm_bytes,
        shm_free_bytes=shm_free_bytes,
        huge_pages=tuple(_huge_pages(root)),
        transparent_huge_pages=_chosen(root, "enabled"),
        shmem_huge_pages=_chosen(root, "shmem_enabled"),
        wsl="microsoft" in _text(root / "proc/version").lower(),
        container=_container(root),
        driver_release=_core._driver_release(f"{root}/"),
    )


def read_link(root: Path, pci_bus_id: str) -> Link:
    """Read the link of a PCI device."""
    folder = root / "sys/bus/pci/devices" / pci_bus_id

    def generation(name: str) -> int | None:
        return _GENERATIONS.get(_text(folder / name).partition(" ")[0].strip())

    return Link(
        generation("current_link_speed"),
        generation("max_link_speed"),
        _number(folder / "current_link_width"),
        _number(folder / "max_link_width"),
    )


def read_node_path(root: Path, node: int) -> NodePath:
    """See from which nodes this process would reach that one."""
    nodes = root / "sys/devices/system/node"
    allowed = _list(_field(_text(root / "proc/self/status"), "Cpus_allowed_list"))
    here = []
    for folder in nodes.glob("node[0-9]*"):
        if allowed & _list(_text(folder / "cpulist")):
            here.append(int(folder.name[4:]))
    # Of a node to each node that is online, in their order.
    distances = _text(nodes / f"node{node}/distance").split()
    online = sorted(_list(_text(nodes / "online")))
    by_node = dict(zip(online, map(int, distances), strict=False))
    reached = [by_node[each] for each in here if each in by_node]
    return NodePath(node, tuple(sorted(here)), min(reached, default=None))


# ---- files


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _field(text: str, name: str) -> str:
    lines = (line.partition(":") for line in text.splitlines())
    return next((value.strip() for key, _, value in lines if key.strip() == name), "")


def _kib(text: str, name: str) -> int | None:
    value = _field(text, name).split()
    return int(value[0]) * 1024 if value and value[0].isdigit() else None


def _list(text: str) -> set[int]:
    """Read "0-3,8": the form in which the kernel lists processors and nodes."""
    numbers: set[int] = set()
    for part in re.findall(r"(\d+)(?:-(\d+))?", text):
        numbers.update(range(int(part[0]), int(part[1] or part[0]) + 1))
    return numbers


# ---- limits


def _memlock(root: Path) -> int | None:
    found = re.search(r"^Max locked memory +(\d+)", _text(root / "proc/self/limits"), re.MULTILINE)
    return int(found[1]) if found else None


def _cgroup(root: Path) -> int | None:
    """Find the smallest limit of memory among the control groups that this process is in."""
    limits: list[int] = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            limits += _limits(root / "sys/fs/cgroup", group, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(root / "sys/fs/cgroup/memory", group, "memory.limit_in_bytes")
    return min((each for each in limits if each < _CGROUP_UNLIMITED), default=None)


def _limits(top: Path, group: str, file: str) -> Iterator[int]:
    """Yield the limits of a group and of those above it.

    In a container the group's path may be one of the host's; what is mounted is then its own.
    """
    folder = top / group.strip("/")
    for each in (folder, *folder.parents):
        value = _number(each / file)  # "max" is none
        if value is not None:
            yield value
        if each == top:
            return


def _space(folder: Path) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(folder)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _huge_pages(root: Path) -> Iterator[HugePages]:
    folders = (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB")
    sizes = {int(each.name.removeprefix("hugepages-").removesuffix("kB")): each for each in folders}
    for kib, folder in sorted(sizes.items()):
        total, free = _number(folder / "nr_hugepages"), _number(folder / "free_hugepages")
        yield HugePages(kib * 1024, total or 0, free or 0)


def _chosen(root: Path, file: str) -> str:
    """Give the word in brackets: always [madvise] never."""
    found = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage" / file))
    return found[1] if found else ""


def _container(root: Path) -> str:
    if (root / "run/.containerenv").exists():
        return "podman"
    groups = _text(root / "proc/1/cgroup") + _text(root / "proc/self/cgroup")
    for mark, name in _CONTAINER_MARKS.items():
        if mark in groups:
            return name
    return "docker" if (root / ".dockerenv").exists() else ""
