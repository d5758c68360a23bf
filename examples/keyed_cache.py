"""Store blocks by their keys, over host memory and a disk, and find them again after a restart."""

import hashlib
import tempfile

import numpy as np

import kvmem

manifest = kvmem.Manifest(  # everything that shapes the state: other state is a miss
    model="m-7b",
    weights="rev 1",
    dtype="float16",
    layers=4,
    kv_heads=8,
    head_size=64,
    block_tokens=16,
    groups={"full": "layer,kv,token,head,dim"},
    engine="my engine 1",
    engine_abi="1",
    rope={"theta": 10000.0},
    adapter=None,
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    cp_rank=0,
    cp_size=1,
)
device = kvmem.open_device("host")
layers = [np.zeros((64, 2, 16, 8, 64), np.float16) for _ in range(4)]  # a KV cache of 64 blocks
layout = kvmem.KVLayout.from_arrays(layers)
compute = device.stream()  # where the engine's kernels run
hashes = [hashlib.blake2b(b"tokens up to block %d" % i).digest() for i in range(8)]
keys = [manifest.key(each) for each in hashes]
folder = tempfile.TemporaryDirectory()
disk = kvmem.Disk(folder.name + "/kv", "64MiB")

manager = kvmem.Manager(device, layout, host_bytes="16MiB")
with kvmem.Cache(manager, manifest, disk=disk) as cache:
    for number, layer in enumerate(layers):
        layer[:6] = number + np.arange(6).reshape(6, 1, 1, 1, 1)  # "computed"
    cache.store(keys[:6], range(6), after=compute, owner="request 1").wait()

with kvmem.Cache(manager, manifest, disk=disk) as cache:  # as after a restart
    hit = cache.reserve(keys, owner="request 2")  # the longest prefix there is, held
    print("found:", len(hit), "of", len(keys), "keys, by tier:", hit.tiers)
    load = cache.load(hit, range(10, 16), after=compute)
    load.wait_on(compute)  # what is queued on `compute` from now on sees the blocks
    load.wait()
    print("loaded:", load.loaded)
    print("bytes equal:", all((layer[10:16] == layer[:6]).all() for layer in layers))
    print("the next key:", cache.why_miss(keys[6]).reason)

with kvmem.Cache(manager, manifest.replace(dtype="bfloat16"), disk=disk) as cache:
    print("with another dtype:", len(cache.reserve(keys)), "keys")
    print(cache.why_miss(keys[0]).detail)
folder.cleanup()
