"""RUN_DIR/sessions.json: when processes worked on a run."""

import json
import time
from datetime import date
from pathlib import Path

from qerl_lab.config.option import ConfigError
from qerl_lab.disk import read_json, replace_file


class Sessions:
    """RUN_DIR/sessions.json: [start, end] of every process that worked on the run, in unix seconds.

    The end is null while it works. One that was killed ended with the last line that it logged, as far as is known. One
    that ended itself did so as long after its start as it took, by a clock that nobody sets: it is the date that may be
    set meanwhile.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = Path(run_dir) / "sessions.json"
        self._times: list[list[float | None]] = read_json(self._path, list) if self._path.exists() else []
        starts = [times[0] for times in self._times if isinstance(times, list) and len(times) == 2]
        if len(starts) < len(self._times) or not all(isinstance(start, int | float) for start in starts):
            raise ConfigError(f"{self._path} is not what a run writes there: {str(self._times)[:80]}. Move it away.")

    @property
    def count(self) -> int:
        """How many processes have begun to work on the run."""
        return len(self._times)

    @property
    def times(self) -> list[tuple[float, float | None]]:
        """The start and the end of each, in unix seconds."""
        return [(start or 0.0, end) for start, end in self._times]

    @property
    def first_day(self) -> date:
        """The day on which the first of them began, by the local clock; today where none has begun."""
        return date.fromtimestamp(self.times[0][0]) if self._times else date.today()

    def begin(self, start: float, last_logged: float, since: float | None = None) -> None:
        """Note a session that began at `start`; the one before it, if killed, is known to have lived at `last_logged`.

        `since` is what `time.monotonic` said at `start`; None where that is now. To be called before metrics.jsonl is
        cut.
        """
        self._since = time.monotonic() if since is None else since
        if self._times and self._times[-1][1] is None:
            self._times[-1][1] = max(self._times[-1][0] or 0, last_logged)
        self._times.append([start, None])
        self._write()

    def end(self) -> float:
        """Note the end of the session under way; returns the seconds of all sessions. A later call moves the end."""
        self._times[-1][1] = (self._times[-1][0] or 0) + time.monotonic() - self._since
        self._write()
        return sum((end or 0) - (start or 0) for start, end in self._times)

    def _write(self) -> None:
        replace_file(self._path, json.dumps(self._times).encode())
