"""What do checksums of host blocks cost, on the way out and back, beside a manager without them?

Blocks of 2 MiB on the host device, a few at a time, as an engine under load has them; the copies
and the sums share the cores.
"""

from __future__ import annotations

from collections.abc import Callable

import kvmem
from harness import AtMost, Versus

Size = Callable[[int, int], int]

SEGMENTS = 32
SEGMENT_BYTES = 64 << 10
AT_A_TIME = 8


class Engine:
    def __init__(self, blocks: int, checksum: str) -> None:
        device = kvmem.open_device("host")
        self.blocks = blocks
        self.memory = device.alloc(SEGMENTS * blocks * SEGMENT_BYTES)
        self.memory.array[:] = 1
        layers = self.memory.array.reshape(SEGMENTS, blocks, SEGMENT_BYTES)
        layout = kvmem.KVLayout.from_arrays(list(layers), memory=device.name)
        self.manager = kvmem.Manager(
            device,
            layout,
            host_bytes=2 * AT_A_TIME * layout.block_bytes,
            checksum=checksum,  # type: ignore[arg-type]
        )

    def there_and_back(self) -> None:
        for first in range(0, self.blocks, AT_A_TIME):
            blocks = list(range(first, min(first + AT_A_TIME, self.blocks)))
            transfer = self.manager.offload(blocks, after=kvmem.READY)
            transfer.wait()
            with transfer.result() as copy:
                self.manager.restore(copy, blocks, after=kvmem.READY).wait()


def test_blocks_of_2_mib_offloaded_and_restored(versus: Versus, size: Size) -> None:
    blocks = size(64, AT_A_TIME)
    engines = {kind: Engine(blocks, kind) for kind in ("off", "sampled", "always")}
    versus(
        engines["always"].there_and_back,
        {
            "without checksums": engines["off"].there_and_back,
            "one block in 16": engines["sampled"].there_and_back,
        },
        operations=blocks,
        goals=[AtMost(2.0, "without checksums")],
        moved_bytes=2 * blocks * SEGMENTS * SEGMENT_BYTES,
    )
    stats = engines["always"].manager.stats()["checksum"]
    assert stats["blocks_summed"] == stats["blocks_verified"] > 0
    for engine in engines.values():
        assert engine.manager.close().quiet
