"""Imported by Python at startup if this folder is on PYTHONPATH: makes runs build failing engines."""

import os
import sys
from collections.abc import Sequence
from types import ModuleType


class BeforeTheRun:
    """Import hook that finds no module, but installs the failing engines just before a run is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "qerl_lab.train.run":
            sys.meta_path.remove(self)
            import failing_engines

            failing_engines.install(os.environ[failing_engines.VARIABLE])


sys.meta_path.insert(0, BeforeTheRun())
