"""The jobs of a sweep on this machine, one after the other or `jobs=N` at once: a thread waits for each."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from qerl_lab import preflight
from qerl_lab.cli.call import Call, Ended
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.preflight import VISIBLE


@dataclass
class Cards:
    """The GPUs of this machine, each of which `share` jobs may use at once. Names are as CUDA_VISIBLE_DEVICES has them.

    `take` waits until as many as a job needs have a place, and gives the least busy of them.
    """

    names: Sequence[str]
    share: int
    _busy: dict[str, int] = field(default_factory=dict)
    _free: threading.Condition = field(default_factory=threading.Condition)

    @contextmanager
    def take(self, count: int) -> Iterator[list[str]]:
        with self._free:
            self._free.wait_for(lambda: len(self._open()) >= count)
            taken = self._open()[:count]
            self._move(taken, 1)
        try:
            yield taken
        finally:
            with self._free:
                self._move(taken, -1)
                self._free.notify_all()

    def _open(self) -> list[str]:
        free = [name for name in self.names if self._busy.get(name, 0) < self.share]
        return sorted(free, key=lambda name: self._busy.get(name, 0))

    def _move(self, names: Sequence[str], by: int) -> None:
        for name in names:
            self._busy[name] = self._busy.get(name, 0) + by


def cards_of(configs: Sequence[RunConfig]) -> Cards | None:
    """The GPUs for these jobs; None on a CPU, or where one runs after the other. Raises ConfigError if unknown."""
    if configs[0].jobs == 1 or all(cfg.device == "cpu" for cfg in configs) or not preflight.has_gpu():
        return None
    names = preflight.visible_gpus()
    if names is None:
        raise ConfigError(f"nvidia-smi does not list the GPUs here. Type {VISIBLE}=0,1 before the command.")
    return Cards(names, configs[0].jobs_per_gpu)


@contextmanager
def local(configs: Sequence[RunConfig], calls: Sequence[Call]) -> Iterator[list[Future[Ended]]]:
    """Start the calls on this machine, `jobs` of their configuration at once, each with GPUs of its own."""
    cards = cards_of(configs)

    def one(cfg: RunConfig, call: Call) -> Ended:
        if cards is None or cfg.device == "cpu":
            return call()
        with cards.take(cfg.gpus) as taken:
            return call({VISIBLE: ",".join(taken)})

    with ThreadPoolExecutor(configs[0].jobs) as pool:
        yield [pool.submit(one, cfg, call) for cfg, call in zip(configs, calls, strict=True)]
