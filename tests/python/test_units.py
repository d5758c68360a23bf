"""Byte sizes as people write them."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvmem
from kvmem._units import parse_bytes

FACTORS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
spaces = st.text(" \t\n", max_size=3)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 << 30),
        ("512 MiB", 512 << 20),
        ("8GB", 8_000_000_000),
        ("1.5KiB", 1536),
        ("0.5 kB", 500),
        ("17", 17),
        ("17b", 17),
        (" 2 tib ", 2 << 40),
        ("0", 0),
        ("007", 7),
    ],
)
def test_a_string_is_read_as_people_mean_it(text: str, size: int) -> None:
    assert parse_bytes("x", text) == size


@given(st.integers(0, 10**15), st.sampled_from(sorted(FACTORS)), spaces, spaces, st.booleans())
def test_whole_numbers_of_any_unit_are_exact(
    number: int, unit: str, before: str, between: str, lower: bool
) -> None:
    text = f"{before}{number}{between}{unit.lower() if lower else unit}"
    assert parse_bytes("x", text) == number * FACTORS[unit]


@given(st.integers(0, 10**9), st.integers(0, 999), st.sampled_from(sorted(FACTORS)))
def test_decimals_are_exact_or_refused(whole: int, thousandths: int, unit: str) -> None:
    exact = (whole + Fraction(thousandths, 1000)) * FACTORS[unit]
    text = f"{whole}.{thousandths:03}{unit}"
    if exact.denominator == 1:
        assert parse_bytes("x", text) == exact
    else:
        with pytest.raises(kvmem.InvalidArgument, match="whole number of bytes"):
            parse_bytes("x", text)


@given(st.integers(), st.booleans())
def test_integers_pass_through_for_the_core_to_check(number: int, index: bool) -> None:
    assert parse_bytes("x", number) is number


@given(st.text())
def test_any_text_is_a_size_or_an_invalid_argument_that_names_it(text: str) -> None:
    with contextlib.suppress(kvmem.InvalidArgument):
        size = parse_bytes("max_bytes", text)
        assert isinstance(size, int)
        assert size >= 0
        return
    with pytest.raises(kvmem.InvalidArgument, match="max_bytes is "):
        parse_bytes("max_bytes", text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "GiB",
        "x",
        "-1",
        "+1",
        "-1GiB",
        "1e9",
        "0x10",
        "1_000",
        "1,5GiB",
        ".5GiB",
        "1.GiB",
        "1.5",
        "8G",
        "8PiB",
        "8GiBs",
        "8 Gi B",
        "8GiB 1MiB",
        "nan",
        "inf",
        "\u0663GiB",
        "8\u212aiB",
        "8\u00a0KiB",
        "1" * 5000,
        "1." + "0" * 5000,
    ],
    ids=lambda text: ascii(text[:12]),
)
def test_what_is_no_size_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(kvmem.InvalidArgument, match="window_bytes is '"):
        parse_bytes("window_bytes", text)
