"""What a run measures, and where it goes: `metrics.jsonl` is the truth, MLflow is its mirror.

`METRICS` holds every metric's name, unit and meaning, once. `Tracker.log` only appends a line to the run's
metrics.jsonl; a daemon thread follows that file and copies it to MLflow, so that no store, however slow or dead, can
hold up or end a training run. `resync` copies the same file through the same code later. Imports no torch; MLflow is
imported by the thread (its import and the creation of its database take seconds).

    python -m qerl_lab.tracking resync RUN_DIR [--uri URI]    fill MLflow from a run's record, without duplicates
    python -m qerl_lab.tracking table                         the Markdown table of docs/metrics.md
"""

import argparse
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from qerl_lab.config import RunConfig, config_hash, did_you_mean, from_dict, leaves
from qerl_lab.record import MetricsLine, MirrorRecord, cut_metrics, encode, lines_from, read_metrics, without_password

Status = Literal["FINISHED", "FAILED", "KILLED"]
STATUSES: tuple[Status, ...] = ("FINISHED", "FAILED", "KILLED")
ARTIFACTS = ("resolved.yaml", "metrics.jsonl", "curves.png", "eval.parquet")
FLUSH_SECONDS = 2.0  # lines are sent together: one log_batch a step costs twice the CPU time of one for twenty
FINISH_SECONDS = 20.0  # how long the end of a run waits for MLflow
METRICS_PER_BATCH, PARAMS_PER_BATCH, PARAM_CHARS = 1000, 100, 6000  # limits of MLflow's API
THREAD = "mlflow-mirror"
# MLflow's own defaults retry a dead server for four minutes, and report to its maker.
MLFLOW_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True)
class Metric:
    unit: str
    meaning: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("reward", "mean reward of the step's completions, all parts added"),
    "reward/std": Metric("reward", "standard deviation of the reward over the step's completions"),
    "reward/format": Metric("reward", "mean of the format part alone"),
    "reward/answer": Metric("reward", "mean of the answer part alone"),
    "reward/zero_variance_groups": Metric("fraction", "groups whose completions all got one reward"),
    "policy/entropy_nats": Metric(
        "nats",
        "entropy of the trainer's clean policy at the sampling temperature: exact over the vocabulary, "
        "masked mean over completion tokens",
    ),
    "policy/kl_reference": Metric("nats", "KL of the policy from the reference policy, mean per completion token"),
    "policy/clip_fraction": Metric("fraction", "completion tokens whose probability ratio was clipped, either side"),
    "policy/clip_fraction_low": Metric("fraction", "clipped at 1 - epsilon_low (negative advantage)"),
    "policy/clip_fraction_high": Metric("fraction", "clipped at 1 + epsilon_high (positive advantage)"),
    "policy/loss": Metric("1", "loss, mean over the step's updates"),
    "policy/grad_norm": Metric("1", "gradient norm before clipping, of the step's last update"),
    "policy/learning_rate": Metric("1", "learning rate of the step's last update"),
    "sampler/entropy_nats": Metric("nats", "policy/entropy_nats of the noisy sampler"),
    "sampler/logprob_gap_mean": Metric("nats", "mean over sampled tokens of abs(sampler - trainer) log-probability"),
    "sampler/logprob_gap_max": Metric("nats", "largest abs(sampler - trainer) log-probability of a sampled token"),
    "sampler/importance_ratio_mean": Metric("1", "mean trainer / sampler probability of a sampled token, as corrected"),
    "rollout/tokens_per_second": Metric("tokens/s", "completion tokens / seconds/rollout"),
    "rollout/completion_tokens": Metric("tokens", "mean length of a completion"),
    "rollout/truncated_fraction": Metric("fraction", "completions cut at max_completion_tokens"),
    "step/seconds": Metric("s", "wall time of the whole step"),
    "step/tokens_per_second": Metric("tokens/s", "completion tokens / step/seconds"),
    "seconds/rollout": Metric("s", "wall time of generation"),
    "seconds/reward": Metric("s", "wall time of the reward functions"),
    "seconds/train": Metric("s", "wall time of log-probabilities, loss, backward and optimizer"),
    "seconds/sync": Metric("s", "wall time of handing adapter and noisy norms to the engine"),
    "seconds/probe": Metric("s", "wall time of measuring the noise (noise/std_observed, noise/kl_nats)"),
    "noise/sigma": Metric("1", "standard deviation of the noise that the schedule asks for"),
    "noise/std_observed": Metric("1", "standard deviation of the engine's norm weights minus the clean ones"),
    "noise/kl_nats": Metric("nats", "KL of the noisy from the clean sampler, mean per token of the probe completions"),
    "memory/rss_gib": Metric("GiB", "largest resident memory of the run's process so far"),
    "memory/gpu_peak_gib": Metric("GiB", "largest GPU memory allocated by torch so far"),
    "eval/accuracy": Metric("fraction", "held-out sampled answers that are right; step 0 is before training"),
    "eval/format": Metric("fraction", "held-out completions in the asked format"),
    "eval/completion_tokens": Metric("tokens", "mean length of a held-out completion"),
    "eval/entropy_nats": Metric("nats", "policy/entropy_nats on the held-out completions"),
}


def table() -> str:
    """METRICS as a Markdown table, a row a metric; the body of docs/metrics.md."""
    rows = [f"| `{name}` | {m.unit} | {m.meaning} |" for name, m in METRICS.items()]
    return "\n".join(["| metric | unit | meaning |", "|---|---|---|", *rows]) + "\n"


# --- a run in MLflow


def mlflow_uri(cfg: RunConfig, record: MirrorRecord) -> str:
    """A run's store: tracking.uri, else MLFLOW_TRACKING_URI, else where it was first mirrored, else sqlite here."""
    uri = cfg.tracking.uri or os.environ.get("MLFLOW_TRACKING_URI") or record.values["uri"] or "sqlite:///mlflow.db"
    path = _sqlite_path(uri)
    return f"sqlite:///{path.absolute()}" if path else uri


def _sqlite_path(uri: str) -> Path | None:
    """The database file of an sqlite URI; None for anything else."""
    name = uri.removeprefix("sqlite:///")
    return None if name in (uri, "") or "?" in name else Path(name)


def _params(cfg: RunConfig) -> dict[str, str]:
    """Dotted names and values of the configuration, without what concerns one command or may hold a password."""
    skip = ("tracking.uri", "resume", "dry_run")  # long values are whole in resolved.yaml
    return {name: str(value)[:PARAM_CHARS] for name, _, value in leaves(cfg) if name not in skip}


def _tags(cfg: RunConfig, run_dir: Path, key: str) -> dict[str, str]:
    env = run_dir / "env.json"
    code = json.loads(env.read_text()) if env.exists() else {}
    return {
        "mlflow.runName": f"{cfg.experiment}-seed{cfg.seed}",
        "experiment": cfg.experiment,
        "seed": str(cfg.seed),
        "config_hash": config_hash(cfg),
        "scale": cfg.scale,
        "format": cfg.format.name,
        "aqn": cfg.aqn.schedule,
        "git_sha": str(code.get("git_sha", "unknown")),
        "dirty": str(code.get("dirty", "unknown")).lower(),
        "run_key": key,
    }


class _Mirror:
    """One run in one MLflow store, found or created. Every call may wait on the store and raise what MLflow raises."""

    def __init__(self, cfg: RunConfig, run_dir: Path, uri: str, record: MirrorRecord) -> None:
        from mlflow import MlflowClient

        logging.getLogger("mlflow").setLevel(os.environ["MLFLOW_LOGGING_LEVEL"].upper())  # trl may have imported it
        logging.getLogger("urllib3.connectionpool").addFilter(_is_not_ours)
        _create_sqlite(uri)
        self.client = MlflowClient(tracking_uri=uri)
        experiment_id = self._experiment_id(cfg.tracking.experiment)
        found = self._find(experiment_id, record)
        self.created = found is None
        if found is None:
            lines = read_metrics(run_dir) if (run_dir / "metrics.jsonl").exists() else []
            start = lines[0]["time"] if lines else time.time()
            tags = _tags(cfg, run_dir, record.values["key"])
            found = self.client.create_run(experiment_id, int(start * 1000), tags)
        self.run_id: str = found.info.run_id
        record.set(run_id=self.run_id, uri=None if "@" in uri or "?" in uri else uri)
        self.params_added = self._add_params(_params(cfg), found.data.params)
        history = [(name, self.client.get_metric_history(self.run_id, name)) for name in found.data.metrics]
        self.seen = {(name, point.step) for name, points in history for point in points}

    def _experiment_id(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        if found := self.client.get_experiment_by_name(name):
            return found.experiment_id
        try:
            return self.client.create_experiment(name)
        except MlflowException:  # another run of the sweep was faster
            if found := self.client.get_experiment_by_name(name):
                return found.experiment_id
            raise

    def _find(self, experiment_id: str, record: MirrorRecord) -> Any | None:
        """The run by its id, else by its key: an id that another store gave is not in this one."""
        run_id, key = record.values["run_id"], record.values["key"]
        for query in ([f"attributes.run_id = '{run_id}'"] if run_id else []) + [f"tags.run_key = '{key}'"]:
            if runs := self.client.search_runs([experiment_id], query, max_results=1):
                return runs[0]
        return None

    def _add_params(self, wanted: Mapping[str, str], known: Mapping[str, str]) -> int:
        """MLflow refuses to change a parameter, so a run found again only gets those it lacks."""
        from mlflow.entities import Param

        missing = [Param(name, value) for name, value in wanted.items() if name not in known]
        for i in range(0, len(missing), PARAMS_PER_BATCH):
            self.client.log_batch(self.run_id, params=missing[i : i + PARAMS_PER_BATCH])
        return len(missing)

    def add(self, lines: Sequence[MetricsLine]) -> int:
        """Send the points whose (name, step) MLflow does not have; returns how many."""
        from mlflow.entities import Metric as Point

        new: dict[tuple[str, int], Any] = {}
        for line in lines:
            for name, value in line["metrics"].items():
                if (at := (name, line["step"])) not in self.seen:
                    new.setdefault(at, Point(name, value, int(line["time"] * 1000), line["step"]))
        sent = list(new.values())
        for i in range(0, len(sent), METRICS_PER_BATCH):
            self.client.log_batch(self.run_id, metrics=sent[i : i + METRICS_PER_BATCH])
        self.seen |= new.keys()
        return len(new)

    def close(self, status: Status, artifacts: Sequence[Path], end_time: float) -> int:
        """Store the artifacts that exist and end the run; returns how many artifacts."""
        existing = [path for path in artifacts if path.exists()]
        for path in existing:
            self.client.log_artifact(self.run_id, str(path))
        self.client.set_terminated(self.run_id, status, int(end_time * 1000))
        return len(existing)


def _create_sqlite(uri: str) -> None:
    """Create a missing database aside and link it into place: one killed while MLflow creates it never opens again."""
    path = _sqlite_path(uri)
    if path is None or path.exists():
        return
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory() as folder:
        aside = path.with_name(f"{path.name}.{Path(folder).name}")
        MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db").search_experiments()
        shutil.copyfile(f"{folder}/mlflow.db", aside)
    try:
        os.link(aside, path)
    except FileExistsError:
        pass  # another run of the sweep was faster
    finally:
        aside.unlink()


def prepare_mlflow() -> None:
    """Settings that MLflow reads from the environment; the user's own stay. Best before trl, which imports MLflow."""
    for name, value in MLFLOW_ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _is_not_ours(record: logging.LogRecord) -> bool:
    """urllib3 warns of each retry; of the mirror's, one line of ours is enough."""
    return record.threadName != THREAD


# --- a training run's side


class Tracker:
    """Appends to RUN_DIR/metrics.jsonl and keeps MLflow in step behind it.

    `last_step` is the step of the loaded checkpoint: later lines, which the resumed run writes again, are cut. The
    points of those steps that MLflow already has stay there and are not sent twice. `run_id` is the checkpoint's MLflow
    run, for a directory that lost its mlflow.json. env.json should be there before (tags `git_sha`, `dirty`).
    """

    def __init__(self, cfg: RunConfig, run_dir: Path, *, run_id: str | None = None, last_step: int = 0) -> None:
        self._cfg, self._run_dir = cfg, Path(run_dir)
        cut_metrics(self._run_dir, last_step)
        self._file = (self._run_dir / "metrics.jsonl").open("ab", buffering=0)
        self._record = MirrorRecord(self._run_dir)
        self._record.set(status=None, run_id=self._record.values["run_id"] or run_id)
        self._uri = mlflow_uri(cfg, self._record)
        self._ending: tuple[Status, list[Path], float] = ("KILLED", [], 0.0)
        self._stop, self._told, self._thread = threading.Event(), threading.Lock(), None
        if cfg.tracking.mlflow:
            prepare_mlflow()
            self._thread = threading.Thread(target=self._mirror, name=THREAD, daemon=True)
            self._thread.start()

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """An exception ends the record as failed; otherwise `finish` has said how the run ended."""
        if kind is not None:
            self.finish("FAILED", [])

    @property
    def uri(self) -> str | None:
        """The MLflow store, None where the run is not mirrored."""
        return self._uri if self._cfg.tracking.mlflow else None

    @property
    def run_id(self) -> str | None:
        """The MLflow run, once known; a checkpoint may carry it. RUN_DIR/mlflow.json has it too."""
        return self._record.values["run_id"]

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one line, in one write. Raises ValueError for a name not in METRICS, OSError if the disk is full."""
        for name in metrics:
            if name not in METRICS:
                hint = did_you_mean(name, list(METRICS))
                raise ValueError(f"{name!r} is not a metric.{hint} Declare it in tracking.METRICS.")
        line = encode(step, metrics)
        if self._file.write(line) != len(line):
            raise OSError(f"{self._file.name}: the line of step {step} was cut; is the disk full?")

    def finish(self, status: Status, artifacts: Sequence[Path] = ()) -> None:
        """End the record, then wait up to FINISH_SECONDS for MLflow. Artifacts that do not exist are left out."""
        if status not in STATUSES:
            raise ValueError(f"status={status!r}; allowed: {', '.join(STATUSES)}.")
        self._file.close()
        self._record.set(status=status)
        self._ending = (status, list(artifacts), time.time())
        self._stop.set()
        if self._thread:
            self._thread.join(FINISH_SECONDS)
            if self._thread.is_alive():
                self._tell(f"gave no answer within {FINISH_SECONDS:.0f} s")

    def _mirror(self) -> None:
        try:
            self._follow(_Mirror(self._cfg, self._run_dir, self._uri, self._record))
        except Exception as error:  # the boundary: what MLflow, its database or the network raises ends the mirror only
            self._tell(f"failed ({type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:200]})")

    def _follow(self, mirror: _Mirror) -> None:
        """Copy what metrics.jsonl gains until the run ends. A run found again is running again."""
        if not mirror.created:
            mirror.client.update_run(mirror.run_id, status="RUNNING")
        offset = 0
        while True:
            ended = self._stop.is_set()  # asked before reading, so that the last read sees the last line
            lines, offset = lines_from(self._run_dir / "metrics.jsonl", offset)
            mirror.add(lines)
            if ended:
                break
            self._stop.wait(FLUSH_SECONDS)
        mirror.close(*self._ending)

    def _tell(self, what: str) -> None:
        if self._told.acquire(blocking=False):  # never released: said once
            truth = f"training goes on and {self._run_dir / 'metrics.jsonl'} is complete"
            later = f"To fill MLflow later: python -m qerl_lab.tracking resync {shlex.quote(str(self._run_dir))}"
            print(without_password(f"qerl-lab: MLflow at {self._uri} {what}; {truth}. {later}"), file=sys.stderr)


# --- commands


def resync(run_dir: Path, uri: str | None = None) -> str:
    """Fill MLflow from RUN_DIR's metrics.jsonl and resolved.yaml; returns a line that says what it did.

    The status is the one the run ended with, else what DONE or FAILED says, else KILLED. Raises FileNotFoundError,
    ConfigError, and what MLflow raises if it is down.
    """
    lines, record = read_metrics(run_dir), MirrorRecord(run_dir)
    cfg = from_dict(yaml.safe_load((run_dir / "resolved.yaml").read_text(encoding="utf-8")))
    cfg.tracking.uri = uri or cfg.tracking.uri
    uri = mlflow_uri(cfg, record)
    prepare_mlflow()
    mirror = _Mirror(cfg, run_dir, uri, record)
    points = mirror.add(lines)
    end = lines[-1]["time"] if lines else time.time()
    files = mirror.close(_status(run_dir, record), [run_dir / name for name in ARTIFACTS], end)
    did = f"{uri}: {'created' if mirror.created else 'found'} run {mirror.run_id}, added {points} points and "
    return without_password(f"{did}{mirror.params_added} parameters, stored {files} artifacts")


def _status(run_dir: Path, record: MirrorRecord) -> Status:
    """A run that is still going counts as killed until its own end says better."""
    if record.values["status"] in STATUSES:
        return record.values["status"]
    return "FINISHED" if (run_dir / "DONE").exists() else "FAILED" if (run_dir / "FAILED").exists() else "KILLED"


def main(argv: Sequence[str] | None = None) -> int:
    """The commands; the exit code is 2 for a record that cannot be used and 1 for an MLflow that cannot be reached."""
    parser = argparse.ArgumentParser(prog="python -m qerl_lab.tracking", description="The metrics and their mirror.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table", help="print the Markdown table of all metrics")
    fill = commands.add_parser("resync", help="fill MLflow from a run directory, without duplicates")
    fill.add_argument("run_dir", type=Path, help="directory with metrics.jsonl and resolved.yaml")
    fill.add_argument("--uri", help="the store; default: tracking.uri, MLFLOW_TRACKING_URI, the run's own, sqlite here")
    args = parser.parse_args(argv)
    if args.command == "table":
        sys.stdout.write(table())
        return 0
    prepare_mlflow()
    from mlflow.exceptions import MlflowException

    try:
        print(resync(args.run_dir, args.uri))
    except (OSError, ValueError, yaml.YAMLError, MlflowException) as error:
        print(f"qerl-lab: not resynced. {without_password(' '.join(str(error).split()))}", file=sys.stderr)
        return 1 if isinstance(error, MlflowException) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
