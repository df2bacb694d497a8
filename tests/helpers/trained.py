"""Small trainings that record their gradients, corrected by TRL or in the single forward."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from transformers import TrainerCallback

from failing_engines import retold
from qerl_lab import tasks
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine, Rollout, Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.tasks import Task
from qerl_lab.train.step import Batch
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer
from qerl_lab.train.training_data import Cursor, select


class Jittered(TransformersEngine):
    """Engine with log-probs off by up to half a nat, so that every correction has an effect."""

    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling) -> Rollout:
        out, rng = super().generate(prompt_ids_P, group_size, sampling), random.Random(3)
        return retold(out, lambda one: [logprob + rng.uniform(-0.5, 0.5) for logprob in one.logprobs])


@dataclass
class Trained:
    """Results of a training, with its trainer and engine."""

    trainer: LabTrainer
    engine: Engine
    numbers: list[int] = field(default_factory=list)  # of the steps that were reported
    steps: list[dict[str, float]] = field(default_factory=list)  # metrics of each
    batches: list[Batch] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)  # per update, clipped
    rates: list[float] = field(default_factory=list)  # learning rate of each update
    scored: int = 0  # rows in the trainer's forwards: completions, or packed micro-batches

    def keep(self, step: int, metrics: dict[str, float]) -> None:
        self.numbers.append(step)
        self.steps.append(metrics)
        self.batches.append(self.trainer.batch)


class Gradients(TrainerCallback):
    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    def on_pre_optimizer_step(self, *_: object, optimizer: Optimizer, **__: object) -> None:
        self.trained.rates.append(optimizer.param_groups[0]["lr"])
        named = self.trained.trainer.policy.model.named_parameters()
        self.trained.gradients.append({name: p.grad.clone() for name, p in named if p.requires_grad})


def train(
    cfg: RunConfig, policy: Policy, engine: Engine, folder: Path, *, is_old: bool = False, task: Task | None = None,
    stop: Stop | None = None, prepare: Callable[[Trained], object] = lambda _: None,
) -> Trained:  # fmt: skip
    """Train to the end; `is_old` makes TRL apply the correction, as in a run with several updates.

    `prepare` is given the training before it starts.
    """
    cursor = Cursor(select(cfg, policy, task or tasks.load(cfg.task)))
    trainer = LabTrainer(cfg, policy, engine, cursor, folder, stop or Stop())
    trainer.on_step = lambda *step: trained.keep(*step)
    trainer.vllm_importance_sampling_correction |= is_old
    trained = Trained(trainer, engine)
    trainer.add_callback(Gradients(trained))

    def count(_model: object, _args: object, kwargs: dict[str, Any]) -> None:
        trained.scored += len(kwargs["input_ids"]) if "labels" in kwargs else 0

    prepare(trained)
    handle = policy.model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        trainer.train()
    finally:
        handle.remove()
    return trained
