"""Run the jobs of a sweep on a cluster: as a Slurm array (by submitit), or as Ray tasks.

Each Slurm job or Ray task runs one `SweepJob`, which names the directory of a run. The run's configuration already lies
in that directory, so every machine must see the directory at the same path. A task that the cluster restarts
resumes its run.
"""

import logging
import os
import re
import shlex
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_lab.cli.launch import SweepJob
from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError, require_package
from qerl_lab.config.schema import RunConfig

if TYPE_CHECKING:
    from submitit import SlurmJob

SET_BY_SUBMITIT = {"array", "output", "error", "open-mode", "nodes", "ntasks-per-node", "signal"}  # sbatch flags
GPU_FLAGS = {"gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres"}
CPU_FLAGS = {"cpus-per-task", "exclusive"}
SIGNAL_SECONDS = 300  # from Slurm's signal to save until the time limit; a step may take that long
LEAST_MINUTES = 10
GOES_ON = "Nothing was started. Correct the line and type it again: the jobs keep their directories."
TIME = re.compile(r"(?:(?:(\d+)-)?(\d+):(\d+):(\d+)|(\d+))")  # Slurm's formats D-H:M:S, H:M:S and M (minutes)


def check_can_submit(cfg: RunConfig) -> None:
    """Raise ConfigError if this machine cannot submit jobs to the cluster that `cfg.launcher` names.

    slurm needs the package submitit and the programs sbatch and srun; ray needs the package ray.
    """
    package = {"slurm": "submitit", "ray": "ray"}[cfg.launcher]
    install = f"pip install 'qerl-lab[{cfg.launcher}]', or launcher=local"
    require_package(f"launcher={cfg.launcher}", package, install)
    if cfg.launcher == "slurm" and (shutil.which("sbatch") is None or shutil.which("srun") is None):
        raise ConfigError(
            "launcher=slurm needs sbatch and srun, and this machine lacks one. Type the command on a login node."
        )


def parse_sbatch_flags(text: str) -> dict[str, Any]:
    """Parse sbatch flags into a dict: `--NAME=VALUE` gives {NAME: VALUE}, `--NAME` gives {NAME: True}.

    Raises ConfigError for anything else, and for the flags that the lab sets itself (`SET_BY_SUBMITIT`).
    """
    flags: dict[str, Any] = {}
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"slurm={text} cannot be read: {error}. Close every quotation mark in it.") from None
    for word in words:
        name, sign, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise ConfigError(
                f"slurm={text}: {word} is not --NAME=VALUE. Type for example --partition=gpu, not -p gpu."
            )
        if name in SET_BY_SUBMITIT:
            raise ConfigError(f"slurm={text}: the lab sets --{name}. Leave it out; jobs=N limits the jobs at once.")
        flags[name] = value if sign else True
    return flags


def time_limit_minutes(flags: Mapping[str, Any]) -> int:
    """Return the time limit of a Slurm job in minutes, rounded up. `flags` come from `parse_sbatch_flags`.

    Raises ConfigError if the flag `time` is missing, unreadable, or below LEAST_MINUTES.
    """
    match = TIME.fullmatch(str(flags.get("time", "")))
    if match is None:
        given = "no --time=LIMIT" if flags.get("time", True) is True else f"--time={flags['time']}"
        raise ConfigError(
            f"slurm= has {given}; allowed: the limit of a job as minutes, H:M:S or D-H:M:S. "
            "Type for example slurm='--partition=gpu --time=2:00:00'."
        )
    days, hours, mins, seconds, only_minutes = (int(part) for part in match.groups(default="0"))
    limit = only_minutes or (days * 24 + hours) * 60 + mins + (seconds > 0)
    if limit < LEAST_MINUTES:
        raise ConfigError(
            f"--time in slurm= is {limit} minutes, and a job stops to save {SIGNAL_SECONDS} seconds before this limit. "
            f"Type --time={LEAST_MINUTES} or more."
        )
    return limit


def resources_to_request(configs: Sequence[RunConfig], flags: Mapping[str, Any]) -> dict[str, int]:
    """Return what every Slurm job requests, as parameters of submitit: GPUs or CPUs, as many as the largest job needs.

    Returns {"gpus_per_node": N} if any job may use a GPU; the cluster then chooses the CPUs. Otherwise returns
    {"cpus_per_task": N}, because Slurm's default is one CPU. Returns {} if `flags` already request the GPUs or CPUs, or
    if no job uses a GPU and cpu_threads is 0.
    """
    on_gpu = [cfg.gpus for cfg in configs if cfg.device != "cpu"]
    if on_gpu:
        return {} if GPU_FLAGS & set(flags) else {"gpus_per_node": max(on_gpu)}
    threads = max(cfg.gpus * cfg.cpu_threads for cfg in configs)
    return {} if threads < 1 or CPU_FLAGS & set(flags) else {"cpus_per_task": threads}


@contextmanager
def submit_to_slurm(sweep_jobs: Sequence[SweepJob], folder: Path) -> "Iterator[list[SlurmJob[str]]]":
    """Context manager: submit the jobs as one Slurm array; yield submitit's jobs, in order.

    Scripts and logs go into `folder`. Raises ConfigError if sbatch refuses. Leaving the context does not wait for the
    jobs.
    """
    import submitit
    from submitit.core.utils import FailedJobError

    logging.getLogger("submitit").setLevel(logging.ERROR)  # silences its warning about clusters without sacct
    configs = [sweep_job.config for sweep_job in sweep_jobs]
    flags = parse_sbatch_flags(configs[0].slurm)
    executor = submitit.SlurmExecutor(folder)
    executor.update_parameters(
        time=time_limit_minutes(flags), job_name="qerl_lab", array_parallelism=configs[0].jobs, stderr_to_stdout=True,
        signal_delay_s=SIGNAL_SECONDS, additional_parameters=flags, **resources_to_request(configs, flags),
    )  # fmt: skip
    try:
        with executor.batch():
            submitted = [executor.submit(sweep_job) for sweep_job in sweep_jobs]
    except FailedJobError as error:  # the error of sbatch
        raise ConfigError(
            f"Slurm refused the jobs with slurm={configs[0].slurm}: {in_one_line(error).rstrip('.')}. {GOES_ON}"
        ) from None
    yield submitted


@contextmanager
def submit_to_ray(sweep_jobs: Sequence[SweepJob]) -> "Iterator[list[Future[str]]]":
    """Context manager: run the jobs as Ray tasks; yield their futures, as `scheduler.run_locally` does.

    Jobs that share a GPU request a fraction of it; in a cluster without GPUs no job requests one. Leaving the context
    waits for all jobs and shuts Ray down. Raises ConfigError if Ray cannot be reached.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics
    import ray

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(log_to_driver=False, include_dashboard=False)
    except ConnectionError as error:
        raise ConfigError(
            f"Ray cannot be reached: {in_one_line(error.__cause__ or error).rstrip('.')}. {GOES_ON}"
        ) from None
    for number, handler in before.items():  # Ray's own handlers would end the command
        signal.signal(number, handler)
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0

    def run_on_ray(sweep_job: SweepJob) -> str:
        cfg = sweep_job.config
        gpus = cfg.gpus / cfg.jobs_per_gpu
        needs_gpu = has_gpus and cfg.device != "cpu"
        task = ray.remote(num_cpus=max(1, cfg.cpu_threads), num_gpus=gpus if needs_gpu else 0)(SweepJob.__call__)
        return str(ray.get(task.remote(sweep_job)))

    try:
        with ThreadPoolExecutor(sweep_jobs[0].config.jobs) as pool:
            yield [pool.submit(run_on_ray, sweep_job) for sweep_job in sweep_jobs]
    finally:
        ray.shutdown()
