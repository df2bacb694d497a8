"""Which GPUs a run takes: the first of those that CUDA_VISIBLE_DEVICES shows. The others stay idle.

transformers' Trainer would put a model on all that it sees (DataParallel), which neither our engine nor the adapters'
packed layers are made for.
"""

import os

import torch

from qerl_lab.config.option import ConfigError
from qerl_lab.preflight import VISIBLE


def visible() -> list[str]:
    """The GPUs that torch sees, as CUDA_VISIBLE_DEVICES names them."""
    count, given = torch.cuda.device_count(), os.environ.get(VISIBLE)
    return given.split(",")[:count] if given else [str(index) for index in range(count)]


def refuse_fewer(wanted: int, count: int) -> None:
    """Raise ConfigError where several GPUs are asked for and there are fewer."""
    if wanted > max(1, count):
        raise ConfigError(
            f"gpus={wanted} and torch sees {count} GPUs here. Type gpus={max(1, count)}, or device=cpu for processes "
            "on the CPU."
        )


def keep(wanted: int) -> str | None:
    """Hide every visible GPU but the first `wanted` from this process; a line on what that means, None where none is
    left idle.

    Call it before CUDA starts, when counting GPUs does not start it. Raises ConfigError where CUDA has started, and
    where there are too few GPUs.
    """
    names = visible()
    count = len(names)
    refuse_fewer(wanted, count)
    if count <= wanted:
        return None
    taken = ",".join(names[:wanted])
    os.environ[VISIBLE] = taken
    if torch.cuda.device_count() != wanted:
        raise ConfigError(
            f"{count} GPUs are visible, a run with gpus={wanted} takes {wanted}, and the others cannot be hidden from "
            f"inside the process. Type {VISIBLE}={taken} before the command."
        )
    idle = count - wanted
    others = "the other visible one stays" if idle == 1 else f"the other {idle} visible ones stay"
    does = f"GPU {taken} ({torch.cuda.get_device_name(0)}) does" if wanted == 1 else f"GPUs {taken} do"
    return f"{does} the run; {others} idle. To take another, type {VISIBLE}={names[wanted]} before the command."
