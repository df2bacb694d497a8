"""The processes of one run or arm: their rank variables, when one must end, and what another program prints."""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Mapping

from qerl_lab.config.option import ConfigError

# Variables in which launchers give the number of processes.
SIZES = {
    "WORLD_SIZE": "torchrun and accelerate launch",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def rank_variables(gpus: int) -> list[dict[str, str]]:
    """Return the environment variables of each process of a run, by rank, as torchrun would set them.

    torchrun itself would kill them a fixed time after a signal, within a step. One process needs no variables.
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


def refuse_several_processes(environment: Mapping[str, str], ranks: int = 1) -> None:
    """Raise ConfigError if a launcher such as torchrun started several of this process; WORLD_SIZE may be `ranks`."""
    for name, launcher in SIZES.items():
        given = environment.get(name, "")
        if given.isdecimal() and int(given) > 1 and not (name == "WORLD_SIZE" and int(given) == ranks):
            raise ConfigError(
                f"{name}={given} is set, as {launcher} do for several processes, and each of them would train the same "
                "run by itself; allowed: one process. Type the command without a launcher (with gpus=N it starts N "
                "processes itself), or ask the launcher for one: torchrun --nproc_per_node 1, accelerate launch "
                "--num_processes 1, srun --ntasks 1."
            )


def end_with_parent(parent: int) -> None:
    """End this process within a second of the end of the process `parent`, by a thread that watches it.

    A pipe would not do: a fork of the parent may hold its other end open.
    """

    def exit_after_parent() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=exit_after_parent, daemon=True).start()


def output_of(*command: str, env: Mapping[str, str] | None = None) -> str | None:
    """Run a command and return its standard output; None if it is missing, fails or takes over 30 s."""
    try:
        done = subprocess.run(command, capture_output=True, check=True, timeout=30, env=env)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")
