"""RUN_DIR/sessions.json: when processes worked on a run."""

import json
import time
from datetime import date
from pathlib import Path
from typing import Any

from qerl_lab.record.metrics import METRICS_FILE
from qerl_lab.system.disk import read_json, replace_file


class Sessions:
    """Reads and writes sessions.json: [start, end] of every process that worked on the run, in unix seconds.

    The end is null while the process runs. A killed process counts as ended at its last logged line.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._path = run_dir, run_dir / "sessions.json"
        self._times: list[list[Any]] = read_json(self._path, list) if self._path.exists() else []

    @property
    def count(self) -> int:
        """Number of processes that started to work on the run."""
        return len(self._times)

    @property
    def first_day(self) -> date:
        """Local date on which the first session started; today if there is none."""
        return date.fromtimestamp(self._times[0][0]) if self._times else date.today()

    def begin(self, start: float) -> None:
        """Record a session from `start` on. Call it before metrics.jsonl is cut, whose last line dates a killed one."""
        if self._times and self._times[-1][1] is None:
            logged = METRICS_FILE.read(self._run_dir)[0] if (self._run_dir / METRICS_FILE.name).exists() else []
            self._times[-1][1] = max([self._times[-1][0], *(line["time"] for line in logged)])
        self._times.append([start, None])
        self._write_sessions()

    def end(self) -> float:
        """Record the end of the current session; return the seconds of all sessions. A later call moves the end."""
        self._times[-1][1] = time.time()
        self._write_sessions()
        return sum(end - start for start, end in self._times)

    def _write_sessions(self) -> None:
        replace_file(self._path, json.dumps(self._times).encode())
