"""Look-ups of other projects that hold what they find. peers.md says how to install them.

Each knows every key that it was made with; hold(batch) finds the keys of one batch and holds them,
and lets them go again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from peers import quiet

GROUP = 10_000  # keys stored at a time


class IndexPeer(Protocol):
    def hold(self, batch: Any) -> None: ...
    def batch(self, keys: Sequence[bytes]) -> Any: ...  # as the project wants it
    def close(self) -> None: ...


class VllmOffloadingManager:
    """vllm.v1.kv_offload.cpu.manager.CPUOffloadingManager: prepare_load and complete_load."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with quiet():
            from vllm.v1.kv_offload.base import ReqContext, make_offload_key
            from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
        self.key, self.request = make_offload_key, ReqContext
        self.manager = CPUOffloadingManager(num_chunks=len(keys), cache_policy="lru")
        for first in range(0, len(keys), GROUP):
            some = self.batch(keys[first : first + GROUP])
            request = self.request(req_id="a request")
            self.manager.prepare_store(some, request)
            self.manager.complete_store(some, request)

    def batch(self, keys: Sequence[bytes]) -> Any:
        return [self.key(key, 0) for key in keys]

    def hold(self, batch: Any) -> None:
        request = self.request(req_id="a request")  # a new one: it collects what it has seen
        self.manager.prepare_load(batch, request)
        self.manager.complete_load(batch, request)

    def close(self) -> None:
        pass


class LmcacheL1:
    """lmcache.v1.distributed.l1_manager.L1Manager: reserve_read and finish_read, 4 KiB objects."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")
        os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
        with quiet():
            import torch
            from lmcache.v1.distributed import api, config
            from lmcache.v1.distributed.l1_manager import L1Manager

            memory = config.L1MemoryManagerConfig(
                size_in_bytes=(len(keys) + 64) * 4096, use_lazy=False, shm_name=""
            )
            self.manager = L1Manager(config.L1ManagerConfig(memory))
        self.key = api.ObjectKey
        layout = api.MemoryLayoutDesc([torch.Size([4096])], [torch.uint8])
        for first in range(0, len(keys), GROUP):
            some = self.batch(keys[first : first + GROUP])
            self.manager.reserve_write(some, [False] * len(some), layout)
            self.manager.finish_write(some)
        one = self.batch(keys[-1:])
        if self.manager.reserve_read(one)[one[0]][1] is None:
            raise RuntimeError("LMCache did not keep what it was given")
        self.manager.finish_read(one)

    def batch(self, keys: Sequence[bytes]) -> Any:
        return [self.key(chunk_hash=key, model_name="model", kv_rank=0) for key in keys]

    def hold(self, batch: Any) -> None:
        self.manager.reserve_read(batch)
        self.manager.finish_read(batch)

    def close(self) -> None:
        self.manager.clear()
        self.manager.close()


PEERS: dict[str, Callable[[Sequence[bytes]], IndexPeer]] = {
    "vLLM CPUOffloadingManager": VllmOffloadingManager,
    "LMCache L1Manager": LmcacheL1,
}


def installed(keys: Sequence[bytes]) -> dict[str, IndexPeer | None]:
    """All peers; None for one that cannot be imported, and why behind its name."""
    found: dict[str, IndexPeer | None] = {}
    for name, make in PEERS.items():
        try:
            found[name] = make(keys)
        except ImportError as error:
            found[f"{name}: no {error.name}"] = None
    return found
