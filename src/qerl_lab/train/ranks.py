"""The world of a run: how many processes share it, which this is, and what they tell each other.

`cli.launch` starts a process for each of `gpus`, in the environment that torchrun gives its workers. No other file of
the core reads it or calls torch.distributed. Each rank samples and trains on whole groups; rank 0 keeps the record.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
from torch import distributed

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.spelling import resume_word

T = TypeVar("T")
PATIENCE = timedelta(days=1)  # with a rank that is slower, or hangs; the command notices one that is dead


@dataclass(eq=False)
class Ranks:
    """This process is number `rank` (from 0) of `size`. Every rank must make each call below, in the same order.

    `waited` counts the seconds that this process has spent in waiting for the others.
    """

    rank: int = 0
    size: int = 1
    waited: float = 0.0

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every rank, in their order, on every rank."""
        if self.size == 1:
            return [value]
        started = time.perf_counter()
        values = self._exchange(value)
        self.waited += time.perf_counter() - started
        return values

    def _exchange(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    def pool(self, items: list[T]) -> list[T]:
        """The items of every rank, rank 0's first, on every rank."""
        return [item for of_rank in self.gather(items) for item in of_rank]

    def mean(self, value: float, weight: float) -> float:
        """Mean over the ranks' values, each with its weight: the same on every rank."""
        if self.size == 1:
            return value
        parts = self.gather((value, weight))
        return sum(value * weight for value, weight in parts) / sum(weight for _, weight in parts)

    def wait(self) -> None:
        """Return when every rank is here."""
        self.gather(None)

    def leave(self) -> None:
        """Part from the others, once nothing more is to tell."""
        if self.size > 1:
            distributed.destroy_process_group()

    def any(self, flag: bool) -> bool:
        """Whether any rank says so."""
        return any(self.gather(flag))

    def alike(self, act: Callable[[], T], *endings: type[Exception]) -> T:
        """Return what `act` does. What it raises of `endings` on any rank is raised on every rank, which it names."""
        if self.size == 1:
            return act()
        done, own = None, None
        try:
            done = act()
        except endings as error:
            own = error
        for rank, ending in enumerate(self.gather(own)):
            if ending is not None:
                raise type(ending)(f"rank {rank}: {ending}") from own
        return cast(T, done)

    def share(self, count: int) -> range:
        """The numbers of this rank's part of `count` things, in parts as even as can be: the first are rank 0's."""
        each, rest = divmod(count, self.size)
        start = self.rank * each + min(self.rank, rest)
        return range(start, start + each + (self.rank < rest))

    def deal(self, items: Sequence[T], count_R: Sequence[int]) -> list[T]:
        """This rank's part of what all ranks have: the first `count_R[0]` are rank 0's, and so on."""
        start = sum(count_R[: self.rank])
        return list(items[start : start + count_R[self.rank]])


ALONE = Ranks()


def join(cfg: RunConfig, device: torch.device) -> Ranks:
    """Meet the run's other ranks, through NCCL on GPUs and Gloo on the CPU. A process alone meets nobody.

    Raises ConfigError where the process is not one of `gpus`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != cfg.gpus:
        raise ConfigError(
            f"gpus={cfg.gpus} and this is one of {size} processes. Type python -m qerl_lab "
            f"{resume_word(cfg.run_dir)}, which starts them all."
        )
    if size == 1:
        return ALONE
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:  # accelerate would say cpu:0, where torch.load puts no tensor
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, timeout=PATIENCE)
    return Ranks(distributed.get_rank(), distributed.get_world_size())
