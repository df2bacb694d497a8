"""Every test is run and has an assertion. Without one, a test would pass whatever its calls return."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
RAISING = {"raises", "warns", "fail"}  # of pytest; functions named assert_... count too


def called(function: ast.FunctionDef) -> Iterator[str]:
    """Yield the names of called functions and methods, without their owners, and "assert_" for an `assert`."""
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        elif isinstance(node, ast.Assert):
            yield "assert_"


def without_assertion(sources: list[str]) -> list[str]:
    """Return the tests that assert neither themselves nor through functions of the tests that they call."""
    found = [node for text in sources for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    calls = [(function.name, set(called(function))) for function in found]
    sound = RAISING | {name for _, names in calls for name in names if name.startswith("assert_")}
    while more := {name for name, names in calls if name not in sound and names & sound}:
        sound |= more
    return [f.name for f in found if f.name.startswith("test_") and f.name not in sound]


def test_every_test_has_an_assertion() -> None:
    assert without_assertion([path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")]) == []


def test_a_test_without_an_assertion_is_found() -> None:
    sound = "def check(x): assert x\ndef twice(x): check(x)\n"
    tests = (
        "def test_a(): twice(1)\n"
        "def test_b():\n    with pytest.raises(ValueError): int('x')\n"
        "def test_c(): torch.testing.assert_close(1, 1)\n"
        "def test_d(): run()\n"
    )
    assert without_assertion([sound, tests]) == ["test_d"]


def test_no_two_files_have_one_name() -> None:
    """pytest imports test files without their folders, and skips the second if one process has both."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
