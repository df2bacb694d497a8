"""Every test is run and says what must hold: one that only calls something would pass whatever that did."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
RAISING = {"raises", "warns", "fail"}  # pytest's; besides these whatever is called assert_...


def called(function: ast.FunctionDef) -> Iterator[str]:
    """Names of what it calls, at any depth, without their owners; `assert` is one of them."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        elif isinstance(node, ast.Assert):
            yield "assert_"


def without_assertion(sources: list[str]) -> list[str]:
    """Tests that neither assert nor call a function of the tests that does, or one that calls such a one."""
    found = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    calls = [(function.name, set(called(function))) for function in found]
    sound = RAISING | {name for _, names in calls for name in names if name.startswith("assert_")}
    while more := {name for name, names in calls if name not in sound and names & sound}:
        sound |= more
    return [f.name for f in found if f.name.startswith("test_") and f.name not in sound]


def test_every_test_has_an_assertion() -> None:
    assert without_assertion([path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")]) == []


def test_one_without_is_found() -> None:
    sound = "def check(x): assert x\ndef twice(x): check(x)\n"
    tests = (
        "def test_a(): twice(1)\n"
        "def test_b():\n    with pytest.raises(ValueError): int('x')\n"
        "def test_c(): torch.testing.assert_close(1, 1)\n"
        "def test_d(): run()\n"
    )
    assert without_assertion([sound, tests]) == ["test_d"]


def test_no_two_files_have_one_name() -> None:
    """pytest imports them without their folders, and leaves out the second where one process meets both."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
