"""How an engine drives a manager without any thread: reaper=False, tags, poll() once a step.

Sequences of four blocks are swapped out and in again. A device block is reused only after the
report of the transfer that used it, whichever way that transfer ended.
"""

import numpy as np

import kvmem

BLOCKS, BLOCKS_EACH, SEQUENCES = 32, 4, 12

device = kvmem.open_device("host")
layers = [np.zeros((BLOCKS, 4096), np.uint8) for _ in range(2)]
compute = device.stream()
manager = kvmem.Manager(
    device,
    kvmem.KVLayout.from_arrays(layers),
    host_bytes=SEQUENCES * BLOCKS_EACH * 8192,
    reaper=False,
)

free = list(range(BLOCKS))
offloads: dict[int, tuple[list[int], kvmem.Transfer]] = {}  # by tag: the sequence's number
resident: dict[int, kvmem.HostCopy] = {}
waiting = list(range(SEQUENCES))


def step() -> None:
    """One engine step: start what fits, then take the reports."""
    while waiting and len(free) >= BLOCKS_EACH:
        blocks = [free.pop() for _ in range(BLOCKS_EACH)]
        for layer in layers:
            layer[blocks] = waiting[0]  # stands for prefill
        transfer = manager.try_offload(blocks, after=compute, tag=waiting[0])
        if transfer is None:  # at a bound: the next step tries again
            free.extend(blocks)
            break
        offloads[waiting.pop(0)] = (blocks, transfer)
    for report in manager.poll():
        assert isinstance(report.tag, int)
        blocks, transfer = offloads.pop(report.tag)
        free.extend(blocks)  # done, failed or cancelled: no copy reads them any more
        if report.state == "done":
            resident[report.tag] = transfer.result()


while waiting or offloads:
    step()

for sequence, copy in resident.items():
    blocks = free[:BLOCKS_EACH]
    restored = manager.restore(copy, blocks, after=compute)
    restored.wait()  # drives the copies, since there is no reaper
    assert (layers[0][blocks] == sequence).all()
    copy.release()

report = manager.close()
print(f"{len(resident)} sequences went out and came back; quiet: {report.quiet}")
