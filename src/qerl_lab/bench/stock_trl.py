"""Measure TRL's unchanged GRPOTrainer with vLLM in its process: the baseline of GRPO steps.

An arm's overrides are arguments of GRPOConfig.
"""

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from qerl_lab.bench import random_model
from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import base_gib, clocks, memory_at_end, wait_for_gpu
from qerl_lab.bench.grpo_step import Step, coin, make_task, summarize
from qerl_lab.bench.job import Job, kv_gib
from qerl_lab.bench.rollout import memory, settings
from qerl_lab.config.units import GIB
from qerl_lab.tasks import Question

TRLS_SHARE = 0.3  # TRL's default share of the GPU for vLLM
SPARE_GIB = 8  # for vLLM's activations and CUDA graphs


class Watch(TrainerCallback):
    """Time each step like the lab's trainer, and keep TRL's logs of it."""

    def __init__(self, completions: int) -> None:
        self.completions, self.found, self._started, self._seconds = completions, list[Step](), 0.0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Override TRL's hook: start the clock."""
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Override TRL's hook: stop the clock, once the GPU is done."""
        wait_for_gpu()
        self._seconds = time.perf_counter() - self._started

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        """Override TRL's hook: append the step's seconds, tokens, entropy and gradient norm to `found`.

        Ignores logs of anything but a step.
        """
        if "completions/mean_length" in logs:
            tokens = self.completions * logs["completions/mean_length"]
            self.found.append(
                {"step_seconds": self._seconds, "tokens": tokens, "nats": logs["entropy"],
                 "grad_norm": logs["grad_norm"]}
            )  # fmt: skip


def rows(job: Job) -> Iterator[Row]:
    """Train with TRL; yield one row that summarizes the steps after the first. TRL reports no seconds by phase."""
    options, started = job.options, time.perf_counter()
    completions = options["groups"] * options["group_size"]
    watch, micro_batches = Watch(completions), completions // options["micro_batch"]
    with tempfile.TemporaryDirectory(dir=Path(job.folder).parent) as folder:
        given = {  # sizes of the lab's arms, TRL's defaults for the rest
            "output_dir": folder, "use_vllm": True, "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": gpu_share(job),
            "vllm_max_model_length": options["prompt"] + options["new"], "model_init_kwargs": {"dtype": "bfloat16"},
            "per_device_train_batch_size": options["micro_batch"], "gradient_accumulation_steps": micro_batches,
            "steps_per_generation": micro_batches, "num_generations": options["group_size"],
            "max_completion_length": options["new"], "max_steps": options["steps"] + 1, "logging_steps": 1,
            "learning_rate": 1e-5, "bf16": True, "gradient_checkpointing": True, "save_strategy": "no",
            "report_to": "none", "disable_tqdm": True,
        }  # fmt: skip
        trainer = GRPOTrainer(
            model=job.folder,
            reward_funcs=reward,
            args=GRPOConfig(**given | job.overrides),
            train_dataset=Dataset.from_dict({"prompt": [question.prompt for question in make_task(job).train]}),
            peft_config=random_model.plain_lora(job.rank),
            callbacks=[watch],
        )
        about: Row = {"start_seconds": time.perf_counter() - started, "policy_gib": base_gib(trainer.model)}
        with clocks() as clock:
            trainer.train()
    if trainer.use_vllm:
        about |= memory(trainer.vllm_generation.llm) | settings(trainer.vllm_generation.llm)
    yield summarize(job, watch.found) | about | clock | memory_at_end()


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a reward of 0 or 1 for each completion, the answer score of `grpo_step.coin`; TRL's trainer calls this."""
    return coin(completions, [Question("", "", "0")] * len(completions))["answer"].tolist()


def gpu_share(job: Job) -> float:
    """Return the share of GPU memory for vLLM: TRL's default, or what weights and cache need if that is more."""
    if not torch.cuda.is_available():
        return TRLS_SHARE
    options = job.options
    weights = sum(file.stat().st_size for file in Path(job.folder).glob("*.safetensors")) / GIB
    cache = kv_gib(job.architecture, options["groups"] * options["group_size"], options["prompt"] + options["new"])
    total = torch.cuda.mem_get_info()[1] / GIB
    return max(TRLS_SHARE, math.ceil(100 * (weights + cache + SPARE_GIB) / total) / 100)
