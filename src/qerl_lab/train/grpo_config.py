"""Translate a run's configuration into `trl.GRPOConfig`."""

import math
from pathlib import Path

import torch
from trl import GRPOConfig

from qerl_lab import algorithms
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.train.ranks import PATIENCE


def grpo_config(cfg: RunConfig, policy: Policy, run_dir: Path) -> GRPOConfig:
    """Build TRL's configuration of a run. TRL's `max_steps` and `logging_steps` count optimizer updates, not steps."""
    micro = cfg.optim.chosen_micro_batch_size
    correction = cfg.rollout.importance_correction
    is_off = correction in ("off", "in_ratio")
    return GRPOConfig(
        output_dir=str(run_dir / "checkpoints"),
        max_steps=cfg.steps * cfg.updates_per_step,
        logging_steps=cfg.updates_per_step,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=cfg.mini_batch_size_per_gpu // micro,
        steps_per_generation=cfg.completions_per_gpu // micro,
        num_generations=cfg.rollout.group_size,
        max_completion_length=cfg.rollout.max_completion_tokens,
        temperature=cfg.rollout.temperature,
        learning_rate=cfg.optim.learning_rate,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(cfg.optim.schedule, cfg.optim.schedule),
        warmup_steps=math.ceil(cfg.optim.warmup_ratio * cfg.steps * cfg.updates_per_step),
        weight_decay=cfg.optim.weight_decay,
        adam_beta1=cfg.optim.beta1,
        adam_beta2=cfg.optim.beta2,
        max_grad_norm=cfg.optim.max_grad_norm,
        optim={"adamw": "adamw_torch", "adamw_8bit": "adamw_bnb_8bit"}[cfg.optim.name],
        bf16=policy.dtype == torch.bfloat16,
        gradient_checkpointing=cfg.model.gradient_checkpointing,
        use_cpu=policy.device.type == "cpu",
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,  # the packed weights are frozen and the same on every rank
        ddp_timeout=int(PATIENCE.total_seconds()),
        seed=cfg.seed,
        save_strategy="no",  # `StepCallback` decides
        report_to="none",
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        dataloader_pin_memory=False,
        # With several updates or dropout TRL computes the rollout's log-probs in an extra forward pass before the first
        # update, and applies the correction. Otherwise the loss's forward pass has the same weights and noise, and
        # `LabTrainer` corrects in it.
        vllm_importance_sampling_correction=cfg.updates_per_step > 1 or policy.uses_dropout,
        # A clip of [1, 1] turns the correction off, while TRL still measures the gap between sampler and trainer.
        # TRL requires two different bounds; in float32 these two are equal.
        vllm_importance_sampling_mode="token_truncate" if is_off else correction,
        vllm_importance_sampling_clip_max=1.0 if is_off else cfg.rollout.importance_clip_max,
        vllm_importance_sampling_clip_min=math.nextafter(1.0, 0.0) if is_off else None,
        **algorithms.loss_settings(cfg.algorithm),
    )
