"""Tasks: questions with exact answers, and how completions are graded. One module per task, named by `task.name`.

A task module offers three functions, which `Task` binds to a configuration:

    train(cfg) -> list[Question]         the questions that training draws from
    heldout(cfg) -> list[Question]       never seen in training, disjoint by construction
    grade(texts, questions) -> Scores    by part one score a completion
"""

import hashlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from qerl_lab.config.schema import TaskConfig

if TYPE_CHECKING:  # checking a command imports tasks too, and should not wait for numpy
    import numpy as np
    from numpy.typing import NDArray

Scores = dict[str, "NDArray[np.float64]"]


@dataclass(frozen=True)
class Question:
    """One row: `prompt` is the question as text, `answer` the known answer, `id` stable across runs.

    `payload` is what a grader needs beside the answer, e.g. the tests of a program.
    """

    id: str
    prompt: str
    answer: str
    payload: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Task:
    """A configured task.

    `grade(texts, questions)` gives by part one score in [0, 1] a text, shape [len(texts)]. It depends on its arguments
    alone, never raises on the text of a model, and ends in time: what passes its limits scores 0. Every task has the
    parts "format" and "answer", which evaluations read. `weights` has the same parts.
    """

    name: str
    instruction: str
    train: list[Question]
    heldout: list[Question]
    weights: dict[str, float]
    grade: Callable[[Sequence[str], Sequence[Question]], Scores]

    def messages(self, question: Question) -> list[dict[str, str]]:
        """The chat that asks `question`: the instruction as a system message (if any), then the question."""
        system = [{"role": "system", "content": self.instruction}] if self.instruction else []
        return [*system, {"role": "user", "content": question.prompt}]

    def rewards(self, texts: Sequence[str], questions: Sequence[Question]) -> Scores:
        """By part the weighted scores, shape [len(texts)]; the reward of a text is their sum."""
        return {part: self.weights[part] * score for part, score in self.grade(texts, questions).items()}


def load(cfg: TaskConfig) -> Task:
    """Build the task that `cfg.name` names. Raises ConfigError where its data cannot be read."""
    module = _module(cfg)
    return _task(cfg, module, module.train(cfg))


def benchmark(cfg: TaskConfig) -> Task:
    """Build the task that `cfg.name` names for an evaluation alone: no training question is read, `train` is empty.

    Raises ConfigError where its data cannot be read.
    """
    return _task(cfg, _module(cfg), [])


def _module(cfg: TaskConfig) -> ModuleType:
    return importlib.import_module(f"qerl_lab.tasks.{cfg.name}")


def _task(cfg: TaskConfig, module: ModuleType, train: list[Question]) -> Task:
    return Task(
        name=cfg.name,
        instruction=cfg.instruction,
        train=train,
        heldout=module.heldout(cfg),
        weights={"format": cfg.format_reward, "answer": cfg.answer_reward},
        grade=module.grade,
    )


def is_heldout(key: str, one_in: int = 8) -> bool:
    """Whether the question with this identity belongs to the held-out set: a fixed share, decided by SHA-256.

    The split is a property of the question, not of a draw. So train and held-out sets are disjoint by construction,
    for every seed, size and process.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % one_in == 0
