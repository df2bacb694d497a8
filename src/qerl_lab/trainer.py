"""The shared core: TRL's GRPOTrainer, driven by a policy, an engine, a task and an algorithm.

A *step* is one rollout and the optimizer updates on it; TRL's `global_step` counts updates. TRL's own seams are used
and nothing is patched: the engine takes the place of vLLM behind `vllm_generation`, whose sampler log-probs feed
TRL's importance correction, and overridden methods add clocks, noise and atomic checkpoints around `super()`.
"""

import math
import os
import resource
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import GRPOConfig, GRPOTrainer

from qerl_lab import algorithms, aqn, checkpoint
from qerl_lab.config import RunConfig
from qerl_lab.policy import Policy, save_adapter
from qerl_lab.rollout import Engine, Rollout, Sampling
from qerl_lab.tasks import Task


@dataclass
class Stop:
    """Whether the run was asked to stop after the step under way: by a signal, or by the death of its starter."""

    signalled: bool = False
    parent: int = field(default_factory=os.getppid)

    @classmethod
    def on_signals(cls) -> "Stop":
        stop = cls()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(stop, "signalled", True))
        return stop

    @property
    def requested(self) -> bool:
        return self.signalled or os.getppid() != self.parent


OnStep = Callable[[int, dict[str, float]], None]
# TRL's names of what it measures, and ours. The first group are means over tokens, weighted by tokens in `log`.
TOKEN_MEANS = {
    "entropy": "policy/entropy_nats",
    "kl": "policy/kl_reference",
    "clip_ratio/region_mean": "policy/clip_fraction",
    "clip_ratio/low_mean": "policy/clip_fraction_low",
    "clip_ratio/high_mean": "policy/clip_fraction_high",
}
STEP_MEANS = {
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "frac_reward_zero_std": "reward/zero_variance_groups",
    "loss": "policy/loss",
    "grad_norm": "policy/grad_norm",
    "learning_rate": "policy/learning_rate",
    "sampling/sampling_logp_difference/mean": "sampler/logprob_gap_mean",
    "sampling/sampling_logp_difference/max": "sampler/logprob_gap_max",
    "sampling/importance_sampling_ratio/mean": "sampler/importance_ratio_mean",
    "completions/mean_length": "rollout/completion_tokens",
    "completions/clipped_ratio": "rollout/truncated_fraction",
}


class LabTrainer(GRPOTrainer):
    """One run's training. `on_step(step, metrics)` is called after every step with everything measured in it."""

    def __init__(
        self, cfg: RunConfig, policy: Policy, engine: Engine, task: Task, run_dir: Path, on_step: OnStep, stop: Stop
    ) -> None:
        self.cfg, self.policy, self.engine, self.on_step, self.stop = cfg, policy, engine, on_step, stop
        self.run_id: Callable[[], str | None] = lambda: None  # the MLflow run that a checkpoint names
        self.clock: dict[str, float] = defaultdict(float)
        self.measured: dict[str, float] = {}
        self.token_counts: list[float] = []
        super().__init__(
            model=policy.model,
            reward_funcs=[self._timed_reward(name, part) for name, part in task.rewards.items()],
            args=trl_arguments(cfg, policy, run_dir),
            train_dataset=training_rows(cfg, policy, task),
            processing_class=policy.tokenizer,
            callbacks=[_Steps(self)],
        )
        self.remove_callback(PrinterCallback)
        self.use_vllm, self.vllm_generation, self._last_loaded_step = True, _EngineSeam(self), -1

    @property
    def steps_done(self) -> int:
        return self.state.global_step // self.cfg.updates_per_step

    @property
    def step(self) -> int:
        """The step under way, from 1; between steps the one that comes next."""
        return self.steps_done + 1

    @property
    def noise(self) -> aqn.Noise:
        return aqn.Noise(aqn.sigma(self.cfg.aqn, self.step, self.cfg.steps), self.cfg.seed, self.step)

    def _timed_reward(self, name: str, part: Callable[[str, str], float]) -> Callable[..., list[float]]:
        def reward(completions: list[list[dict[str, str]]], answer: list[str], **_: object) -> list[float]:
            started = time.perf_counter()
            values = [part(chat[-1]["content"], gold) for chat, gold in zip(completions, answer, strict=True)]
            self.clock["reward"] += time.perf_counter() - started
            return values

        reward.__name__ = name
        return reward

    def roll_out(self, prompt_ids: list[list[int]], group_size: int) -> Rollout:
        """Generate for TRL, which repeats each prompt `group_size` times in a row."""
        cfg = self.cfg
        sampling = Sampling(
            cfg.rollout.max_completion_tokens,
            seed=cfg.seed * 1_000_003 + self.step,
            temperature=cfg.rollout.temperature,
        )
        rollout = self.engine.generate(prompt_ids[::group_size], group_size, sampling)
        self.clock["rollout"] += rollout.seconds
        self.measured["sampler/entropy_nats"] = rollout.entropy
        self.measured["rollout/tokens_per_second"] = rollout.tokens / rollout.seconds
        self.measured["tokens"] = rollout.tokens
        self._measure_noise(rollout)
        return rollout

    def sync(self) -> None:
        started = time.perf_counter()
        self.engine.sync(self.policy, self.noise)
        self.clock["sync"] += time.perf_counter() - started

    def _measure_noise(self, rollout: Rollout) -> None:
        started, probe = time.perf_counter(), self.cfg.aqn.probe_prompts
        self.measured["noise/sigma"] = self.noise.sigma
        self.measured["noise/std_observed"] = self.engine.noise_std()
        if probe:
            self.measured["noise/kl_nats"] = self.engine.noise_kl(rollout, probe, self.cfg.rollout.temperature)
        self.clock["probe"] += time.perf_counter() - started

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        # Forward and backward both lie inside; autograd keeps the norm parameter itself, not a copy of its values, so
        # the noisy weights must stay in place until the backward pass is done.
        noisy = self.cfg.aqn.scope == "rollout_and_train" and self.noise.sigma > 0
        with self.policy.norms_as(self._training_norms()) if noisy else nullcontext():
            return super().training_step(*args, **kwargs)

    def _training_norms(self) -> dict[str, Tensor]:
        return {
            name: self.noise.onto(clean, name, self.policy.norms[name].dtype)
            for name, clean in self.policy.clean_norms.items()
        }

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        self.token_counts.append(float(inputs["completion_mask"].sum()))
        return super()._compute_loss(model, inputs)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "train_runtime" in logs:  # the Trainer's closing summary of the whole run
            return
        recorded = self._metrics["train"]
        for name in TOKEN_MEANS:
            if name in recorded:
                recorded[name] = [weighted_mean(recorded[name], self.token_counts)]
        super().log(logs, start_time)
        self.on_step(self.steps_done, self._step_metrics(logs))
        self.token_counts.clear()
        self.measured.clear()
        self.clock.clear()

    def _step_metrics(self, logs: dict[str, float]) -> dict[str, float]:
        names = TOKEN_MEANS | STEP_MEANS | {f"rewards/{f}/mean": f"reward/{f}" for f in self.reward_func_names}
        metrics = {ours: logs[theirs] for theirs, ours in names.items() if theirs in logs}
        seconds = self.clock["step"]
        phases = {name: self.clock[name] for name in ("rollout", "reward", "sync", "probe")}
        metrics |= {f"seconds/{name}": value for name, value in phases.items()}
        metrics["seconds/train"] = seconds - sum(phases.values())
        metrics["step/seconds"] = seconds
        metrics["step/tokens_per_second"] = self.measured.pop("tokens") / seconds
        return metrics | self.measured | memory_gib()

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """No model card: the run directory is the record."""

    def _save_checkpoint(self, model: torch.nn.Module, trial: None) -> None:
        state = {
            "step": self.steps_done,
            "prompts_seen": self.steps_done * self.cfg.rollout.prompts_per_step,
            "mlflow_run_id": self.run_id(),
        }
        checkpoint.save(Path(self.args.output_dir), state, self._write_checkpoint, self.cfg.checkpoint.keep)

    def _write_checkpoint(self, folder: Path) -> None:
        save_adapter(self.policy.model, folder)
        self._save_optimizer_and_scheduler(str(folder))
        self._save_rng_state(str(folder))
        self.state.save_to_json(str(folder / "trainer_state.json"))


class _EngineSeam:
    """What TRL calls where it would call vLLM (`trl/generation/vllm_generation.py`)."""

    def __init__(self, trainer: LabTrainer) -> None:
        self.trainer = trainer

    def sync_weights(self) -> None:
        self.trainer.sync()

    def generate(self, prompts: list[list[int]], num_generations: int, **_: object) -> tuple[list, list, list, None]:
        rollout = self.trainer.roll_out(prompts, num_generations)
        ids = [ids for group in rollout.completion_ids_P_G for ids in group]
        logprobs = [
            [[lp] for lp in row] for group in rollout.logprobs_P_G for row in group
        ]  # TRL reads the top-1 of each
        return prompts, ids, logprobs, None


class _Steps(TrainerCallback):
    """Times a step, and decides at its end whether to save and whether to stop."""

    def __init__(self, trainer: LabTrainer) -> None:
        self.trainer, self.started = trainer, 0.0

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer = self.trainer
        trainer.clock["step"] += time.perf_counter() - self.started
        step, updates_left = divmod(state.global_step, trainer.cfg.updates_per_step)
        if updates_left:
            return
        every = trainer.cfg.checkpoint.every
        stopping = step == trainer.cfg.steps or trainer.stop.requested  # asked once: a signal may arrive at any line
        control.should_save = stopping or bool(every and step % every == 0)
        control.should_training_stop = stopping


def trl_arguments(cfg: RunConfig, policy: Policy, run_dir: Path) -> GRPOConfig:
    """TRL's configuration of the run. `max_steps`, `logging_steps` count updates."""
    micro, updates = cfg.optim.micro_batch_size, cfg.algorithm.updates_per_rollout
    correction = cfg.rollout.importance_correction
    return GRPOConfig(
        output_dir=str(run_dir / "checkpoints"),
        max_steps=cfg.steps * cfg.updates_per_step,
        logging_steps=cfg.updates_per_step,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=cfg.completions_per_step // (updates * micro),
        steps_per_generation=cfg.completions_per_step // micro,
        num_generations=cfg.rollout.group_size,
        max_completion_length=cfg.rollout.max_completion_tokens,
        temperature=cfg.rollout.temperature,
        shuffle_dataset=False,  # `training_rows` are in order
        # A clip of [1, 1] turns the correction off and keeps TRL measuring the gap between sampler and trainer. TRL
        # wants two different bounds; in float32 these are one.
        vllm_importance_sampling_mode="token_truncate" if correction == "off" else correction,
        vllm_importance_sampling_clip_max=1.0 if correction == "off" else cfg.rollout.importance_clip_max,
        vllm_importance_sampling_clip_min=math.nextafter(1.0, 0.0) if correction == "off" else None,
        learning_rate=cfg.optim.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(cfg.optim.schedule, cfg.optim.schedule),
        warmup_steps=math.ceil(cfg.optim.warmup_ratio * cfg.steps * cfg.updates_per_step),
        weight_decay=cfg.optim.weight_decay,
        adam_beta1=cfg.optim.beta1,
        adam_beta2=cfg.optim.beta2,
        max_grad_norm=cfg.optim.max_grad_norm,
        optim={"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit"}[cfg.optim.name],
        bf16=policy.model.dtype == torch.bfloat16,
        gradient_checkpointing=cfg.model.gradient_checkpointing,
        use_cpu=policy.device.type == "cpu",
        seed=cfg.seed,
        data_seed=cfg.seed,
        save_strategy="no",  # `_Steps` decides
        report_to="none",
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        dataloader_pin_memory=False,
        **algorithms.loss_settings(cfg.algorithm),
    )


def training_rows(cfg: RunConfig, policy: Policy, task: Task) -> Dataset:
    """The questions of the whole run in the order of use: one seeded permutation of the training set after another.

    A row's index is thus the position in the data, and a resumed run needs nothing but its step to find it.
    """
    limit = cfg.rollout.max_prompt_tokens
    fitting = [question for question in task.train if len(policy.prompt_ids(task.messages(question))) <= limit]
    if not fitting:
        raise ValueError(f"no training question fits rollout.max_prompt_tokens={limit}")
    generator, needed, order = (
        torch.Generator().manual_seed(cfg.seed),
        cfg.steps * cfg.rollout.prompts_per_step,
        list[int](),
    )
    while len(order) < needed:
        order += torch.randperm(len(fitting), generator=generator).tolist()
    rows = [fitting[index] for index in order[:needed]]
    return Dataset.from_dict({"prompt": [task.messages(row) for row in rows], "answer": [row.answer for row in rows]})


def weighted_mean(values: list[float], weights: list[float]) -> float:
    """Mean over tokens of per-micro-batch means, which TRL would average without weights."""
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / max(sum(weights), 1.0)


def memory_gib() -> dict[str, float]:
    """Peak resident memory of this process so far, and peak GPU memory allocated since the start."""
    peak = {"memory/rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if torch.cuda.is_available():
        peak["memory/gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return peak
