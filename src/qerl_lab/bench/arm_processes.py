"""Measure each arm in its own process, which frees all its memory. A dead arm yields a row with the reason.

The process is `python -m qerl_lab.bench.one_arm JOB.json ROWS.jsonl PARENT`. Building takes most of the time, so
several arms may be built at once; they then measure one after another. Arms of one format share a checkpoint, which is
removed after the last of them.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qerl_lab import formats
from qerl_lab.bench import random_model
from qerl_lab.bench.arm_config import arm_config
from qerl_lab.bench.bench_options import TRL, VLLM, Arm, RolloutOptions, Row, StepOptions, arm_of
from qerl_lab.bench.shapes import ARCHITECTURES
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import FormatConfig, RunConfig
from qerl_lab.processes import rank_variables
from qerl_lab.rollout.vllm.base import IN_MEMORY, OF_RUNS, named_folder, remove_left
from qerl_lab.train import ranks

READY, GO, PAUSE = "ready", "go", 0.05  # seconds
SCRATCH = f"qerl-lab-bench-{socket.gethostname()}"  # per host: a lock shows live processes of one machine only
LINES = 40  # log lines kept if a process died without a reason


@dataclass(frozen=True)
class Job:
    """What the process of one arm measures. `options` are the benchmark's, `folder` holds the checkpoint.

    `turn` is the arm's own folder: the arm writes READY there when it is built, and measures once GO appears.
    """

    benchmark: str
    arm: Arm
    rank: int
    architecture: dict[str, Any]
    folder: str
    adapter: str
    turn: str
    options: dict[str, Any]

    @property
    def config(self) -> RunConfig:
        """Return the configuration of the lab's run."""
        return arm_config(self.benchmark, self.arm, self.options, self.rank, self.architecture, self.folder)

    @property
    def about(self) -> Row:
        """Return the columns common to all rows of the arm."""
        return {
            "model": self.options["model"], "arm": self.arm.name, "format": self.arm.format,
            "baseline": self.arm.is_baseline, "rank": self.rank, "gpus": self.arm.gpus,
        }  # fmt: skip


def read_job(file: Path) -> Job:
    """Read the job file that `Process` wrote."""
    job = json.loads(file.read_text(encoding="utf-8"))
    return Job(**job | {"arm": Arm(**job["arm"])})


def wait_for_turn(job: Job) -> None:
    """Write READY, then wait for GO."""
    turn = Path(job.turn)
    (turn / READY).touch()
    while not (turn / GO).exists():
        time.sleep(PAUSE)


def clear(place: Path) -> None:
    """Remove folders that killed benchmarks left in `place`, and that killed arms and runs left in shared memory."""
    remove_left(place, f"{SCRATCH}-*")
    remove_left(IN_MEMORY, OF_RUNS)


def refuse_small_scratch(options: RolloutOptions | StepOptions) -> None:
    """Raise ConfigError if scratch is too small for the checkpoints needed at once. Allocates no tensor."""
    scratch, device = Path(options.scratch), torch.device("cpu")
    size = {}
    for name in {arm.format for arm in arms(options)}:
        built = formats.build(FormatConfig(name=name))
        _, shards = random_model.plan(ARCHITECTURES[options.model], built, device)
        size[name] = sum(shard.bytes for shard in shards)
    at_once = [sorted({arm.format for arm, _ in lot}) for lot in lots(options)]
    needed, largest = max((sum(size[name] for name in names), names) for names in at_once)
    free, asked = shutil.disk_usage(scratch).free, 1.02 * needed  # 2% for adapter and tokenizer
    if free < asked:
        raise ConfigError(
            f"scratch={scratch} has {free / 1e9:.1f} GB free, and {options.model} in {' and '.join(largest)} takes "
            f"{asked / 1e9:.1f} GB: {(asked - free) / 1e9:.1f} GB are missing. Type scratch=DIR of a larger disk."
        )


def refuse_wrong_runs(benchmark: str, options: RolloutOptions | StepOptions) -> None:
    """Raise ConfigError if an arm's words contradict each other or the benchmark's options."""
    for arm in (arm for arm in arms(options) if not arm.is_baseline):
        for rank in options.ranks:
            try:
                arm_config(benchmark, arm, vars(options), rank, ARCHITECTURES[options.model], options.scratch)
            except ConfigError as error:
                raise ConfigError(f"the arm {arm.name!r} with rank {rank}: {error}") from None


def refuse_few_gpus(options: RolloutOptions | StepOptions) -> None:
    """Raise ConfigError if an arm needs more GPUs than this machine has."""
    wanted = max((arm.gpus for arm in arms(options) if not arm.is_on_cpu), default=1)
    ranks.refuse_fewer_gpus(wanted, len(ranks.visible_gpus()))


def arms(options: RolloutOptions | StepOptions) -> list[Arm]:
    """Return the arms, grouped by format."""
    baselines = VLLM if isinstance(options, RolloutOptions) else TRL
    every = [arm_of(text, baselines) for text in options.arms]
    order = list(dict.fromkeys(arm.format for arm in every))
    return sorted(every, key=lambda arm: order.index(arm.format))


def lots(options: RolloutOptions | StepOptions) -> list[list[tuple[Arm, int]]]:
    """Split all (arm, rank) pairs into lots that are built at the same time."""
    todo, size = [(arm, rank) for arm in arms(options) for rank in options.ranks], options.side_by_side
    return [todo[first : first + size] for first in range(0, len(todo), size)]


def run(benchmark: str, options: RolloutOptions | StepOptions) -> Iterator[Row]:
    """Yield the rows of every arm and rank. The last row of a dead arm has the reason as `died`."""
    with named_folder(SCRATCH, Path(options.scratch)) as scratch:
        written = set[str]()
        for rank in options.ranks:
            random_model.write_adapter(scratch / f"rank{rank}", ARCHITECTURES[options.model], rank)
        for together in lots(options):
            needed = {arm.format for arm, _ in together}
            for weight_format in written - needed:
                shutil.rmtree(scratch / weight_format)
            for weight_format in sorted(needed - written):
                write_checkpoint(scratch / weight_format, weight_format, options)
            written = needed
            jobs = [
                Job(
                    benchmark, arm, rank, ARCHITECTURES[options.model], str(scratch / arm.format),
                    str(scratch / f"rank{rank}"), tempfile.mkdtemp(prefix="arm-", dir=scratch), asdict(options),
                )
                for arm, rank in together
            ]  # fmt: skip
            yield from run_together(jobs, options.timeout_minutes)


def write_checkpoint(folder: Path, weight_format: str, options: RolloutOptions | StepOptions) -> None:
    """Write the checkpoint for all arms of one format, on the GPU if there is one; free its memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mean_tokens = options.mean_tokens if isinstance(options, StepOptions) else 0.0
    built = formats.build(FormatConfig(name=weight_format))
    random_model.write(folder, ARCHITECTURES[options.model], built, device, mean_tokens)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run_together(jobs: Sequence[Job], minutes: float) -> Iterator[Row]:
    """Start the processes of a lot; once all are built, let them measure in turn, and yield their rows."""
    processes: list[Process] = []
    try:
        for job in jobs:
            processes.append(Process(job))
        for process in processes:
            process.wait(process.is_ready, minutes)
        for process in processes:
            process.let_go()
            try:
                process.wait(lambda: False, minutes)
            except KeyboardInterrupt:  # keep what it has measured so far
                yield from process.measured()
                raise
            yield from process.rows(minutes)
    finally:
        for process in processes:
            process.end()
        remove_left(IN_MEMORY, OF_RUNS)


def environments(arm: Arm) -> list[dict[str, str]]:
    """Return the environment variables of each rank of an arm, which show it only the arm's GPUs.

    The process could not hide GPUs itself: its imports may initialize CUDA.
    """
    shown = {} if arm.is_on_cpu else {ranks.VISIBLE: ",".join(ranks.visible_gpus()[: arm.gpus])}
    return [shown | rank for rank in rank_variables(arm.gpus)]


class Process:
    """The process of one arm; with `gpus=N` its N ranks, the first of which writes the rows."""

    def __init__(self, job: Job) -> None:
        self.job, self.turn, self.is_late = job, Path(job.turn), False
        self.status: int | None = None  # of the first failed rank, else of all
        asked, self.file, self.log = (self.turn / name for name in ("job.json", "rows.jsonl", "log.txt"))
        asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
        self.file.write_text("", encoding="utf-8")
        command = [sys.executable, "-m", "qerl_lab.bench.one_arm", str(asked), str(self.file), str(os.getpid())]
        self.children: list[subprocess.Popen[bytes]] = []
        try:
            with self.log.open("w", encoding="utf-8") as out:
                for variables in environments(job.arm):
                    self.children.append(subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | variables))
        except BaseException:  # Ctrl-C too: a started rank would wait for the missing ones
            self.end()
            raise

    def is_ready(self) -> bool:
        """Tell whether the arm is built."""
        return (self.turn / READY).exists()

    def let_go(self) -> None:
        """Let the arm measure."""
        (self.turn / GO).touch()

    def wait(self, is_over: Callable[[], bool], minutes: float) -> None:
        """Wait for `is_over` or the end of all ranks. Kill them after `minutes`, or once one has failed."""
        deadline = time.monotonic() + 60 * minutes
        while not self.has_ended() and not is_over():
            if time.monotonic() > deadline:
                self.is_late = True
                self.end()
            time.sleep(PAUSE)

    def has_ended(self) -> bool:
        """Tell whether all ranks are done or one has failed; then kill the others, which would wait for it."""
        codes = [child.poll() for child in self.children]
        if self.status is None and (None not in codes or any(codes)):
            self.status = next((code for code in codes if code), 0)
            self.end()
        return self.status is not None

    def end(self) -> None:
        """Kill all ranks."""
        for child in self.children:
            child.kill()
            child.wait()

    def measured(self) -> list[Row]:
        """Read the rows written so far, without an incomplete last line."""
        whole, _, _ = self.file.read_text(encoding="utf-8").rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def rows(self, minutes: float) -> list[Row]:
        """Return the rows so far, plus the first failing rank's message if the arm died."""
        measured = self.measured()
        if said_why := dead(measured):
            return [*(row for row in measured if row not in said_why), said_why[0]]
        if self.status == 0 and measured:
            return measured
        said = self.log.read_text("utf-8", "replace").splitlines()[-LINES:]
        died = why(None if self.is_late else self.status, minutes, bool(measured))
        return [*measured, self.job.about | {"died": died, "log": "\n".join(said)}]


def why(status: int | None, timeout_minutes: float, has_rows: bool) -> str:
    """Explain the end of a process that wrote no reason: too slow, a signal, or an exit status."""
    if status is None:
        return f"took longer than timeout_minutes={timeout_minutes:g}"
    if status < 0:
        return f"ended by signal {-status}" + (" (the memory of the host may be full)" if status == -9 else "")
    return f"exit status {status}" + ("" if has_rows else ", and no row")


def dead(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of arms that died."""
    return [row for row in rows if "died" in row]
