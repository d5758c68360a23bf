"""Byte sizes as people write them."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import SupportsIndex

from .errors import InvalidArgument

_DECIMAL = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS = {**_DECIMAL, **_BINARY, "b": 1}
_FORM = re.compile(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_bytes(name: str, value: SupportsIndex | str) -> SupportsIndex:
    """Returns a size in bytes from an integer or a string such as "8GiB", "512 MiB" or "8GB"
    (10^9).

    Integers pass through unchecked, because the core checks them by name. Raises InvalidArgument
    for a string that is no size, or that is not a whole number of bytes.
    """
    if not isinstance(value, str):
        return value
    match = _FORM.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise InvalidArgument(f"{name} is {value!r}: not a size such as 512MiB, 8GiB or 8GB")
    size = Fraction(match[1]) * _UNITS[match[2].lower()]
    if size.denominator != 1:
        raise InvalidArgument(f"{name} is {value!r}: not a whole number of bytes")
    return int(size)
