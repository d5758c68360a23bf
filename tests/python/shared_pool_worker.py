"""One rank of test_scheduler_and_workers.py: a process with a device and a manager of its own.

Each line of its input is a JSON list, a method of Worker and its arguments; each is answered with a
line.
"""

import json
import os
import sys

import numpy as np

import kvmem
from kvmem.testing import Gate, stall
from support import PATIENCE

LAYERS, SEGMENT_BYTES, DEVICE_BLOCKS = 2, 2048, 8
BLOCK_BYTES = LAYERS * SEGMENT_BYTES


class Worker:
    def __init__(self, memory: str, capacity_bytes: int) -> None:
        device = kvmem.open_device("host", workers=1)
        # A number that was inherited, or the file of another process's descriptor.
        fd = int(memory) if memory.isdecimal() else os.open(memory, os.O_RDWR | os.O_CLOEXEC)
        pool = kvmem.BlockPool.attach(
            device, fd, block_bytes=BLOCK_BYTES, capacity_bytes=capacity_bytes
        )
        os.close(fd)
        self.device = device
        self.layers = [np.zeros((DEVICE_BLOCKS, SEGMENT_BYTES), np.uint8) for _ in range(LAYERS)]
        layout = kvmem.KVLayout.from_arrays(self.layers, memory=device.name)
        self.manager = kvmem.Manager(device, layout, pool)
        self.begun: tuple[kvmem.Transfer, Gate] | None = None

    def store(self, slots: list[int], values: list[int]) -> str:
        self.fill(values)
        transfer = self.manager.offload(range(len(slots)), after=kvmem.READY, into=slots)
        transfer.wait(PATIENCE)
        return transfer.state

    def begin_store(self, slots: list[int], values: list[int]) -> str:
        """Stands in front of a gate from now on."""
        self.fill(values)
        stream = self.device.stream()
        gate = stall(self.device, stream)
        transfer = self.manager.offload(range(len(slots)), after=stream, into=np.array(slots))
        self.begun = transfer, gate
        return transfer.state

    def end_store(self, cancel: bool) -> str:
        assert self.begun is not None
        transfer, gate = self.begun
        if cancel:
            transfer.cancel()
        gate.open()
        assert self.manager.drain(PATIENCE).quiet
        return transfer.state

    def load(self, slots: list[int]) -> list[int]:
        """What is in those slots, by way of device blocks that held something else."""
        targets = list(range(DEVICE_BLOCKS - len(slots), DEVICE_BLOCKS))
        for layer in self.layers:
            layer[targets] = 255
        self.manager.restore(slots, targets, after=kvmem.READY).wait(PATIENCE)
        return [self.value(block) for block in targets]

    def fill(self, values: list[int]) -> None:
        for block, value in enumerate(values):
            for number, layer in enumerate(self.layers):
                layer[block] = value + number

    def value(self, block: int) -> int:
        value = int(self.layers[0][block, 0])
        right = all((layer[block] == value + n).all() for n, layer in enumerate(self.layers))
        return value if right else -1

    def close(self) -> bool:
        return self.manager.close(PATIENCE).quiet


def main() -> None:
    worker = Worker(sys.argv[1], int(sys.argv[2]))
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(worker, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()
