"""Just enough C++ for tidy.py: comments and strings away, function bodies found by their braces.

This is no parser. It is right for code in the style of this project (clang-formatted, no brace
that one preprocessor branch opens and another closes) and raises `Unreadable` where braces do not
match.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# What must not be read as code. Digit separators come first, so that 1'000 opens no character.
TOKEN = re.compile(
    r"""
    (?P<number>\b\d(?:'?[\w.])*)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<raw>R"(?P<tag>[^()\s\\]{0,16})\(.*?\)(?P=tag)")
  | (?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
    """,
    re.VERBOSE | re.DOTALL,
)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
TEMPLATE = re.compile(r"template\s*<")
ACCESS = re.compile(r"\s*(?:public|private|protected)\s*:(?!:)")
NAMESPACE = re.compile(r"(?:inline\s+)?namespace\b|extern\s*\"\s*\"\s*$")
CLASS = re.compile(r"(?:requires\b.*\s)?(?:class|struct|union|enum)\b.*[^)\s]\s*$", re.DOTALL)
# A body that a semicolon follows: a lambda in a variable, or a function with a superfluous one.
LAMBDA = re.compile(r"=\s*\[")
INITIALISER = re.compile(r"=[^()\[\]]*$")
SIGNATURE = re.compile(r"\)\s*(?:const\s*|noexcept\s*|override\s*|final\s*)*$")
STATIC_CONTAINER = re.compile(
    r"std::(?:(?:unordered_)?(?:multi)?(?:map|set)|vector|string|deque|list|queue|function"
    r"|unique_ptr|shared_ptr|any|thread|jthread)\b(?!::)"
)
QUALIFIERS = re.compile(r"(?:(?:static|inline|const|constexpr|constinit|extern|mutable)\s+)*")


class Unreadable(Exception):
    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class Function(NamedTuple):
    name: str
    line: int
    lines: int


def blank(source: str, keep_strings: bool = False) -> str:
    """The source with comments (and the inside of strings) as spaces: every offset stays true."""

    def replace(match: re.Match[str]) -> str:
        text = match[0]
        if match["number"] is not None:
            return text
        if match["comment"] is not None:
            return re.sub(r"[^\n]", " ", text)
        if keep_strings:
            return text
        return text[0] + re.sub(r"[^\n]", " ", text[1:-1]) + text[-1]

    return TOKEN.sub(replace, source)


def functions(source: str) -> Iterator[Function]:
    """Every function body outside another one; a lambda counts as part of what it stands in."""
    for kind, head, start, end in _statements(_code(source)):
        if kind == "function":
            line = source.count("\n", 0, start) + 1
            yield Function(_name(head), line, source.count("\n", start, end) + 1)


def static_containers(source: str) -> Iterator[tuple[int, str]]:
    """Objects with a destructor at namespace scope or `static` in a function or class."""
    code = _code(source)
    at_namespace = {start for kind, _, start, _ in _statements(code) if kind == "namespace"}
    for match in STATIC_CONTAINER.finditer(code):
        start = _statement_start(code, match.start())
        qualifiers = QUALIFIERS.match(code, start)
        if qualifiers is None or qualifiers.end() != match.start():
            continue
        if "extern" in qualifiers[0] or not (start in at_namespace or "static" in qualifiers[0]):
            continue
        name = re.compile(r"\s*([A-Za-z_]\w*)\s*[;={]").match(code, _past_angles(code, match.end()))
        if name is not None:
            yield code.count("\n", 0, start) + 1, name[1]


def _code(source: str) -> str:
    return DIRECTIVE.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), blank(source))


def _statements(code: str) -> Iterator[tuple[str, str, int, int]]:
    """(kind, head, start, end) of what stands in namespaces and classes.

    Kinds: "function" (it has a body), and anything else at "namespace" or at "class" scope.
    """
    containers: list[str] = []
    start = position = 0
    parentheses = 0
    while position < len(code):
        character = code[position]
        if character in "()":
            parentheses += 1 if character == "(" else -1
        elif character == ";" and parentheses == 0:
            yield _kind(containers), code[start:position], *_span(code, start, position)
            start = position + 1
        elif character == "}":
            if not containers:
                raise Unreadable("a closing brace too many", code.count("\n", 0, position) + 1)
            containers.pop()
            start = position + 1
        elif character == "{":
            head = _head(code[start:position])
            if parentheses == 0 and (NAMESPACE.match(head) or CLASS.match(head)):
                containers.append("namespace" if NAMESPACE.match(head) else "class")
                start = position + 1
            else:
                close = _closing(code, position)
                following = code[close + 1 :].lstrip()[:1]
                # A brace in a default argument, a member initialiser (the body is still to come)
                # or an expression ends nothing.
                inside = following in (",", "{") or INITIALISER.search(head)
                if parentheses == 0 and (following == ";" or not inside):
                    has_body = following != ";" or LAMBDA.search(head) or SIGNATURE.search(head)
                    kind = "function" if has_body else _kind(containers)
                    yield kind, head, *_span(code, start, close)
                    start = close + 1
                position = close
        position += 1
    if containers or parentheses:
        raise Unreadable("a brace or parenthesis is not closed", code.count("\n") + 1)


def _kind(containers: list[str]) -> str:
    return "class" if "class" in containers else "namespace"


def _span(code: str, start: int, end: int) -> tuple[int, int]:
    access = ACCESS.match(code, start)
    while access is not None:
        start = access.end()
        access = ACCESS.match(code, start)
    while start < end and code[start].isspace():
        start += 1
    return start, end


def _head(text: str) -> str:
    """What stands before a brace, without access labels, template parameters and attributes."""
    start, _ = _span(text, 0, len(text))
    template = TEMPLATE.match(text, start)
    while template is not None:
        start, _ = _span(text, _past_angles(text, template.end() - 1), len(text))
        template = TEMPLATE.match(text, start)
    return text[start:]


def _past_angles(text: str, start: int) -> int:
    """The offset behind a balanced <...> at start, or start where there is none."""
    depth = 0
    for position in range(start, len(text)):
        if text[position] == "<":
            depth += 1
        elif text[position] == ">":
            depth -= 1
        if depth == 0:
            return position + 1 if position > start else start
    return len(text)


def _closing(code: str, opening: int) -> int:
    depth = 0
    for match in re.compile(r"[{}]").finditer(code, opening):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    raise Unreadable("a brace is not closed", code.count("\n", 0, opening) + 1)


def _statement_start(code: str, position: int) -> int:
    start = max(code.rfind(mark, 0, position) for mark in ";{}") + 1
    return _span(code, start, position)[0]


def _name(head: str) -> str:
    match = re.search(r"((?:[\w~]+::)*(?:operator\s*(?:\(\)|[^\s(]+)|[\w~]+))\s*\(", head)
    return match[1] if match is not None else " ".join(head.split())[:40]
