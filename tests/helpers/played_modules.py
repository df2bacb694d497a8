"""Fake modules, for code that imports a package which is not installed."""

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest


def play(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Make each module importable with the given attributes for the duration of the test."""
    for name, names in modules.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(names)
