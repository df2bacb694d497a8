"""Several jobs of a sweep at once on this machine (`jobs=N`): a thread waits for each, and a table says how they do."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

from tqdm import tqdm

from qerl_lab import preflight
from qerl_lab.cli.compose import Job
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.record.directory import RunDirectory
from qerl_lab.terminal import LINES, columns

VISIBLE = "CUDA_VISIBLE_DEVICES"
REDRAW_SECONDS = 1.0
Start = Callable[[Job, Mapping[str, str]], int]  # a job and the variables that show it its GPUs -> its exit code


@dataclass
class Cards:
    """The GPUs of this machine, each of which `share` jobs may use at once. Names are as CUDA_VISIBLE_DEVICES has them.

    `take` waits until as many as a job needs have a place, and gives the least busy of them.
    """

    names: Sequence[str]
    share: int
    _busy: dict[str, int] = field(default_factory=dict)
    _free: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def take(self, count: int) -> Iterator[list[str]]:
        with self._free:
            self._free.wait_for(lambda: len(self._open()) >= count)
            taken = self._open()[:count]
            self._move(taken, 1)
        try:
            yield taken
        finally:
            with self._free:
                self._move(taken, -1)
                self._free.notify_all()

    def _open(self) -> list[str]:
        free = [name for name in self.names if self._busy.get(name, 0) < self.share]
        return sorted(free, key=lambda name: self._busy.get(name, 0))

    def _move(self, names: Sequence[str], by: int) -> None:
        for name in names:
            self._busy[name] = self._busy.get(name, 0) + by


def cards_of(configs: Sequence[RunConfig]) -> Cards | None:
    """The GPUs for these jobs; None where they run on the CPU. Raises ConfigError for a job that needs more."""
    on_gpu = [cfg for cfg in configs if cfg.device != "cpu"]
    if not on_gpu or not preflight.has_gpu():
        return None
    given = os.environ.get(VISIBLE)
    names = given.split(",") if given else _listed()
    if (wanted := max(cfg.gpus for cfg in on_gpu)) > len(names):
        raise ConfigError(f"gpus={wanted}, and this machine shows {len(names)}. Type gpus={len(names)} or less.")
    return Cards(names, configs[0].jobs_per_gpu)


def _listed() -> list[str]:
    """Every GPU of this machine. Raises ConfigError where nvidia-smi does not say."""
    try:
        out = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        raise ConfigError(f"nvidia-smi does not list the GPUs here. Type {VISIBLE}=0,1 before the command.") from None
    return [str(index) for index, _ in enumerate(line for line in out.splitlines() if line.startswith("GPU "))]


def run(jobs: Sequence[Job], start: Start) -> None:
    """Start every job, `jobs` of its configuration at once, and show them until the last has ended."""
    configs = [job.config for job in jobs]
    cards = cards_of(configs)

    def one(job: Job) -> int:
        if cards is None or job.config.device == "cpu":
            return start(job, {})
        with cards.take(job.config.gpus) as taken:
            return start(job, {VISIBLE: ",".join(taken)})

    shown = Shown(jobs)
    with ThreadPoolExecutor(configs[0].jobs) as pool:
        waiting: set[Future[int]] = {pool.submit(one, job) for job in jobs}
        while waiting:
            ended, waiting = wait(waiting, REDRAW_SECONDS, FIRST_COMPLETED)
            shown.update()
            for future in ended:
                future.result()  # raises what a bug raised
    shown.close()


@dataclass
class Shown:
    """The table of running jobs: drawn in place on a terminal, elsewhere a line for each tenth of a job."""

    jobs: Sequence[Job]
    _said: dict[int, str] = field(default_factory=dict)
    _began: dict[int, tuple[float, int]] = field(default_factory=dict)
    _drawn: int = 0

    def update(self) -> None:
        """Look at every run's record, and show what is new."""
        rows = {job.number: self._row(job) for job in self.jobs}
        if sys.stderr.isatty():
            self._draw([row for row in rows.values() if row[1] == "running"])
            return
        for job in self.jobs:
            self._say(job, rows[job.number])

    def close(self) -> None:
        """Leave the terminal as a line that comes next wants it."""
        if self._drawn:
            self._draw([])

    def _row(self, job: Job) -> list[str]:
        run = RunDirectory(job.run_dir)
        status = "running" if run.status == "interrupted" else run.status
        lines = run.metrics() if status == "running" else []
        steps = [line for line in lines if line["step"] > 0 and "reward/mean" in line["metrics"]]
        step = steps[-1]["step"] if steps else 0
        reward = f"{steps[-1]['metrics']['reward/mean']:.2f}" if steps else "-"
        words = " ".join(job.overrides)
        return [f"job {job.number}", status, f"{step}/{job.config.steps}", reward, self._eta(job, step), words]

    def _eta(self, job: Job, step: int) -> str:
        """Time left at the pace since the first step that was seen here."""
        if not step:
            return "-"
        began, first = self._began.setdefault(job.number, (time.monotonic(), step))
        if step == first:
            return "-"
        return str(tqdm.format_interval((time.monotonic() - began) / (step - first) * (job.config.steps - step)))

    def _draw(self, rows: list[list[str]]) -> None:
        table = columns([["job", "status", "step", "reward", "ETA", "words"], *rows]).splitlines() if rows else []
        up = f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""
        width = os.get_terminal_size(sys.stderr.fileno()).columns or 100
        sys.stderr.write(up + "".join(line[: width - 1] + "\n" for line in table))
        sys.stderr.flush()
        self._drawn = len(table)

    def _say(self, job: Job, row: list[str]) -> None:
        number, status, step, reward, eta, words = row
        tenth = int(step.partition("/")[0]) * LINES // job.config.steps
        mark = f"{status} {tenth}"
        before = self._said.setdefault(job.number, "not run 0")
        if mark == before:
            return
        self._said[job.number] = mark
        if status == "running" and tenth:
            print(f"{number}: step {step}, ETA {eta}, reward {reward}", file=sys.stderr, flush=True)
        else:
            print(f"{number}: {status}, {words}", file=sys.stderr, flush=True)
