"""Fake modules, for code that imports a package which is not installed."""

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest


def play(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, Mapping[str, Any]]) -> None:
    """Make each module importable with the given attributes for the duration of the test."""
    for name, names in modules.items():
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[name]).update(names)


@contextmanager
def imported_over(
    monkeypatch: pytest.MonkeyPatch, name: str, modules: Mapping[str, Mapping[str, Any]]
) -> Iterator[ModuleType]:
    """Yield the module `name`, imported over vLLM if that is installed, else over these fake modules."""
    if importlib.util.find_spec("vllm") is not None:
        yield importlib.import_module(name)
        return
    play(monkeypatch, modules)
    yield importlib.import_module(name)
    package, _, leaf = name.rpartition(".")
    del sys.modules[name]
    vars(sys.modules[package]).pop(leaf, None)
