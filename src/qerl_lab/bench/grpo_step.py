"""Measure whole GRPO steps of the lab's trainer: rollout, reward, log-probs, loss, backward, optimizer, sync.

Phases are the trainer's own. GSM8K's grader reads each answer, but a coin decides the reward: a random model would earn
none, and its gradients would be zero. `stock_trl.py` measures TRL's trainer on the same task.
"""

import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from qerl_lab.bench import lab, random_model
from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import clocks, memory_at_end
from qerl_lab.bench.job import Job
from qerl_lab.bench.rollout import memory, settings
from qerl_lab.config.units import GIB
from qerl_lab.model.policy import device_of
from qerl_lab.record.metrics import PHASES
from qerl_lab.tasks import Question, Scores, Task
from qerl_lab.tasks.grading import grade_math
from qerl_lab.train.ranks import join
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer
from qerl_lab.train.training_data import Cursor, TrainingData

Step = dict[str, float]  # measured values of one step


def rows(job: Job) -> Iterator[Row]:
    """Train random weights with the lab's trainer; yield one row that summarizes the steps after the first.

    With several GPUs only the first rank yields it.
    """
    cfg, found = job.config(), list[Step]()
    ranks = join(cfg, device_of(cfg.device))
    policy, engine, about = lab.build(job)
    asked = make_task(job)
    data = TrainingData(asked, asked.train, left_out=0, heldout_left_out=0, seed=0)
    try:
        with tempfile.TemporaryDirectory(dir=Path(job.folder).parent) as folder, clocks() as clock:
            trainer = LabTrainer(
                cfg, policy, engine, Cursor(data), Path(folder),
                lambda _, metrics: found.append(step_values(metrics)), Stop(parent=os.getppid()), ranks,
            )  # fmt: skip
            trainer.train()
        if (llm := getattr(engine, "llm", None)) is not None:  # absent from some engines
            about = {**memory(llm), **settings(llm), **about}
        owned = 4 * sum(p.nbytes for p in policy.model.parameters() if p.requires_grad) / GIB
        if ranks.is_first:  # an adapter has a gradient and Adam's two moments beside its weights
            yield summarize(job, found) | about | clock | {"adapter_gib": owned, **memory_at_end()}
    finally:
        engine.close()
    ranks.leave()


def make_task(job: Job) -> Task:
    """Make a task for all steps of a job: random questions of `options["prompt"]` tokens, scored by `coin`."""
    options = job.options
    texts = random_model.prompt_texts(options["groups"] * (options["steps"] + 1), options["prompt"])
    questions = [Question(str(index), text, "0") for index, text in enumerate(texts)]
    return Task("bench", "", questions, [], {"format": 0.2, "answer": 1.0}, coin)


def coin(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """Score texts by GSM8K's grader, then replace each answer score by the lowest bit of the text's CRC-32.

    A random model would get no answer right, and so no gradient.
    """
    scores = grade_math(texts, questions)
    return scores | {"answer": np.array([zlib.crc32(text.encode()) % 2 for text in texts], dtype=np.float64)}


def step_values(metrics: dict[str, float]) -> Step:
    """Return a step's seconds by phase and in all, tokens, entropy (nats) and gradient norm, from `metrics`."""
    step = {f"{phase}_seconds": metrics[f"seconds/{phase}"] for phase in PHASES}
    seconds = metrics["step/seconds"]
    step |= {"step_seconds": seconds, "tokens": seconds * metrics["step/tokens_per_second"]}
    return step | {"nats": metrics["policy/entropy_nats"], "grad_norm": metrics["policy/grad_norm"]}


def summarize(job: Job, steps: list[Step]) -> Row:
    """Summarize a run as a row: medians over the steps after the first, and their total tokens per second.

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
        "step_seconds_min": of_steps["step_seconds"].min(), "step_seconds_max": of_steps["step_seconds"].max(),
        "completions": completions,
        **{name: options[name] for name in ("prompt", "new", "mean_tokens", "micro_batch", "steps")},
    }  # fmt: skip
