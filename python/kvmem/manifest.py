"""What must be equal for stored KV state to be restorable."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
import struct
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ._shown import shown
from .errors import Incompatible, InvalidArgument

FORMAT = b"KVMF\x01"
"""What the canonical form begins with: a name, and the version of the form."""

DIGEST_BYTES = 16
KEY_BYTES = 32
"""Of what key() makes."""

_BLOCK_HASH_BYTES = (16, 64)
_TEXT_BYTES_MOST = 1 << 16
_ITEMS_MOST = 1 << 12
_BYTES_MOST = 1 << 20
_DEPTH_MOST = 4
_NAME_LETTERS_MOST = 64  # of what near names are looked for

_Value = Any  # None, bool, int, float, str, tuple of values, or read-only mapping of names to them


class Difference(NamedTuple):
    """One field in which two manifests differ."""

    field: str
    """Its path, such as "tp_rank", "rope.theta" or "groups.full"."""
    mine: _Value
    theirs: _Value


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


MISSING = _Missing()
"""In a Difference: the other manifest has no such entry."""


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Manifest:
    """Names everything that must match before stored blocks may be used again. Immutable.

    Two manifests are equal when their canonical forms are, byte for byte: docs/MANIFEST.md. Raises
    InvalidArgument that names the field, its value and its limit.
    """

    model: str
    """Which model, as the engine names it."""
    weights: str
    """A digest of the weights, or the revision they were published under."""
    dtype: str
    """Of the stored elements, such as "bfloat16" or "fp8_e4m3"."""
    layers: int
    """Of the whole model."""
    kv_heads: int
    """Of the whole model."""
    head_size: int
    block_tokens: int
    groups: Mapping[str, str]
    """By group, the order of the axes of its blocks: {"full": "layer,kv,token,head,dim"}, say."""
    engine: str
    """Name and version of what wrote the blocks."""
    engine_abi: str
    """What the engine promises about the layout of its cache."""
    rope: Mapping[str, _Value] | None
    """Parameters of the positional encoding, numbers taken as float; None where there is none."""
    adapter: str | None
    """A digest of the adapter that the state was computed with, or None."""
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    quantisation: str | None = None
    """Of the cache beyond its dtype, such as "per-head"; with it goes scale_layout."""
    scale_layout: str | None = None
    """Where the scales of quantised blocks are."""
    salt: str | None = dataclasses.field(default=None, repr=False)
    """Of a tenant: blocks of one salt are never found under another. Shown nowhere."""
    kvmem_abi: int = 1
    """Of the form in which kvmem keeps blocks."""

    if not TYPE_CHECKING:  # a type checker sees the one that dataclass makes, with every field

        def __init__(self, /, **fields: _Value) -> None:
            self._take(fields)

    def _take(self, fields: dict[str, _Value]) -> None:
        known = {field.name: field.default for field in dataclasses.fields(self)}
        for name in fields:
            if name not in known:
                near = difflib.get_close_matches(name[:_NAME_LETTERS_MOST], known, 1, cutoff=0)[0]
                raise InvalidArgument(f"a manifest has no field {shown(name)}; {near!r} is near")
        needed = [name for name, default in known.items() if default is dataclasses.MISSING]
        missing = [repr(name) for name in needed if name not in fields]
        if missing:
            raise InvalidArgument(f"a manifest needs the field {' and the field '.join(missing)}")
        for name, value in (known | fields).items():
            object.__setattr__(self, name, _checked_field(name, value))
        for kind in ("tp", "pp", "cp"):
            rank, size = getattr(self, f"{kind}_rank"), getattr(self, f"{kind}_size")
            if rank >= size:
                few = f"which must be below the {size} ranks"
                raise InvalidArgument(f"{kind}_rank is {rank}, {few}")
        if (self.quantisation is None) != (self.scale_layout is None):
            raise InvalidArgument(
                f"quantisation is {self.quantisation!r} and scale_layout {self.scale_layout!r}:"
                " either both are given or none"
            )
        whole = FORMAT + _form(self._fields())
        if len(whole) > _BYTES_MOST:
            raise InvalidArgument(f"it has {len(whole)} bytes, which must be at most {_BYTES_MOST}")
        digest = hashlib.blake2b(whole, digest_size=DIGEST_BYTES).digest()
        object.__setattr__(self, "_bytes", whole)
        object.__setattr__(self, "_digest", digest)

    def _fields(self) -> dict[str, _Value]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def to_bytes(self) -> bytes:
        """Give the canonical form: the same on every machine, in every process."""
        return bytes(self._bytes)  # type: ignore[attr-defined]

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Manifest:
        """Read a canonical form. Raises InvalidArgument for whatever is not exactly one."""
        if not isinstance(data, bytes | bytearray | memoryview):
            raise InvalidArgument(f"data is {shown(data)}, not bytes")
        whole = bytes(data)
        if len(whole) > _BYTES_MOST:
            raise InvalidArgument(f"data has {len(whole)} bytes, at most {_BYTES_MOST}")
        if not whole.startswith(FORMAT):
            raise InvalidArgument(f"data begins with {whole[:5]!r}, not with {FORMAT!r}")
        fields, end = _decoded(whole, len(FORMAT), 0)
        if end != len(whole):
            raise InvalidArgument(f"data has {len(whole) - end} bytes behind the manifest")
        if not isinstance(fields, dict):
            raise InvalidArgument("data holds no fields")
        made = cls(**fields)
        if made.to_bytes() != whole:
            raise InvalidArgument("data is a manifest, and not in its canonical form")
        return made

    @property
    def digest(self) -> bytes:
        """BLAKE2b of the canonical form, 16 bytes."""
        return bytes(self._digest)  # type: ignore[attr-defined]

    @property
    def hexdigest(self) -> str:
        return self.digest.hex()

    def key(self, block_hash: bytes) -> bytes:
        """Make the key of a block under this manifest: 32 bytes.

        block_hash: 16 to 64 bytes that name the block's tokens and all before them. BLAKE2b of it,
        with the digest as its key: blocks of two manifests never have a key in common.
        """
        least, most = _BLOCK_HASH_BYTES
        if not isinstance(block_hash, bytes):
            raise InvalidArgument(f"block_hash is {shown(block_hash)}, not bytes")
        if not least <= len(block_hash) <= most:
            raise InvalidArgument(
                f"block_hash has {len(block_hash)} bytes, which must be {least} to {most}"
            )
        return hashlib.blake2b(block_hash, key=self.digest, digest_size=KEY_BYTES).digest()

    def compare(self, other: Manifest) -> list[Difference]:
        """List the fields that differ, by path; empty where both are equal.

        The salt of a tenant is listed with None for both values.
        """
        if not isinstance(other, Manifest):
            raise InvalidArgument(f"other is {shown(other)}, not a Manifest")
        differing = _differences(self._fields(), other._fields())
        return [Difference("salt", None, None) if d.field == "salt" else d for d in differing]

    def explain(self, other: Manifest) -> str:
        """Say for people what differs. Salts are not shown."""
        differing = [
            f"{field} is another one"
            if field == "salt"
            else f"{field} is {_said(mine)} here and {_said(theirs)} there"
            for field, mine, theirs in self.compare(other)
        ]
        if not differing:
            return "the manifests are equal"
        return f"the manifests differ: {'; '.join(differing)}"

    def expect_equal(self, other: Manifest) -> None:
        """Raise Incompatible, whose `fields` lists what differs."""
        differing = self.compare(other)
        if differing:
            error = Incompatible(self.explain(other))
            error.fields = [d.field for d in differing]
            raise error

    def replace(self, /, **changes: _Value) -> Manifest:
        """Make one with other values in some fields."""
        return Manifest(**(self._fields() | changes))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Manifest):
            return NotImplemented
        return self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash(self.to_bytes())

    def __reduce__(self) -> tuple[Any, ...]:
        return Manifest.from_bytes, (self.to_bytes(),)


# ---- checking ----

_COUNTS = {"layers", "kv_heads", "head_size", "block_tokens", "tp_size", "pp_size", "cp_size"}
_NUMBERS = {"tp_rank", "pp_rank", "cp_rank", "kvmem_abi"}
_OPTIONAL_TEXTS = {"quantisation", "scale_layout", "adapter", "salt"}
_NUMBER_MOST = (1 << 31) - 1


def _checked_field(name: str, value: _Value) -> _Value:
    if name in _COUNTS | _NUMBERS:
        least = 1 if name in _COUNTS else 0
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(f"{name} is {shown(value)}, not an integer")
        if not least <= value <= _NUMBER_MOST:
            raise InvalidArgument(f"{name} is {shown(value)}, not from {least} to {_NUMBER_MOST}")
        return int(value)  # of an enumeration, say
    if name == "groups":
        if not isinstance(value, Mapping) or not value:
            raise InvalidArgument(f"groups is {shown(value)}, not a mapping of names to layouts")
        layouts = {_name("groups", k): _text(f"groups.{k}", v) for k, v in value.items()}
        return _mapping("groups", layouts, len(value))
    if name == "rope":
        if value is not None and not isinstance(value, Mapping):
            raise InvalidArgument(f"rope is {shown(value)}, not a mapping of parameters")
        return None if value is None else _tree("rope", value, 0)
    if value is None and name in _OPTIONAL_TEXTS:
        return None
    return _text(name, value)


def _text(name: str, value: _Value, *, may_be_empty: bool = False) -> str:
    said = "given" if name == "salt" else shown(value)  # nothing shows that one
    if not isinstance(value, str):
        raise InvalidArgument(f"{name} is {said}, not a string")
    value = str.__str__(value)  # of an enumeration, say
    # What has no meaning yet may get another normal form with it.
    if any(unicodedata.category(letter) == "Cn" for letter in value):
        raise InvalidArgument(f"{name} is {said}, with code points that mean nothing")
    if not value and not may_be_empty:
        raise InvalidArgument(f"{name} is empty")
    text = unicodedata.normalize("NFC", value)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name} is {said}, which is no valid text") from None
    if size > _TEXT_BYTES_MOST:
        raise InvalidArgument(f"{name} has {size} bytes, which must be at most {_TEXT_BYTES_MOST}")
    return text


def _name(path: str, value: _Value) -> str:
    name = _text(f"a name in {path}", value)
    if "." in name:
        raise InvalidArgument(f"{path} has the name {shown(name)}, which must have no '.'")
    return name


def _mapping(path: str, named: dict[str, _Value], given: int) -> _Value:
    if given > _ITEMS_MOST:
        raise InvalidArgument(f"{path} has {given} items, which must be at most {_ITEMS_MOST}")
    if len(named) != given:
        raise InvalidArgument(f"{path} has two names that are one in normal form")
    return MappingProxyType(named)


def _tree(path: str, value: _Value, depth: int) -> _Value:
    """Check a value of `rope`: 10000 and 10000.0 are the same number, as float."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(path, value, may_be_empty=True)
    if isinstance(value, int | float):
        if abs(value) > 1 << 53 if isinstance(value, int) else not math.isfinite(value):
            raise InvalidArgument(f"{path} is {shown(value)}, which must be finite and exact")
        return float(value) + 0.0  # no negative zero
    if depth >= _DEPTH_MOST:
        raise InvalidArgument(f"{path} is nested deeper than {_DEPTH_MOST}")
    if isinstance(value, Mapping | list | tuple) and len(value) > _ITEMS_MOST:
        raise InvalidArgument(f"{path} has {len(value)} items, which must be at most {_ITEMS_MOST}")
    if isinstance(value, Mapping):
        named = {_name(path, k): _tree(f"{path}.{k}", v, depth + 1) for k, v in value.items()}
        return _mapping(path, named, len(value))
    if isinstance(value, list | tuple):
        return tuple(_tree(f"{path}[{i}]", v, depth + 1) for i, v in enumerate(value))
    raise InvalidArgument(f"{path} is {shown(value)}, which a manifest cannot hold")


def _differences(mine: _Value, theirs: _Value, path: str = "") -> Iterator[Difference]:
    """Go down as far as both have something to go down to; a list is one value."""
    if not isinstance(mine, Mapping) or not isinstance(theirs, Mapping):
        if _form(mine) != _form(theirs):
            yield Difference(path, mine, theirs)
        return
    for name in sorted(mine.keys() | theirs.keys()):
        below = f"{path}.{name}" if path else name
        yield from _differences(mine.get(name, MISSING), theirs.get(name, MISSING), below)


def _said(value: _Value) -> str:
    return shown(dict(value) if isinstance(value, Mapping) else value)


# ---- the canonical form ----


def _form(value: _Value) -> bytes:
    return b"" if value is MISSING else b"".join(_encoded(value))


def _encoded(value: _Value) -> Iterator[bytes]:
    if value is None:
        yield b"n"
    elif isinstance(value, bool):
        yield b"t" if value else b"f"
    elif isinstance(value, int):
        yield b"i" + struct.pack(">q", value)
    elif isinstance(value, float):
        yield b"d" + struct.pack(">d", value)
    elif isinstance(value, str):
        text = value.encode()
        yield b"s" + struct.pack(">I", len(text)) + text
    elif isinstance(value, tuple):
        yield b"l" + struct.pack(">I", len(value))
        for each in value:
            yield from _encoded(each)
    else:
        yield b"m" + struct.pack(">I", len(value))
        for name in sorted(value, key=str.encode):
            yield from _encoded(name)
            yield from _encoded(value[name])


def _decoded(data: bytes, at: int, depth: int) -> tuple[_Value, int]:
    """Read one value. What is not in canonical order is found out by encoding it again."""
    if depth > _DEPTH_MOST + 2:
        raise InvalidArgument(f"data is nested deeper than {_DEPTH_MOST}")
    kind, at = data[at : at + 1], at + 1
    if kind in (b"n", b"t", b"f"):
        return {b"n": None, b"t": True, b"f": False}[kind], at
    if kind in (b"i", b"d"):
        return struct.unpack(">q" if kind == b"i" else ">d", _taken(data, at, 8))[0], at + 8
    if kind not in (b"s", b"l", b"m"):
        raise InvalidArgument(f"data has {kind!r} at byte {at - 1}, which begins no value")
    count, at = struct.unpack(">I", _taken(data, at, 4))[0], at + 4
    if kind == b"s":
        try:
            return _taken(data, at, count).decode(), at + count
        except UnicodeDecodeError:
            raise InvalidArgument(f"data has no valid text at byte {at}") from None
    if count > _ITEMS_MOST:
        raise InvalidArgument(f"data has {count} items at byte {at}, at most {_ITEMS_MOST}")
    if kind == b"l":
        items = []
        for _ in range(count):
            item, at = _decoded(data, at, depth + 1)
            items.append(item)
        return tuple(items), at
    named: dict[str, _Value] = {}
    for _ in range(count):
        name, at = _decoded(data, at, depth + 1)
        if not isinstance(name, str) or name in named:
            raise InvalidArgument(f"data has a name before byte {at} that is none or stands twice")
        named[name], at = _decoded(data, at, depth + 1)
    return named, at


def _taken(data: bytes, at: int, count: int) -> bytes:
    if at + count > len(data):
        raise InvalidArgument(f"data ends at byte {len(data)}, within a value at byte {at}")
    return data[at : at + count]
