"""Write a run's metrics to `metrics.jsonl`, the source of truth, and mirror them to MLflow.

`Tracker.log` only appends a line to metrics.jsonl. A daemon thread follows that file and copies it to MLflow, so that a
slow or dead store cannot delay or end training. `resync` uses the same code later. Imports no torch; the thread imports
MLflow, which takes seconds, as does creating its database.
"""

import errno
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError, did_you_mean
from qerl_lab.config.redact import redact, url_without_secrets
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import declared, encode
from qerl_lab.tracking.mlflow import STATUSES, THREAD, MlflowRun, Status, mlflow_uri, points_of, prepare_mlflow

FLUSH_SECONDS = 2.0  # send lines in batches: one log_batch per step takes twice the CPU time of one per twenty steps
RETRY_SECONDS = 30.0  # between attempts while the store is unreachable
FINISH_SECONDS = 20.0  # maximum wait for MLflow when a run ends


@dataclass(frozen=True)
class Mirrored:
    """The run's place in MLflow, and the number of points that may be missing there. The URI has no password."""

    uri: str
    experiment_id: str | None
    missing: int


class Tracker:
    """Appends to RUN_DIR/metrics.jsonl and mirrors it to MLflow in a thread.

    Each reward part in `parts` has its own metric. `last_step` is the step of the loaded checkpoint; later lines are
    cut, because the resumed run writes them again. `run_key` is the key in that checkpoint, for a directory that lost
    its mlflow.json. Write env.json first: the tags `git_sha` and `command` come from it.
    """

    def __init__(
        self, cfg: RunConfig, directory: RunDirectory, *, parts: Iterable[str] = (), run_key: str | None = None,
        last_step: int = 0,
    ) -> None:  # fmt: skip
        self._cfg, self._directory, self._declared = cfg, directory, declared(parts)
        self._file = directory.append_metrics(last_step)
        self._record = directory.mirror(run_key)
        self._record.set(status=None)
        self._ending: tuple[Status, list[Path], float] = ("KILLED", [], 0.0)
        self._stop, self._known, self._is_away, self._is_whole = threading.Event(), 0, False, False
        self._thread: threading.Thread | None = None
        if cfg.tracking.mlflow:
            prepare_mlflow()
            self._thread = threading.Thread(target=self._mirror, name=THREAD, daemon=True)
            self._thread.start()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the record as failed on an exception; otherwise `finish` has set the status.

        An exception after DONE (such as a second Ctrl-C) leaves the run done.
        """
        if kind is None or self._directory.status == "done":
            return
        try:
            self.finish("FAILED", [])
        except OSError as error:  # a full disk; the exception being raised is more informative
            print(f"qerl-lab: the record could not be ended ({error}).", file=sys.stderr)

    @property
    def key(self) -> str:
        """The run's key in MLflow; checkpoints store it."""
        return self._record.values["key"]

    @property
    def mirror(self) -> Mirrored | None:
        """The run in MLflow; None if it is not mirrored."""
        if not self._cfg.tracking.mlflow:
            return None
        missing = 0 if self._is_whole else max(1, len(points_of(self._directory.metrics())) - self._known)
        return Mirrored(self._shown_uri(), self._record.values["experiment_id"], missing)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line in one write. Raises ValueError for an undeclared metric, OSError if the disk is full."""
        for name in metrics:
            if name not in self._declared:
                hint = did_you_mean(name, list(self._declared))
                raise ValueError(f"{name!r} is not a metric.{hint} Declare it in metrics.METRICS.")
        line = encode(step, metrics)
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, f"the line of step {step} was cut; is the disk full?", self._file.name)

    def flush(self) -> None:
        """Wait until every line is on the disk and survives a crash of the machine."""
        os.fsync(self._file.fileno())

    def finish(self, status: Status, artifacts: Sequence[Path] = ()) -> None:
        """End the record, then wait up to FINISH_SECONDS for MLflow. Skips artifacts that do not exist."""
        if status not in STATUSES:
            raise ValueError(f"status={status!r}; allowed: {', '.join(STATUSES)}.")
        self._file.close()
        self._record.set(status=status)
        self._ending = (status, list(artifacts), time.time())
        self._stop.set()
        if self._thread:
            self._thread.join(FINISH_SECONDS)
            if self._thread.is_alive() and not self._is_away:
                self._tell_away(f"gave no answer within {FINISH_SECONDS:.0f} s")

    def _mirror(self) -> None:
        """Follow the run, starting over after every outage."""
        while not self._is_whole:
            is_last = self._stop.is_set()
            try:
                self._follow()
            except Exception as error:  # the thread's boundary: an error of MLflow or the network must not end a run
                self._tell_away(f"failed ({type(error).__name__}: {first_line(error)[:200]})")
                if is_last:
                    return
                self._stop.wait(RETRY_SECONDS)

    def _follow(self) -> None:
        """Copy new lines of metrics.jsonl until the run ends; then open the MLflow run again to compare both."""
        uri = mlflow_uri(self._cfg, self._record)
        self._record.set(uri=url_without_secrets(uri))  # a resumed run needs it, even if the store was down throughout
        run = MlflowRun(self._cfg, self._directory, uri, self._record)
        run.running()
        offset = 0
        while not self._stop.is_set():
            lines, offset = self._directory.metrics_from(offset)
            run.add(lines)
            self._known = len(run.known)
            self._tell_back()
            self._stop.wait(FLUSH_SECONDS)
        run = MlflowRun(self._cfg, self._directory, uri, self._record)
        run.add(self._directory.metrics())
        self._known = len(run.known)
        run.close(*self._ending)
        self._is_whole = True

    def _shown_uri(self) -> str:
        try:
            return url_without_secrets(mlflow_uri(self._cfg, self._record))
        except ConfigError:
            return self._record.values["uri"]

    def _tell_away(self, what: str) -> None:
        """Print the failure once per outage; `_mirror` retries silently."""
        if self._is_away:
            return
        self._is_away = True
        truth = f"training goes on and {self._directory.path / 'metrics.jsonl'} is complete"
        later = f"To fill MLflow later: python -m qerl_lab.tracking resync {shlex.quote(str(self._directory.path))}"
        print(redact(f"qerl-lab: MLflow at {self._shown_uri()} {what}; {truth}. {later}"), file=sys.stderr)

    def _tell_back(self) -> None:
        if self._is_away:
            self._is_away = False
            print(f"qerl-lab: MLflow at {self._shown_uri()} is back and has every line.", file=sys.stderr)
