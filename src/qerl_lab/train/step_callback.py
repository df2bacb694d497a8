"""The Trainer's callback at the start and the end of a step: its clock, and whether to save and to stop."""

from typing import Any

from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from qerl_lab.config.schema import RunConfig
from qerl_lab.train.noise_level import NoiseLevel
from qerl_lab.train.ranks import Ranks
from qerl_lab.train.step import Clock
from qerl_lab.train.stop import Stop


class StepCallback(TrainerCallback):
    """Time each step; at its end decide whether to save and to stop.

    Also set the learning rate when an extended run begins again.
    """

    def __init__(self, cfg: RunConfig, clock: Clock, level: NoiseLevel, stop: Stop, ranks: Ranks) -> None:
        self.cfg, self.clock, self.level, self.stop, self.ranks = cfg, clock, level, stop, ranks

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, lr_scheduler: LambdaLR, **_: Any
    ) -> None:
        """Override the Trainer's hook: set the learning rate by the longer schedule when an extended run begins again.

        The checkpoint has restored the rate of the shorter schedule.
        """
        extended = [steps * self.cfg.updates_per_step for steps in self.cfg.extended]
        if state.global_step not in extended:
            return
        rates = zip(lr_scheduler.base_lrs, lr_scheduler.lr_lambdas, strict=True)
        for group, (peak, share) in zip(lr_scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = peak * share(lr_scheduler.last_epoch)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Override the Trainer's hook before each update: start the clock if the update is the first of a step."""
        if state.global_step % self.cfg.updates_per_step == 0:
            self.clock.start_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Override the Trainer's hook after each update: at the end of a step decide whether to save and to stop."""
        step, updates_left = divmod(state.global_step, self.cfg.updates_per_step)
        if updates_left:
            return
        self.clock.end_step()
        self.level.end_step()
        every = self.cfg.checkpoint.every
        stopping = self.ranks.any(self.stop.requested) or step == self.cfg.steps  # asked once: signals come anytime
        control.should_save = stopping or bool(every and step % every == 0)
        control.should_training_stop = stopping
