"""Held-out questions, asked before and after training."""

import hashlib
from dataclasses import dataclass

import numpy as np
import pandas as pd

from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine, OnDone, Sampling, ignore
from qerl_lab.tasks import Task


@dataclass(frozen=True)
class Evaluation:
    """`rows`: one row a question (id, answer, accuracy, format, tokens: means over its samples; and one sample)."""

    rows: pd.DataFrame
    entropy: float | None

    @property
    def metrics(self) -> dict[str, float]:
        entropy = {} if self.entropy is None else {"eval/entropy_nats": self.entropy}
        return {
            "eval/accuracy": float(self.rows["accuracy"].mean()),
            "eval/format": float(self.rows["format"].mean()),
            "eval/completion_tokens": float(self.rows["tokens"].mean()),
        } | entropy


def evaluate(engine: Engine, policy: Policy, task: Task, cfg: RunConfig, on_done: OnDone = ignore) -> Evaluation:
    """Ask the first `eval.questions` held-out questions `eval.samples` times each, of the engine as it is synced.

    `on_done` hears of the completions, part by part. The draw follows the run's seed alone: both phases and all arms of
    a seed share it, and two seeds do not.
    """
    questions = task.heldout[: cfg.eval.questions]
    sampling = Sampling(cfg.rollout.max_completion_tokens, _draw(cfg.seed), cfg.eval.temperature, cfg.eval.top_p)
    prompts = [policy.prompt_ids(task.messages(question)) for question in questions]
    out = engine.generate(prompts, cfg.eval.samples, sampling, on_done)
    samples_P_G = out.completion_ids_P_G
    texts = [policy.decode(ids) for group in samples_P_G for ids in group]
    scores = task.grade(texts, [question for question in questions for _ in range(cfg.eval.samples)])
    shape = len(questions), cfg.eval.samples
    rows = {
        "id": [question.id for question in questions],
        "answer": [question.answer for question in questions],
        "accuracy": scores["answer"].reshape(shape).mean(axis=1),
        "format": scores["format"].reshape(shape).mean(axis=1),
        "tokens": [np.mean([len(ids) for ids in group]) for group in samples_P_G],
        "sample": texts[:: cfg.eval.samples],
    }
    return Evaluation(pd.DataFrame(rows), out.entropy)


def _draw(seed: int) -> int:
    """Hash the seed of a run to that of its evaluations, which no rollout has. Torch takes 32 bits on a CPU."""
    return int.from_bytes(hashlib.sha256(f"evaluation/{seed}".encode()).digest()[:4], "big")
