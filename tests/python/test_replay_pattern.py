"""The bytes of a block: no two places of any two blocks pass for each other."""

from __future__ import annotations

import numpy as np

from kvmem.replay.device_cache import runs_of
from kvmem.replay.pattern import BlockPattern

KEYS = [0, 1, 2, 511, 512, 2**63, 2**64 - 1]


def blocks_of(pattern: BlockPattern, keys: list[int]) -> np.ndarray:
    blocks = np.zeros((4, len(keys), 32), dtype=np.uint64)
    pattern.fill(blocks, pattern.seeds(keys))
    return blocks


def test_every_word_of_every_block_is_its_own() -> None:
    blocks = blocks_of(BlockPattern(4, 256), KEYS)
    assert len(np.unique(blocks)) == blocks.size


def test_one_flipped_bit_makes_a_block_differ() -> None:
    pattern = BlockPattern(4, 256)
    blocks = blocks_of(pattern, KEYS)
    seeds = pattern.seeds(KEYS)
    assert pattern.differing(blocks, seeds) == 0
    blocks[3, 2, 31] ^= np.uint64(1)
    blocks[0, 2, 0] ^= np.uint64(1)
    assert pattern.differing(blocks, seeds) == 1
    blocks[1, 5, 7] ^= np.uint64(1 << 63)
    assert pattern.differing(blocks, seeds) == 2


def test_swapped_blocks_and_segments_differ() -> None:
    pattern = BlockPattern(4, 256)
    seeds = pattern.seeds(KEYS)
    swapped = blocks_of(pattern, KEYS)[:, [1, 0, 2, 3, 4, 5, 6]]
    assert pattern.differing(swapped, seeds) == 2
    rolled = blocks_of(pattern, KEYS)[[1, 2, 3, 0]]
    assert pattern.differing(rolled, seeds) == len(KEYS)


def test_positions_are_joined_into_runs() -> None:
    assert runs_of([]) == []
    assert runs_of([4]) == [(4, 5)]
    assert runs_of([0, 1, 2, 5, 7, 8]) == [(0, 3), (5, 6), (7, 9)]
