"""Everything that `kvmem doctor` looks at."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import kvmem
from kvmem import _core, _cuda
from kvmem.devices import _cuda_options
from kvmem.doctor.host import Host, Link, NodePath, read_host, read_link, read_node_path

SETTINGS = (
    "KVMEM_CUDART_PATH",
    _cuda.BATCH,
    _cuda.MAX_DESCRIPTORS,
    _cuda.NO_BATCH_DRIVERS,
    "CUDA_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
)
"""Of the environment; those that are not set are left out."""


@dataclass(frozen=True)
class Cuda:
    """Whether CUDA can be used, and with what. Versions as CUDA counts them: 12080 is 12.8.

    usability: "usable", "no_runtime", "no_driver", "no_device", "driver_too_old" or "broken".
    error: what counting the devices gave. sentence: what is the matter, and what helps.
    runtime_found_by: "KVMEM_CUDART_PATH", "process", "wheel" or "system".
    """

    usability: str
    error: int
    sentence: str
    runtime_path: str = ""
    runtime_found_by: str = ""
    runtime_version: int = 0
    driver_version: int = 0
    device_count: int = 0


@dataclass(frozen=True)
class CudaDevice:
    """One device: what can be asked without a context, and how opening it went.

    opened: whether kvmem could open it; problem: why not.
    copy_path: how copies go out: in batches, or one by one and why.
    """

    name: str
    facts: dict[str, Any]
    link: Link
    node_path: NodePath | None
    opened: bool
    problem: str = ""
    copy_path: str = ""
    max_descriptors: int = 0
    memory_bytes: int = 0


@dataclass(frozen=True)
class Facts:
    """What was found."""

    cuda: Cuda
    devices: tuple[CudaDevice, ...]
    host: Host
    settings: dict[str, str]

    @property
    def usable(self) -> bool:
        """Whether kvmem can work on a CUDA device here."""
        return any(device.opened for device in self.devices)

    def to_json(self) -> dict[str, Any]:
        """Everything in plain values."""
        return {"usable": self.usable, **asdict(self)}


def probe(root: Path = Path("/")) -> Facts:
    """Look. Opens each device, which makes its context. Raises InvalidArgument for a setting.

    root: where the files of the kernel are; a made-up tree in tests.
    """
    _cuda_options({"batch": None, "max_descriptors": None})
    devices: tuple[CudaDevice, ...] = ()
    try:
        status = _cuda.find()
    except kvmem.DeviceUnavailable as error:  # a KVMEM_CUDART_PATH that is none
        cuda = Cuda("no_runtime", 0, str(error))
    else:
        cuda = _cuda_of(status)
        if status.usability == "usable":
            devices = tuple(
                _probe_device(root, status, ordinal) for ordinal in range(status.device_count)
            )
    settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
    return Facts(cuda, devices, read_host(root), settings)


def _cuda_of(status: _core._CudaStatus) -> Cuda:
    return Cuda(
        usability=status.usability,
        error=status.error,
        sentence=status.sentence,
        runtime_path=status.runtime_path,
        runtime_found_by=status.runtime_found_by,
        runtime_version=status.runtime_version,
        driver_version=status.driver_version,
        device_count=status.device_count,
    )


def _probe_device(root: Path, status: _core._CudaStatus, ordinal: int) -> CudaDevice:
    name = f"cuda:{ordinal}"
    facts = status.device_facts(ordinal)
    node = facts["numa_node"]
    link = read_link(root, facts["pci_bus_id"])
    path = None if node is None else read_node_path(root, node)
    try:
        info = kvmem.open_device(name).info
    except kvmem.KvmemError as error:
        return CudaDevice(name, dict(facts), link, path, opened=False, problem=str(error))
    return CudaDevice(
        name,
        dict(facts),
        link,
        path,
        opened=True,
        copy_path=info["copy_path"],
        max_descriptors=info["max_descriptors"],
        memory_bytes=info["memory_bytes"],
    )
