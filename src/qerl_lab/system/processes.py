"""Processes: variables of libraries, variables and number of a run's ranks, ending with the parent, output."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping

from qerl_lab.config.message import with_noun
from qerl_lab.config.option import ConfigError

# Defaults of environment variables that libraries read when they are imported. By its own default a waiting OpenMP
# thread spins: with a second process on the same cores both take several times as long. Tokenizers warn at every fork,
# vLLM logs its whole configuration, and some packages send usage statistics.
LIBRARY_VARIABLES = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DISABLE_MLFLOW_INTEGRATION": "TRUE",  # of transformers and TRL, which import MLflow before the first step
}
# Environment variable in which each launcher gives the number of processes that it started.
SIZES = {
    "WORLD_SIZE": "torchrun or accelerate launch",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def rank_variables(gpus: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun would set: one dict per process of a run on `gpus` GPUs, by rank.

    With one GPU the result is `[{}]`. The lab does not use torchrun: after a signal, torchrun waits a fixed time and
    then kills the processes, even in the middle of a step.
    """
    if gpus == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    size = str(gpus)
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size,
    }  # fmt: skip
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(gpus)]


def refuse_several_processes(environment: Mapping[str, str]) -> None:
    """Raise ConfigError if a launcher such as torchrun or srun started several copies of this process.

    `environment` is searched for the launchers' variables (`SIZES`).
    """
    for name, launcher in SIZES.items():
        given = environment.get(name, "")
        if given.isdecimal() and int(given) > 1:
            raise ConfigError(
                f"{name}={given} is set, so a launcher ({launcher}) started several processes, and each would train "
                "the same run by itself; allowed: one process. Type the command without a launcher (with gpus=N it "
                "starts N processes itself), or ask the launcher for one process: torchrun --nproc_per_node 1, "
                "accelerate launch --num_processes 1, srun --ntasks 1."
            )


def refuse_fewer_gpus(wanted: int, count: int) -> None:
    """Raise ConfigError if `wanted` is more than 1 and more than `count`, the number of GPUs of this process."""
    if wanted > max(1, count):
        raise ConfigError(
            f"gpus={wanted}, and {with_noun(count, 'GPU')} can be used here. Type gpus={max(1, count)}, or device=cpu "
            "for processes on the CPU."
        )


def end_with_parent(parent: int) -> None:
    """Start a thread that ends this process within a second after the process with id `parent` has ended.

    `parent` must be the parent of this process. The thread asks for the parent's id every second. Waiting for a pipe to
    close would not reliably show that the parent has ended, because a fork of the parent may hold the pipe open.
    """

    def exit_after_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=exit_after_parent, daemon=True).start()


def output_of(*command: str) -> str | None:
    """Run a command and return its standard output. None if the program is missing, fails or takes over 30 s."""
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
