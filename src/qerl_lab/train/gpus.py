"""Limit a run to the first `gpus` of the visible GPUs.

Otherwise transformers' Trainer would use all of them through DataParallel, which the engines and packed layers do not
support.
"""

import os

import torch

from qerl_lab.config.option import ConfigError
from qerl_lab.preflight.machine import VISIBLE


def visible() -> list[str]:
    """Return the names of the GPUs that torch sees, as CUDA_VISIBLE_DEVICES lists them."""
    count, given = torch.cuda.device_count(), os.environ.get(VISIBLE)
    return given.split(",")[:count] if given else [str(index) for index in range(count)]


def refuse_fewer(wanted: int, count: int) -> None:
    """Raise ConfigError if several GPUs are requested and fewer are visible."""
    if wanted > max(1, count):
        raise ConfigError(
            f"gpus={wanted} and torch sees {count} GPUs here. Type gpus={max(1, count)}, or device=cpu for processes "
            "on the CPU."
        )


def keep(wanted: int) -> str | None:
    """Hide all but the first `wanted` GPUs from this process; return a line for the user, None if no GPU is left idle.

    Call it before CUDA starts: CUDA reads CUDA_VISIBLE_DEVICES once. Raises ConfigError if CUDA has started already or
    there are too few GPUs.
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
