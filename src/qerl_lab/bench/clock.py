"""What it costs that a step's clock waits for the GPU: steps with and without the waits, in blocks that take turns.

Whole blocks take turns and not steps: what a step without waits leaves on the GPU runs into the next step, and at the
end of a block both kinds wait. Both kinds sample, so their tokens differ: seconds are counted by completion token.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from transformers import TrainerCallback

from qerl_lab import rollout, tasks
from qerl_lab.bench.options import ClockOptions
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import policy
from qerl_lab.train.data import Cursor, select
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer

Row = dict[str, Any]
DRAWS = 10_000


@dataclass
class Turns(TrainerCallback):
    """Switches the clock's waits off and on again, and keeps the seconds a token of each block."""

    trainer: LabTrainer
    length: int  # of a block, in steps
    wait: Callable[[], None]
    waiting: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)  # without waits
    tokens: float = 0
    started: float = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        block, step = divmod(state.global_step, self.length)
        if step:
            return
        self.wait()
        now = time.perf_counter()
        if block > 1:  # of the first block no time is kept: compiling, allocating
            (self.running if block % 2 else self.waiting).append((now - self.started) / self.tokens)
        self.started, self.tokens = now, 0
        self.trainer.clock.wait = self.wait if block % 2 else lambda: None

    def count(self, metrics: dict[str, float]) -> None:
        self.tokens += metrics["rollout/completion_tokens"] * self.trainer.cfg.completions_per_step


def measure(options: ClockOptions) -> Row:
    """Train the embedded policy, whose steps are short, and return what the waits add to a token's seconds.

    The interval is a bootstrap's over pairs of neighbouring blocks.
    """
    cfg = config(options)
    learner = policy.build(cfg, policy.device_of(cfg.device))
    engine = rollout.build(cfg, learner)
    cursor = Cursor(select(cfg, learner, tasks.load(cfg.task)))
    with tempfile.TemporaryDirectory() as folder:
        trainer = LabTrainer(cfg, learner, engine, cursor, Path(folder), lambda *_: None, Stop(parent=os.getppid()))
        turns = Turns(trainer, options.block, trainer.clock.wait)
        trainer.on_step = lambda _, metrics: turns.count(metrics)
        trainer.add_callback(turns)
        trainer.train()
    engine.close()
    return row_of(turns.waiting, turns.running) | {"steps_a_block": options.block}


def config(options: ClockOptions) -> RunConfig:
    """Keep the pocket scale's recipe, without evaluations or checkpoints."""
    steps = options.block * (2 * options.pairs + 1) + 1  # the first block is not timed, the last step ends one
    return from_dict({
        "steps": steps, "lora": {"rank": 16}, "eval": {"questions": 0}, "checkpoint": {"every": 0},
        "tracking": {"mlflow": False}, "device": options.device,
        "rollout": {"prompts_per_step": 8, "max_completion_tokens": 64, "engine": options.engine},
        "optim": {"micro_batch_size": 64, "learning_rate": 1e-3},
    })  # fmt: skip


def row_of(waiting: list[float], running: list[float]) -> Row:
    """Median cost in percent over pairs of blocks, with a 95% interval, and the medians of both kinds."""
    costs = [100 * (a / b - 1) for a, b in zip(waiting, running, strict=True)]
    rng = random.Random(0)
    drawn = sorted(median(rng.choices(costs, k=len(costs))) for _ in range(DRAWS))
    return {
        "pairs": len(costs), "cost_percent": median(costs), "low": drawn[DRAWS // 40], "high": drawn[-DRAWS // 40],
        "us_per_token_waiting": 1e6 * median(waiting), "us_per_token_running": 1e6 * median(running),
    }  # fmt: skip
