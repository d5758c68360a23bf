"""Checks on the tree itself: rooms, cycles, sizes, banned code, names in docs, leftovers.

Run it as `python tests/tidy/tidy.py [root]`; it prints one line a finding and exits 1 if there are
any. Standard library only. Each rule is a generator over a root folder and is tested against a
planted violation in test_tidy.py. A rule that has nothing to look at yet raises `NothingToCheck`.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import cxx

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70

# A room sees rooms of smaller rank only; two rooms of one rank do not see each other.
ROOM_RANKS = {
    "base": 0,
    "device": 1,
    "host": 2,
    "copy": 3,
    "recycle": 4,
    "tier": 4,
    "offload": 5,
    "cache": 6,
    "service": 7,
    "bindings": 8,
}

SKIPPED_FOLDERS = {"build", "dist", "__pycache__"}
CODE_FOLDERS = ("csrc", "python", "tests", "bench", "examples", "tools", ".ci")

# Written so that this file does not find itself.
LEFTOVER_MARK = re.compile(r"\b(T[O]DO|F[I]XME|X[X]X|H[A]CK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.$}])/(root|work)/")

BANNED_IN_CSRC = {
    r"\bcudaDeviceSynchronize\b": "waits for everybody's work; wait for an event of our own",
    r"\bcudaLaunchHostFunc\b": "a host callback may not call the runtime; poll events instead",
    r"\bcudaDeviceReset\b": "destroys the engine's context",
    r"#\s*include\s*[<\"]g(test|mock)/": "test through the contract; no test code in csrc",
    r"\bthread_local\b": "hidden per-thread state; put it in an object that somebody owns",
}

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*([<"])([^>"]+)[>"]', re.MULTILINE)
DOC_PATH = re.compile(r"(?<![\w./*{}<>~-])((?:[\w.-]+/)+[\w.-]*\w\.(?:hpp|cpp|py|md))(?![\w/])")
DOC_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]*[./][^)#\s]*)")
DOC_NAME = re.compile(r"(?<![\w./-])kvmem\.([A-Za-z_]\w*)")
CONTRACT_FACT = re.compile(r"TEST_P\(DeviceContract, (\w+)\)")
CONTRACT_ROW = re.compile(r"^\| ([A-Z]\w+) \|", re.MULTILINE)
URL = re.compile(r"[a-z]+://\S+")


class Finding(NamedTuple):
    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


class NothingToCheck(Exception):
    """The files that a rule reads do not exist yet."""


Rule = Callable[[Path], Iterator[Finding]]


def files(root: Path, folders: tuple[str, ...], suffixes: tuple[str, ...]) -> list[Path]:
    """Files under the folders of root ("" is the root itself), without builds and environments."""
    found: set[Path] = set()
    for folder in folders:
        for here, names, leaves in os.walk(root / folder):
            names[:] = [n for n in names if not _is_skipped(Path(here) / n)]
            found.update(Path(here) / leaf for leaf in leaves if leaf.endswith(suffixes))
    return sorted(found)


def _is_skipped(folder: Path) -> bool:
    hidden = folder.name.startswith(".") and folder.name != ".ci"
    return hidden or folder.name in SKIPPED_FOLDERS or (folder / "pyvenv.cfg").exists()


def cxx_files(root: Path) -> list[Path]:
    return files(root, ("csrc",), (".cpp", ".hpp", ".h", ".c", ".cu", ".cuh"))


def python_files(root: Path) -> list[Path]:
    # Stubs are left out: they list what the bindings offer and hold no code.
    return files(root, ("python",), (".py",))


def doc_files(root: Path) -> list[Path]:
    top = [root / name for name in ("README.md", "CONTRIBUTING.md") if (root / name).exists()]
    docs = top + files(root, ("docs",), (".md",))
    if not docs:
        raise NothingToCheck("no README.md and no docs/ yet")
    return docs


def relative(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix()


def line_of(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1


def includes(path: Path) -> Iterator[tuple[int, str, bool]]:
    """(line, target, is it written with angle brackets) of each include."""
    text = cxx.blank(path.read_text(encoding="utf-8"), keep_strings=True)
    for match in INCLUDE.finditer(text):
        yield line_of(text, match.start()), match[2], match[1] == "<"


def check_rooms(root: Path) -> Iterator[Finding]:
    csrc = root / "csrc"
    for path in cxx_files(root):
        name = relative(root, path)
        room = path.relative_to(csrc).parts[0]
        if room not in ROOM_RANKS:
            yield Finding(name, 1, "is in no room; see ROOM_RANKS in tests/tidy/tidy.py")
            continue
        for line, target, angled in includes(path):
            target_room = target.split("/")[0] if "/" in target else ""
            if angled and target_room not in ROOM_RANKS:
                continue
            if angled or target_room not in ROOM_RANKS:
                yield Finding(name, line, f'write the include of {target} as "room/file.hpp"')
            elif not (csrc / target).is_file():
                yield Finding(name, line, f"includes {target}, which does not exist")
            elif target_room != room and ROOM_RANKS[target_room] >= ROOM_RANKS[room]:
                yield Finding(
                    name,
                    line,
                    f"{room} (rank {ROOM_RANKS[room]}) may not include {target}"
                    f" (rank {ROOM_RANKS[target_room]})",
                )


def check_cycles(root: Path) -> Iterator[Finding]:
    csrc = root / "csrc"
    graph = {
        path.relative_to(csrc).as_posix(): [target for _, target, _ in includes(path)]
        for path in cxx_files(root)
    }
    finished: set[str] = set()

    def visit(node: str, trail: list[str]) -> Iterator[Finding]:
        if node in trail:
            cycle = [*trail[trail.index(node) :], node]
            yield Finding(f"csrc/{node}", 1, "includes itself: " + " -> ".join(cycle))
        elif node in graph and node not in finished:
            for target in graph[node]:
                yield from visit(target, [*trail, node])
            finished.add(node)

    for node in graph:
        yield from visit(node, [])


def check_file_size(root: Path) -> Iterator[Finding]:
    for path in cxx_files(root) + python_files(root):
        count = len(path.read_text(encoding="utf-8").splitlines())
        if count > FILE_LINES_MAX:
            yield Finding(relative(root, path), 1, f"{count} lines; at most {FILE_LINES_MAX}")


def check_function_size(root: Path) -> Iterator[Finding]:
    for path in cxx_files(root):
        name = relative(root, path)
        try:
            functions = list(cxx.functions(path.read_text(encoding="utf-8")))
        except cxx.Unreadable as error:
            yield Finding(name, error.line, f"cannot match braces: {error}")
            continue
        for function in functions:
            yield from _over_budget(name, function.line, function.name, function.lines)
    for path in python_files(root):
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from _over_budget(
                    relative(root, path), node.lineno, node.name, _python_lines(node)
                )


def _over_budget(name: str, line: int, function: str, count: int) -> Iterator[Finding]:
    if count > FUNCTION_LINES_MAX:
        yield Finding(name, line, f"{function}: {count} lines; at most {FUNCTION_LINES_MAX}")


def _python_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines without those of the docstring: long documentation is no fault."""
    count = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        docstring = node.body[0]
        count -= (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1
    return count


def check_banned_code(root: Path) -> Iterator[Finding]:
    for path in cxx_files(root):
        name = relative(root, path)
        source = path.read_text(encoding="utf-8")
        # Strings are kept: a runtime function fetched by name is a call as well.
        code = cxx.blank(source, keep_strings=True)
        for pattern, why in BANNED_IN_CSRC.items():
            for match in re.finditer(pattern, code):
                yield Finding(name, line_of(code, match.start()), f"{match[0].strip()}: {why}")
        for line, variable in cxx.static_containers(source):
            yield Finding(
                name, line, f"{variable}: a static object with a destructor; give it an owner"
            )


def check_doc_paths(root: Path) -> Iterator[Finding]:
    """Paths in docs are relative to the root, to csrc/, to python/, to tests/ or to the doc."""
    for doc in doc_files(root):
        bases = [root, root / "csrc", root / "python", root / "tests", doc.parent]
        for number, text in enumerate(doc.read_text(encoding="utf-8").splitlines(), 1):
            line = URL.sub("", text)
            dead = [t for t in DOC_LINK.findall(line) if not (doc.parent / t).exists()]
            named = DOC_PATH.findall(DOC_LINK.sub("", line))
            dead += [t for t in named if not any((base / t).exists() for base in bases)]
            for target in dict.fromkeys(dead):
                yield Finding(relative(root, doc), number, f"{target} is not there")


def check_doc_names(root: Path) -> Iterator[Finding]:
    known = public_names(root)
    for doc in doc_files(root):
        for number, text in enumerate(doc.read_text(encoding="utf-8").splitlines(), 1):
            for name in dict.fromkeys(DOC_NAME.findall(URL.sub("", text))):
                if name not in known:
                    yield Finding(relative(root, doc), number, f"kvmem.{name} is not public")


def public_names(root: Path) -> set[str]:
    """What `kvmem.` may be followed by: __all__, the package's modules, its dunder names."""
    package = root / "python" / "kvmem"
    if not (package / "__init__.py").exists():
        raise NothingToCheck("no python/kvmem/__init__.py yet")
    names = {"_core"}
    names |= {p.stem for p in package.iterdir() if p.suffix in (".py", ".pyi")}
    names |= {p.parent.name for p in package.glob("*/__init__.py")}
    for node in ast.parse((package / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            assigned = {t.id for t in targets if isinstance(t, ast.Name)}
            names |= {name for name in assigned if name.startswith("__")}
            if "__all__" in assigned and node.value is not None:
                names |= {str(c.value) for c in ast.walk(node.value) if isinstance(c, ast.Constant)}
    return names


def check_contract_facts(root: Path) -> Iterator[Finding]:
    """The facts of the contract suite and those of its document are the same."""
    doc = root / "docs" / "DEVICE_CONTRACT.md"
    suite = files(root, ("tests/contract",), ("_facts.cpp",))
    if not suite:
        raise NothingToCheck("no tests/contract yet")
    name = relative(root, doc)
    listed = set(CONTRACT_ROW.findall(doc.read_text(encoding="utf-8"))) if doc.exists() else set()
    tested: set[str] = set()
    for path in suite:
        tested |= set(CONTRACT_FACT.findall(path.read_text(encoding="utf-8")))
    for fact in sorted(tested - listed):
        yield Finding(name, 1, f"{fact} is tested and not listed")
    for fact in sorted(listed - tested):
        yield Finding(name, 1, f"{fact} is listed and not tested")


def check_leftover_marks(root: Path) -> Iterator[Finding]:
    yield from _matches(root, files(root, CODE_FOLDERS, ("",)), LEFTOVER_MARK, "finish it")


def check_machine_paths(root: Path) -> Iterator[Finding]:
    yield from _matches(root, files(root, ("",), ("",)), MACHINE_PATH, "a path of one machine")


def _matches(
    root: Path, paths: list[Path], pattern: re.Pattern[str], why: str
) -> Iterator[Finding]:
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        for match in pattern.finditer(text):
            yield Finding(relative(root, path), line_of(text, match.start()), f"{match[0]}: {why}")


RULES: dict[str, Rule] = {
    "rooms": check_rooms,
    "cycles": check_cycles,
    "file-size": check_file_size,
    "function-size": check_function_size,
    "banned-code": check_banned_code,
    "doc-paths": check_doc_paths,
    "doc-names": check_doc_names,
    "contract-facts": check_contract_facts,
    "leftover-marks": check_leftover_marks,
    "machine-paths": check_machine_paths,
}


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[2]
    count = 0
    for rule, check in RULES.items():
        try:
            for finding in check(root):
                print(f"{finding} [{rule}]")
                count += 1
        except NothingToCheck as reason:
            print(f"tidy: {rule} skipped: {reason}")
    print(f"tidy: {count} finding(s), {len(RULES)} rules")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
