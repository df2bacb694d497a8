"""Modules that a test plays, for code that imports a package which is not installed."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def play(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Have each module be importable, with these names in it, for as long as the test takes."""
    for name, names in modules.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(names)
