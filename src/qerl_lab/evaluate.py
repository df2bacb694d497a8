"""Held-out questions, asked before and after training. (`python -m qerl_lab.evaluate` comes later.)"""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from qerl_lab.config import RunConfig
from qerl_lab.policy import Policy
from qerl_lab.rollout import Engine, Sampling
from qerl_lab.tasks import Question, Task
from qerl_lab.tasks.rewards import answer_reward, format_reward

SEED = 777_000_000  # the same draw for every arm, seed and phase


@dataclass(frozen=True)
class Evaluation:
    """`rows`: one row a question (id, answer, accuracy, format, tokens: means over its samples; and one sample)."""

    rows: pd.DataFrame
    entropy: float

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "eval/accuracy": float(self.rows["accuracy"].mean()),
            "eval/format": float(self.rows["format"].mean()),
            "eval/completion_tokens": float(self.rows["tokens"].mean()),
            "eval/entropy_nats": self.entropy,
        }


def evaluate(engine: Engine, policy: Policy, task: Task, cfg: RunConfig) -> Evaluation:
    """Ask the first `eval.questions` held-out questions `eval.samples` times each, of the engine as it is synced."""
    questions = task.heldout[: cfg.eval.questions]
    sampling = Sampling(cfg.rollout.max_completion_tokens, SEED, cfg.eval.temperature, cfg.eval.top_p)
    prompts = [policy.prompt_ids(task.messages(question)) for question in questions]
    out = engine.generate(prompts, cfg.eval.samples, sampling)
    pairs = zip(questions, out.completion_ids_P_G, strict=True)
    return Evaluation(pd.DataFrame([_row(policy, task, question, group) for question, group in pairs]), out.entropy)


def _row(policy: Policy, task: Task, question: Question, completions: list[list[int]]) -> dict[str, object]:
    texts = [policy.decode(ids) for ids in completions]
    return {
        "id": question.id,
        "answer": question.answer,
        "accuracy": float(np.mean([answer_reward(text, question.answer, task.is_correct) for text in texts])),
        "format": float(np.mean([format_reward(text) for text in texts])),
        "tokens": float(np.mean([len(ids) for ids in completions])),
        "sample": texts[0],
    }
