"""Measure whole GRPO steps: rollout, reward, log-probs, loss, backward, optimizer, sync.

A lab arm is the lab's trainer, timed by phase. The baseline is TRL's unchanged GRPOTrainer with vLLM in its process;
overrides of a baseline arm are arguments of GRPOConfig. GSM8K's grader reads each answer, but every second one earns
the reward: a random model gets no answer right, and a group of equal rewards has no gradient.
"""

import math
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from qerl_lab.bench import lab, random_model
from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import base_gib, clocks, memory_at_end, wait_for_gpu
from qerl_lab.bench.job import Job
from qerl_lab.bench.rollout import memory, settings
from qerl_lab.config.units import GIB
from qerl_lab.model.policy import device_of
from qerl_lab.record.metrics import PHASES
from qerl_lab.tasks import Question, Scores, Task
from qerl_lab.tasks.grading import grade_math
from qerl_lab.train.out_of_memory import bytes_by_owner
from qerl_lab.train.ranks import join
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer
from qerl_lab.train.training_data import Cursor, TrainingData

TRLS_SHARE = 0.3  # TRL's default share of the GPU for vLLM
SPARE_GIB = 8  # for vLLM's activations and CUDA graphs
Step = dict[str, float]  # measured values of one step


def rows(job: Job) -> Iterator[Row]:
    """Train a model with random weights; yield one row that summarizes all steps but the first."""
    return rows_of_trl(job) if job.is_baseline else rows_of_lab(job)


def rows_of_lab(job: Job) -> Iterator[Row]:
    """Train with the lab's trainer, and yield one row of measurements, on several GPUs only in the first process.

    Raises RuntimeError as `summarize` does.
    """
    cfg, steps = job.config(), list[Step]()
    ranks = join(cfg, device_of(cfg.device))
    policy, engine, row = lab.build(job)
    task = make_task(job)
    data = TrainingData(task, task.train, left_out=0, heldout_left_out=0, seed=0, longest_prompt=job.options["prompt"])
    try:
        with tempfile.TemporaryDirectory(dir=Path(job.folder).parent) as folder, clocks() as clock:
            stop = Stop(parent=os.getppid())
            trainer = LabTrainer(cfg, policy, engine, Cursor(data), Path(folder), stop, ranks)
            trainer.on_step = lambda step, metrics: steps.append(step_values(metrics))
            trainer.train()
        if (llm := getattr(engine, "llm", None)) is not None:  # absent from some engines
            row = {**memory(llm), **settings(llm), **row}
        held = bytes_by_owner(policy, engine.memory_bytes())
        row["gib_by_owner"] = {owner: size / GIB for owner, size in held.items()}
        if ranks.is_first:
            yield summarize(job, steps, cfg.optim.chosen_micro_batch_size) | row | clock | memory_at_end()
    finally:
        engine.close()
    ranks.leave()


class StepClock(TrainerCallback):
    """Callback of TRL's trainer: append the seconds of each step to `seconds`."""

    def __init__(self) -> None:
        self.seconds, self._started = list[float](), 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Override TRL's hook: start the clock."""
        self._started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Override TRL's hook: stop the clock, once the GPU is done."""
        wait_for_gpu()
        self.seconds.append(time.perf_counter() - self._started)


def rows_of_trl(job: Job) -> Iterator[Row]:
    """Train with TRL's trainer; yield one row that summarizes all steps but the first.

    The row has no seconds by phase, because TRL does not report them. Raises RuntimeError if the arm's overrides change
    the number of completions in a step, or as `summarize` does.
    """
    options, started = job.options, time.perf_counter()
    completions = options["groups"] * options["group_size"]
    micro_batch_size = job.overrides.get("per_device_train_batch_size", options["micro_batch"])
    micro_batches, step_clock = completions // micro_batch_size, StepClock()
    with tempfile.TemporaryDirectory(dir=Path(job.folder).parent) as folder:
        given = {  # sizes of the lab's arms, TRL's defaults for the rest
            "output_dir": folder, "use_vllm": True, "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": gpu_share(job),
            "vllm_max_model_length": options["prompt"] + options["new"], "model_init_kwargs": {"dtype": "bfloat16"},
            "per_device_train_batch_size": micro_batch_size, "gradient_accumulation_steps": micro_batches,
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
            callbacks=[step_clock],
        )
        row: Row = {"start_seconds": time.perf_counter() - started, "policy_gib": base_gib(trainer.model)}
        args = trainer.args
        trained = args.per_device_train_batch_size * args.gradient_accumulation_steps
        if not args.generation_batch_size == trained == completions:  # the count of tokens below relies on it
            raise RuntimeError(
                f"a step samples {args.generation_batch_size} completions and trains {trained}, not {completions}"
            )
        with clocks() as clock:
            trainer.train()
    if trainer.use_vllm:
        row |= memory(trainer.vllm_generation.llm) | settings(trainer.vllm_generation.llm)
    logged = [logs for logs in trainer.state.log_history if "completions/mean_length" in logs]  # one a step
    steps = [
        {"step_seconds": seconds, "tokens": completions * logs["completions/mean_length"], "nats": logs["entropy"],
         "grad_norm": logs["grad_norm"]}
        for seconds, logs in zip(step_clock.seconds, logged, strict=False)  # `summarize` counts them
    ]  # fmt: skip
    yield summarize(job, steps, micro_batch_size) | row | clock | memory_at_end()


def reward(completions: list[str], **_: Any) -> list[float]:
    """Return a reward of 0 or 1 for each completion, by `alternate`. TRL's trainer calls this function."""
    return alternate(completions, [Question("", "", "0")] * len(completions))["answer"].tolist()


def gpu_share(job: Job) -> float:
    """Return the share of GPU memory for vLLM, from 0 to 1: TRL's default, or more if weights and cache need more."""
    if not torch.cuda.is_available():
        return TRLS_SHARE
    options = job.options
    weights = sum(file.stat().st_size for file in Path(job.folder).glob("*.safetensors")) / GIB
    cache = job.kv_gib(options["groups"] * options["group_size"])
    total = torch.cuda.mem_get_info()[1] / GIB
    return max(TRLS_SHARE, math.ceil(100 * (weights + cache + SPARE_GIB) / total) / 100)


def make_task(job: Job) -> Task:
    """Make a task of random questions, enough for the job's measured steps and one step before, which does not count.

    Each question has `options["prompt"]` tokens. `alternate` grades the answers, because a random model answers nothing
    right and would get no gradient.
    """
    options = job.options
    texts = random_model.prompt_texts(options["groups"] * (options["steps"] + 1), options["prompt"])
    questions = [Question(str(index), text, "0") for index, text in enumerate(texts)]
    return Task("bench", "", questions, [], {"format": 0.2, "answer": 1.0}, alternate)


def alternate(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """Score texts by GSM8K's grader, then replace the answer scores by 0, 1, 0, 1 and so on.

    The completions of a question are neighbours, so that each group of two or more has both scores and a gradient.
    """
    scores = grade_math(texts, questions)
    return scores | {"answer": np.arange(len(texts), dtype=np.float64) % 2}


def step_values(metrics: dict[str, float]) -> Step:
    """Return seconds (by phase and in all), tokens, entropy (nats) and gradient norm of a step with these metrics."""
    step = {f"{phase}_seconds": metrics[f"seconds/{phase}"] for phase in PHASES}
    seconds = metrics["step/seconds"]
    step |= {"step_seconds": seconds, "tokens": seconds * metrics["step/tokens_per_second"]}
    return step | {"nats": metrics["policy/entropy_nats"], "grad_norm": metrics["policy/grad_norm"]}


def summarize(job: Job, steps: list[Step], micro_batch_size: int) -> Row:
    """Summarize the steps of a run, except the first, as a row: medians, and tokens per second over all these steps.

    `micro_batch_size` is passed, because an override of the arm may change the command's option `micro_batch`.
    Raises RuntimeError if steps or tokens are missing, or if a gradient is zero or NaN.
    """
    options, timed = job.options, steps[1:]
    completions = options["groups"] * options["group_size"]
    if len(timed) != options["steps"]:
        raise RuntimeError(f"asked for {options['steps']} steps after the first, and got {len(timed)}")
    for step in timed:
        if not options["mean_tokens"] and round(step["tokens"]) != completions * options["new"]:
            raise RuntimeError(f"a step sampled {step['tokens']:.0f} tokens, not {completions} x {options['new']}")
        if not step["grad_norm"] > 0:
            raise RuntimeError(f"the gradient is {step['grad_norm']}: nothing would be learned")
    of_steps = pd.DataFrame(timed)
    return of_steps.median().to_dict() | {
        "tokens_per_second": of_steps["tokens"].sum() / of_steps["step_seconds"].sum(),
        "completions": completions, "micro_batch": micro_batch_size,
        **{name: options[name] for name in ("prompt", "new", "mean_tokens", "steps")},
    }  # fmt: skip
