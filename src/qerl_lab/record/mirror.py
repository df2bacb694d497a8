"""RUN_DIR/mlflow.json: the MLflow run that mirrors this directory."""

import json
import threading
import uuid
from pathlib import Path
from typing import Any

from qerl_lab.config.option import ConfigError
from qerl_lab.disk import read_json, replace_file


class MirrorRecord:
    """Reads and writes mlflow.json. The file is created before the first request to MLflow.

    `key` identifies the run: it is a tag of the MLflow run and finds it, because `run_id` may belong to another store
    or be missing. `uri` has *** in place of a password. `status` is null until the run ends.
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
        with self._lock:  # the mirror thread and the trainer may write at the same time
            self.values |= changes
            replace_file(self._path, json.dumps(self.values, indent=1).encode())
