"""What the processes of one run or arm are told of each other. Imports no torch."""

import socket


def rank_variables(gpus: int) -> list[dict[str, str]]:
    """By rank what torchrun sets for its workers; nothing for a run of one process.

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
