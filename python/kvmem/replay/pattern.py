"""The bytes of a block, as a function of its key and of the place within the block.

Word w of block k is seed(k) * odd(w) modulo 2^64, with odd numbers on both sides. Odd numbers have
an inverse, so two blocks differ in every word, and two words of one block differ too: no swapped,
shifted, torn or stale segment passes for the right one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

WORD_BYTES = 8

_PLACES_APART = np.uint64(0xA5A5A5A500000000)
_KINDS_APART = 0x9D39247E33776D41


class BlockPattern:
    """Patterns of blocks that consist of `regions` segments of equal size.

    kind: blocks of one key and two kinds differ in every word too.
    """

    def __init__(self, regions: int, segment_bytes: int, kind: int = 0) -> None:
        self.segment_bytes = segment_bytes
        self.regions = regions
        self._apart = np.uint64(kind * _KINDS_APART % (1 << 64))

    @cached_property
    def _places(self) -> NDArray[np.uint64]:
        """One factor for each word; as large as a block, so only where bytes are looked at."""
        words = self.regions * self.segment_bytes // WORD_BYTES
        # Apart from the keys, or word a of block b would equal word b of block a.
        places = np.arange(words, dtype=np.uint64) ^ _PLACES_APART
        return _odd(_mix(places)).reshape(self.regions, 1, -1)

    def seeds(self, keys: Sequence[int]) -> NDArray[np.uint64]:
        """Give the seed of each key."""
        return _odd(_mix(np.array(keys, dtype=np.uint64) ^ self._apart))

    def first_word(self, seed: np.uint64) -> np.uint64:
        """Give what a block of this seed begins with."""
        words: NDArray[np.uint64] = self._places[0, 0, :1] * seed
        return np.uint64(words[0])

    def fill(self, target: NDArray[np.uint64], seeds: NDArray[np.uint64]) -> None:
        """Write blocks into uint64[regions, blocks, words of a segment]."""
        np.multiply(self._places, seeds[:, None], out=target)

    def fill_segment(
        self, region: int, target: NDArray[np.uint64], seeds: NDArray[np.uint64]
    ) -> None:
        """Write one region's segments of blocks into uint64[blocks, words of a segment]."""
        np.multiply(self._places[region], seeds[:, None], out=target)

    def differing(self, seen: NDArray[np.uint64], seeds: NDArray[np.uint64]) -> int:
        """Count the blocks in uint64[regions, blocks, words] that hold anything else."""
        wrong = seen != self._places * seeds[:, None]
        return int(np.count_nonzero(wrong.any(axis=(0, 2))))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scatter neighbouring numbers over 64 bits (splitmix64, wrapping on purpose)."""
    mixed: NDArray[np.uint64] = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def _odd(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    odd: NDArray[np.uint64] = (values << np.uint64(1)) | np.uint64(1)
    return odd
