"""Measure each arm in its own process, which frees all its memory. A dead arm yields a row with the reason.

The process is `python -m qerl_lab.bench.one_arm JOB.json ROWS.jsonl PARENT`. Arms of one format share a checkpoint,
which is removed after the last of them.
"""

import gc
import itertools
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
from qerl_lab.bench.arm_config import Job, arm_config
from qerl_lab.bench.bench_options import Arm, RolloutOptions, Row, StepOptions
from qerl_lab.bench.shapes import ARCHITECTURES
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import FormatConfig
from qerl_lab.rollout.vllm.base import IN_MEMORY, OF_RUNS, named_folder, remove_leftovers
from qerl_lab.system.processes import rank_variables
from qerl_lab.train import ranks

SCRATCH = f"qerl-lab-bench-{socket.gethostname()}"  # per host: a lock shows live processes of one machine only
PAUSE = 0.05  # seconds between two looks at the processes
LINES = 40  # log lines kept if a process died without a reason
Process = subprocess.Popen[bytes]


def check(options: RolloutOptions | StepOptions) -> None:
    """Raise ConfigError if an arm contradicts itself or the options, or if GPUs or `scratch` do not suffice."""
    arms, scratch = options.read_arms(), Path(options.scratch)
    for arm, rank in itertools.product(arms, options.ranks):
        try:
            if not arm.is_baseline:
                arm_config(options.BENCHMARK, arm, vars(options), rank, ARCHITECTURES[options.model], options.scratch)
        except ConfigError as error:
            raise ConfigError(f"the arm {arm.name!r} with rank {rank}: {error}") from None
    ranks.refuse_fewer_gpus(max((arm.gpus for arm in arms if not arm.is_on_cpu), default=1), len(ranks.visible_gpus()))
    remove_leftovers(scratch, f"{SCRATCH}-*")  # of killed benchmarks; the next of killed arms and runs
    remove_leftovers(IN_MEMORY, OF_RUNS)
    needed, largest = max(
        (random_model.size_of(ARCHITECTURES[options.model], formats.build(FormatConfig(name=name))), name)
        for name in {arm.format for arm in arms}
    )
    free, asked = shutil.disk_usage(scratch).free, 1.02 * needed  # 2% for adapter and tokenizer
    if free < asked:
        raise ConfigError(
            f"scratch={scratch} has {free / 1e9:.1f} GB free, and {options.model} in {largest} takes "
            f"{asked / 1e9:.1f} GB: {(asked - free) / 1e9:.1f} GB are missing. Type scratch=DIR of a larger disk."
        )


def run(options: RolloutOptions | StepOptions) -> Iterator[Row]:
    """Measure all arms; yield the rows of each arm and rank. The last row of a dead arm has the reason as `died`."""
    architecture, arms = ARCHITECTURES[options.model], options.read_arms()
    with named_folder(SCRATCH, Path(options.scratch)) as scratch:
        for rank in options.ranks:
            random_model.write_adapter(scratch / f"rank{rank}", architecture, rank)
        for name in dict.fromkeys(arm.format for arm in arms):
            write_checkpoint(scratch / name, name, options)
            same = [arm for arm in arms if arm.format == name]
            for arm, rank in itertools.product(same, options.ranks):
                folders = str(scratch / name), str(scratch / f"rank{rank}")
                with tempfile.TemporaryDirectory(prefix="arm-", dir=scratch) as own:
                    yield from measure(Job(options.BENCHMARK, arm, rank, architecture, *folders, asdict(options)), own)
            shutil.rmtree(scratch / name)


def write_checkpoint(folder: Path, weight_format: str, options: RolloutOptions | StepOptions) -> None:
    """Write the random checkpoint for all arms of one format, on the GPU if there is one; free its memory."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    mean_tokens = options.mean_tokens if isinstance(options, StepOptions) else 0.0
    built = formats.build(FormatConfig(name=weight_format))
    random_model.write(folder, ARCHITECTURES[options.model], built, device, mean_tokens)
    gc.collect()  # a model may hold itself in a cycle
    if device.type == "cuda":
        torch.cuda.empty_cache()


def environments(arm: Arm) -> list[dict[str, str]]:
    """Return the environment variables for each rank's process of an arm, which show it only its GPUs.

    The process could not hide GPUs itself: its imports may initialize CUDA.
    """
    shown = {} if arm.is_on_cpu else {ranks.VISIBLE: ",".join(ranks.visible_gpus()[: arm.gpus])}
    return [shown | rank for rank in rank_variables(arm.gpus)]


def measure(job: Job, folder: str) -> Iterator[Row]:
    """Run the processes of an arm (N with `gpus=N`) and yield its rows; `folder` holds its files meanwhile.

    Ctrl-C yields the rows so far, then is raised.
    """
    asked, rows, log = (Path(folder, name) for name in ("job.json", "rows.jsonl", "log.txt"))
    asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
    rows.touch()
    command = [sys.executable, "-m", "qerl_lab.bench.one_arm", str(asked), str(rows), str(os.getpid())]
    minutes, processes = job.options["timeout_minutes"], list[Process]()
    try:
        with log.open("w", encoding="utf-8") as out:
            for variables in environments(job.arm):
                processes.append(subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | variables))
        status = wait(processes, time.monotonic() + 60 * minutes)
    except KeyboardInterrupt:
        yield from read_rows(rows)
        raise
    finally:
        for process in processes:
            process.kill()
            process.wait()
        remove_leftovers(IN_MEMORY, OF_RUNS)
    found = read_rows(rows)
    yield from (row for row in found if "died" not in row)
    if dead := dead_rows(found):
        yield dead[0]  # the other ranks died of the first
    elif status != 0 or not found:
        tail = log.read_text("utf-8", "replace").splitlines()[-LINES:]
        yield job.about | {"died": explain_end(status, minutes, bool(found)), "log": "\n".join(tail)}


def wait(processes: Sequence[Process], deadline: float) -> int | None:
    """Wait until all processes end or one fails; return the exit status of the failed one, else 0.

    Return None after `deadline`, a time of `time.monotonic`.
    """
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if None not in codes or any(codes):
            return next((code for code in codes if code), 0)
        time.sleep(PAUSE)
    return None


def read_rows(file: Path) -> list[Row]:
    """Read the rows that an arm's process wrote to `file`, without an incomplete last line."""
    whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def explain_end(status: int | None, timeout_minutes: float, has_rows: bool) -> str:
    """Explain why a process ended that wrote no reason: too slow, a signal, or an exit status."""
    if status is None:
        return f"took longer than timeout_minutes={timeout_minutes:g}"
    if status < 0:
        return f"ended by signal {-status}" + (" (the memory of the host may be full)" if status == -9 else "")
    return f"exit status {status}" + ("" if has_rows else ", and no row")


def dead_rows(rows: Sequence[Row]) -> list[Row]:
    """Return those rows that report the death of their arm."""
    return [row for row in rows if "died" in row]
