"""Ways of other projects to bring blocks to disk and back. peers.md says how to install them.

Each moves every block of a buffer once with `write` or `read`, with at most `depth` calls at a
time, past the page cache. A write makes files anew, as these projects do; `clear` removes them.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from peers import quiet


class DiskPeer(Protocol):
    def write(self) -> None: ...
    def read(self) -> None: ...
    def clear(self) -> None: ...


def blocks_of(buffer: Any, block_bytes: int) -> list[memoryview]:
    whole = memoryview(buffer)
    return [whole[at : at + block_bytes] for at in range(0, len(whole), block_bytes)]


class VllmFsIo:
    """vllm.fs_io_C, a file a block, from as many threads as calls may be open."""

    def __init__(self, folder: Path, buffer: Any, block_bytes: int, depth: int) -> None:
        with quiet():
            from vllm import fs_io_C
        self.io = fs_io_C
        self.blocks = blocks_of(buffer, block_bytes)
        self.folder = folder
        self.names = [str(folder / f"{number}.kv") for number in range(len(self.blocks))]
        self.threads = ThreadPoolExecutor(depth)
        self.clear()

    def write(self) -> None:
        def store(name: str, block: memoryview) -> None:
            self.io.batch_store_block([name + ".tmp"], [name], [block], True)

        list(self.threads.map(store, self.names, self.blocks))

    def read(self) -> None:
        def load(name: str, block: memoryview) -> None:
            self.io.batch_load_block([name], [block], True)

        list(self.threads.map(load, self.names, self.blocks))

    def clear(self) -> None:
        remake(self.folder)


class LmcacheFsNative:
    """The client of LMCache's `fs_native` adapter, with O_DIRECT and `depth` workers."""

    def __init__(self, folder: Path, buffer: Any, block_bytes: int, depth: int) -> None:
        with quiet():
            from lmcache.lmcache_fs import LMCacheFSClient
        self.folder = folder
        self.clear()
        self.client = LMCacheFSClient(str(folder), depth, "", True, 0)
        self.blocks = blocks_of(buffer, block_bytes)
        self.names = [f"model@0@{number:016x}@0" for number in range(len(self.blocks))]

    def write(self) -> None:
        self.client.submit_batch_set(self.names, self.blocks)
        self._wait()

    def read(self) -> None:
        self.client.submit_batch_get(self.names, self.blocks)
        self._wait()

    def _wait(self) -> None:
        while not (ended := self.client.drain_completions()):
            select.select([self.client.event_fd()], [], [])
        for _, well, *rest in ended:
            if not well:
                raise RuntimeError(f"LMCache: {rest}")

    def clear(self) -> None:
        remake(self.folder)


class DeepSpeedAio:
    """DeepSpeed's aio_handle: one call for all blocks, cut into blocks, `depth` of them open.

    It has a locked buffer of its own: from others it copies first.
    """

    def __init__(self, folder: Path, buffer: Any, block_bytes: int, depth: int) -> None:
        with quiet():
            import torch
            from deepspeed.ops.op_builder import AsyncIOBuilder

            made = AsyncIOBuilder().load(verbose=False)
        self.handle = made.aio_handle(
            block_size=block_bytes,
            queue_depth=depth,
            single_submit=False,
            overlap_events=True,
            intra_op_parallelism=1,
        )
        ours = torch.frombuffer(buffer, dtype=torch.uint8)
        self.tensor = self.handle.new_cpu_locked_tensor(ours.numel(), ours)
        self.tensor.copy_(ours)
        remake(folder)
        self.file = str(folder / "blocks")

    def write(self) -> None:
        self.handle.sync_pwrite(self.tensor, self.file)

    def read(self) -> None:
        self.handle.sync_pread(self.tensor, self.file)

    def clear(self) -> None:  # it writes into the file that is there
        pass


class Fio:
    """fio, in a process of its own, which says how fast it was."""

    def __init__(self, folder: Path, nbytes: int, block_bytes: int, depth: int, engine: str):
        if shutil.which("fio") is None:
            raise ModuleNotFoundError(name="fio")
        threads, queue = (depth, 1) if engine == "psync" else (1, depth)
        remake(folder)
        self.command = [
            *("fio", "--name=kvmem", f"--filename={folder / 'blocks'}", "--output-format=json"),
            *("--direct=1", "--thread", "--group_reporting", "--overwrite=1", "--norandommap"),
            *(f"--size={nbytes}", f"--io_size={nbytes // threads}", f"--bs={block_bytes}"),
            *(f"--ioengine={engine}", f"--numjobs={threads}", f"--iodepth={queue}"),
        ]
        self.nbytes = nbytes
        self.last_seconds = 0.0

    def seconds(self) -> float:
        return self.last_seconds

    def write(self) -> None:
        self._run("write")

    def read(self) -> None:
        self._run("read")

    def _run(self, what: str) -> None:
        ended = subprocess.run(
            [*self.command, f"--rw=rand{what}"], capture_output=True, check=True, text=True
        )
        job = json.loads(ended.stdout)["jobs"][0]
        self.last_seconds = self.nbytes / job[what]["bw_bytes"]

    def clear(self) -> None:
        pass


def remake(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.sync()


PEERS: dict[str, Callable[[Path, Any, int, int], DiskPeer]] = {
    "vLLM fs_io": VllmFsIo,
    "LMCache fs_native": LmcacheFsNative,
    "DeepSpeed aio": DeepSpeedAio,
    "fio psync": lambda folder, buffer, block_bytes, depth: Fio(
        folder, len(memoryview(buffer)), block_bytes, depth, "psync"
    ),
    "fio io_uring": lambda folder, buffer, block_bytes, depth: Fio(
        folder, len(memoryview(buffer)), block_bytes, depth, "io_uring"
    ),
}


ANY_MEMORY = ("vLLM fs_io", "LMCache fs_native")


def installed(
    folder: Path, buffer: Any, block_bytes: int, depth: int, names: Iterable[str] = tuple(PEERS)
) -> dict[str, DiskPeer | None]:
    """These peers; None for one that cannot be used, and why behind its name."""
    found: dict[str, DiskPeer | None] = {}
    for name in names:
        place = folder / name.replace(" ", "-")
        try:
            found[name] = PEERS[name](place, buffer, block_bytes, depth)
        except ImportError as error:
            found[f"{name}: no {error.name}"] = None
    return found
