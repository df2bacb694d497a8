"""Communicate between the processes (ranks) of a run, and limit a run to its GPUs.

`cli.launch` starts one process per GPU with torchrun's environment variables. In the core only this file reads them and
calls torch.distributed. Each rank samples and trains on whole groups; rank 0 writes the record. Suffix _R: by rank.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from qerl_lab.config.message import with_noun
from qerl_lab.config.schema import RunConfig
from qerl_lab.preflight.machine import VISIBLE
from qerl_lab.system.processes import refuse_fewer_gpus

T = TypeVar("T")
PATIENCE = timedelta(days=1)  # timeout for slow or hung ranks; the command itself detects dead ones


@dataclass(eq=False)
class Ranks:
    """This process as rank `rank` (from 0) of `size` ranks. Every rank must make the same calls in the same order.

    `waited` counts the seconds that this process has spent in exchanges with other ranks.
    """

    rank: int = 0
    size: int = 1
    waited: float = 0.0

    @property
    def is_first(self) -> bool:
        """Tell whether this process is rank 0, which writes the record."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """Exchange `value` with all ranks; return the values of all ranks, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        started = time.perf_counter()
        values = self._gather_over_network(value)
        self.waited += time.perf_counter() - started
        return values

    def _gather_over_network(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        return self.gather(value)[0]

    def pool(self, items: list[T]) -> list[T]:
        """Exchange lists with all ranks; return them concatenated, in rank order, on every rank."""
        return [item for of_rank in self.gather(items) for item in of_rank]

    def barrier(self) -> None:
        """Block until every rank has called this."""
        self.gather(None)

    def leave(self) -> None:
        """Leave torch's process group. Call it after the last exchange between ranks."""
        if self.size > 1:
            distributed.destroy_process_group()

    def any(self, flag: bool) -> bool:
        """Return, on every rank, whether `flag` is true on any rank."""
        return any(self.gather(flag))

    def run_on_all(self, act: Callable[[], T], *exceptions: type[Exception]) -> T:
        """Call `act` on every rank and return this rank's result.

        If `act` raises an exception of a type in `exceptions` on any rank, every rank raises an exception of that type.
        """
        if self.size == 1:
            return act()
        result, raised = None, None
        try:
            result = act()
        except exceptions as error:
            raised = error
        for rank, error_of_rank in enumerate(self.gather(raised)):
            if error_of_rank is not None:
                raise type(error_of_rank)(f"rank {rank}: {error_of_rank}") from raised
        return cast(T, result)

    def share(self, count: int) -> range:
        """Return the indices of this rank's share of `count` items, split evenly and in rank order."""
        least, rest = divmod(count, self.size)  # the first `rest` ranks take one item more than the least
        start = self.rank * least + min(self.rank, rest)
        return range(start, start + least + (self.rank < rest))


ALONE = Ranks()


def join(cfg: RunConfig, device: torch.device) -> Ranks:
    """Join torch's process group; return `ALONE` for a run of one process."""
    if cfg.gpus == 1:
        return ALONE
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:  # accelerate would use cpu:0, which torch.load does not accept
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=PATIENCE)
    return Ranks(distributed.get_rank(), distributed.get_world_size())


def gpus_of_torch() -> list[str]:
    """Return the GPUs that torch sees, as CUDA_VISIBLE_DEVICES lists them, or their numbers from 0 if it is not set."""
    count, given = torch.cuda.device_count(), os.environ.get(VISIBLE)
    return given.split(",")[:count] if given else [str(index) for index in range(count)]


def hide_other_gpus(wanted: int) -> str | None:
    """Hide all but the first `wanted` GPUs from this process; return a line for the user, None if it hides none.

    Otherwise transformers' Trainer would use all GPUs through DataParallel, which engines and packed layers do not
    support. Call it before CUDA starts, because CUDA reads CUDA_VISIBLE_DEVICES only then. Raises ConfigError if
    `wanted` is more than 1 and torch sees fewer GPUs.
    """
    names = gpus_of_torch()
    refuse_fewer_gpus(wanted, len(names))
    if len(names) <= wanted:
        return None
    os.environ[VISIBLE] = ",".join(names[:wanted])
    return (
        f"The run takes {with_noun(wanted, 'GPU')} ({torch.cuda.get_device_name(0)}) of the {len(names)} visible ones: "
        f"{VISIBLE}={os.environ[VISIBLE]}. To take others, type it before the command with other numbers."
    )
