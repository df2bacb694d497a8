"""What it costs that a step's clock waits for the GPU: steps with and without the waits, in blocks that take turns.

Whole blocks take turns and not steps: what a step without waits leaves on the GPU runs into the next step, and at the
end of a block both kinds wait. The model is small, because short steps have the most waits a second; its weights are
random and no completion ends early, so that every step does the same work.

Steps vary by more than waits cost. So the seconds inside of the waits are added up too: without a wait a step would be
shorter by these at most. The last wait of a step stands before the reading of its loss, which waits for the same
work; without it no more can be saved than what lies between the two.
"""

import os
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from transformers import TrainerCallback

from qerl_lab.bench import arms, lab, random_model, step
from qerl_lab.bench.options import ClockOptions, Row, StepOptions, arm_of
from qerl_lab.bench.shapes import ARCHITECTURES
from qerl_lab.rollout.vllm.base import named_folder
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer

DRAWS = 10_000
SMALL = StepOptions(model="qwen2.5-0.5b", groups=8, group_size=8, prompt=64, new=64, micro_batch=64)


@dataclass
class Turns(TrainerCallback):
    """Switches the clock's waits off and on again, and keeps the seconds a step of each block."""

    trainer: LabTrainer
    length: int  # of a block, in steps
    wait: Callable[[], None]
    on_pair: Callable[[Row], None]  # is told what all pairs say, as soon as there is one more
    waiting: list[float] = field(default_factory=list)
    running: list[float] = field(default_factory=list)  # without waits
    started: float = 0
    inside: list[float] = field(default_factory=list)  # seconds of each wait of the step so far
    returned: float = 0  # when the last one did
    at_most: list[float] = field(default_factory=list)  # seconds that the waits of a step cost

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        block, step = divmod(state.global_step, self.length)
        if step:
            return
        self.wait()
        now = time.perf_counter()
        if block > 1:  # of the first block no time is kept: compiling, allocating
            (self.running if block % 2 else self.waiting).append((now - self.started) / self.length)
            if block % 2:
                self.on_pair(self.row)
        self.started = now
        self.trainer.clock.wait = self.timed if block % 2 else lambda: None

    def timed(self) -> None:
        """Wait, and note for how long."""
        began = time.perf_counter()
        self.wait()
        self.returned = time.perf_counter()
        self.inside.append(self.returned - began)

    def on_log(self, *_: Any, **__: Any) -> None:
        """The loss was read: the step's waits are over."""
        if self.inside:
            *others, last = self.inside
            self.at_most.append(sum(others) + min(last, time.perf_counter() - self.returned))
            self.inside.clear()

    @property
    def row(self) -> Row:
        at_most = 100 * median(self.at_most) / median(self.waiting)
        return row_of(self.waiting, self.running) | {"at_most_percent": at_most, "steps_a_block": self.length}


def measure(options: ClockOptions, on_pair: Callable[[Row], None], size: StepOptions = SMALL) -> Row:
    """Train a small model, and return what the waits add to a step's seconds; `on_pair` gets it after every pair.

    The interval is a bootstrap's over pairs of neighbouring blocks.
    """
    with named_folder(arms.SCRATCH, Path(size.scratch)) as folder:
        job = job_of(options, size, folder)
        built = lab.build(job)
        trainer = LabTrainer(
            built.cfg, built.policy, built.engine, step.questions(job), folder, lambda *_: None,
            Stop(parent=os.getppid()),
        )  # fmt: skip
        turns = Turns(trainer, options.block, trainer.clock.wait, on_pair)
        trainer.add_callback(turns)
        trainer.train()
        built.engine.close()
    return turns.row


def job_of(options: ClockOptions, size: StepOptions, folder: Path) -> arms.Job:
    """The job of a step benchmark with as many steps as the blocks have; its checkpoint is written."""
    steps = options.block * (2 * options.pairs + 1)  # the first block is not timed; one step more ends the last
    sized = asdict(size) | {"steps": steps}
    arm = arm_of(f"nvfp4 rollout.engine={options.engine} device={options.device}", {})
    arms.write_checkpoint(folder / "model", arm.format, size)
    random_model.write_adapter(folder / "adapter", ARCHITECTURES[size.model], size.rank)
    return arms.Job(
        "step", arm, size.rank, ARCHITECTURES[size.model], str(folder / "model"), str(folder / "adapter"), "", sized
    )


def row_of(waiting: list[float], running: list[float]) -> Row:
    """Median cost in percent over pairs of blocks, with a 95% interval, and the medians of both kinds."""
    costs = [100 * (a / b - 1) for a, b in zip(waiting, running, strict=True)]
    rng = random.Random(0)
    drawn = sorted(median(rng.choices(costs, k=len(costs))) for _ in range(DRAWS))
    return {
        "pairs": len(costs), "cost_percent": median(costs), "low": drawn[DRAWS // 40], "high": drawn[-DRAWS // 40],
        "ms_per_step_waiting": 1e3 * median(waiting), "ms_per_step_running": 1e3 * median(running),
    }  # fmt: skip
