"""The processes of one run or arm: what they are told of each other, and when one must end. Imports no torch."""

import os
import socket
import threading
import time
from collections.abc import Mapping

from qerl_lab.config.option import ConfigError

# By which a launcher tells how many processes it started.
SIZES = {
    "WORLD_SIZE": "torchrun and accelerate launch",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def rank_variables(gpus: int) -> list[dict[str, str]]:
    """The environment variables that torchrun sets, by rank; none for a run of one process.

    The processes are the command's own children, not torchrun's: they inherit the lock, a signal leaves them all the
    time that a step takes (torchrun kills after a fixed time), and each tells how it ended.
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


def refuse_several(environment: Mapping[str, str], ranks: int = 1) -> None:
    """Raise ConfigError for one of several processes of a launcher: each would train the same run by itself.

    A run starts its own `ranks`, which are allowed.
    """
    for name, launcher in SIZES.items():
        given = environment.get(name, "")
        if given.isdecimal() and int(given) > 1 and not (name == "WORLD_SIZE" and int(given) == ranks):
            raise ConfigError(
                f"{name}={given} is set, as {launcher} do for several processes, and each of them would train the same "
                "run by itself; allowed: one process. Type the command without a launcher (with gpus=N it starts N "
                "processes itself), or ask the launcher for one: torchrun --nproc_per_node 1, accelerate launch "
                "--num_processes 1, srun --ntasks 1."
            )


def end_with(parent: int) -> None:
    """End this process soon after `parent`, its process id, has ended; at once if it has.

    An end of a pipe would not tell: a fork of the parent may hold the other end open.
    """
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
