"""Measure each arm in its own process, which frees all its memory. A dead arm yields a row with the reason.

The process is `python -m qerl_lab.bench.one_arm JOB.json ROWS.jsonl PARENT`. Arms of one format share a checkpoint,
which is removed after the last of them.
"""

import gc
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
from qerl_lab.bench.bench_options import ARCHITECTURES, AnyOptions, Row, StepOptions
from qerl_lab.bench.job import Job, read_jobs
from qerl_lab.config.option import ConfigError
from qerl_lab.model import policy
from qerl_lab.rollout.vllm.base import IN_MEMORY, RUN_FOLDERS, named_folder, remove_leftovers
from qerl_lab.system import terminal
from qerl_lab.system.disk import refuse_full_disk
from qerl_lab.system.processes import rank_variables, refuse_fewer_gpus
from qerl_lab.train import ranks

SCRATCH = f"qerl-lab-bench-{socket.gethostname()}"  # per host: a lock shows live processes of one machine only
PAUSE = 0.05  # seconds between two looks at the processes
LINES = 40  # log lines kept if a process died without a reason


def prepare(options: AnyOptions) -> None:
    """Check that the machine can measure all arms, and remove leftovers of killed benchmarks and runs.

    Raises ConfigError if the machine has too few GPUs, if config.json of a checkpoint cannot express an arm's format
    options, or if the directory `options.scratch` has too little free space.
    """
    jobs, scratch, architecture = read_jobs(options, ""), Path(options.scratch), ARCHITECTURES[options.model]
    refuse_fewer_gpus(max((job.gpus for job in jobs), default=1), len(ranks.gpus_of_torch()))
    checkpoints = {job.folder: job for job in jobs}.values()  # one job of each
    for job in checkpoints:
        if (weight_format := formats.build(job.format_config)).BLOCK is not None:
            try:
                weight_format.quantization_config(job.format_config.ignore, torch.bfloat16)
            except ValueError as error:
                raise ConfigError(
                    f"the arm {job.arm!r}: {error}. Type for example format.ignore=[lm_head,down_proj]."
                ) from error
    remove_leftovers(scratch, f"{SCRATCH}-*")  # of killed benchmarks
    remove_leftovers(IN_MEMORY, RUN_FOLDERS)  # of killed arms and runs
    needed, largest = max((random_model.size_of(architecture, job.format_config), job.format) for job in checkpoints)
    weights = f"the weights of {options.model} in {largest}"
    refuse_full_disk(scratch, 1.02 * needed, weights, "Type scratch=DIR of a larger disk.")  # 2% for other files


def run(options: AnyOptions) -> Iterator[Row]:
    """Measure all arms; yield the rows of each arm and LoRA rank. If an arm dies, `died` in its last row says why."""
    architecture, device = ARCHITECTURES[options.model], policy.device_of("auto")
    mean_tokens = options.mean_tokens if isinstance(options, StepOptions) else 0  # elsewhere no completion ends early
    with named_folder(SCRATCH, Path(options.scratch)) as scratch:
        jobs = read_jobs(options, str(scratch))
        if options.BENCHMARK != "train_step":  # which makes its own adapters
            for adapter, rank in {job.adapter: job.rank for job in jobs}.items():
                random_model.write_adapter(Path(adapter), architecture, rank)
        for folder, format_config in {job.folder: job.format_config for job in jobs}.items():
            started = time.perf_counter()
            random_model.write(Path(folder), architecture, format_config, device, mean_tokens)
            terminal.say(f"random weights in {format_config.name}: written in {time.perf_counter() - started:.0f} s")
            gc.collect()  # a model may hold itself in a cycle
            if device.type == "cuda":
                torch.cuda.empty_cache()
            for job in (job for job in jobs if job.folder == folder):
                terminal.say(f"{job.arm}, rank {job.rank}: starts")  # minutes may pass before its first row
                with tempfile.TemporaryDirectory(prefix="arm-", dir=scratch) as job_folder:
                    yield from run_processes(job, Path(job_folder))
            shutil.rmtree(folder)


def run_processes(job: Job, folder: Path) -> Iterator[Row]:
    """Run a job in new processes, one per GPU of its arm, and yield its rows. `folder` receives job, rows and log.

    If a process fails, or if not all end in `timeout_minutes`, the last row has the reason under `died`. After Ctrl-C
    yields the rows so far, then raises KeyboardInterrupt.
    """
    job_file, rows_file, log_file = (folder / name for name in ("job.json", "rows.jsonl", "log.txt"))
    job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
    rows_file.touch()
    command = [sys.executable, "-m", "qerl_lab.bench.one_arm", str(job_file), str(rows_file), str(os.getpid())]
    # Show the process only its GPUs. It could not hide the others itself: its imports may initialize CUDA.
    shown = {ranks.VISIBLE: ",".join(ranks.gpus_of_torch()[: job.gpus])}
    minutes: float = job.options["timeout_minutes"]
    processes: list[subprocess.Popen[bytes]] = []
    codes: list[int | None] = [None]
    try:
        with log_file.open("w", encoding="utf-8") as log:
            for variables in rank_variables(job.gpus):
                environment = os.environ | shown | variables
                processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        deadline = time.monotonic() + 60 * minutes
        # Until all have ended, one has failed, or the time is up.
        while None in codes and not any(codes) and time.monotonic() < deadline:
            time.sleep(PAUSE)
            codes = [process.poll() for process in processes]
    except KeyboardInterrupt:
        yield from read_rows(rows_file)
        raise
    finally:
        for process in processes:
            process.kill()
            process.wait()
        remove_leftovers(IN_MEMORY, RUN_FOLDERS)
    rows = read_rows(rows_file)
    yield from (row for row in rows if "died" not in row)
    if dead := [row for row in rows if "died" in row]:
        yield dead[0]  # the other ranks died of the first
    elif reason := why_dead(codes, bool(rows), minutes):
        tail = log_file.read_text("utf-8", "replace").splitlines()[-LINES:]
        yield job.about | {"died": reason, "log": "\n".join(tail)}


def why_dead(codes: Sequence[int | None], has_rows: bool, minutes: float) -> str:
    """Return why an arm's processes count as dead; an empty string if all ended well and wrote a row.

    `codes` are their exit codes, None for a process that was ended after `minutes`.
    """
    failed = [code for code in codes if code]
    if failed and failed[0] < 0:
        return f"ended by signal {-failed[0]}" + (" (the memory of the host may be full)" if failed[0] == -9 else "")
    if failed:
        return f"exit status {failed[0]}" + ("" if has_rows else ", and no row")
    if None in codes:
        return f"took longer than timeout_minutes={minutes:g}"
    return "" if has_rows else "exit status 0, and no row"


def read_rows(file: Path) -> list[Row]:
    """Read the rows that an arm's process wrote to `file`, without an incomplete last line."""
    whole, _, _ = file.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]
