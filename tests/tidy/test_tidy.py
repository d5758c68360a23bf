"""The tree is tidy, and the checker finds what it is meant to find."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cxx
import tidy

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rule", tidy.RULES)
def test_the_tree_is_tidy(rule: str) -> None:
    try:
        findings = [str(finding) for finding in tidy.RULES[rule](ROOT)]
    except tidy.NothingToCheck as reason:
        pytest.skip(str(reason))
    assert findings == []


def plant(root: Path, tree: dict[str, str]) -> Path:
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def found(rule: str, root: Path) -> list[str]:
    return [str(finding) for finding in tidy.RULES[rule](root)]


LONG_CXX = "void f() {\n" + "  g();\n" * 69 + "}\n"
LONG_PYTHON = "def f():\n" + "    g()\n" * 70
FACTS = "TEST_P(DeviceContract, ItCopies) {}\nTEST_P(DeviceContract, ItWaits) {}\n"
TIDY_PACKAGE = {"python/kvmem/__init__.py": "__all__ = ['Pool']\n"}

# rule, the planted tree, what the one finding must begin with
VIOLATIONS = [
    (
        "rooms",
        {"csrc/base/a.hpp": '#include "host/b.hpp"\n', "csrc/host/b.hpp": ""},
        "csrc/base/a.hpp:1: base (rank 0) may not include host/b.hpp (rank 2)",
    ),
    (
        "rooms",
        {"csrc/tier/a.hpp": '\n#include "recycle/b.hpp"\n', "csrc/recycle/b.hpp": ""},
        "csrc/tier/a.hpp:2: tier (rank 4) may not include recycle/b.hpp (rank 4)",
    ),
    ("rooms", {"csrc/host/a.cpp": '#include "a.hpp"\n'}, "csrc/host/a.cpp:1: write the include"),
    ("rooms", {"csrc/host/a.cpp": "#include <base/a.hpp>\n"}, "csrc/host/a.cpp:1: write the"),
    ("rooms", {"csrc/host/a.cpp": '#include "host/a.hpp"\n'}, "csrc/host/a.cpp:1: includes host"),
    ("rooms", {"csrc/attic/a.cpp": ""}, "csrc/attic/a.cpp:1: is in no room"),
    ("rooms", {"csrc/a.cpp": ""}, "csrc/a.cpp:1: is in no room"),
    (
        "cycles",
        {
            "csrc/base/a.hpp": '#include "base/b.hpp"\n',
            "csrc/base/b.hpp": '#include "base/c.hpp"\n',
            "csrc/base/c.hpp": '#include "base/b.hpp"\n',
        },
        "csrc/base/b.hpp:1: includes itself: base/b.hpp -> base/c.hpp -> base/b.hpp",
    ),
    ("file-size", {"csrc/base/a.cpp": "\n" * 401}, "csrc/base/a.cpp:1: 401 lines"),
    ("file-size", {"python/kvmem/a.py": "\n" * 401}, "python/kvmem/a.py:1: 401 lines"),
    ("function-size", {"csrc/base/a.cpp": LONG_CXX}, "csrc/base/a.cpp:1: f: 71 lines"),
    ("function-size", {"csrc/base/a.cpp": "void f() {\n"}, "csrc/base/a.cpp:1: cannot match"),
    ("function-size", {"python/kvmem/a.py": LONG_PYTHON}, "python/kvmem/a.py:1: f: 71 lines"),
    ("banned-code", {"csrc/device/a.cpp": "\ncudaDeviceSynchronize();\n"}, "csrc/device/a.cpp:2: "),
    ("banned-code", {"csrc/device/a.cpp": 'find("cudaLaunchHostFunc");\n'}, "csrc/device/a.cpp:1"),
    ("banned-code", {"csrc/device/a.cpp": "cudaDeviceReset();\n"}, "csrc/device/a.cpp:1: cuda"),
    ("banned-code", {"csrc/base/a.hpp": "#include <gtest/gtest.h>\n"}, "csrc/base/a.hpp:1: #incl"),
    ("banned-code", {"csrc/base/a.hpp": "thread_local int a;\n"}, "csrc/base/a.hpp:1: thread_"),
    (
        "banned-code",
        {"csrc/base/a.cpp": "namespace kvmem {\nconst std::map<int, std::vector<int>> all;\n}\n"},
        "csrc/base/a.cpp:2: all: a static object",
    ),
    (
        "banned-code",
        {"csrc/base/a.cpp": 'void f() {\n  static const std::string name = "a";\n}\n'},
        "csrc/base/a.cpp:2: name: a static object",
    ),
    ("doc-paths", {"README.md": "\nSee `host/gone.hpp`.\n"}, "README.md:2: host/gone.hpp is not"),
    ("doc-paths", {"docs/deep/a.md": "[the way](gone.md#in)\n"}, "docs/deep/a.md:1: gone.md is"),
    ("doc-names", {**TIDY_PACKAGE, "README.md": "`kvmem.Pond()`\n"}, "README.md:1: kvmem.Pond"),
    (
        "contract-facts",
        {
            "tests/contract/a_facts.cpp": FACTS,
            "docs/DEVICE_CONTRACT.md": "| copies | source |\n| ItCopies | R |\n",
        },
        "docs/DEVICE_CONTRACT.md:1: ItWaits is tested and not listed",
    ),
    (
        "contract-facts",
        {
            "tests/contract/a_facts.cpp": FACTS,
            "docs/DEVICE_CONTRACT.md": "| ItCopies | R |\n| ItFlies | R |\n| ItWaits | K |\n",
        },
        "docs/DEVICE_CONTRACT.md:1: ItFlies is listed and not tested",
    ),
    ("leftover-marks", {"python/kvmem/a.py": "# TO" + "DO: later\n"}, "python/kvmem/a.py:1: TO"),
    ("machine-paths", {"docs/a.md": "in /ro" + "ot/src\n"}, "docs/a.md:1: /ro"),
]


@pytest.mark.parametrize(("rule", "tree", "message"), VIOLATIONS)
def test_a_planted_violation_is_found(
    tmp_path: Path, rule: str, tree: dict[str, str], message: str
) -> None:
    findings = found(rule, plant(tmp_path, tree))
    assert len(findings) == 1
    assert findings[0].startswith(message)


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in VIOLATIONS} == set(tidy.RULES)


TIDY_TREE = {
    **TIDY_PACKAGE,
    "README.md": "`kvmem.Pool`, `kvmem.testing`, [how](docs/a.md#top), host/a.hpp, http://x/y.md\n",
    "docs/a.md": "../README.md, `csrc/host/a.hpp`, /usr/include/a/b.hpp, f([&](int x) {})\n",
    "docs/DEVICE_CONTRACT.md": "| ItCopies | R |\n| ItWaits | K |\n",
    "tests/contract/a_facts.cpp": FACTS,
    "python/kvmem/testing.py": f'def f():\n    """{"long" * 9}{chr(10) * 80}"""\n    g()\n',
    "csrc/base/a.hpp": "// cudaDeviceReset() never\nstd::string name();\n",
    "csrc/host/a.hpp": '#include <vector>\n#include "base/a.hpp"\nstruct A {\n'
    "  std::vector<int> all_;\n  static std::string name();\n};\n",
    "csrc/host/a.cpp": "void f() {\n" + "  g();\n" * 68 + "}\n",
    "csrc/bindings/a.cpp": '#include <pybind11/pybind11.h>\n#include "host/a.hpp"\n',
    "build/a.md": "/ro" + "ot/\n",
    "env/pyvenv.cfg": "",
    "env/lib/a.py": "/ro" + "ot/\n",
}


@pytest.mark.parametrize("rule", tidy.RULES)
def test_a_tidy_tree_has_no_findings(tmp_path: Path, rule: str) -> None:
    assert found(rule, plant(tmp_path, TIDY_TREE)) == []


def test_names_are_not_checked_before_there_is_a_package(tmp_path: Path) -> None:
    with pytest.raises(tidy.NothingToCheck, match=r"no README\.md"):
        found("doc-paths", tmp_path)
    with pytest.raises(tidy.NothingToCheck, match="__init__"):
        found("doc-names", plant(tmp_path, {"README.md": ""}))


@pytest.mark.parametrize(("tree", "status"), [(TIDY_TREE, 0), ({"csrc/a.cpp": ""}, 1)])
def test_the_exit_status_tells(tmp_path: Path, tree: dict[str, str], status: int) -> None:
    command = [sys.executable, tidy.__file__, str(plant(tmp_path, tree))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == status, run.stdout + run.stderr
    assert run.stdout.splitlines()[-1].startswith(f"tidy: {status} finding(s)")


HARD_TO_READ = r"""
#define OPEN() { \
  {
namespace kvmem {
namespace {
constexpr int table[] = {1'000, '{', '\''};
constexpr auto size_max = std::size_t{4} * 1024;
const auto pick = [](int a) {
  return a;
};
}  // namespace

enum class State : int { one, two };
template <typename T = std::vector<int>>
class Pool final : public Base {
 public:
  explicit Pool(int a, Options options = {})
      : a_{a}, names_{{"}", R"x(}"{)x"}}, b_(b) {
    if (a) { g(); }
  }
  bool operator()(int) const noexcept { return true; }
  [[nodiscard]] auto size() const -> std::size_t { return sizeof(struct Other); }
  struct Inner {
    int x{3};
    ~Inner() = default;
  };

 private:
  std::atomic<int> a_{0};  // } is no brace
};

template <typename T>
  requires std::integral<T>
struct Box {
  T get() /* { */ { return value; }
};

std::vector<int> Pool::all(
    int a) {
  auto f = [&] { return 1; };
  return {a};
}
}  // namespace kvmem
extern "C" {
int main() { return 0; }
}
"""


def test_functions_are_found_by_their_braces() -> None:
    functions = [(f.name, f.line, f.lines) for f in cxx.functions(HARD_TO_READ)]
    assert functions == [
        ("const auto pick = [](int a)", 8, 3),
        ("Pool", 17, 4),
        ("operator()", 21, 1),
        ("size", 22, 1),
        ("get", 35, 1),
        ("Pool::all", 38, 5),
        ("main", 45, 1),
    ]
