"""A run's directory from its claim to its end. Imports neither torch nor pandas.

resolved.yaml                                     the configuration, from the claim on
QUEUED                                            what was typed, until the run begins; .typed until env.json has it
env.json code.diff sessions.json                  where, with what code and when it ran
metrics.jsonl samples.jsonl eval.parquet          what it measured
checkpoints/ adapter/ curves.png mlflow.json      what it learned, and who mirrors it
console.txt                                       what a job printed that ran beside others
DONE or FAILED                                    how it ended; neither after an interruption
"""

import itertools
import json
import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from qerl_lab.config.option import ConfigError
from qerl_lab.config.redact import redact
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import resume_word
from qerl_lab.disk import lock, read_json, replace_file
from qerl_lab.exits import FAILURE, INTERRUPTED, OK, SIGNALS, USAGE
from qerl_lab.record import checkpoint, environment, evaluations, finished, metrics, resolved, resume, samples
from qerl_lab.record.environment import Typed
from qerl_lab.record.metrics import MetricsLine
from qerl_lab.record.mirror import MirrorRecord
from qerl_lab.record.samples import Sample
from qerl_lab.record.sessions import Sessions

if TYPE_CHECKING:
    import pandas as pd

DONE, FAILED, QUEUED, TYPED = "DONE", "FAILED", "QUEUED", ".typed"
CONSOLE = "console.txt"
ROOM, ROOM_BYTES = ".room-for-FAILED", 65536
ARTIFACTS = (resolved.NAME, "metrics.jsonl", evaluations.NAME, "curves.png")
MARKS = (resolved.NAME, "metrics.jsonl", DONE, FAILED)  # a folder with one of them is a run's, be it damaged
LEFT_BY_A_REFUSED_RUN = {
    resolved.NAME, QUEUED, TYPED, FAILED, ROOM, "env.json", "code.diff", "sessions.json", CONSOLE,
}  # fmt: skip


class RunDirectory:
    """The only reader and writer of a run's files. Says by ConfigError what is wrong with one, and what to do."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.checkpoints, self.adapter, self.curves = (self.path / n for n in ("checkpoints", "adapter", "curves.png"))
        self.console = self.path / CONSOLE

    # --- from its claim to its end

    def refuse_used(self) -> None:
        """Raise ConfigError unless the directory is missing or empty: two runs never share one."""
        if is_unused(self.path):
            return
        if not self.path.is_dir():
            raise ConfigError(f"the run directory {self.path} is a file. Type run_dir=DIR with another name.")
        if (self.path / DONE).is_file():
            raise ConfigError(
                f"the run directory {self.path} has a finished run. Type run_dir=DIR for a new one, or "
                f"{resume_word(self.path)} steps=N to extend it."
            )
        raise ConfigError(
            f"the run directory {self.path} is not empty. "
            f"Type {resume_word(self.path)} alone to continue the run in it, or run_dir=DIR for a new one."
        )

    def claim(self, cfg: RunConfig, typed: Typed) -> None:
        """Make the directory of a run to be, which must be missing or empty. Raises ConfigError where it cannot be."""
        self.refuse_used()
        make(self.path)
        resolved.write_config(self.path, cfg)
        replace_file(self.path / QUEUED, redact(json.dumps(asdict(typed))).encode())

    def begin(self) -> Typed | None:
        """Leave the queue: what was typed for the run; None where its record has that, and it goes on now.

        It is kept until then: a run that is stopped while it loads has recorded nothing.
        """
        typed = self._typed()
        if (self.path / QUEUED).exists():
            (self.path / QUEUED).replace(self.path / TYPED)
        (self.path / FAILED).unlink(missing_ok=True)
        return typed

    def _typed(self) -> Typed | None:
        noted = next((path for name in (QUEUED, TYPED) if (path := self.path / name).exists()), None)
        if noted is None or self.environment():
            return None
        try:
            return Typed(**read_json(noted, dict))
        except TypeError:
            raise ConfigError(f"{noted} is not what a run writes there. Move it away.") from None

    @contextmanager
    def locked(self) -> Iterator[TextIO]:
        """Hold resolved.yaml locked. A child that inherits the lock keeps it, so that it outlives a killed parent."""
        with open(self.path / resolved.NAME, "r+", encoding="utf-8") as file:  # NFS locks what may be written only
            lock(file, f"another process is running in {self.path}. Wait for it or stop it first.")
            yield file

    @property
    def is_claimed(self) -> bool:
        return (self.path / resolved.NAME).exists()

    @property
    def status(self) -> str:
        """`done`, `failed`, `interrupted` or `not run`."""
        for name, word in ((DONE, "done"), (FAILED, "failed"), (QUEUED, "not run"), (resolved.NAME, "interrupted")):
            if (self.path / name).exists():
                return word
        return "not run"

    @property
    def status_in_words(self) -> str:
        """The status, as far as the files tell: who has begun and left neither DONE nor FAILED may be at work."""
        return {"interrupted": "interrupted, or still running"}.get(self.status, self.status)

    @property
    def reason(self) -> str:
        """Why a failed run failed, in a line."""
        return ((self.path / FAILED).read_text(encoding="utf-8").splitlines() or ["no reason given"])[0]

    def reserve_room(self) -> None:
        """Take the room of FAILED in advance, so that a run which a full disk ends can say so. Raises OSError."""
        replace_file(self.path / ROOM, b"\n" * ROOM_BYTES)

    def release_room(self) -> None:
        """Give the room back: the run has ended without FAILED."""
        (self.path / ROOM).unlink(missing_ok=True)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write DONE, the headline numbers of the run."""
        replace_file(self.path / DONE, json.dumps(result, indent=1).encode())

    def result(self) -> dict[str, Any]:
        """Read DONE; empty where the run has none. Raises ConfigError for a damaged one, which resume writes again."""
        path = self.path / DONE
        return read_json(path, dict) if path.exists() else {}

    def refuse_damaged(self) -> None:
        """Raise ConfigError for a finished run whose record is damaged: it says what of it, and what to type."""
        finished.refuse_damaged(self.path, self.settings())

    def fail(self, text: str) -> None:
        """Write FAILED (the reason in its first line) into the room reserved for it, cut to what fits.

        Raises OSError on a full disk without such room.
        """
        room = self.path / f"{ROOM}-{os.getpid()}"  # of several ranks that fail at once each writes the whole of it
        try:
            (self.path / ROOM).rename(room)
        except FileNotFoundError:
            replace_file(room, b"\n" * ROOM_BYTES)
        with room.open("r+b") as file:  # in place: these blocks are the run's own
            file.write(text.encode()[:ROOM_BYTES])
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        room.replace(self.path / FAILED)

    def settle(self, ended_with: int, rank: str = "") -> int:
        """Return the exit code of the run whose process ended with this status (negative: by this signal).

        Writes FAILED where the process could not. `rank` says which of several processes it was; what the others wrote
        then only followed from a signal.
        """
        if self.status == "done":
            return OK
        if ended_with == INTERRUPTED or -ended_with in SIGNALS:
            self.release_room()  # a process that had nothing to save, or was killed, left it
            (self.path / FAILED).unlink(missing_ok=True)  # of a rank that met the end of another
            return INTERRUPTED
        if self.status != "failed" or (rank and ended_with < 0):
            self.fail(_ending(ended_with, rank or "the process") + "\n")
            return FAILURE
        return USAGE if ended_with == USAGE else FAILURE

    def extend(self, cfg: RunConfig) -> None:
        """Make a finished run one of more steps, which resume goes on with. DONE is kept as DONE-STEPS.

        A process that is killed between the two leaves the run as it was, and resume finishes it anew.
        """
        (self.path / DONE).rename(self.path / f"{DONE}-{cfg.extended[-1]}")
        resolved.replace_config(self.path, cfg)

    def take_back(self, was: RunConfig) -> None:
        """Undo `extend`, in the reverse order, of a run that trained nothing since."""
        (self.path / FAILED).unlink(missing_ok=True)
        resolved.replace_config(self.path, was)
        (self.path / f"{DONE}-{was.steps}").rename(self.path / DONE)

    def discard(self, made: Path | None) -> None:
        """Remove what a run that never began has left, then the directories made for it, up to `made`.

        A directory that holds anything else stays as it is.
        """
        if {path.name for path in self.path.iterdir()} - LEFT_BY_A_REFUSED_RUN:
            return
        for path in self.path.iterdir():
            path.unlink()
        remove_empty(self.path, made)

    # --- its configuration, and from where it goes on

    def config(self) -> RunConfig:
        """Read the whole, checked configuration; its `run_dir` is where the directory lies now."""
        return resolved.read_config(self.path)

    def settings(self) -> dict[str, str]:
        """Read every dotted key with its value as text, also of a run of another version of the lab."""
        return resolved.read_settings(self.path)

    def text(self) -> str:
        """Read resolved.yaml as it is written. Raises OSError."""
        return (self.path / resolved.NAME).read_text(encoding="utf-8")

    def device_kind(self) -> str | None:
        """`cpu` or `cuda`, on which the run began; None where it has not. Raises ConfigError for a damaged record."""
        began = self.environment()
        if not began:
            return None
        return "cuda" if began["gpus"] and self.settings()["device"] != "cpu" else "cpu"

    def check(self) -> None:
        """Refuse a directory that cannot be written, or whose files are not what a run leaves."""
        resume.check(self.path)

    def starting_point(self, cfg: RunConfig) -> checkpoint.Saved | None:
        """Find the checkpoint from which the run goes on; None where it starts from its beginning."""
        return resume.starting_point(self.path, cfg)

    def refuse_other_data(self, data: Mapping[str, Any]) -> None:
        """Refuse to go on with other questions than the run began with; `data` is what its task says of them."""
        resume.refuse_other_data(self.environment(), data)

    def refuse_other_device(self, device: str) -> None:
        """Refuse to go on on `cuda` what began on `cpu`, and the other way round."""
        resume.refuse_other_device(self.path, self.device_kind(), device)

    def last_saved(self) -> int:
        """Return the step of the newest checkpoint, unverified; 0 if there is none."""
        return checkpoint.last_step(self.checkpoints)

    def drop_checkpoints(self) -> None:
        """Remove the checkpoints of a finished run: its adapter and its record stay."""
        shutil.rmtree(self.checkpoints)

    # --- what it records

    def write_environment(self, data: Mapping[str, Any], linear_backend: str | None = None) -> None:
        """Write env.json and code.diff, as `environment.write_environment`; a resumed run adds a numbered pair."""
        environment.write_environment(self.path, data, linear_backend)
        (self.path / TYPED).unlink(missing_ok=True)

    def environment(self) -> dict[str, Any]:
        """Read where the run began; empty where it has not."""
        path = self.path / "env.json"
        return read_json(path, dict) if path.exists() else {}

    def environments(self) -> list[dict[str, Any]]:
        """Read where every session of the run began, in their order; the first is `environment`."""
        first, later = self.environment(), self.path.glob("env.*.json")
        numbered = sorted(later, key=lambda path: int(path.name.split(".")[1]))
        return [first, *(read_json(path, dict) for path in numbered)] if first else []

    def sessions(self) -> Sessions:
        """Read when processes worked on the run."""
        return Sessions(self.path)

    @property
    def is_mirrored(self) -> bool:
        return (self.path / "mlflow.json").exists()

    def mirror(self, key: str | None = None) -> MirrorRecord:
        """Read which MLflow run mirrors this one; `key` is what a new record calls it."""
        return MirrorRecord(self.path, key)

    def metrics(self) -> list[MetricsLine]:
        """Read the lines of metrics.jsonl; none where the file is not there yet."""
        return self.metrics_from(0)[0]

    def metrics_from(self, offset: int) -> tuple[list[MetricsLine], int]:
        """Read the complete lines that start at byte `offset`; and the offset after them."""
        path = self.path / "metrics.jsonl"
        return metrics.lines_from(path, offset) if path.exists() else ([], offset)

    def whole_metrics(self) -> list[MetricsLine]:
        """Read the lines of metrics.jsonl. Raises ConfigError where a step that was trained is missing, or there twice.

        A finished run trained every step of its configuration, another one those up to its newest checkpoint at least.
        """
        configured = self.settings().get("steps", 0) if self.status == "done" else 0  # a cut configuration lacks it
        steps = max(int(configured), self.last_saved())
        lines = self.metrics()  # after the checkpoints: a run that is at work adds to both
        metrics.check_steps(metrics.trained(lines), steps)
        return lines

    def last_logged(self) -> float:
        """Return the time of the newest line of metrics.jsonl, in unix seconds; 0 where there is none."""
        return metrics.last_logged(self.path)

    def append_metrics(self, last_step: int) -> BinaryIO:
        """Cut metrics.jsonl after `last_step`, and open it for more lines, unbuffered."""
        metrics.cut_metrics(self.path, last_step)
        return (self.path / "metrics.jsonl").open("ab", buffering=0)

    def samples(self) -> list[Sample]:
        """Read the completions of samples.jsonl. Raises FileNotFoundError."""
        return samples.read_samples(self.path)

    def append_samples(self, of_step: Iterable[Sample]) -> None:
        """Add the completions of one step."""
        samples.append(self.path, of_step)

    def cut_samples(self, last_step: int) -> None:
        """Drop the completions of every step after `last_step`."""
        samples.cut(self.path, last_step)

    def evaluations(self) -> "dict[str, pd.DataFrame]":
        """Read the held-out answers by phase ("before", "after"); empty where there is none yet."""
        return evaluations.read_evaluations(self.path)

    def write_evaluations(self, phases: "dict[str, pd.DataFrame]") -> None:
        """Write the held-out answers of all phases, a row a question, atomically."""
        evaluations.write_evaluations(self.path, phases)

    def artifacts(self) -> list[Path]:
        """List the files that a mirror keeps whole, of those that there are."""
        return [path for name in ARTIFACTS if (path := self.path / name).exists()]


def make(wanted: Path, exist_ok: bool = True) -> None:
    """Make a run's directory. Raises FileExistsError where it may not be there, ConfigError where it cannot be."""
    try:
        wanted.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(
            f"the run directory {wanted} cannot be made: {error.strerror}. "
            "Type another: run_dir=DIR, for a sweep hydra.sweep.dir=DIR."
        ) from None


def reserve(wanted: Path) -> Path:
    """Make a new directory by this name, or the next of `numbered` where another process was first."""
    candidates = numbered(wanted)
    while True:
        candidate = next(candidates)
        with suppress(FileExistsError):
            make(candidate, exist_ok=False)
            return candidate


def is_unused(path: Path) -> bool:
    """Whether nothing is there, or an empty directory."""
    if not os.path.exists(path):  # Path's own raises for too long a name
        return True
    return path.is_dir() and not any(path.iterdir())


def numbered(wanted: Path) -> Iterator[Path]:
    """NAME, NAME-2, NAME-3 ..., without end."""
    yield wanted
    yield from (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))


def first_missing(wanted: Path) -> Path | None:
    """Return the topmost directory that making this one would make; None if it is there."""
    missing = [path for path in (wanted, *wanted.parents) if not os.path.exists(path)]
    return missing[-1] if missing else None


def remove_empty(folder: Path, made: Path | None) -> None:
    """Remove a directory and those above it, up to `made`, as far as they are empty."""
    for path in (folder, *folder.parents) if made else ():
        if any(path.iterdir()):
            return
        path.rmdir()
        if path == made:
            return


def is_run(files: Iterable[str]) -> bool:
    """Tell whether a folder with these files is the directory of a run."""
    return not set(files).isdisjoint(MARKS)


def _ending(code: int, who: str) -> str:
    if code == -signal.SIGKILL:
        return f"Killed: signal 9 (SIGKILL) ended {who}, as the system does when memory runs out"
    if code < 0:
        return f"Killed: signal {-code} ({signal.strsignal(-code)}) ended {who}"
    return f"NoRecord: {who} ended with status {code} without writing DONE or FAILED; see its messages"
