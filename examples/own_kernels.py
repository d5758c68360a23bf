"""Host blocks for an engine that copies with kernels of its own: release(after=stream).

The blocks go home when the device has reached the point at which they were released, not before.
"""

import numpy as np

import kvmem

device = kvmem.open_device("host")
pool = kvmem.BlockPool(device, block_bytes=1 << 20, capacity_bytes="8MiB")
stream = device.stream()
source = np.full(1 << 20, 7, np.uint8)

for _ in range(100):  # far more than the pool holds: acquire() waits until blocks are home again
    blocks = pool.acquire(2, timeout=10)
    for index in blocks.indices:
        stream.copy(pool.array[index], source)  # stands for the engine's own copy kernel
    blocks.release(after=stream)

stream.synchronize()
with pool.acquire(8, timeout=10):  # waiting reaps: all eight came home
    print("all blocks are home:", pool.stats()["held_slots"], "of", pool.capacity, "in this lease")
