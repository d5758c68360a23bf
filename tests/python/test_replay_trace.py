"""Reading request traces, and refusing what is none by line and field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvmem.replay.trace import Request, TraceError, read_trace

GOOD = {"timestamp": 5, "input_length": 1000, "output_length": 7, "hash_ids": [3, 4]}


def write(folder: Path, *lines: object) -> Path:
    path = folder / "trace.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def test_requests_are_read_in_file_order(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, GOOD | {"timestamp": 5.5, "hash_ids": [0, 2**64 - 1]})
    assert read_trace(path) == [
        Request(5.0, 1000, 7, (3, 4)),
        Request(5.5, 1000, 7, (0, 2**64 - 1)),
    ]


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, GOOD, "", GOOD, ""))) == 2


def test_a_limit_leaves_the_rest_unread(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, GOOD, "not JSON"), limit=1)) == 1


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1024, 1025])
def test_a_last_block_that_is_not_full_counts_as_a_block(tmp_path: Path, tokens: int) -> None:
    ids = list(range(-(-tokens // 512)))
    line = GOOD | {"input_length": tokens, "hash_ids": ids}
    assert read_trace(write(tmp_path, line))[0].keys == tuple(ids)


@pytest.mark.parametrize("ids", [[], [1], [1, 2, 3]])
def test_a_wrong_block_size_is_refused_by_name(tmp_path: Path, ids: list[int]) -> None:
    path = write(tmp_path, GOOD, GOOD | {"hash_ids": ids})
    expected = rf"line 2: block size: .* of 512 tokens makes 2 hash_ids, the line has {len(ids)}"
    with pytest.raises(TraceError, match=expected):
        read_trace(path)


def test_a_wrong_block_size_names_the_one_that_fits(tmp_path: Path) -> None:
    line = GOOD | {"input_length": 1000, "hash_ids": list(range(63))}
    with pytest.raises(TraceError, match="63 would fit blocks of 16 tokens"):
        read_trace(write(tmp_path, line))


def test_a_time_before_the_one_above_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, GOOD | {"timestamp": 4})
    with pytest.raises(TraceError, match="line 2: timestamp 4 is before 5"):
        read_trace(path)


@pytest.mark.parametrize("name", sorted(GOOD))
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    line = {key: value for key, value in GOOD.items() if key != name}
    with pytest.raises(TraceError, match=f"line 1: has no {name}"):
        read_trace(write(tmp_path, line))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("timestamp", "5"),
        ("timestamp", -1),
        ("timestamp", True),
        ("timestamp", float("nan")),
        ("timestamp", float("inf")),
        ("input_length", 0),
        ("input_length", -1000),
        ("input_length", 1000.0),
        ("input_length", True),
        ("input_length", None),
        ("output_length", -1),
        ("output_length", "7"),
        ("hash_ids", None),
        ("hash_ids", "34"),
        ("hash_ids", {"3": 4}),
        ("hash_ids", [3, -4]),
        ("hash_ids", [3, 2**64]),
        ("hash_ids", [3, 4.0]),
        ("hash_ids", [3, True]),
        ("hash_ids", [3, [4]]),
    ],
)
def test_a_value_that_is_none_of_its_kind_is_named(
    tmp_path: Path, name: str, value: object
) -> None:
    with pytest.raises(TraceError, match=f"line 2: {name}: "):
        read_trace(write(tmp_path, GOOD, GOOD | {name: value}))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "line 2: is not JSON"),
        ("[1, 2]", "line 2: is not a JSON object"),
        ("7", "line 2: is not a JSON object"),
        ("[" * 100_000, "line 2: is not JSON"),
        ('{"input_length": ' + "9" * 5000 + "}", "line 2: is not JSON"),
    ],
)
def test_a_line_that_is_no_request_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(TraceError, match=expected):
        read_trace(write(tmp_path, GOOD, text))


def test_an_unreadable_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="Is a directory"):
        read_trace(tmp_path)
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TraceError, match="UTF-8"):
        read_trace(path)


def test_a_file_without_a_request_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(write(tmp_path, "", ""))
