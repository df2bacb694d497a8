"""Measure each arm in its own process, which frees all its memory. A dead arm yields a row with the reason.

The process is `python -m qerl_lab.bench.one_arm JOB.json ROWS.jsonl PARENT`. Building takes longer than measuring, so
`side_by_side` arms are built at once, and then measure one after another. Arms of one format share a checkpoint, which
is removed after the last of them.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from qerl_lab import formats
from qerl_lab.bench import random_model
from qerl_lab.bench.arm_config import GO, PAUSE, READY, Job, arm_config
from qerl_lab.bench.bench_options import TRL, VLLM, Arm, RolloutOptions, Row, StepOptions, arm_of
from qerl_lab.bench.shapes import ARCHITECTURES
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import FormatConfig
from qerl_lab.rollout.vllm.base import IN_MEMORY, OF_RUNS, named_folder, remove_leftovers
from qerl_lab.system.processes import rank_variables
from qerl_lab.train import ranks

SCRATCH = f"qerl-lab-bench-{socket.gethostname()}"  # per host: a lock shows live processes of one machine only
LINES = 40  # log lines kept if a process died without a reason
JOB, ROWS, LOG = "job.json", "rows.jsonl", "log.txt"  # files in the folder of an arm
Process = subprocess.Popen[bytes]


def check(options: RolloutOptions | StepOptions) -> None:
    """Raise ConfigError if an arm contradicts itself or the options, or GPUs or `scratch` are too few or too small."""
    every, scratch = arms(options), Path(options.scratch)
    for arm in (arm for arm in every if not arm.is_baseline):
        for rank in options.ranks:
            try:
                arm_config(options.BENCHMARK, arm, vars(options), rank, ARCHITECTURES[options.model], options.scratch)
            except ConfigError as error:
                raise ConfigError(f"the arm {arm.name!r} with rank {rank}: {error}") from None
    ranks.refuse_fewer_gpus(max((arm.gpus for arm in every if not arm.is_on_cpu), default=1), len(ranks.visible_gpus()))
    remove_leftovers(scratch, f"{SCRATCH}-*")  # of killed benchmarks; the next of killed arms and runs
    remove_leftovers(IN_MEMORY, OF_RUNS)
    size = {}
    for name in {arm.format for arm in every}:
        built = formats.build(FormatConfig(name=name))
        _, shards = random_model.plan(ARCHITECTURES[options.model], built, torch.device("cpu"))
        size[name] = sum(shard.bytes for shard in shards)
    at_once = [sorted({arm.format for arm, _ in lot}) for lot in split_into_lots(options)]
    needed, largest = max((sum(size[name] for name in names), names) for names in at_once)
    free, asked = shutil.disk_usage(scratch).free, 1.02 * needed  # 2% for adapter and tokenizer
    if free < asked:
        raise ConfigError(
            f"scratch={scratch} has {free / 1e9:.1f} GB free, and {options.model} in {' and '.join(largest)} takes "
            f"{asked / 1e9:.1f} GB: {(asked - free) / 1e9:.1f} GB are missing. Type scratch=DIR of a larger disk."
        )


def arms(options: RolloutOptions | StepOptions) -> list[Arm]:
    """Return the arms, grouped by format."""
    baselines = VLLM if isinstance(options, RolloutOptions) else TRL
    every = [arm_of(text, baselines) for text in options.arms]
    order = list(dict.fromkeys(arm.format for arm in every))
    return sorted(every, key=lambda arm: order.index(arm.format))


def split_into_lots(options: RolloutOptions | StepOptions) -> list[list[tuple[Arm, int]]]:
    """Split all pairs of arm and rank into lots that are built at once."""
    pairs, size = [(arm, rank) for arm in arms(options) for rank in options.ranks], options.side_by_side
    return [pairs[first : first + size] for first in range(0, len(pairs), size)]


def run(options: RolloutOptions | StepOptions) -> Iterator[Row]:
    """Yield the rows of every arm and rank. The last row of a dead arm has the reason as `died`."""
    architecture, written = ARCHITECTURES[options.model], set[str]()
    with named_folder(SCRATCH, Path(options.scratch)) as scratch:
        for rank in options.ranks:
            random_model.write_adapter(scratch / f"rank{rank}", architecture, rank)
        for lot in split_into_lots(options):
            needed = {arm.format for arm, _ in lot}
            for name in written - needed:
                shutil.rmtree(scratch / name)
            for name in sorted(needed - written):
                write_checkpoint(scratch / name, name, options)
            written, jobs = needed, list[Job]()
            for arm, rank in lot:
                folders = str(scratch / arm.format), str(scratch / f"rank{rank}")
                turn = tempfile.mkdtemp(prefix="arm-", dir=scratch)
                jobs.append(Job(options.BENCHMARK, arm, rank, architecture, *folders, turn, asdict(options)))
            yield from measure(jobs)


def write_checkpoint(folder: Path, weight_format: str, options: RolloutOptions | StepOptions) -> None:
    """Write the checkpoint for all arms of one format, on the GPU if there is one; free its memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mean_tokens = options.mean_tokens if isinstance(options, StepOptions) else 0.0
    built = formats.build(FormatConfig(name=weight_format))
    random_model.write(folder, ARCHITECTURES[options.model], built, device, mean_tokens)
    if device.type == "cuda":
        torch.cuda.empty_cache()


def environments(arm: Arm) -> list[dict[str, str]]:
    """Return the environment variables of each rank of an arm, which show it only the arm's GPUs.

    The process could not hide GPUs itself: its imports may initialize CUDA.
    """
    shown = {} if arm.is_on_cpu else {ranks.VISIBLE: ",".join(ranks.visible_gpus()[: arm.gpus])}
    return [shown | rank for rank in rank_variables(arm.gpus)]


def measure(jobs: Sequence[Job]) -> Iterator[Row]:
    """Start all jobs. When each is built or dead, let one after another measure, and yield its rows.

    Ctrl-C yields the rows so far, then is raised.
    """
    seconds, started = 60 * jobs[0].options["timeout_minutes"], [(job, list[Process]()) for job in jobs]
    try:
        for job, processes in started:
            start(job, processes)
        deadline = time.monotonic() + seconds
        statuses = [wait(processes, deadline, Path(job.turn, READY)) for job, processes in started]
        for (job, processes), status in zip(started, statuses, strict=True):
            if Path(job.turn, READY).exists():  # else it died, or took too long to build
                Path(job.turn, GO).touch()
                try:
                    status = wait(processes, time.monotonic() + seconds)
                except KeyboardInterrupt:
                    yield from rows_so_far(job)
                    raise
            yield from rows_at_end(job, status)
    finally:
        for _, processes in started:
            kill_all(processes)
        remove_leftovers(IN_MEMORY, OF_RUNS)


def start(job: Job, ranks: list[Process]) -> None:
    """Start the process of an arm, with `gpus=N` its N ranks, the first of which writes the rows. Append to `ranks`."""
    asked, rows, log = (Path(job.turn, name) for name in (JOB, ROWS, LOG))
    asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
    rows.write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "qerl_lab.bench.one_arm", str(asked), str(rows), str(os.getpid())]
    with log.open("w", encoding="utf-8") as out:
        for variables in environments(job.arm):
            ranks.append(subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | variables))


def wait(ranks: Sequence[Process], deadline: float, ready: Path | None = None) -> int | None:
    """Wait for all ranks, the first that fails, or the file `ready`. Return the exit status of the failed one, else 0.

    `deadline` is a time of `time.monotonic`; after it kill all ranks, and return None.
    """
    while True:
        codes = [rank.poll() for rank in ranks]
        if None not in codes or any(codes) or (ready and ready.exists()):
            return next((code for code in codes if code), 0)
        if time.monotonic() > deadline:
            kill_all(ranks)
            return None
        time.sleep(PAUSE)


def kill_all(ranks: Sequence[Process]) -> None:
    """Kill all ranks."""
    for rank in ranks:
        rank.kill()
        rank.wait()


def rows_so_far(job: Job) -> list[Row]:
    """Read the rows written so far, without an incomplete last line."""
    whole, _, _ = Path(job.turn, ROWS).read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def rows_at_end(job: Job, status: int | None) -> Iterator[Row]:
    """Yield the rows of an ended job, and one with the reason if it died."""
    rows = rows_so_far(job)
    yield from (row for row in rows if "died" not in row)
    if dead := dead_rows(rows):
        yield dead[0]  # the other ranks died of the first
    elif status != 0 or not rows:
        tail = Path(job.turn, LOG).read_text("utf-8", "replace").splitlines()[-LINES:]
        yield job.about | {
            "died": explain_end(status, job.options["timeout_minutes"], bool(rows)),
            "log": "\n".join(tail),
        }


def explain_end(status: int | None, timeout_minutes: float, has_rows: bool) -> str:
    """Explain the end of a process that wrote no reason: too slow, a signal, or an exit status."""
    if status is None:
        return f"took longer than timeout_minutes={timeout_minutes:g}"
    if status < 0:
        return f"ended by signal {-status}" + (" (the memory of the host may be full)" if status == -9 else "")
    return f"exit status {status}" + ("" if has_rows else ", and no row")


def dead_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of arms that died."""
    return [row for row in rows if "died" in row]
