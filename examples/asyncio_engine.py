"""Awaiting acceptance and completion in an event loop: no thread of ours ever enters Python."""

import asyncio

import numpy as np

import kvmem

device = kvmem.open_device("host")
layers = [np.arange(64 * 4096, dtype=np.uint32).reshape(64, 4096) for _ in range(2)]
compute = device.stream()


async def swap(manager: kvmem.Manager, block: int) -> bool:
    """Send one block out and bring it back 32 blocks further on."""
    out = await manager.offload_async([block], after=compute)  # waits in a FIFO for a host slot
    await out  # raises if it failed
    with out.result() as copy:
        back = await manager.restore_async(copy, [block + 32], after=compute)
        await back
    return all((layer[block] == layer[block + 32]).all() for layer in layers)


async def main() -> None:
    layout = kvmem.KVLayout.from_arrays(layers)
    with kvmem.Manager(device, layout, host_bytes="256KiB") as manager:  # eight slots for 32 tasks
        same = await asyncio.gather(*(swap(manager, block) for block in range(32)))
    print(f"{sum(same)} of {len(same)} blocks came back as they went")


asyncio.run(main())
