"""RUN_DIR/mlflow.json: which MLflow run mirrors this directory."""

import json
import threading
import uuid
from pathlib import Path
from typing import Any

from qerl_lab.config.option import ConfigError
from qerl_lab.disk import read_json, replace_file


class MirrorRecord:
    """RUN_DIR/mlflow.json: which MLflow run mirrors this directory. Exists before MLflow is first asked.

    `key` is the run's own name for itself and a tag of the MLflow run, which is found by it: a `run_id` may be of
    another store, or never have been noted. `uri` has *** in place of a password. `status` is null until the run ends.
    """

    def __init__(self, run_dir: Path, key: str | None = None) -> None:
        self._path, self._lock = Path(run_dir) / "mlflow.json", threading.Lock()
        self.values: dict[str, Any] = {
            "key": key or uuid.uuid4().hex, "run_id": None, "experiment_id": None, "uri": None, "status": None,
        }  # fmt: skip
        if self._path.exists():
            self.values |= read_json(self._path, dict)
            if not all(value is None or isinstance(value, str) for value in self.values.values()):
                raise ConfigError(f"{self._path} is not what a run writes there: {self.values}. Move it away.")

    def set(self, **changes: str | None) -> None:
        with self._lock:  # the mirror's thread notes the run id while the trainer may note the end
            self.values |= changes
            replace_file(self._path, json.dumps(self.values, indent=1).encode())
