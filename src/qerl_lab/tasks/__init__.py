"""Tasks: questions with exact answers. One module per task, picked by `task.name`.

A task module offers three pure functions, which `Task` below binds to its configuration:

    train(cfg) -> list[Question]       the questions that training draws from
    heldout(cfg) -> list[Question]     never seen in training, disjoint by construction
    is_correct(given, answer) -> bool  whether the text of a model's final answer equals the known answer
"""

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from qerl_lab.config import TaskConfig
from qerl_lab.tasks.rewards import Reward, answer_reward, format_reward


@dataclass(frozen=True)
class Question:
    """One row: `prompt` is the question as text, `answer` the known answer, `id` stable across runs."""

    id: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Task:
    """A configured task. `rewards` maps the name of each part to its function of (completion, answer);
    `is_correct` compares the text of a final answer with the known answer.
    """

    name: str
    instruction: str
    train: list[Question]
    heldout: list[Question]
    rewards: dict[str, Reward]
    is_correct: Callable[[str, str], bool]

    def messages(self, question: Question) -> list[dict[str, str]]:
        """The chat that asks `question`: the instruction as a system message (if any), then the question."""
        system = [{"role": "system", "content": self.instruction}] if self.instruction else []
        return [*system, {"role": "user", "content": question.prompt}]

    def reward(self, completion: str, answer: str) -> float:
        """Sum of all parts for one completion."""
        return sum(part(completion, answer) for part in self.rewards.values())


def load(cfg: TaskConfig) -> Task:
    """Build the task that `cfg.name` names. Raises ConfigError where its data cannot be read."""
    module = importlib.import_module(f"qerl_lab.tasks.{cfg.name}")
    return Task(
        name=cfg.name,
        instruction=cfg.instruction,
        train=module.train(cfg),
        heldout=module.heldout(cfg),
        rewards=_rewards(cfg, module.is_correct),
        is_correct=module.is_correct,
    )


def _rewards(cfg: TaskConfig, is_correct: Callable[[str, str], bool]) -> dict[str, Reward]:
    return {
        "format": lambda completion, _answer: cfg.format_reward * format_reward(completion),
        "answer": lambda completion, answer: cfg.answer_reward * answer_reward(completion, answer, is_correct),
    }


def is_heldout(key: str, one_in: int = 8) -> bool:
    """Whether the question with this identity belongs to the held-out set: a fixed share, decided by SHA-256.

    The split is a property of the question, not of a draw, so that train and held-out sets are disjoint by
    construction for every seed, size and process.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % one_in == 0
