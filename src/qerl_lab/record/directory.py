"""A run's directory from creation to end. Imports neither torch nor pandas.

resolved.yaml                                     the configuration, written when the directory is claimed
QUEUED                                            the typed command, until the run starts
.typed                                            the command that starts or resumes the run, until env.json has it
env.json code.diff sessions.json                  where, with what code and when it ran
metrics.jsonl samples.jsonl eval.parquet          measurements
checkpoints/ adapter/ curves.png mlflow.json      trained weights, curves, the run in MLflow and W&B (if any)
model/                                            in place of adapter/, the model of a run that trained all weights
console.txt                                       output of a job of a sweep
DONE or FAILED                                    how it ended; neither after an interruption
"""

import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import yaml

from qerl_lab.config import arm
from qerl_lab.config.keys import spell_value
from qerl_lab.config.message import in_one_line, some_of
from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import resume_override
from qerl_lab.record import checkpoint, environment, metrics
from qerl_lab.record.environment import TypedCommand
from qerl_lab.record.line_files import SAMPLES_FILE, Sample, encode_samples
from qerl_lab.record.metrics import METRICS_FILE, MetricsLine
from qerl_lab.system.disk import lock, make_directory, read_json, replace_file
from qerl_lab.system.exits import FAILURE, FULL, INTERRUPTED, OK, SIGNALS, USAGE

if TYPE_CHECKING:
    import pandas as pd

RESOLVED, DONE, FAILED, QUEUED, TYPED = "resolved.yaml", "DONE", "FAILED", "QUEUED", ".typed"
CONSOLE, MIRROR, SESSIONS, EVALUATIONS = "console.txt", "mlflow.json", "sessions.json", "eval.parquet"
ARTIFACTS = (RESOLVED, METRICS_FILE.name, SAMPLES_FILE.name, EVALUATIONS, "curves.png")
WRITTEN_IN_PLACE = ("", RESOLVED, METRICS_FILE.name, SAMPLES_FILE.name, "checkpoints", "adapter", "model")
MARKS = (RESOLVED, METRICS_FILE.name, DONE, FAILED)  # any of them marks a run directory, even a damaged one
PUT_BACK = "Put it back as it was (if the run used MLflow, it is among the run's artifacts), or start a new run."
FILES_OF_A_REFUSED_RUN = {RESOLVED, QUEUED, TYPED, FAILED, "env.json", "code.diff", SESSIONS}
# libyaml is eight times as fast as PyYAML's own parser, and a report reads the resolved.yaml of every run.
YAML_LOADER = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class RunDirectory:
    """Reads and writes a run's files. Methods raise ConfigError for a damaged file, and the message says what to do."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.checkpoints, self.adapter = self.path / "checkpoints", self.path / "adapter"
        self.model = self.path / "model"
        self.curves, self.console = self.path / "curves.png", self.path / CONSOLE

    def _read_json(self, name: str, kind: type) -> Any:
        """Read the JSON file `name`, which must hold a `kind` (dict or list); an empty `kind` if it is missing."""
        path = self.path / name
        return read_json(path, kind) if path.exists() else kind()

    # --- life cycle

    def refuse_used(self) -> None:
        """Raise ConfigError unless the directory is missing or empty, so that two runs never share one."""
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        if (self.path / DONE).is_file():
            raise ConfigError(
                f"the run directory {self.path} has a finished run. Type run_dir=DIR for a new run, or "
                f"{resume_override(self.path)} steps=N to extend it."
            )
        goes_on = f"{resume_override(self.path)} alone to continue the run in it, or " if self.is_claimed else ""
        raise ConfigError(f"the run directory {self.path} is not empty. Type {goes_on}run_dir=DIR for a new run.")

    def claim(self, cfg: RunConfig, typed: TypedCommand) -> None:
        """Create the directory, with `cfg` in resolved.yaml and the command `typed` in QUEUED.

        Raises ConfigError if the directory is not empty or cannot be written.
        """
        self.refuse_used()
        make_directory(self.path, f"run_dir={self.path}")
        with open(self.path / RESOLVED, "x", encoding="utf-8") as file:  # "x": another process may have been first
            yaml.safe_dump(asdict(cfg), file, sort_keys=False)
        self._note_command(QUEUED, typed)

    def _note_command(self, name: str, typed: TypedCommand) -> None:
        """Write the command `typed` into the file `name`, with passwords and tokens hidden."""
        replace_file(self.path / name, json.dumps(asdict(typed.without_secrets())).encode())

    def begin(self, typed: TypedCommand | None = None) -> None:
        """Mark the run as started, and keep its command in .typed until env.json records it.

        The first start renames QUEUED, which holds the first command, to .typed. A later start writes `typed` there,
        unless .typed still holds the first command because the first start ended before env.json. Deletes FAILED.
        """
        if (self.path / QUEUED).exists():
            (self.path / QUEUED).replace(self.path / TYPED)
        elif typed and (self.environment() or not (self.path / TYPED).exists()):
            self._note_command(TYPED, typed)
        (self.path / FAILED).unlink(missing_ok=True)

    def overrides(self) -> list[str]:
        """Return the command-line overrides (`key=value`) that concern this run; empty if not recorded."""
        began = self.environment() or self._read_json(QUEUED, dict) or self._read_json(TYPED, dict)
        return list(began.get("words", []))

    @contextmanager
    def locked(self) -> Iterator[TextIO]:
        """Lock resolved.yaml and yield it; a child process that inherits the file keeps the lock.

        Raises ConfigError if another process holds the lock.
        """
        with open(self.path / RESOLVED, "r+", encoding="utf-8") as file:  # NFS locks only writable files
            lock(
                file,
                f"another process is running in {self.path}. Wait for it or stop it first. "
                "After `kill -9` of a command its run still finishes the step and saves.",
            )
            yield file

    @property
    def is_claimed(self) -> bool:
        """Tell whether the directory has a resolved.yaml, and so belongs to a run."""
        return (self.path / RESOLVED).exists()

    @property
    def status(self) -> str:
        """Return the run's status: `done`, `failed`, `interrupted` (also while it runs) or `not run`."""
        for name, word in ((DONE, "done"), (FAILED, "failed"), (QUEUED, "not run"), (RESOLVED, "interrupted")):
            if (self.path / name).exists():
                return word
        return "not run"

    @property
    def status_in_words(self) -> str:
        """Return `status` for users: without DONE or FAILED a run is `interrupted, or still running`."""
        status = self.status
        return "interrupted, or still running" if status == "interrupted" else status

    @property
    def reason(self) -> str:
        """Return why the run failed: the first line of FAILED, or a full disk if FAILED is empty. FAILED must exist."""
        text = (self.path / FAILED).read_text(encoding="utf-8")
        return next(iter(text.splitlines()), f"the disk of {self.path} was full, so the reason could not be written")

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write DONE with the run's headline numbers `result`."""
        replace_file(self.path / DONE, json.dumps(result, indent=1).encode())

    def result(self) -> dict[str, Any]:
        """Read the headline numbers in DONE; empty if the file is missing. Raises ConfigError if it is damaged."""
        return self._read_json(DONE, dict)

    def fail(self, text: str) -> None:
        """Write `text` into FAILED; the first line of `text` is the reason.

        Creates the directory again if it was removed or renamed. On a full disk leaves FAILED empty and prints the
        reason.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            replace_file(self.path / FAILED, text.encode(), suffix=str(os.getpid()))  # several ranks may fail at once
        except OSError as error:
            if error.errno not in FULL:
                raise
            (self.path / FAILED).touch()  # an empty file takes no space
            print(text.partition("\n")[0], file=sys.stderr)

    def settle(self, ended_with: int, rank: str = "") -> int:
        """Return the exit code of the ended run: 0, 1, 2 or 130. Write FAILED if the run failed without writing it.

        `ended_with` is the exit code of the process, or minus the number of the signal that killed it. With several
        processes it is the exit code of the first failed process, and `rank` names this process, e.g. "rank 1 of 2". If
        a signal killed it, its reason replaces FAILED of other ranks, which failed only as a consequence. An
        interruption deletes FAILED.
        """
        if self.status == "done":
            return OK
        if ended_with == INTERRUPTED or -ended_with in SIGNALS:
            (self.path / FAILED).unlink(missing_ok=True)  # another rank may have written it
            return INTERRUPTED
        if self.status != "failed" or (rank and ended_with < 0):
            process = rank or "the process"
            if ended_with == -signal.SIGKILL:
                reason = f"Killed: signal 9 (SIGKILL) ended {process}, as the system does when memory runs out"
            elif ended_with < 0:
                reason = f"Killed: signal {-ended_with} ({signal.strsignal(-ended_with)}) ended {process}"
            else:
                reason = f"NoRecord: {process} ended with status {ended_with} without writing DONE or FAILED"
                reason += "; see its messages"
            self.fail(f"{reason}\n")
            return FAILURE
        return USAGE if ended_with == USAGE else FAILURE

    def extend(self, cfg: RunConfig) -> None:
        """Prepare a finished run so that it continues up to step `cfg.steps` when it is resumed.

        Renames DONE to DONE-N, where N is the number of steps so far (the last entry of `cfg.extended`), and replaces
        resolved.yaml by `cfg`. If the process is killed between these two changes, a resumed run trains no more steps
        and writes DONE again.
        """
        (self.path / DONE).rename(self.path / f"{DONE}-{cfg.extended[-1]}")
        self._replace_config(cfg)

    def share_gpu(self, jobs: int) -> RunConfig:
        """Set `jobs_per_gpu` in resolved.yaml to `jobs`, and return the configuration.

        Raises ConfigError if the file is damaged, or if the value changes while another process is running here.
        """
        cfg = self.config()
        if cfg.jobs_per_gpu != jobs:
            cfg = replace(cfg, jobs_per_gpu=jobs)
            with self.locked():
                self._replace_config(cfg)
        return cfg

    def _replace_config(self, cfg: RunConfig) -> None:
        """Replace resolved.yaml atomically. A lock of the old file does not hold for the new one."""
        replace_file(self.path / RESOLVED, yaml.safe_dump(asdict(cfg), sort_keys=False).encode())

    def discard(self) -> None:
        """Delete the directory of a run that never started, unless it has a file beyond FILES_OF_A_REFUSED_RUN.

        A directory that cannot be deleted (a link, a mounted folder, the working directory) is only emptied.
        """
        if {path.name for path in self.path.iterdir()} - FILES_OF_A_REFUSED_RUN:
            return
        for path in self.path.iterdir():
            path.unlink()
        with suppress(OSError):  # else its message would hide the reason of the refusal
            self.path.rmdir()

    # --- configuration and resuming

    def config(self) -> RunConfig:
        """Read and check resolved.yaml; set `run_dir` to where the directory is now.

        Raises ConfigError if the file is missing, damaged or invalid, or lacks a key, because the default of the key
        could differ from the value that the run started with. These keys may be missing: keys of sweeps, tracking and
        the preregistration, keys added later, and model.hash (null: unknown).
        """
        path, values = self.path / RESOLVED, self._config_values()
        try:
            cfg = from_dict(values)
        except ConfigError as error:
            wrong = str(error).partition(" Type ")[0]  # the rest says what to type, which cannot change a run
            raise ConfigError(
                f"{path}: {wrong} It was edited, or another version of the lab wrote it. {PUT_BACK}{self._began_with()}"
            ) from None
        known = {*dict(arm.flatten(values)), *arm.OF_SWEEPS, *arm.PREREGISTRATION, "model.hash"}
        known |= {*arm.ADDED, *arm.ADDED_BESIDE_ARMS}
        lacking = [
            name for name in arm.values_of(RunConfig()) if name not in known and not name.startswith("tracking.")
        ]
        if lacking:
            raise ConfigError(
                f"{path} lacks {some_of(lacking)}: it was cut off, or another version wrote it. "
                f"{PUT_BACK}{self._began_with()}"
            )
        if cfg.task.module is not None and cfg.task.module_hash is None:  # else any file could run as this user
            raise ConfigError(
                f"{path} has task.module={cfg.task.module} without task.module_hash, and every run records the hash of "
                f"this file. {PUT_BACK}"
            )
        cfg.run_dir = str(self.path.absolute())
        return cfg

    def settings(self) -> dict[str, str]:
        """Return the value of every key in resolved.yaml as text, by dotted key, whatever version of the lab wrote it.

        Raises ConfigError if the file is missing, cannot be read or has no configuration.
        """
        return arm.fill_added_keys({name: str(value) for name, value in arm.flatten(self._config_values())})

    def _config_values(self) -> dict[str, Any]:
        """Parse resolved.yaml. Raises ConfigError if it is missing, cannot be read or has no configuration."""
        path = self.path / RESOLVED
        if not path.is_file():
            what = f"has no {RESOLVED}, so it is no run directory" if self.path.is_dir() else "is no directory"
            raise ConfigError(
                f"{self.path} {what}. "
                "Type the directory that the run printed, for example runs/nvfp4_aqn/seed0/20260131-120000."
            )
        try:
            values = YAML_LOADER(path.read_text(encoding="utf-8")).get_single_data()
        except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {in_one_line(error)}. {PUT_BACK}") from None
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds no configuration. {PUT_BACK}")
        return values

    def config_text(self) -> str:
        """Read resolved.yaml as text. Raises OSError if the file cannot be read."""
        return (self.path / RESOLVED).read_text(encoding="utf-8")

    def refuse_edited_config(self, saved: checkpoint.Saved) -> None:
        """Raise ConfigError if resolved.yaml differs from the configuration in the checkpoint `saved`.

        Compares the keys in `saved.config` (see `arm.settings_of_run`); an empty one passes. A key of `arm.ADDED`
        that either lacks counts with its value in `arm.ADDED`. An extension after the checkpoint may add steps.
        """
        if not saved.config:
            return
        now = arm.model_by_content({**arm.ADDED, **dict(arm.flatten(self._config_values()))})
        then = {**arm.ADDED, **saved.config}
        steps, extended = then.get("steps"), now.get("extended")
        if isinstance(extended, list) and steps in extended:  # the checkpoint is older than the extension
            now |= {"steps": steps, "extended": extended[: extended.index(steps)]}
        changed = [
            f"{key}={spell_value(now[key]) if key in now else 'nothing'} (was {spell_value(was)})"
            for key, was in then.items()
            if key not in arm.REMOVED and (key not in now or now[key] != was)
        ]
        if changed:
            raise ConfigError(
                f"{self.path / RESOLVED} is not the configuration that {saved.path.name} was trained with: "
                f"{some_of(changed)}. {PUT_BACK}"
            )

    def check(self) -> None:
        """Raise ConfigError unless a run can be resumed or mirrored here.

        The files must be writable, and sessions.json, mlflow.json and eval.parquet intact.
        """
        for path in (self.path / name for name in WRITTEN_IN_PLACE):
            if path.exists() and not os.access(path, os.W_OK):
                raise ConfigError(
                    f"{path} cannot be written. Make it writable, or copy {self.path} to a writable place."
                )
        for read in (self.sessions, self.mirror, self.evaluations):  # each raises for a damaged file
            read()

    def starting_point(self, *, with_weights: bool = True) -> checkpoint.Saved | None:
        """Return the newest intact checkpoint to resume from, or None to start from step 0.

        with_weights=False does not read the weights, which may then be damaged. The command uses this before it starts
        the run's process, which reads them. Raises ConfigError if the record does not fit it (`refuse_unfit_record`).
        """
        saved = checkpoint.newest(self.checkpoints, with_weights=with_weights)
        if saved is not None:
            self.refuse_unfit_record(saved)
        return saved

    def refuse_unfit_record(self, saved: checkpoint.Saved) -> None:
        """Raise ConfigError if the run cannot continue from the checkpoint `saved`.

        Reasons: resolved.yaml differs from the configuration in the checkpoint (`refuse_edited_config`), or
        metrics.jsonl does not have each step up to the checkpoint once.
        """
        self.refuse_edited_config(saved)
        lines = self.metrics()  # raises for a damaged line, and says what to do
        try:
            metrics.check_steps([line for line in lines if line["step"] <= saved.step], saved.step)
        except ConfigError as error:
            raise ConfigError(
                f"{self.path}: {error}, and {saved.path.name} was saved after them. Put metrics.jsonl back as it was, "
                "or remove the checkpoints of that step and of later steps, to train again from there."
            ) from None

    def refuse_other_data(self, data: Mapping[str, Any]) -> None:
        """Raise ConfigError if the run began with other questions than those that `data` describes.

        `data` (`Task.data`) has number and SHA-256 of the training and held-out questions. Compares each SHA-256 with
        env.json. Passes if env.json has none. If another commit of the lab began the run, the message names it, because
        commits may give the same rows different ids.
        """
        began = self.environment()
        then = began.get("data") or {}  # older versions of the lab do not record the questions
        for role in ("training", "heldout"):
            count, digest = f"{role}_questions", f"{role}_sha256"
            if digest in then and then[digest] != data[digest]:
                raise ConfigError(
                    f"the {role} questions have changed since the run began: now {data[count]:,} with SHA-256 "
                    f"{data[digest][:12]}, at the start {then[count]:,} with {then[digest][:12]}. "
                    f"Put the data back as it was, or start a new run.{self._began_with()}"
                )

    def refuse_other_model(self, folder: Path) -> None:
        """Refuse a hub model in `folder` that has changed since the run began: raise ConfigError.

        Without model.revision a run takes the newest model, so the hub may give another one later. Compares the model's
        hash with the hash in env.json. Accepts any model if env.json has none.
        """
        then = self.environment().get("model")
        if then and then["hash"] != (found := model_hash(folder)):
            raise ConfigError(
                f"{folder} holds the model of {found}, and the run began with the model of {then['hash']} in "
                f"{then['folder']}: it changed on the hub. Put it back as it was, or start a new run."
            )

    def _began_with(self) -> str:
        """Return a sentence that names the commit of the lab which began the run.

        Empty if this is the present commit, or if the commit is not known.
        """
        sha = self.environment().get("git_sha")
        if sha in (None, "unknown", environment.git_state()[0]):
            return ""
        return f" Commit {sha[:8]} of the lab began the run: with it the run can be resumed."

    def refuse_other_device(self, device: str) -> None:
        """Raise ConfigError if the run started on another device than `device`, which is `cpu` or `cuda`."""
        if not (began := self.environment()):
            return
        began_on = "cuda" if began["gpus"] and self.settings()["device"] != "cpu" else "cpu"
        if began_on != device:
            raise ConfigError(
                f"{self.path} began on {began_on}, and here it would continue on {device}: one record would hold two "
                "computations. Resume it where it began, or start a new run."
            )

    def last_saved(self) -> int:
        """Return the step of the newest checkpoint, as `checkpoint.last_step` does."""
        return checkpoint.last_step(self.checkpoints)

    # --- record

    def write_environment(
        self, data: Mapping[str, Any], linear_backend: str | None = None, micro_batch_size: int | None = None,
        module: str | None = None, code_hash: str | None = None, downloaded: Path | None = None,
    ) -> None:  # fmt: skip
        """Write env.json and code.diff; a resumed run adds env.2.json and code.2.diff.

        `data` describes the questions (`Task.data`). `linear_backend` is the engine's kernel for products with packed
        weights, if any. `micro_batch_size` counts completions per pass. `module` is the path in task.module.
        `code_hash` is the hash of the source files when the process began; None computes it now. `downloaded` is
        the folder of a model from the hub. The command comes from .typed, which is then deleted; without that file it
        is the command of this process.
        """
        typed = self._read_json(TYPED, dict)
        # Not the number of files: the user may have moved a damaged one away.
        last = max(map(_session_of, self.path.glob("env*.json")), default=0)
        number = f".{last + 1}" if last else ""
        (self.path / f"code{number}.diff").write_text(environment.code_diff(module), encoding="utf-8")
        found = environment.environment(TypedCommand(**typed) if typed else None)
        found |= {"linear_backend": linear_backend, "micro_batch_size": micro_batch_size, "data": dict(data)}
        found["code_hash"] = code_hash or environment.code_hash()
        if downloaded:
            found["model"] = {"hash": model_hash(downloaded), "folder": str(downloaded)}
        replace_file(self.path / f"env{number}.json", json.dumps(found, indent=1).encode() + b"\n")
        (self.path / TYPED).unlink(missing_ok=True)

    def environment(self) -> dict[str, Any]:
        """Read env.json; empty if the run has not started."""
        return self._read_json("env.json", dict)

    def environments(self) -> list[dict[str, Any]]:
        """Read env.json and every env.N.json, in the order of their sessions."""
        return [read_json(path, dict) for path in sorted(self.path.glob("env*.json"), key=_session_of)]

    def sessions(self) -> list[list[Any]]:
        """Read [start, end] of every process that worked on the run, in Unix seconds; the end is null while it runs."""
        return self._read_json(SESSIONS, list)

    def begin_session(self, start: float) -> None:
        """Record that this process works on the run, since `start` (Unix seconds).

        If an earlier process was killed, this also ends its session, at the time of the last line in metrics.jsonl.
        Call it before `cut_records`, which may remove this line.
        """
        sessions = self.sessions()
        if sessions and sessions[-1][1] is None:
            sessions[-1][1] = max([sessions[-1][0], *(line["time"] for line in self.metrics())])
        replace_file(self.path / SESSIONS, json.dumps([*sessions, [start, None]]).encode())

    def end_session(self) -> float:
        """Record that the current session ends now, and return the seconds of all sessions together."""
        sessions = self.sessions()
        sessions[-1][1] = time.time()
        replace_file(self.path / SESSIONS, json.dumps(sessions).encode())
        return sum(end - start for start, end in sessions)

    def first_day(self) -> date:
        """Return the local date on which the first session started; today if there is none."""
        sessions = self.sessions()
        return date.fromtimestamp(sessions[0][0]) if sessions else date.today()

    def mirror(self) -> dict[str, str | None]:
        """Read mlflow.json, which identifies the MLflow run that mirrors this run; empty if the file is missing.

        `key` is a tag that finds the MLflow run, because `run_id` may belong to another store or be missing. `uri` has
        *** in place of a password. `run_dir` is where the directory was when the file was written.
        """
        return self._read_json(MIRROR, dict)

    def note_mirror(self, **changes: str | None) -> None:
        """Set `changes` in mlflow.json (see `mirror` for its keys) and `run_dir` to this directory.

        A new file gets a random `key`. If this directory is a copy and its original still exists, it gets a new `key`
        too, and keeps only `uri` of the other values.
        """
        here, values = str(self.path.absolute()), self.mirror()
        first = values.get("run_dir") or here
        is_elsewhere = os.path.exists(first) and not os.path.samefile(first, here)
        if is_elsewhere and RunDirectory(Path(first)).mirror().get("key") == values["key"]:
            values = {"uri": values.get("uri")}
        values = {"key": uuid.uuid4().hex} | values | {"run_dir": here} | changes
        replace_file(self.path / MIRROR, json.dumps(values, indent=1).encode())

    def metrics(self) -> list[MetricsLine]:
        """Read the lines of metrics.jsonl; empty if the file does not exist."""
        return self.metrics_from(0)[0]

    def metrics_from(self, offset: int) -> tuple[list[MetricsLine], int]:
        """Read the complete lines of metrics.jsonl from byte `offset` on; return them and the next offset."""
        return METRICS_FILE.read(self.path, offset)

    def append_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append one line to metrics.jsonl. Raises OSError if the disk is full or the directory is gone."""
        METRICS_FILE.append(self.path, metrics.encode_line(step, values))

    def samples(self) -> list[Sample]:
        """Read the completions in samples.jsonl; empty if the file does not exist."""
        return SAMPLES_FILE.read(self.path)[0]

    def append_samples(self, of_step: Iterable[Sample]) -> None:
        """Append the completions of one step to samples.jsonl."""
        SAMPLES_FILE.append(self.path, encode_samples(of_step))

    def cut_records(self, last_step: int) -> None:
        """Delete metrics and completions of steps after `last_step`, which a resumed run records again."""
        METRICS_FILE.cut(self.path, last_step)
        SAMPLES_FILE.cut(self.path, last_step)

    def checked_metrics(self) -> list[MetricsLine]:
        """Check every file of the record; return the lines of metrics.jsonl. Raises ConfigError if one is damaged.

        resolved.yaml must be the configuration of the run (`refuse_edited_config`). metrics.jsonl must have every step
        up to the newest checkpoint once. A finished run must have all configured steps and no incomplete last line, and
        eval.parquet unless eval.questions is 0.
        """
        if self.is_claimed and (saved := checkpoint.newest(self.checkpoints, with_weights=False)):
            self.refuse_edited_config(saved)
        is_done = self.status == "done"
        settings = self.settings() if is_done else {}
        for read in (self.result, self.environments, self.sessions, self.mirror):  # each raises for a damaged file
            read()
        steps = max(int(settings.get("steps", 0)), self.last_saved())  # a key is missing if resolved.yaml is truncated
        lines, end = self.metrics_from(0)  # read after the checkpoints, as a running run adds to both
        metrics.check_steps(lines, steps)
        if is_done and end < (self.path / METRICS_FILE.name).stat().st_size:
            raise ConfigError(f"{METRICS_FILE.name} ends within a line. Move {DONE} away and resume the run.")
        self.evaluations()  # a damaged file would replace the copy in a mirror
        if is_done and settings.get("eval.questions") != "0" and not (self.path / EVALUATIONS).exists():
            raise ConfigError(f"{EVALUATIONS} is missing. Move {DONE} away and resume the run, which then writes it.")
        self.samples()
        return lines

    def evaluations(self) -> "dict[str, pd.DataFrame]":
        """Read the held-out answers: a table per phase, with a row per question; empty if there are none.

        Phases are "before" and "after" training, and "step N".
        """
        path = self.path / EVALUATIONS
        if not path.exists():
            return {}
        import pandas as pd  # imported here, because it takes a second

        try:
            rows = pd.read_parquet(path)
            return {str(phase): part.drop(columns="phase") for phase, part in rows.groupby("phase", sort=False)}
        except (OSError, ValueError, KeyError) as error:  # pyarrow's are ValueErrors
            raise ConfigError(
                f"{path} is damaged ({in_one_line(error)}). Move it away; a resumed run asks the questions again."
            ) from None

    def write_evaluations(self, phases: "dict[str, pd.DataFrame]") -> None:
        """Write eval.parquet atomically: a table of held-out answers per phase (see `evaluations`)."""
        import pandas as pd

        data = pd.concat([rows.assign(phase=phase) for phase, rows in phases.items()]).to_parquet(index=False)
        replace_file(self.path / EVALUATIONS, data)

    def artifacts(self) -> list[Path]:
        """Return the existing files that a mirror uploads."""
        paths = [self.path / name for name in ARTIFACTS]
        return [path for path in paths if path.exists()]


def _session_of(path: Path) -> int:
    """Read the number of a session from the name of its file: 1 for env.json, 2 for env.2.json."""
    return int(path.stem.partition(".")[2] or 1)


def is_run(files: Iterable[str]) -> bool:
    """Return whether a folder with files of these names is a run directory."""
    return not set(files).isdisjoint(MARKS)
