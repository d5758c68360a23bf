"""Offload some blocks, cancel one offload, restore the other into different device blocks."""

import numpy as np

import kvmem

device = kvmem.open_device("host")
layers = [np.zeros((64, 2, 16, 8, 64), np.float16) for _ in range(4)]  # a KV cache of 64 blocks
layout = kvmem.KVLayout.from_arrays(layers)  # block i is layers[0][i], layers[1][i], ...
compute = device.stream()  # where the engine's kernels run

with kvmem.Manager(device, layout, host_bytes="64MiB") as manager:
    for number, layer in enumerate(layers):
        layer[3], layer[7] = number + 1, number + 2  # "computed"
    kept = manager.offload([3, 7], after=compute)  # reads them once `compute` has written them
    unwanted = manager.offload([5], after=compute)
    print("cancel:", unwanted.cancel().name)  # returns at once; block 5 may still be read
    kept.wait()  # from here on device blocks 3 and 7 may be used again
    copy = kept.result()  # two host blocks, held until released
    restored = manager.restore(copy, [10, 11], after=compute)  # after the last use of 10 and 11
    restored.wait_on(compute)  # what is queued on `compute` from now on sees the restored bytes
    restored.wait()
    same = all((layer[[10, 11]] == layer[[3, 7]]).all() for layer in layers)
    copy.release()

slots = manager.pool.stats()
print("restored bytes equal:", same)
print("host slots free:", slots["free_slots"], "of", slots["capacity_slots"])
