"""Make the runs of a queue on short-lived machines: `python -m qerl_lab.tools.queue plan|run|collect QUEUE.yaml`.

`plan` prints the next runs and the GPU hours left. `run` trains and evaluates the next runs on a machine, and packs the
record of each. `collect` merges packed records into the results beside QUEUE.yaml. `queue_file.py` describes
QUEUE.yaml. If a machine is lost, only its current runs are lost: runs missing from the ledger are planned again.
"""

import gzip
import io
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from qerl_lab.cli.grammar import Command, main_of
from qerl_lab.cli.launch import handle_stop_signals
from qerl_lab.cli.scheduler import GpuPool
from qerl_lab.config.keys import spell_value
from qerl_lab.config.message import in_one_line, some_of, with_noun
from qerl_lab.config.option import ConfigError, option
from qerl_lab.config.paths import WEIGHTS, sha256
from qerl_lab.config.spelling import shell_line
from qerl_lab.record.directory import RunDirectory
from qerl_lab.system import exits
from qerl_lab.system.disk import make_directory, replace_file
from qerl_lab.system.exits import FAILURE, INTERRUPTED, OK, SIGNALS, USAGE
from qerl_lab.system.terminal import columns, format_path
from qerl_lab.tools import queue_file
from qerl_lab.tools.queue_file import ATTEMPTS, DONE, FAILED, PREREGISTRATION, Planned, Queue, Row, split_words

RUNS = "runs/queue"
ROW = "queue.json"  # in a run's directory: its row of the ledger
NOT_PACKED = ("checkpoints", "adapter", "model", "curves.png")  # too large to transfer, or redrawn by the report
DAMAGED = (ValueError, EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError)  # errors of reading a damaged pack
STAGGER_SECONDS = 30.0  # between the starts of runs on one GPU: engines that start at once compete for its memory
START_SECONDS = 60.0  # start no run with less time left, because an engine needs about as long to start
GRACE_SECONDS = 60.0  # for a stopped run to save
LOOK_SECONDS = 0.5  # between two checks whether a signal came, while a run's process is waited for
QUEUE = "the queue's YAML file; the key may be left out"
PARTS = "parts of the queue, by name; none is all"
EXTRA = "words added to every line, separated by blanks; they win over the file's words: words='scale=NAME'"


@dataclass
class PlanOptions:
    queue: str = option("", QUEUE)
    minutes: float = option(25.0, "machine time to fill", above=0, unit="min")
    jobs: int = option(1, "runs side by side on a GPU", at_least=1, at_most=16)
    gpus: int = option(1, "GPUs of the machine; with more than one, each run sees one", at_least=1, at_most=64)
    parts: list[str] = option([], PARTS)
    words: str = option("", EXTRA)

    @property
    def part_of_gpu(self) -> list[str]:
        """Return the override, in a list, that limits a run to its part of a GPU; empty if no runs share a GPU.

        Put it before the run's overrides, so that those win.
        """
        return [f"jobs_per_gpu={self.jobs}"] if self.jobs > 1 else []


@dataclass
class RunOptions(PlanOptions):
    here: str = option("", "words for this machine; a line's own words win: here='model.path=FILE task.path=DIR'")
    runs: str = option(RUNS, "folder of the run directories, on this machine's own disk")
    pack: str = option("", "folder for a packed record of each run, KEY.tar.gz; required")
    lease: float | None = option(
        None, "minutes that the machine is available, later calls included; a run starts if it fits; null: minutes",
        above=0, unit="min",
    )  # fmt: skip
    commit: str = option("", "commit of the code; empty is the commit of the checkout")


@dataclass
class CollectOptions:
    queue: str = option("", QUEUE)
    packs: list[str] = option([], "packed records, or folders of them")
    runs: str = option(RUNS, "folder to unpack the runs into")


def plan(options: PlanOptions) -> None:
    """Print the queue's parts with the hours left, the runs that failed twice, and the commands that fit `minutes`.

    Above each command are the run's key, its minutes and their source (`Queue.estimate`). The minutes of a part
    are the mean over its runs left, or over all its runs if none is left. Also names runs made under another version of
    PREREGISTRATION.md and done runs that lack evaluations, and says why the next run does not fit.
    """
    queue = queue_file.read(Path(options.queue), split_words(options.words, f"words={options.words}"), options.parts)
    at_once = options.jobs * options.gpus
    rows = [["part", "runs", "done", "left", "min a run", "hours left"]]
    parts = queue.chosen
    all_left = [planned for planned in queue.left() if planned.part_in(parts)]

    estimates = {planned.key: queue.estimate(planned, options.jobs) for planned in queue.runs}

    def seconds(runs: Sequence[Planned]) -> float:
        """Return the seconds that `runs` take one after the other."""
        return sum(estimates[planned.key].seconds for planned in runs)

    for part in parts:
        runs = [planned for planned in queue.runs if planned.part_in(parts) is part]
        left = [planned for planned in all_left if planned.part_in(parts) is part]
        done = sum(queue.is_done(planned.key) for planned in runs)
        timed = left or runs
        minutes = seconds(timed) / 60 / max(1, len(timed))
        hours = seconds(left) / at_once / 3600
        rows.append([part.name, str(len(runs)), str(done), str(len(left)), f"{minutes:.1f}", f"{hours:.1f}"])
    print(columns(rows))
    together = f", {at_once} runs at once" if at_once > 1 else ""
    print(f"{with_noun(len(all_left), 'run')} left, {seconds(all_left) / at_once / 3600:.1f} hours{together}")
    for planned in queue.runs:
        failures = queue.failures(planned.key)
        if failures >= ATTEMPTS and not queue.is_done(planned.key):
            print(f"failed {failures} times, not planned again: {planned.key}")
    if keys := queue.of_another_preregistration():
        print(
            f"{with_noun(len(keys), 'run')} made under another {PREREGISTRATION}; to make one again, take its row out "
            f"of ledger.csv: {', '.join(keys)}"
        )
    made_here = {planned.key for planned in queue.runs if planned.part_in(parts)}
    of_done = [row for row in queue.rows if row["state"] == DONE and row["run"] in made_here]
    if lacking := [row["run"] for row in of_done if queue_file.missing_evaluations(row)]:
        what = "are done and lack evaluations" if len(lacking) > 1 else "is done and lacks evaluations"
        print(
            f"{with_noun(len(lacking), 'run')} {what}, which `run` makes only on the machine that has the run's "
            f"directory: {some_of(lacking)}"
        )
    spent = 0.0
    share = f", divided by {at_once} runs at once" if at_once > 1 else ""
    for planned in all_left:
        estimate, remaining = estimates[planned.key], options.minutes - spent
        needed = estimate.seconds / at_once / 60
        described = f"{needed:.1f} minutes ({estimate.source}{share})"
        if needed > remaining:
            print(
                f"the next run does not fit: {planned.key} needs {described}, and {remaining:.1f} of "
                f"minutes={options.minutes:g} are left"
            )
            break
        spent += needed
        print(f"# {planned.key}, {described}:")
        words = queue_file.join_overrides(options.part_of_gpu, planned.overrides)
        print(f"python -m qerl_lab {shlex.join(words)}")
    if spent:
        usual = vars(PlanOptions(options.queue))
        typed = [f"{key}={spell_value(value)}" for key, value in vars(options).items() if value != usual[key]]
        line = f"{LINE} run {shell_line([options.queue, 'pack=DIR', *typed])}"
        print(f"to make them on a machine and pack their records in DIR: {line}")


def run(options: RunOptions) -> None:
    """Train and evaluate the next runs of the queue on this machine for `options.minutes`, and pack their records.

    When the time is up or a signal comes, running processes are stopped; the same command on the same machine continues
    them. Raises ConfigError if the main command refuses a run, or if a preregistered run comes before
    PREREGISTRATION.md is complete. Raises ValueError after all others have ended if a run or an evaluation failed. A
    run that was stopped, or that did not fit into the time, did not fail.
    """
    queue = queue_file.read(Path(options.queue), split_words(options.words, f"words={options.words}"), options.parts)
    pack = Path(options.pack)
    make_directory(pack, f"pack={pack}")
    waiting = [planned for planned in queue.left() if planned.part_in(queue.chosen)]
    queue.refuse_unregistered(waiting)
    gpus = [str(number) for number in range(options.gpus)]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = visible.split(",")[: options.gpus]
    machine = Machine(queue, options, GpuPool(gpus, options.jobs), time.monotonic())
    done = [planned for planned in queue.runs if planned.part_in(queue.chosen) and queue.is_done(planned.key)]
    to_make = [planned for planned in (*done, *waiting) if machine.has_work(planned)]
    # These ended here and were not collected, perhaps because their packs were lost.
    packed_again = [planned for planned in waiting if planned not in to_make]
    for planned in packed_again:
        machine.pack(planned)

    def stop(number: int, frame: FrameType | None) -> None:
        """Handle a signal, which may reach this process alone: tell the threads to stop; raise KeyboardInterrupt."""
        machine.stopped.set()
        raise KeyboardInterrupt

    with handle_stop_signals(stop), ThreadPoolExecutor(options.jobs * options.gpus) as slots:
        started = [slots.submit(machine.make, planned, number) for number, planned in enumerate(to_make)]
        try:
            ended = [future.result() for future in started]
        except BaseException:
            slots.shutdown(wait=False, cancel_futures=True)
            raise
    if packed_again:
        print(f"{with_noun(len(packed_again), 'run')} that ended here before packed again into {format_path(pack)}")
    if not to_make:
        print("no run is left to make here")
    elif machine.started.is_set():
        print(f"{sum(ended)} of {len(to_make)} runs ended; their records are in {format_path(pack)}")
    else:
        minutes = max(START_SECONDS, queue.estimate(to_make[0], options.jobs).seconds) / 60
        left = with_noun(len(to_make), "run")
        print(f"{left} left, none started: the next needs {minutes:.1f} minutes, more than minutes or lease leave")
        return
    if any(ended) or packed_again:
        print(f"next, where the results are: {LINE} collect {shlex.join([options.queue, f'packs=[{options.pack}]'])}")
    if failed := [planned.key for planned in to_make if planned.key in machine.failed]:
        raise ValueError(
            f"{with_noun(len(failed), 'run')} failed in training or evaluation, see above: {', '.join(failed)}. A run "
            "that failed in training for the first time is made once more after its pack is collected."
        )


@dataclass(frozen=True)
class Machine:
    """Trains, evaluates and packs runs on this machine until the time is up or a signal comes.

    Attributes:
        began: the start of the command, by the monotonic clock.
        stopped: set by a signal; then nothing starts, and what is running is stopped.
        started: set once there was time for a run, also for one that then failed.
        failed: keys of the runs that failed, or of which an evaluation failed.
    """

    queue: Queue
    options: RunOptions
    gpus: GpuPool
    began: float
    stopped: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)
    failed: set[str] = field(default_factory=set)

    @property
    def until(self) -> float:
        """Return when this command must end, in seconds of `time.monotonic`; a past time once `stopped` is set."""
        return self.began + 60 * (0 if self.stopped.is_set() else self.options.minutes)

    def run_folder(self, planned: Planned) -> Path:
        """Return the directory of a run on this machine."""
        return Path(self.options.runs).absolute() / planned.key

    def ended_row(self, planned: Planned) -> Row | None:
        """Read the row of the ledger that was stored in the run's directory when training ended; None if it did not."""
        file = self.run_folder(planned) / ROW
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def has_work(self, planned: Planned) -> bool:
        """Tell whether a run still has to be trained or evaluated on this machine.

        A run that failed here is trained again only once the ledger has the failure. Evaluations that a run trained
        here lacks are made, but not if the ledger has the run as done elsewhere.
        """
        row, is_done = self.ended_row(planned), self.queue.is_done(planned.key)
        if row is None:
            return not is_done
        if row["state"] == DONE:
            return queue_file.missing_evaluations(row) > 0 and (not is_done or self.queue.has_attempt(row))
        return not is_done and self.queue.has_attempt(row)

    def make(self, planned: Planned, number: int) -> bool:
        """Wait for a GPU with fewer than `options.jobs` runs, then train and evaluate a run on it.

        Returns whether the training ended, done or failed. `number` is the run's position in this command, from 0: the
        first runs on a GPU start STAGGER_SECONDS apart.
        """
        if number < self.options.jobs * self.options.gpus:
            self.stopped.wait(STAGGER_SECONDS * (number // self.options.gpus))
        with self.gpus.take(1) as (gpu,):
            return self.train_and_evaluate(planned, {"CUDA_VISIBLE_DEVICES": gpu} if self.options.gpus > 1 else {})

    def train_and_evaluate(self, planned: Planned, visible: Mapping[str, str]) -> bool:
        """Train a run, pack its record, evaluate it, and pack again.

        Does not start a new run that does not fit the time left. Packs before the evaluation too, so that the training
        is kept if the machine is lost during an evaluation. `visible` holds the environment variables that choose the
        GPU.

        Returns True if the training ended, done or failed, and False if it was not started or was stopped. Raises
        ConfigError if the main command refuses a new run.
        """
        run, now = RunDirectory(self.run_folder(planned)), time.monotonic()
        minutes = self.options.lease or self.options.minutes
        fits = now + self.queue.estimate(planned, self.options.jobs).seconds < self.began + 60 * minutes
        if now > self.until - START_SECONDS or not (fits or run.is_claimed):
            return False
        self.started.set()
        start = time.time()
        code: int | None = OK
        if run.status != DONE:
            words = [f"resume={run.path}", f"jobs_per_gpu={self.options.jobs}"]  # the run may have begun beside others
            if not run.is_claimed:
                here = split_words(self.options.here, f"here={self.options.here}")
                words = queue_file.join_overrides(here, self.options.part_of_gpu, planned.overrides)
                words.append(f"run_dir={run.path}")
            code = self._call(planned, ["-m", "qerl_lab", *words], visible)
            if code == USAGE and not run.is_claimed:
                console = self.console_file(planned).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                raise ConfigError(
                    f"{planned.key} was refused: {console[-1] if console else 'the command printed nothing'}"
                )
        if run.status == FAILED and code in (FAILURE, USAGE):  # another code: FAILED is from an attempt before
            self.failed.add(planned.key)
            self._report(planned, f"failed: {run.reason}")
        elif run.status != DONE:
            self._report_end(planned, code, when="" if run.is_claimed else " before its run began")
            return False
        trained = time.time()
        training_seconds = max(trained - start, run.result().get("seconds", 0.0))  # the result counts all sessions
        self._write_row(planned, run, start, training_seconds, 0)
        self.pack(planned)
        if run.status == DONE and planned.after:
            with ThreadPoolExecutor(len(planned.after)) as side_by_side:  # an engine mostly waits for its host
                evaluate = partial(self._evaluate, planned, visible)
                evaluated = sum(side_by_side.map(evaluate, range(len(planned.after)), planned.after))
            _drop_texts(run)
            self._write_row(planned, run, start, training_seconds + time.time() - trained, evaluated)
            self.pack(planned)
        return True

    def _evaluate(self, planned: Planned, visible: Mapping[str, str], number: int, line: str) -> bool:
        """Wait `number` * STAGGER_SECONDS, run the evaluate command `line` of a run, and return whether it succeeded.

        A finished evaluation only prints its table.
        """
        self.stopped.wait(STAGGER_SECONDS * number)
        command, *words = shlex.split(os.path.expandvars(line))
        words = ["-m", "qerl_lab.evaluate", command, f"run={self.run_folder(planned)}", *words]
        code = self._call(planned, words, visible)
        if code != OK:
            self._report_end(planned, code, f"is trained, and its evaluation `{line}` ")
        return code == OK

    def _call(self, planned: Planned, words: Sequence[str], visible: Mapping[str, str]) -> int | None:
        """Run Python with arguments `words` and environment variables `visible`; append its output to `console_file`.

        Returns the exit code of the process. If the time is up (`until`), stops the process and returns None; if the
        time was up before, starts no process.
        """
        if self.until < time.monotonic():
            return None
        make_directory(self.console_file(planned).parent, f"runs={self.options.runs}")
        with self.console_file(planned).open("ab") as console:
            line, environment = [sys.executable, *words], os.environ | visible
            process = subprocess.Popen(line, stdout=console, stderr=console, env=environment)
            while (left := self.until - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(LOOK_SECONDS, left))
            # After Ctrl-C not SIGINT: the process has got one from the terminal, and a second one aborts a run. A
            # SIGTERM so soon after it does not (launch.StopRequest).
            process.send_signal(signal.SIGTERM if self.stopped.is_set() else signal.SIGINT)
            try:
                process.wait(GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            return None

    def _report_end(self, planned: Planned, code: int | None, subject: str = "", when: str = "") -> None:
        """Print how a process ended before its work was done, and add the run to `failed` unless it was stopped.

        `code` is the result of `_call`. The words `subject` and `when` are printed before and after the verb.
        """
        if code is None and not self.stopped.is_set():
            how = "was stopped when the time was up"
        elif code in (None, INTERRUPTED) or -code in SIGNALS:  # a lent machine may send SIGTERM when it is taken back
            how = "was stopped by a signal"
        else:
            how = f"ended with exit code {code}"
            self.failed.add(planned.key)
        self._report(planned, f"{subject}{how}{when}")

    def _report(self, planned: Planned, how: str) -> None:
        """Print why a run, or one of its evaluations, is not done here; `how` follows the run's key."""
        line = f"{planned.key} {how}; {format_path(self.console_file(planned))} has its output\n"
        print(line, end="", flush=True)  # one write, because the threads of other runs print too

    def console_file(self, planned: Planned) -> Path:
        """Return the path of KEY.txt, beside the run's directory, which collects the output of the run's commands."""
        return self.run_folder(planned).with_suffix(".txt")

    def _write_row(self, planned: Planned, run: RunDirectory, began: float, seconds: float, evaluated: int) -> None:
        """Write the run's row of the ledger into its directory, and copy the console file there.

        `began` is when this command began to work on the run, in Unix seconds; `seconds` is the time taken, `evaluated`
        the number of evaluations that this command finished.
        """
        where: dict[str, Any] = run.environment()
        start = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(began))  # kept for an attempt after a failed one
        if (before := self.ended_row(planned)) is None:
            start = where.get("time", start)
        elif before["state"] == DONE:  # the attempt is the same, and has more evaluations now
            start = before["start"]
            evaluated = max(evaluated, int(before["evaluations"].partition(" of ")[0]))  # of an earlier command too
        trained = [file for file in (run.adapter / WEIGHTS, *run.model.glob("*.safetensors")) if file.exists()]
        row = {
            "run": planned.key, "seed": str(planned.config.seed), "part": planned.part.name, "state": run.status,
            "host": where.get("host", os.uname().nodename),
            "card": " ".join(f"{gpu['name']} {gpu['uuid']}" for gpu in where.get("gpus", [])) or "none",
            "start": start,
            "seconds": f"{seconds:.0f}",
            "commit": self.options.commit or where.get("git_sha", "unknown"),
            "preregistration": self.queue.preregistration_hash(),
            "adapter_sha256": " ".join(map(sha256, sorted(trained))),  # with lora=full of the model
            "evaluations": f"{evaluated} of {len(planned.after)}", "words": shlex.join(planned.overrides),
        }  # fmt: skip
        replace_file(run.path / ROW, json.dumps(row, indent=1).encode())
        shutil.copy(self.console_file(planned), run.path / "queue.txt")

    def pack(self, planned: Planned) -> None:
        """Pack the record in a run's directory into KEY.tar.gz in the folder `options.pack`, atomically.

        Leaves out the files in NOT_PACKED and unfinished evaluations.
        """
        file = Path(self.options.pack) / f"{planned.key}.tar.gz"
        with tarfile.open(file.with_suffix(".tmp"), "w:gz") as packed:
            for path in sorted(self.run_folder(planned).iterdir()):
                if path.name not in NOT_PACKED:
                    name = f"{planned.key}/{path.name}"
                    packed.add(path, name, filter=lambda at: None if ".partial" in at.name else at)
        file.with_suffix(".tmp").replace(file)


def _drop_texts(run: RunDirectory) -> None:
    """Drop the texts of completions from the files of the run's evaluations, so that its pack is small."""
    import pandas as pd  # imported here, because it takes a quarter of a second

    for file in run.path.glob("evaluations/*/eval.parquet"):
        pd.read_parquet(file).drop(columns="completion", errors="ignore").to_parquet(file, index=False)


def collect(options: CollectOptions) -> None:
    """Unpack packed records into `options.runs`, and merge new runs into results and ledger beside QUEUE.yaml.

    A run that is done in the ledger is left out, unless the pack is of the same attempt with more evaluations. The
    ledger is written last, so that the same command continues after a stop. Raises ConfigError if the queue file is
    invalid or a pack is missing. Raises ValueError after all others are collected if a pack is damaged or is of a part
    that the queue lacks.
    """
    queue, runs = queue_file.read(Path(options.queue)), Path(options.runs)
    make_directory(runs, f"runs={runs}")
    rows = {(row["run"], row["start"]): row for row in queue.rows}
    new = dict[str, list[Path]]()  # run -> folders of its results
    files, bad = list[Path](), list[Path]()
    for pack in map(Path, options.packs):
        files += sorted(pack.glob("*.tar.gz")) if pack.is_dir() else [pack]
    if missing := [file for file in files if not file.exists()]:
        raise ConfigError(f"{missing[0]} is not there. Type packs=[FILE.tar.gz] or packs=[DIR].")
    for file in files:
        with tempfile.TemporaryDirectory(dir=runs) as fresh:
            try:
                row = _unpack(file, Path(fresh))
                folders = [queue.folder / part.into for part in queue.parts_of(row)]
                if reason := _reason_to_leave(row, rows):
                    print(f"{row['run']}: {reason}")
                    continue
                if row["state"] == DONE and not folders:  # left out below, as a damaged pack is
                    raise ConfigError(f"the queue has no part {row['part']}. Put it back to collect this pack.")
            except DAMAGED as error:
                print(f"{file} is left out: {in_one_line(error)}")
                bad.append(file)
                continue
            shutil.rmtree(runs / row["run"], ignore_errors=True)
            Path(fresh, row["run"]).rename(runs / row["run"])
        rows[row["run"], row["start"]] = row
        if row["state"] == DONE:
            new[row["run"]] = folders
    changed = dict.fromkeys(itertools.chain(*new.values()))
    for folder in changed:
        _merge(folder, [runs / run for run in new if folder in new[run]])
    queue_file.write_ledger(queue.folder, list(rows.values()))
    replaced = sum(rows[row["run"], row["start"]] is not row for row in queue.rows)
    also = f", {replaced} replaced by packs with more" if replaced else ""
    print(f"{with_noun(len(rows) - len(queue.rows), 'new row')} in {format_path(queue.folder)}/ledger.csv{also}")
    for folder in changed:
        print(f"next: python -m qerl_lab.report {shlex.quote(format_path(folder))}")
    if bad:
        raise ValueError(f"{with_noun(len(bad), 'pack')} left out, see above: {', '.join(map(str, bad))}")


def _unpack(file: Path, folder: Path) -> Row:
    """Unpack `file`, a packed run directory, into `folder`; return the run's row of the ledger.

    Raises one of DAMAGED if `file` is no whole record.
    """
    data = gzip.decompress(file.read_bytes())  # reads to the end, unlike tarfile, and so checks the sum
    with tarfile.open(fileobj=io.BytesIO(data)) as packed:
        packed.extractall(folder, filter="data")
    found = list(folder.glob(f"*/{ROW}"))
    row: Row = json.loads(found[0].read_text(encoding="utf-8")) if len(found) == 1 else {}
    if row.keys() != {*queue_file.COLUMNS} or found[0].parent.name != row["run"]:
        raise ConfigError(f"it is no packed record, for it has no {ROW} of its run. Type a file that `run` packed.")
    return row


def _reason_to_leave(row: Row, rows: Mapping[tuple[str, str], Row]) -> str:
    """Return why the pack with this row changes nothing in the ledger's `rows` (by run and start); empty if it does."""

    def worth(row: Row) -> tuple[bool, int]:
        """Return the rank of a pack among those of one attempt: a done run counts most, then more evaluations."""
        return row["state"] == DONE, -queue_file.missing_evaluations(row)

    known = rows.get((row["run"], row["start"]))
    if known and worth(row) <= worth(known):
        return "already collected"
    if any(other["run"] == row["run"] and other["state"] == DONE and other is not known for other in rows.values()):
        return "made twice; this second run is left out, because the first counts"
    return ""


def _merge(folder: Path, run_dirs: Sequence[Path]) -> None:
    """Add run directories to the results in `folder` with the command report, and copy their evaluations there.

    Raises ValueError if the report fails.
    """
    make_directory(folder, f"{folder}")
    known = [str(folder)] if (folder / "runs.parquet").exists() else []
    line = [sys.executable, "-m", "qerl_lab.report", *known, *map(str, run_dirs), f"out={folder}"]
    if subprocess.run(line, stdout=subprocess.DEVNULL).returncode != OK:
        raise ValueError(f"the report failed: {shlex.join(line[1:])}")
    for run_dir in run_dirs:
        if (made := run_dir / "evaluations").is_dir():
            shutil.copytree(made, folder / "evaluations" / run_dir.name, dirs_exist_ok=True)


LINE = "python -m qerl_lab.tools.queue"
FILE = "results/qwen1_5b/queue.yaml"
COMMANDS: dict[str, Command[Any]] = {
    "plan": Command(
        f"{LINE} plan QUEUE.yaml", "Print the next runs of a queue, and the GPU hours left in each part.",
        PlanOptions, plan, ((f"{LINE} plan {FILE} minutes=25", "what one machine would make"),), ("queue",), "queue",
    ),
    "run": Command(
        f"{LINE} run QUEUE.yaml pack=DIR",
        "Make the next runs of a queue here, and pack their records; exit code 1 if one of them failed.",
        RunOptions, run, ((f"{LINE} run {FILE} minutes=9 jobs=2 pack=packed", "two runs side by side"),),
        ("queue", "pack"), "queue",
    ),
    "collect": Command(
        f"{LINE} collect QUEUE.yaml packs=[DIR]", "Merge packed records into the results and the ledger of a queue.",
        CollectOptions, collect, ((f"{LINE} collect {FILE} packs=[packed]", "packs of a folder"),), ("queue", "packs"),
        "queue",
    ),
}  # fmt: skip
main = main_of(COMMANDS)


if __name__ == "__main__":
    exits.run(main)
