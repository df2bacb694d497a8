"""Measure each arm in its own process, which frees all its memory. A dead arm yields a row with the reason.

The process is `python -m qerl_lab.bench.one_arm JOB.json ROWS.jsonl PARENT`. Arms of one format share a checkpoint,
which is removed after the last of them.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from qerl_lab import formats
from qerl_lab.bench import random_model
from qerl_lab.bench.arm_config import Job, arm_config
from qerl_lab.bench.bench_options import TRL, VLLM, Arm, RolloutOptions, Row, StepOptions, arm_of
from qerl_lab.bench.shapes import ARCHITECTURES
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import FormatConfig
from qerl_lab.rollout.vllm.base import IN_MEMORY, OF_RUNS, named_folder, remove_left
from qerl_lab.system.processes import rank_variables
from qerl_lab.train import ranks

SCRATCH = f"qerl-lab-bench-{socket.gethostname()}"  # per host: a lock shows live processes of one machine only
LINES = 40  # log lines kept if a process died without a reason
PAUSE = 0.05  # seconds between two looks at a process


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
    remove_left(scratch, f"{SCRATCH}-*")  # of killed benchmarks; the next of killed arms and runs
    remove_left(IN_MEMORY, OF_RUNS)
    size = {}
    for name in {arm.format for arm in every}:
        built = formats.build(FormatConfig(name=name))
        _, shards = random_model.plan(ARCHITECTURES[options.model], built, torch.device("cpu"))
        size[name] = sum(shard.bytes for shard in shards)
    largest = max(size, key=size.__getitem__)
    free, asked = shutil.disk_usage(scratch).free, 1.02 * size[largest]  # 2% for adapter and tokenizer
    if free < asked:
        raise ConfigError(
            f"scratch={scratch} has {free / 1e9:.1f} GB free, and {options.model} in {largest} takes "
            f"{asked / 1e9:.1f} GB: {(asked - free) / 1e9:.1f} GB are missing. Type scratch=DIR of a larger disk."
        )


def arms(options: RolloutOptions | StepOptions) -> list[Arm]:
    """Return the arms, grouped by format."""
    baselines = VLLM if isinstance(options, RolloutOptions) else TRL
    every = [arm_of(text, baselines) for text in options.arms]
    order = list(dict.fromkeys(arm.format for arm in every))
    return sorted(every, key=lambda arm: order.index(arm.format))


def run(options: RolloutOptions | StepOptions) -> Iterator[Row]:
    """Yield the rows of every arm and rank. The last row of a dead arm has the reason as `died`."""
    architecture, written = ARCHITECTURES[options.model], ""
    with named_folder(SCRATCH, Path(options.scratch)) as scratch:
        for rank in options.ranks:
            random_model.write_adapter(scratch / f"rank{rank}", architecture, rank)
        for arm in arms(options):
            if arm.format != written:
                if written:
                    shutil.rmtree(scratch / written)
                written = arm.format
                write_checkpoint(scratch / written, written, options)
            for rank in options.ranks:
                folders = str(scratch / arm.format), str(scratch / f"rank{rank}")
                yield from measure(Job(options.BENCHMARK, arm, rank, architecture, *folders, asdict(options)), scratch)


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


def measure(job: Job, scratch: Path) -> Iterator[Row]:
    """Run the process of an arm, with `gpus=N` its N ranks, the first of which writes the rows; yield these.

    Ctrl-C yields the rows so far, then is raised.
    """
    asked, file, log = (scratch / name for name in ("job.json", "rows.jsonl", "log.txt"))
    asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
    file.write_text("", encoding="utf-8")
    command = [sys.executable, "-m", "qerl_lab.bench.one_arm", str(asked), str(file), str(os.getpid())]
    minutes = job.options["timeout_minutes"]
    children: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("w", encoding="utf-8") as out:
            for variables in environments(job.arm):
                children.append(subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | variables))
        status = wait(children, minutes)
    except KeyboardInterrupt:
        yield from rows_in(file)
        raise
    finally:
        for child in children:
            child.kill()
            child.wait()
        remove_left(IN_MEMORY, OF_RUNS)
    rows = rows_in(file)
    yield from (row for row in rows if "died" not in row)
    if said_why := dead(rows):
        yield said_why[0]  # the other ranks died of the first
    elif status != 0 or not rows:
        tail = log.read_text("utf-8", "replace").splitlines()[-LINES:]
        yield job.about | {"died": why(status, minutes, bool(rows)), "log": "\n".join(tail)}


def wait(children: Sequence[subprocess.Popen[bytes]], minutes: float) -> int | None:
    """Wait for all ranks, or for the first that fails; return its exit status, else 0; None after `minutes`."""
    deadline = time.monotonic() + 60 * minutes
    while time.monotonic() < deadline:
        codes = [child.poll() for child in children]
        if None not in codes or any(codes):
            return next((code for code in codes if code), 0)
        time.sleep(PAUSE)
    return None


def rows_in(file: Path) -> list[Row]:
    """Read the rows written so far, without an incomplete last line."""
    whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


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
