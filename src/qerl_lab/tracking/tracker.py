"""Write a run's metrics to `metrics.jsonl`, the source of truth, and mirror the record to MLflow or Weights & Biases.

A daemon thread for each store follows that file, so that a slow or dead store cannot delay or end training. The threads
import MLflow and wandb, which takes seconds.
"""

import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from qerl_lab.config.message import first_line
from qerl_lab.config.redact import redact
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import declared_metrics
from qerl_lab.tracking.mlflow import MlflowMirror, Status, prepare_mlflow
from qerl_lab.tracking.wandb import WandbMirror

FLUSH_SECONDS = 2.0  # send lines in batches: one log_batch per step takes twice the CPU time of one per twenty steps
RETRY_SECONDS = 30.0  # between attempts while the store is unreachable
FINISH_SECONDS = 20.0  # maximum wait for a store when a run ends


class Follower:
    """Copy a run's record to one store, MLflow or W&B, in a daemon thread that reconnects after every outage.

    `open_mirror` connects to the store. Messages contain the store's name, which `name` returns, and the text `remedy`,
    which says how to fill the store later. `is_whole` tells whether the store has the whole record.
    """

    def __init__(
        self, open_mirror: Callable[[], MlflowMirror | WandbMirror], name: Callable[[], str], remedy: str
    ) -> None:
        self._open, self._name, self._remedy = open_mirror, name, remedy
        # Arguments for `close` of the mirror; `finish` sets them.
        self._ending: tuple[Status, Mapping[str, Any], float] = ("KILLED", {}, 0.0)
        self._stop, self._is_away, self.is_whole = threading.Event(), False, False
        self.thread = threading.Thread(target=self._follow_record, daemon=True)
        self.thread.start()

    def finish(self, status: Status, result: Mapping[str, Any]) -> None:
        """Let the thread send the rest of the record and end the store's run as `status`.

        Waits at most FINISH_SECONDS, and prints a message if the store gave no answer by then.
        """
        self._ending = (status, result, time.time())
        self._stop.set()
        self.thread.join(FINISH_SECONDS)
        if self.thread.is_alive() and not self._is_away:
            self._report_outage(f"gave no answer within {FINISH_SECONDS:.0f} s")

    def _follow_record(self) -> None:
        """Thread: send new lines every FLUSH_SECONDS until `finish`; after an error reconnect in RETRY_SECONDS."""
        while not self.is_whole:
            is_last = self._stop.is_set()
            try:
                mirror = self._open()
                while not self._stop.is_set():
                    mirror.update()
                    if self._is_away:
                        self._is_away = False
                        print(f"qerl-lab: {self._name()} is back and has every line.", file=sys.stderr)
                    self._stop.wait(FLUSH_SECONDS)
                mirror.update()
                mirror.close(*self._ending)
                self.is_whole = True
            except Exception as error:  # the thread's boundary: an error of a store or the network must not end a run
                self._report_outage(f"failed ({type(error).__name__}: {first_line(error)})")
                if is_last:
                    return
                self._stop.wait(RETRY_SECONDS)

    def _report_outage(self, what: str) -> None:
        """Print that the store failed, and how (`what`); only once per outage."""
        if not self._is_away:
            self._is_away = True
            print(redact(f"qerl-lab: {self._name()} {what}; training goes on and {self._remedy}"), file=sys.stderr)


class Tracker:
    """Append a run's metrics to metrics.jsonl, and mirror the record to the stores that `cfg.tracking` turns on.

    Use it as a context manager. `parts` names the parts of the reward, each of which has a metric. Metrics and samples
    of steps after `last_step` are deleted, because a resumed run trains these steps again. Write env.json first: the
    MLflow tags contain values from it.
    """

    def __init__(
        self, cfg: RunConfig, directory: RunDirectory, *, parts: Iterable[str] = (), last_step: int = 0
    ) -> None:
        self._directory, self._declared = directory, declared_metrics(parts)
        directory.cut_records(last_step)
        if cfg.tracking.mlflow or cfg.tracking.wandb or directory.mirror():  # a copied directory needs a new key
            directory.note_mirror()
        whole = f"{directory.path / 'metrics.jsonl'} is complete."
        later = f"To fill MLflow later: python -m qerl_lab.tracking resync {shlex.quote(str(directory.path))}"
        self._followers: dict[str, Follower] = {}
        if cfg.tracking.mlflow:
            prepare_mlflow()
            self._followers["mlflow"] = Follower(
                lambda: MlflowMirror(cfg, directory),
                lambda: f"MLflow at {directory.mirror().get('uri')}",
                f"{whole} {later}",
            )
        if cfg.tracking.wandb:
            self._followers["wandb"] = Follower(lambda: WandbMirror(cfg, directory), lambda: "Weights & Biases", whole)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """After an error in the block, end the stores' runs as FAILED, with the reason, unless the run is done."""
        if error is not None and self._directory.status != "done":
            self.finish("FAILED", {"reason": redact(f"{type(error).__name__}: {first_line(error)}")})

    @property
    def is_mirrored(self) -> bool | None:
        """Tell whether MLflow has the whole record; None if `tracking.mlflow` is off."""
        return self._followers["mlflow"].is_whole if "mlflow" in self._followers else None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append a step's metrics, by name, to metrics.jsonl. Raises ValueError for a name that is not declared."""
        if unknown := metrics.keys() - self._declared.keys():
            raise ValueError(f"{sorted(unknown)} are not declared in metrics.METRICS")
        self._directory.append_metrics(step, metrics)

    def finish(self, status: Status, result: Mapping[str, Any] | None = None) -> None:
        """Send the rest of the record and `result` to every store, and end the stores' runs.

        `result` holds the headline numbers of a finished run, or the `reason` why it failed. `status` says how they
        end. Waits at most FINISH_SECONDS for each store.
        """
        for follower in self._followers.values():
            follower.finish(status, result or {})
