"""What a cache of a given size would hit, by eviction policy alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, SupportsIndex

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import _core
from ._shown import shown
from .errors import InvalidArgument

PolicyName = Literal["lru", "arc", "gdsf"]


def count_hits(
    policy: PolicyName,
    capacity: SupportsIndex,
    keys: Sequence[int] | NDArray[np.integer],
    values: ArrayLike | None = None,
) -> int:
    """Count the hits of a cache of `capacity` equal blocks, one access for each key, in order.

    keys: integers from 0 to 2^64 - 1, one for each access.
    values: what a hit of each access is worth for its size, positive and finite; None is 1 for
        all. Only "gdsf" looks at it, and only ratios matter.

    Nothing is held and nothing is in flight: this is the policy by itself, as simulators of caches
    count it. Raises InvalidArgument. Any thread; the GIL is released.
    """
    return int(_core.policy_hits(policy, capacity, _keys(keys), _values(values), False))


def hits_of(
    policy: PolicyName,
    capacity: SupportsIndex,
    keys: Sequence[int] | NDArray[np.integer],
    values: ArrayLike | None = None,
) -> NDArray[np.bool_]:
    """Tell of each access whether it hits: bool[len(keys)]. As count_hits() otherwise."""
    each: NDArray[np.bool_] = _core.policy_hits(
        policy, capacity, _keys(keys), _values(values), True
    )
    return each


def _keys(keys: Sequence[int] | NDArray[np.integer]) -> NDArray[np.uint64]:
    try:
        array = np.asarray(keys)
        if array.size == 0:
            return np.empty(0, np.uint64)
        # Of hashes above and below 2^63 NumPy makes floats.
        if array.dtype.kind in "fO" and all(type(key) is int for key in keys):
            array = np.asarray(keys, np.uint64)
        if array.ndim != 1 or array.dtype.kind not in "iu" or array.min() < 0:
            raise ValueError
        return np.ascontiguousarray(array, np.uint64)
    except (ValueError, TypeError, OverflowError):
        message = f"keys is {shown(keys)}: not a sequence of integers from 0 to 2^64 - 1"
        raise InvalidArgument(message) from None


def _values(values: ArrayLike | None) -> NDArray[np.float64] | None:
    if values is None:
        return None
    try:
        array = np.ascontiguousarray(values, np.float64)
        if array.ndim != 1:
            raise ValueError
        return array
    except (ValueError, TypeError, OverflowError):
        message = f"values is {shown(values)}: not a sequence of numbers"
        raise InvalidArgument(message) from None
