"""Manifests: what must be equal, to the byte, in every process."""

from __future__ import annotations

import copy
import dataclasses
import enum
import os
import pickle
import re
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmem import Incompatible, InvalidArgument, Manifest

DOCUMENT = Path(__file__).parents[2] / "docs" / "MANIFEST.md"

FIELDS: dict[str, Any] = {
    "model": "llama-3-8b",
    "weights": "sha256:00ff",
    "dtype": "bfloat16",
    "layers": 32,
    "kv_heads": 8,
    "head_size": 128,
    "block_tokens": 16,
    "groups": {"full": "layer,kv,token,head,dim", "window": "layer,kv,head,token,dim"},
    "engine": "engine 1.2",
    "engine_abi": "7",
    "quantisation": "per-head",
    "scale_layout": "inline",
    "rope": {"theta": 500000, "scaling": {"kind": "yarn", "factor": 8.0}, "factors": [1.0, 2.5]},
    "adapter": "lora:1",
    "tp_rank": 1,
    "tp_size": 2,
    "pp_rank": 0,
    "pp_size": 2,
    "cp_rank": 0,
    "cp_size": 2,
    "salt": "tenant",
    "kvmem_abi": 1,
}
OPTIONAL = {"quantisation", "scale_layout", "salt", "kvmem_abi"}
REQUIRED = [name for name in FIELDS if name not in OPTIONAL]
SMALLEST = {name: FIELDS[name] for name in REQUIRED} | {"rope": None, "adapter": None}


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(value, Mapping):
        return [path]
    return [leaf for name, each in value.items() for leaf in leaves(each, (*path, name))]


def changed(fields: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The fields with another value at one place."""
    name, *rest = path
    value = fields[name]
    if rest:
        return fields | {name: changed(dict(value), tuple(rest))}
    if isinstance(value, str):
        return fields | {name: value + "x"}
    if isinstance(value, list):
        return fields | {name: [*value, 3.0]}
    # Ranks go from 0 to 1 or back, sizes stay above them.
    return fields | {name: 1 - value if name.endswith("_rank") else value + 1}


def test_every_field_is_in_the_example() -> None:
    assert Manifest(**FIELDS)._fields().keys() == FIELDS.keys()


# Cases 95 and 96: another topology, layout or number format of equal size was used.
@pytest.mark.parametrize("path", leaves(FIELDS), ids=".".join)
def test_any_single_field_makes_another_manifest_and_is_named(path: tuple[str, ...]) -> None:
    mine, theirs = Manifest(**FIELDS), Manifest(**changed(FIELDS, path))
    assert mine.digest != theirs.digest
    assert mine.key(b"h" * 32) != theirs.key(b"h" * 32)
    assert mine != theirs
    assert [difference.field for difference in mine.compare(theirs)] == [".".join(path)]
    with pytest.raises(Incompatible, match=path[-1]) as error:
        mine.expect_equal(theirs)
    assert error.value.fields == [".".join(path)]


# Case 95: sizes matched, and ranks or heads did not.
@pytest.mark.parametrize(
    "changes",
    [
        {"tp_rank": 0},
        {"pp_rank": 1},
        {"cp_rank": 1},
        {"groups": {"full": "layer,kv,head,token,dim"}},
    ],
    ids=str,
)
def test_blocks_of_equal_size_are_not_those_of_another_rank_or_order(
    changes: dict[str, Any],
) -> None:
    mine = Manifest(**FIELDS | {"groups": {"full": "layer,kv,token,head,dim"}})
    theirs = mine.replace(**changes)
    assert mine.key(b"h" * 32) != theirs.key(b"h" * 32)
    assert len(mine.compare(theirs)) == 1


@pytest.mark.parametrize(
    ("mine", "theirs", "paths"),
    [
        (None, {"theta": 1}, ["rope"]),
        (None, {}, ["rope"]),
        ({}, {"theta": 1}, ["rope.theta"]),
        ({"scaling": None}, {"scaling": {"factor": 8, "kind": "yarn"}}, ["rope.scaling"]),
        ({"scaling": {}}, {"scaling": {"factor": 8}}, ["rope.scaling.factor"]),
        ({"factors": [1, 2]}, {"factors": [1, 3]}, ["rope.factors"]),
        ({"a": 1, "b": 2}, {"b": 3, "c": 4}, ["rope.a", "rope.b", "rope.c"]),
    ],
)
def test_a_difference_is_named_where_it_is_and_once(
    mine: dict[str, Any] | None, theirs: dict[str, Any] | None, paths: list[str]
) -> None:
    one = Manifest(**SMALLEST | {"rope": mine})
    another = one.replace(rope=theirs)
    assert [difference.field for difference in one.compare(another)] == paths
    assert [difference.field for difference in another.compare(one)] == paths


def test_people_are_told_what_differs() -> None:
    mine = Manifest(**FIELDS)
    assert mine.explain(mine.replace()) == "the manifests are equal"
    theirs = mine.replace(tp_rank=0, rope={"theta": 1e4}, salt="secret", model="m" * 100)
    said = mine.explain(theirs)
    assert "tp_rank is 1 here and 0 there" in said
    assert "rope.theta is 500000.0 here and 10000.0 there" in said
    assert "rope.factors is (1.0, 2.5) here and (missing) there" in said
    assert "rope is {'theta': 10000.0} here and None there" in theirs.explain(
        mine.replace(rope=None)
    )
    assert "salt is another one" in said
    assert "secret" not in said
    assert "m" * 50 not in said
    with pytest.raises(Incompatible) as error:
        mine.expect_equal(theirs)
    assert str(error.value) == said


def test_the_salt_of_a_tenant_is_shown_nowhere() -> None:
    mine, theirs = Manifest(**FIELDS), Manifest(**FIELDS | {"salt": "secret"})
    assert mine.compare(theirs) == [("salt", None, None)]
    with pytest.raises(Incompatible) as error:
        mine.expect_equal(theirs)
    assert error.value.fields == ["salt"]
    assert "secret" not in str(error.value) + repr(theirs)


def test_equal_ones_are_equal_in_every_way() -> None:
    mine = Manifest(**FIELDS)
    theirs = Manifest(**dict(reversed(FIELDS.items())))
    assert mine == theirs
    assert hash(mine) == hash(theirs)
    assert mine.digest == theirs.digest
    assert mine.compare(theirs) == []
    mine.expect_equal(theirs)
    assert Manifest.from_bytes(mine.to_bytes()) == mine
    assert pickle.loads(pickle.dumps(mine)) == mine
    assert mine.replace() == mine
    assert mine.replace(tp_rank=0).compare(mine)[0] == ("tp_rank", 0, 1)


def test_the_canonical_form_is_this_one() -> None:
    made = Manifest(**SMALLEST).replace(rope={"theta": 1})
    data = made.to_bytes()
    assert data.startswith(b"KVMF\x01m\x00\x00\x00\x16s\x00\x00\x00\x07adapterns")
    assert b"s\x00\x00\x00\x04ropem\x00\x00\x00\x01s\x00\x00\x00\x05thetad\x3f\xf0" in data
    assert len(data) == 557
    assert made.hexdigest == "498462a16db81de47a55eee563d0e086"
    assert (
        made.key(bytes(range(16))).hex()
        == "b2c8ccbea20349dbd995c8f2ac89cf344af6b43df15ba04d1a6bc4a81d8e171a"
    )


def written(value: Any) -> bytes:
    """The canonical form as docs/MANIFEST.md has it, written a second time."""
    if value is None or isinstance(value, bool):
        return {None: b"n", True: b"t", False: b"f"}[value]
    if isinstance(value, str):
        return b"s" + len(value.encode()).to_bytes(4, "big") + value.encode()
    if isinstance(value, list):
        return b"l" + len(value).to_bytes(4, "big") + b"".join(map(written, value))
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: name.encode())
        pairs = b"".join(written(name) + written(value[name]) for name in names)
        return b"m" + len(value).to_bytes(4, "big") + pairs
    if isinstance(value, int):
        return b"i" + value.to_bytes(8, "big", signed=True)
    return b"d" + struct.pack(">d", value)


def test_the_canonical_form_is_that_of_its_document() -> None:
    rope = {"theta": 5e5, "é": [1.0, None, True, {"b": "ü", "a": -2.5}], "z": {}, "Z": False}
    fields = FIELDS | {"rope": rope}
    assert Manifest(**fields).to_bytes() == b"KVMF\x01" + written(fields)


def test_the_example_of_the_document_is_right() -> None:
    lines = re.findall(r"^ *(?:73|6d) .*", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    shown = re.sub(r" {2}[^0-9 ].*| ", "", "\n".join(lines)).replace("\n", "")
    assert bytes.fromhex(shown) == written("rope") + written({"kind": "", "theta": 1.0})


def test_the_block_hash_of_the_document_tells_a_chain_from_another() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    block_hash = names["block_hash"]
    first = block_hash(None, [1, 2])
    assert first.hex() == "a376d8fa62d9a19ae2353f7c8bbe0d4934b37f1785f78bc17260c8968e6c6b2c"
    hashes = {first, block_hash(first, [1, 2]), block_hash(first, [2, 1]), block_hash(None, [1])}
    assert len({Manifest(**SMALLEST).key(each) for each in hashes}) == 4


# Case 180: the hash of None and of strings was another one in each process.
def test_every_process_makes_the_same_digest() -> None:
    fields = FIELDS | {"adapter": None}
    code = f"import kvmem; print(kvmem.Manifest(**{fields!r}).hexdigest)"
    for seed in ("0", "1", "random"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        made = subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, env=environment
        )
        assert made.stdout.decode().strip() == Manifest(**fields).hexdigest


def test_nothing_and_empty_are_two_things() -> None:
    smallest = Manifest(**SMALLEST)
    digests = {
        smallest.digest,
        smallest.replace(rope={}).digest,
        smallest.replace(rope={"theta": None}).digest,
        smallest.replace(rope={"theta": ""}).digest,
        smallest.replace(rope={"theta": 0}).digest,
        smallest.replace(rope={"theta": False}).digest,
        smallest.replace(rope={"theta": {}}).digest,
        smallest.replace(rope={"theta": {"a": []}}).digest,
    }
    assert len(digests) == 8


def test_what_means_the_same_is_the_same() -> None:
    smallest = Manifest(**SMALLEST)
    assert smallest.replace(rope={"theta": 10000}) == smallest.replace(rope={"theta": 10000.0})
    assert smallest.replace(rope={"theta": -0.0}) == smallest.replace(rope={"theta": 0})
    assert smallest.replace(model="e\u0301") == smallest.replace(model="\u00e9")


def test_texts_and_numbers_of_enumerations_are_taken_as_what_they_are() -> None:
    class Text(str, enum.Enum):
        MODEL = "model"

    made = Manifest(**SMALLEST | {"model": Text.MODEL, "tp_size": enum.IntEnum("N", ["A", "B"]).B})
    assert made == Manifest(**SMALLEST | {"model": "model", "tp_size": 2})
    assert type(made.model) is str
    assert type(made.tp_size) is int


def test_it_is_a_dataclass_to_copy_and_replace() -> None:
    made = Manifest(**FIELDS)
    assert dataclasses.replace(made, tp_rank=0) == made.replace(tp_rank=0)
    assert copy.deepcopy(made) == copy.copy(made) == made
    with pytest.raises(InvalidArgument):
        dataclasses.replace(made, tp_size=1)


def test_nobody_changes_one_afterwards() -> None:
    layouts = {"full": "a"}
    made = Manifest(**SMALLEST | {"groups": layouts})
    before = made.digest
    layouts["full"] = "b"
    assert made.digest == before
    with pytest.raises(AttributeError):
        made.model = "another"  # type: ignore[misc]
    with pytest.raises(TypeError):
        made.groups["full"] = "b"  # type: ignore[index]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(InvalidArgument, match=f"needs the field '{name}'"):
        Manifest(**{k: v for k, v in FIELDS.items() if k != name})


def test_all_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(InvalidArgument, match="'layers' and the field 'kv_heads'"):
        Manifest(model="m", weights="w", dtype="d")  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"modle": "x"}, "no field 'modle'; 'model' is near"),
        ({"zzz": 1}, "no field 'zzz'; '"),
        ({"self": 1}, "no field 'self'; '"),
        ({"scale_layout": None}, "either both are given or none"),
        ({"model": "\u0378"}, "code points that mean nothing"),
        ({"rope": {str(i): "x" * 60000 for i in range(20)}}, "must be at most 1048576"),
        ({"layers": 0}, "layers is 0"),
        ({"layers": True}, "layers is True, not an integer"),
        ({"layers": 1.0}, "layers is 1.0"),
        ({"layers": 1 << 40}, "layers is 1099511627776"),
        ({"tp_rank": 2}, "tp_rank is 2, which must be below the 2 ranks"),
        ({"tp_rank": -1}, "tp_rank is -1"),
        ({"model": ""}, "model is empty"),
        ({"model": b"x"}, "model is b'x', not a string"),
        ({"model": "\ud800"}, "no valid text"),
        ({"model": "x" * 70000}, "model has 70000 bytes"),
        ({"dtype": None}, "dtype is None"),
        ({"groups": {}}, "groups is {}"),
        ({"groups": {"a": 1}}, "groups.a is 1"),
        ({"groups": {"a.b": "x"}}, "must have no '.'"),
        ({"groups": {"e\u0301": "x", "\u00e9": "x"}}, "one in normal form"),
        ({"rope": 7.0}, "rope is 7.0"),
        ({"rope": {"theta": float("nan")}}, "rope.theta is nan"),
        ({"rope": {"theta": float("inf")}}, "rope.theta is inf"),
        ({"rope": {"theta": 1 << 60}}, "rope.theta is 1152921504606846976"),
        ({"rope": {"theta": object()}}, "rope.theta is <object"),
        ({"rope": {1: 2}}, "a name in rope is 1"),
        ({"rope": {"a": {"b": {"c": {"d": {"e": 1}}}}}}, "nested deeper"),
        ({"salt": ""}, "salt is empty"),
    ],
)
def test_what_a_field_cannot_be_is_refused_by_name(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        Manifest(**FIELDS | changes)
    assert what in str(error.value)


def test_calls_refuse_what_they_cannot_mean() -> None:
    made = Manifest(**SMALLEST)
    for block_hash in (b"x" * 15, b"x" * 65, "x" * 32, None):
        with pytest.raises(InvalidArgument):
            made.key(block_hash)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        made.compare(made.to_bytes())  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument):
        made.replace(tp_size=0)
    assert made != made.to_bytes()


def form(rope: bytes, *, tail: bytes = b"") -> bytes:
    """A canonical form, but for what stands for `rope` and behind the end."""
    made = Manifest(**SMALLEST | {"rope": {"is": "here"}}).to_bytes()
    return made.replace(written({"is": "here"}), rope) + tail


NAMED_TWICE = written({"a": 1.0, "b": 2.0}).replace(b"b", b"a")
FALLING_NAMES = b"m" + (2).to_bytes(4, "big") + b"".join(map(written, ["b", 1.0, "a", 2.0]))
DEEP = b"l\x00\x00\x00\x01" * 100_000 + b"n"


def test_a_form_made_by_hand_is_read() -> None:
    assert Manifest.from_bytes(form(written({"a": 1.0, "b": 2.0}))).rope == {"a": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("KVMF\x01", "not bytes"),
        (None, "not bytes"),
        (b"", "begins with"),
        (b"KVMF", "begins with"),
        (b"KVMF\x02" + form(b"n")[5:], "begins with"),
        (bytes(1 << 21), "has 2097152 bytes, at most 1048576"),
        (b"KVMF\x01", "begins no value"),
        (b"KVMF\x01n", "no fields"),
        (form(b"n", tail=b"\x00"), "1 bytes behind"),
        (form(b"n")[:-1], "ends at byte"),
        (form(b"?"), "begins no value"),
        (form(written({"a": 1})), "not in its canonical form"),
        (form(written({"a": -0.0})), "not in its canonical form"),
        (form(written({"e\u0301": 1.0})), "not in its canonical form"),
        (form(FALLING_NAMES), "not in its canonical form"),
        (form(NAMED_TWICE), "stands twice"),
        (form(b"m\x00\x00\x00\x01nn"), "is none"),
        (form(written({"a": float("nan")})), "rope.a is nan"),
        (form(b"s\x00\x00\x00\x01\xff"), "no valid text"),
        (form(b"s\xff\xff\xff\xff"), "ends at byte"),
        (form(b"l\xff\xff\xff\xff"), "4294967295 items"),
        (form(DEEP), "nested deeper"),
        (form(b"t"), "rope is True"),
    ],
)
def test_what_is_no_canonical_form_is_refused(data: Any, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        Manifest.from_bytes(data)


def test_a_form_without_a_field_is_refused_by_its_name() -> None:
    fields = {name: value for name, value in FIELDS.items() if name not in {"layers", "rope"}}
    with pytest.raises(InvalidArgument, match="needs the field 'layers' and the field 'rope'"):
        Manifest.from_bytes(b"KVMF\x01" + written(fields))


# Case 100: a damaged descriptor was still readable.
@given(data=st.data())
def test_a_damaged_form_is_another_manifest_or_refused(data: st.DataObject) -> None:
    whole = Manifest(**FIELDS).to_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = data.draw(
        st.one_of(
            st.integers(0, 255).map(lambda byte: whole[:at] + bytes([byte]) + whole[at + 1 :]),
            st.just(whole[:at]),
            st.binary(min_size=1, max_size=20).map(lambda tail: whole + tail),
            st.binary(max_size=20).map(lambda middle: whole[:at] + middle + whole[at:]),
        )
    )
    try:
        read = Manifest.from_bytes(damaged)
    except InvalidArgument:
        return
    assert read.to_bytes() == damaged
    assert (read == Manifest(**FIELDS)) == (damaged == whole)


@given(tail=st.binary(max_size=200))
def test_random_bytes_are_refused(tail: bytes) -> None:
    with pytest.raises(InvalidArgument):
        Manifest.from_bytes(b"KVMF\x01" + tail)


scalars = st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
names = st.text("ab\u00e9", min_size=1, max_size=2)
trees = st.dictionaries(
    names, scalars | st.lists(scalars, max_size=2) | st.dictionaries(names, scalars, max_size=2)
)


def made_with(rope: dict[str, Any]) -> Manifest:
    try:
        return Manifest(**SMALLEST).replace(rope=rope)
    except InvalidArgument as error:
        message = str(error)
    assert "valid text" in message or "mean nothing" in message
    return Manifest(**SMALLEST)


@given(mine=trees, theirs=trees)
def test_forms_go_round_and_differences_are_those_of_digests(
    mine: dict[str, Any], theirs: dict[str, Any]
) -> None:
    one, another = made_with(mine), made_with(theirs)
    assert Manifest.from_bytes(one.to_bytes()) == one
    assert (one.compare(another) == []) == (one.digest == another.digest)


@pytest.mark.parametrize(
    ("one", "another"),
    [
        ({}, {"a": {}}),
        ({"a": {}}, {"b": {}}),
        ({"a": [True]}, {"a": [1.0]}),
        ({"a": [False, 1]}, {"a": [0, True]}),
        ({"a": None}, {}),
        ({"a": ""}, {"a": None}),
    ],
)
def test_small_differences_are_differences(one: dict[str, Any], another: dict[str, Any]) -> None:
    smallest = Manifest(**SMALLEST)
    mine, theirs = smallest.replace(rope=one), smallest.replace(rope=another)
    assert mine.digest != theirs.digest
    assert len(mine.compare(theirs)) >= 1


def test_a_form_whose_names_are_not_fields_is_refused() -> None:
    whole = Manifest(**SMALLEST).to_bytes()
    with pytest.raises(InvalidArgument, match="no field 'self'"):
        Manifest.from_bytes(whole.replace(b"\x04rope", b"\x04self"))
