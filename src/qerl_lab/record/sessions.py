"""RUN_DIR/sessions.json: when processes worked on a run."""

import json
import time
from datetime import date
from pathlib import Path

from qerl_lab.config.option import ConfigError
from qerl_lab.record.metrics import last_logged
from qerl_lab.system.disk import read_json, replace_file


class Sessions:
    """Reads and writes sessions.json: [start, end] of every process that worked on the run, in unix seconds.

    The end is null while the process runs. A killed process counts as ended at its last logged line. Otherwise the end
    is the start plus the elapsed monotonic time, so that a clock change in between has no effect.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = Path(run_dir) / "sessions.json"
        self._times: list[list[float | None]] = read_json(self._path, list) if self._path.exists() else []
        starts = [times[0] for times in self._times if isinstance(times, list) and len(times) == 2]
        if len(starts) < len(self._times) or not all(isinstance(start, int | float) for start in starts):
            raise ConfigError(f"{self._path} is not what a run writes there: {str(self._times)[:80]}. Move it away.")

    @property
    def count(self) -> int:
        """Number of processes that started to work on the run."""
        return len(self._times)

    @property
    def times(self) -> list[tuple[float, float | None]]:
        """Start and end of each session, in unix seconds."""
        return [(start or 0.0, end) for start, end in self._times]

    @property
    def first_day(self) -> date:
        """Local date on which the first session started; today if there is none."""
        return date.fromtimestamp(self.times[0][0]) if self._times else date.today()

    def begin(self, start: float, since: float | None = None) -> None:
        """Record a session started at `start`. A killed one before it gets the time of its last metrics as its end.

        `since` is `time.monotonic()` at `start`; None means now. Call it before metrics.jsonl is cut.
        """
        self._since = time.monotonic() if since is None else since
        if self._times and self._times[-1][1] is None:
            self._times[-1][1] = max(self._times[-1][0] or 0, last_logged(self._path.parent))
        self._times.append([start, None])
        self._write()

    def end(self) -> float:
        """Record the end of the current session; return the seconds of all sessions. A later call moves the end."""
        self._times[-1][1] = (self._times[-1][0] or 0) + time.monotonic() - self._since
        self._write()
        return sum((end or 0) - (start or 0) for start, end in self._times)

    def _write(self) -> None:
        replace_file(self._path, json.dumps(self._times).encode())
