"""The number of processes that a launcher started. A run starts its own (`gpus=N`), and refuses another's.

Read from the environment alone, so that the command line knows it before anything is imported.
"""

from collections.abc import Mapping

from qerl_lab.config.option import ConfigError

# Variable -> who sets it. The first tell how many processes there are, the others which of them this is.
SIZES = {
    "WORLD_SIZE": "torchrun and accelerate launch",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "MV2_COMM_WORLD_SIZE": "mpirun_rsh",
    "SLURM_STEP_NUM_TASKS": "srun",
}
RANKS = {
    "RANK": "torchrun and accelerate launch",
    "LOCAL_RANK": "torchrun and accelerate launch",
    "OMPI_COMM_WORLD_RANK": "mpirun",
    "PMI_RANK": "mpiexec",
    "MV2_COMM_WORLD_RANK": "mpirun_rsh",
    "SLURM_PROCID": "srun",
}


def refuse_several(environment: Mapping[str, str], ranks: int = 1) -> None:
    """ConfigError where this is one of several processes, each of which would train the same run by itself.

    One of `ranks`, which the run has started, is none of them.
    """
    if ranks > 1 and _number(environment, "WORLD_SIZE") == ranks:
        return
    for name, launcher in SIZES.items():
        if _number(environment, name) > 1:
            raise _several(f"{name}={environment[name]}", launcher)
    for name, launcher in RANKS.items():
        if _number(environment, name) > 0:
            raise _several(f"{name}={environment[name]}", launcher)
    # In a batch script SLURM_NTASKS is what was asked for, and so it is in the only task of `srun --ntasks=1`.
    is_task = "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" not in environment
    if is_task and _number(environment, "SLURM_NTASKS") > 1:
        raise _several(f"SLURM_NTASKS={environment['SLURM_NTASKS']}", "sbatch and srun")


def _number(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    return int(value) if value.isdecimal() else 0


def _several(given: str, launcher: str) -> ConfigError:
    return ConfigError(
        f"{given} is set, as {launcher} do for several processes, and each of them would train the same run by itself; "
        "allowed: one process. Type the command without a launcher (with gpus=N it starts N processes itself), or ask "
        "the launcher for one: torchrun --nproc_per_node 1, accelerate launch --num_processes 1, srun --ntasks 1."
    )
