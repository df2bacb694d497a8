"""Write a run's metrics to `metrics.jsonl`, the source of truth, and mirror the record to MLflow or Weights & Biases.

`Tracker.log` only appends a line to metrics.jsonl. A daemon thread for each store follows that file, so that a slow or
dead store cannot delay or end training. Imports no torch; the threads import MLflow and wandb, which takes seconds.
"""

import errno
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError, did_you_mean
from qerl_lab.config.redact import redact, url_without_secrets
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import resume_word
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import declared_metrics, encode
from qerl_lab.tracking import mlflow
from qerl_lab.tracking.mlflow import MlflowMirror, Status
from qerl_lab.tracking.wandb import WandbMirror

FLUSH_SECONDS = 2.0  # send lines in batches: one log_batch per step takes twice the CPU time of one per twenty steps
RETRY_SECONDS = 30.0  # between attempts while the store is unreachable
FINISH_SECONDS = 20.0  # maximum wait for a store when a run ends


class DirectoryLost(Exception):
    """The run directory was removed or renamed while its run went on."""


class Follower:
    """Keeps a store equal to the record in a thread, opening it anew after every outage.

    `open_mirror` opens the store, `name` says which it is, and `remedy` what fills it later.
    """

    def __init__(
        self, open_mirror: Callable[[], MlflowMirror | WandbMirror], name: Callable[[], str], remedy: str
    ) -> None:
        self._open, self._name, self._remedy = open_mirror, name, remedy
        self._ending: tuple[Status, Mapping[str, Any], float] = ("KILLED", {}, 0.0)
        self._stop, self._is_away, self.is_whole = threading.Event(), False, False
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def finish(self, status: Status, result: Mapping[str, Any]) -> None:
        """Send the rest and end the store's run; wait up to FINISH_SECONDS."""
        self._ending = (status, result, time.time())
        self._stop.set()
        self.thread.join(FINISH_SECONDS)
        if self.thread.is_alive() and not self._is_away:
            self._report_outage(f"gave no answer within {FINISH_SECONDS:.0f} s")

    def _follow(self) -> None:
        while not self.is_whole:
            is_last = self._stop.is_set()
            try:
                mirror = self._open()
                while not self._stop.is_set():
                    mirror.update()
                    self._report_recovery()
                    self._stop.wait(FLUSH_SECONDS)
                mirror.update()
                mirror.close(*self._ending)
                self.is_whole = True
            except Exception as error:  # the thread's boundary: an error of a store or the network must not end a run
                self._report_outage(f"failed ({type(error).__name__}: {first_line(error)[:200]})")
                if is_last:
                    return
                self._stop.wait(RETRY_SECONDS)

    def _report_outage(self, what: str) -> None:
        """Print the failure once per outage; `_follow` retries silently."""
        if not self._is_away:
            self._is_away = True
            print(redact(f"qerl-lab: {self._name()} {what}; training goes on and {self._remedy}"), file=sys.stderr)

    def _report_recovery(self) -> None:
        if self._is_away:
            self._is_away = False
            print(f"qerl-lab: {self._name()} is back and has every line.", file=sys.stderr)


@dataclass(frozen=True)
class Mirrored:
    """The run's place in MLflow, and whether that has all of the record. The URI has no password."""

    uri: str
    experiment_id: str | None
    is_whole: bool


class Tracker:
    """Appends to RUN_DIR/metrics.jsonl, and has its stores follow it.

    Each reward part in `parts` has its own metric. `last_step` is the step of the loaded checkpoint; later lines are
    cut, because the resumed run writes them again. `run_key` is the key in that checkpoint, for a directory that lost
    its mlflow.json. Write env.json first: the tags `git_sha` and `command` come from it.
    """

    def __init__(
        self, cfg: RunConfig, directory: RunDirectory, *, parts: Iterable[str] = (), run_key: str | None = None,
        last_step: int = 0,
    ) -> None:  # fmt: skip
        self._cfg, self._directory, self._declared = cfg, directory, declared_metrics(parts)
        self._file = directory.append_metrics(last_step)
        known = directory.mirror() or ({"key": run_key} if run_key else {})
        directory.note_mirror(**known)
        self.key = str(directory.mirror()["key"])  # of the run in its stores; checkpoints store it
        run_dir = directory.path
        whole = f"{run_dir / 'metrics.jsonl'} is complete."
        self._followers: list[Follower] = []
        self._mlflow: Follower | None = None
        if cfg.tracking.mlflow:
            mlflow.prepare_mlflow()
            later = f"To fill MLflow later: python -m qerl_lab.tracking resync {shlex.quote(str(run_dir))}"
            self._mlflow = Follower(
                lambda: MlflowMirror(cfg, directory), lambda: f"MLflow at {self._shown_uri()}", f"{whole} {later}"
            )
            self._followers.append(self._mlflow)
        if cfg.tracking.wandb:
            self._followers.append(Follower(lambda: WandbMirror(cfg, directory), lambda: "Weights & Biases", whole))

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the record as failed on an exception; otherwise `finish` was called.

        An exception after DONE (such as a second Ctrl-C) leaves the run done. Raises DirectoryLost instead of any
        other error if the run directory is gone, which is then the cause.
        """
        if kind is None or self._directory.status == "done":
            return
        try:
            if not self._file.closed:
                self._refuse_moved()
        finally:
            self.finish("FAILED")

    @property
    def mirror(self) -> Mirrored | None:
        """The run in MLflow; None if it is not mirrored."""
        if self._mlflow is None:
            return None
        return Mirrored(self._shown_uri(), self._directory.mirror().get("experiment_id"), self._mlflow.is_whole)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line in one write. Raises ValueError for an undeclared metric, OSError if the disk is full.

        Raises DirectoryLost if metrics.jsonl was removed or renamed.
        """
        for name in metrics:
            if name not in self._declared:
                hint = did_you_mean(name, list(self._declared))
                raise ValueError(f"{name!r} is not a metric.{hint} Declare it in metrics.METRICS.")
        line = encode(step, metrics)
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, f"the line of step {step} was cut; is the disk full?", self._file.name)
        self._refuse_moved()

    def _refuse_moved(self) -> None:
        """Raise DirectoryLost unless the run directory still holds the file that this run has opened."""
        run_dir, own = self._directory.path, os.fstat(self._file.fileno())
        with suppress(OSError):
            if os.path.samestat(os.stat(self._file.name), own):
                return
        if not own.st_nlink:
            raise DirectoryLost(f"the run directory {run_dir} was removed while the run went on. Start a new run.")
        now = Path(os.readlink(f"/proc/self/fd/{self._file.fileno()}")).parent
        raise DirectoryLost(
            f"the run directory {run_dir} was renamed to {now} while the run went on. Type python -m qerl_lab "
            f"{resume_word(now)} to go on there."
        )

    def flush(self) -> None:
        """Wait until every line is on the disk and survives a crash of the machine. Raises DirectoryLost."""
        self._refuse_moved()
        os.fsync(self._file.fileno())

    def finish(self, status: Status, result: Mapping[str, Any] | None = None) -> None:
        """End the record, then wait for the stores. `result` holds the headline numbers of a finished run."""
        self._file.close()
        for follower in self._followers:
            follower.finish(status, result or {})

    def _shown_uri(self) -> str:
        try:
            return url_without_secrets(mlflow.mlflow_uri(self._cfg, self._directory))
        except ConfigError:
            return str(self._directory.mirror().get("uri"))
