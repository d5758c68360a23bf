"""The stub of the extension names what the extension has, no more and no less."""

from __future__ import annotations

import ast
import enum
from pathlib import Path

import numpy as np
import pytest

from kvmem import _core
from support import Cache

STUB = Path(_core.__file__).with_name("_core.pyi")
MODULE = ast.parse(STUB.read_text(encoding="utf-8"))
GIVEN_BY_PYBIND11 = {"_pybind11_conduit_v1_"}
GIVEN_BY_PYTHON = set(dir(object)) | {"__module__", "__dict__", "__weakref__", "__annotations__"}


def classes() -> dict[str, ast.ClassDef]:
    """The classes of the stub that exist when the program runs."""
    return {
        node.name: node
        for node in MODULE.body
        if isinstance(node, ast.ClassDef)
        and not any(ast.unparse(each) == "type_check_only" for each in node.decorator_list)
    }


def members(node: ast.ClassDef) -> dict[str, ast.stmt]:
    """What the class declares, by name."""
    found: dict[str, ast.stmt] = {}
    for each in node.body:
        if isinstance(each, ast.FunctionDef):
            found[each.name] = each
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            found[each.target.id] = each
    return found


def existing(owner: type) -> set[str]:
    """What the class of the extension defines itself and the stub must know."""
    own = set(vars(owner)) - GIVEN_BY_PYBIND11
    if owner.__init__ is object.__init__ or "instancemethod" not in repr(owner.__init__):
        own.discard("__init__")  # cannot be made from Python
    return own - {"__repr__", "__str__"}


def test_the_stub_lies_beside_the_extension() -> None:
    assert STUB.is_file()


def test_every_name_of_the_module_is_in_the_stub_and_the_other_way_round() -> None:
    stated = set(classes())
    for node in MODULE.body:
        if isinstance(node, ast.FunctionDef):
            stated.add(node.name)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) != "TypeAlias":
            assert isinstance(node.target, ast.Name)
            stated.add(node.target.id)
    dunders = {"__doc__", "__file__", "__loader__", "__name__", "__package__", "__spec__"}
    assert stated == set(vars(_core)) - dunders


@pytest.mark.parametrize("name", sorted(classes()))
def test_every_member_of_a_class_is_in_the_stub_and_the_other_way_round(name: str) -> None:
    owner = getattr(_core, name)
    if issubclass(owner, enum.Enum):
        stated_values = {
            ast.unparse(node.targets[0]): ast.literal_eval(node.value)
            for node in classes()[name].body
            if isinstance(node, ast.Assign)
        }
        assert stated_values == {each.name: each.value for each in owner}
        return
    stated = set(members(classes()[name]))
    assert existing(owner) - GIVEN_BY_PYTHON == stated - GIVEN_BY_PYTHON
    for special in stated & GIVEN_BY_PYTHON:
        assert special in vars(owner), f"{name}.{special} is only in the stub"


@pytest.mark.parametrize("name", sorted(classes()))
def test_properties_and_methods_are_what_the_stub_says(name: str) -> None:
    owner = getattr(_core, name)
    for member, node in members(classes()[name]).items():
        if not isinstance(node, ast.FunctionDef):
            continue
        stated = [ast.unparse(each) for each in node.decorator_list]
        actual = vars(owner)[member]
        assert isinstance(actual, property) == ("property" in stated), f"{name}.{member}"
        assert isinstance(actual, staticmethod) == ("staticmethod" in stated), f"{name}.{member}"


@pytest.mark.parametrize("name", sorted(classes()))
def test_arguments_have_the_names_and_defaults_that_the_stub_says(name: str) -> None:
    """pybind11 writes the signature into the docstring."""
    for member, node in members(classes()[name]).items():
        doc = getattr(getattr(_core, name), member).__doc__ or ""
        first = doc.splitlines()[0] if doc else ""
        if not isinstance(node, ast.FunctionDef) or not first.startswith(f"{member}("):
            continue
        if member.startswith("__") or node.args.posonlyargs or "arg0" in first:
            continue
        stated = [each.arg for each in node.args.args + node.args.kwonlyargs if each.arg != "self"]
        signature = ast.parse(f"def {first.partition(' -> ')[0]}: ...").body[0]
        assert isinstance(signature, ast.FunctionDef)
        actual = signature.args.args + signature.args.kwonlyargs
        assert [each.arg for each in actual if each.arg != "self"] == stated, f"{name}.{member}"
        assert [ast.unparse(each) for each in node.args.defaults] == [
            ast.unparse(each) for each in signature.args.defaults
        ], f"{name}.{member}"
        assert [each and ast.unparse(each) for each in node.args.kw_defaults] == [
            each and ast.unparse(each) for each in signature.args.kw_defaults
        ], f"{name}.{member}"


def test_the_dicts_have_the_keys_that_the_stub_says(cache: Cache) -> None:
    typed = {
        node.name: {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
        for node in MODULE.body
        if isinstance(node, ast.ClassDef) and "TypedDict" in map(ast.unparse, node.bases)
        for n in node.body
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    stats = cache.manager.stats()
    assert set(stats) == typed["_ManagerStats"]
    assert set(stats["offload"]) == set(stats["restore"]) == typed["_DirectionStats"]
    assert set(cache.manager.drain().slots) == typed["_SlotCounts"]


def test_the_arrays_have_the_types_that_the_stub_says(cache: Cache) -> None:
    blocks = cache.pool.acquire(1)
    assert blocks.indices.dtype == np.int64
    assert {blocks[0].dtype, blocks.gather().dtype, cache.pool.array.dtype} == {np.dtype(np.uint8)}
