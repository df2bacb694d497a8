"""Python imports this at its start where the folder is on PYTHONPATH: runs then build engines that fail by a plan."""

import os
import sys
from collections.abc import Sequence
from types import ModuleType


class BeforeTheRun:
    """Finds no module. Just before a run is imported it puts the failing engines in place."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "qerl_lab.train.run":
            sys.meta_path.remove(self)
            import failing_engines

            failing_engines.install(os.environ[failing_engines.VARIABLE])


sys.meta_path.insert(0, BeforeTheRun())
