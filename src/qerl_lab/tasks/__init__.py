"""Tasks: questions with exact answers, and grading. One module per task, selected by `task.name`.

A task module offers these functions, which `Task` binds to a configuration:

    train(cfg) -> list[Question]         training questions; missing in a task for evaluation only
    heldout(cfg) -> list[Question]       never in training, disjoint by construction
    grade(texts, questions) -> Scores    one score per completion for each part
    worked(cfg) -> list[Question]        training questions with a solution in the answer's format, if any, in
                                         payload["solution"]
    weights(cfg) -> dict[str, float]     of the parts beside "format" and "answer", if `grade` returns any

`task.module=FILE.py` replaces them by functions of a file.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from qerl_lab.config.files import choices_of, group_folder
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks.answers.completion import has_thought

if TYPE_CHECKING:  # avoid importing numpy when only checking a command
    import numpy as np
    from numpy.typing import NDArray

Scores = dict[str, "NDArray[np.float64]"]
UNPARSED = "unparsed"  # unrewarded score: 1 for an answer that could not be parsed, or compared in time


@dataclass(frozen=True)
class Question:
    """One question: its text `prompt`, the reference `answer`, and an `id` that is stable across runs.

    `payload` holds what else a grader needs, such as a program's tests.
    """

    id: str
    prompt: str
    answer: str
    payload: Mapping[str, Any] = field(default_factory=dict, hash=False)


class BadRow(ValueError):
    """A row that cannot become a question. The message continues the row's location: `has no 'answer'`."""


@dataclass(frozen=True)
class LeftOut:
    """Rows that were left out: their number, the number of all rows, and the first with its error."""

    count: int
    rows: int
    first: str

    def check(self, remedy: str) -> None:
        """Raise ConfigError if more than 1% of the rows are bad, which means a wrong file or column."""
        if self.count > 0.01 * self.rows:
            raise ConfigError(f"{self.said}, and more than 1% is an error. {remedy}")

    @property
    def said(self) -> str:
        """Description for the user."""
        return f"{self.count:,} of {self.rows:,} rows are bad and left out; the first: {self.first}"


class Questions(list[Question]):
    """Questions, the rows left out, and notes for the user."""

    def __init__(self, questions: Iterable[Question], left_out: Sequence[LeftOut] = (), notes: Sequence[str] = ()):
        super().__init__(questions)
        self.left_out, self.notes = [one for one in left_out if one.count], list(notes)

    @property
    def warnings(self) -> list[str]:
        return [one.said for one in self.left_out] + self.notes


@dataclass(frozen=True)
class Task:
    """A configured task.

    `grade(texts, questions)` returns scores in [0, 1] by part, shape [len(texts)]. It depends on its arguments alone,
    never raises on model output, and is time-limited: what exceeds the limits scores 0. Every task has the parts
    "format" and "answer", which evaluations read; it may have UNPARSED. `weights` covers all parts but UNPARSED.
    `warnings` reports rows left out, `data` is the description stored in the record.
    """

    name: str
    instruction: str
    train: list[Question]
    heldout: list[Question]
    weights: dict[str, float]
    grade: Callable[[Sequence[str], Sequence[Question]], Scores]
    format_reward_for: str = "any"
    warnings: tuple[str, ...] = ()
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def messages(self, question: Question) -> list[dict[str, str]]:
        """Return the chat for a question: the instruction as system message (if any), then the question."""
        system = [{"role": "system", "content": self.instruction}] if self.instruction else []
        return [*system, {"role": "user", "content": question.prompt}]

    def rewards(self, texts: Sequence[str], questions: Sequence[Question]) -> Scores:
        """Grade the texts and return weighted scores by part, shape [len(texts)]; their sum is the reward."""
        return self.weighted(self.grade(texts, questions), texts)

    def weighted(self, scores: Scores, texts: Sequence[str]) -> Scores:
        """Return weight x score by part, shape [len(texts)], without UNPARSED.

        "format" is 0 for completions that task.format_reward_for excludes.
        """
        parts = {part: self.weights[part] * score for part, score in scores.items() if part != UNPARSED}
        if self.format_reward_for == "thought":
            parts["format"] = parts["format"] * [has_thought(text) for text in texts]
        elif self.format_reward_for == "right":
            parts["format"] = parts["format"] * (scores["answer"] == 1)
        return parts


def load(cfg: TaskConfig) -> Task:
    """Build the task named by `cfg.name`.

    Raises ConfigError if its data cannot be read, it is for evaluation only, or over 1% of its training questions are
    held out too; fewer are removed from training.
    """
    check_trains(cfg)
    module = _module(cfg)
    train, heldout = module.train(cfg), module.heldout(cfg)
    return _task(cfg, module, _apart(train, heldout, cfg.train_questions), heldout)


def wording(text: str) -> str:
    """Return the text without whitespace and case. Questions with equal wording are on the same side of a split."""
    return "".join(text.casefold().split())


def _apart(train: list[Question], heldout: list[Question], size: int) -> Questions:
    """Remove held-out questions (compared by `wording`) from training; return the first `size` (0: all)."""
    asked = {wording(question.prompt) for question in heldout}
    kept = [question for question in train if wording(question.prompt) not in asked]
    shared = [f"{question.id} is held out too" for question in train if wording(question.prompt) in asked]
    leaked = LeftOut(len(shared), len(train), shared[0] if shared else "")
    leaked.check("Check task.path.")
    known = train if isinstance(train, Questions) else Questions(train)
    return Questions(kept[: size or None], [*known.left_out, leaked], known.notes)


def with_solutions() -> list[str]:
    """Return the names of tasks with worked solutions."""
    return [name for name in choices_of("task") if hasattr(_module(TaskConfig(name=name)), "worked")]


def worked(cfg: TaskConfig) -> Task:
    """Build the task with worked solutions, payload["solution"], in `train`.

    Raises ConfigError as `load` does, and if the task has no solutions.
    """
    module = _module(cfg)
    if not hasattr(module, "worked"):
        others = with_solutions()
        raise ConfigError(f"task={cfg.name} has no worked solutions; allowed: {', '.join(others)}. "
                          f"Type task={others[-1]}.")  # fmt: skip
    heldout = module.heldout(cfg)
    return _task(cfg, module, _apart(module.worked(cfg), heldout, cfg.train_questions), heldout)


def benchmark(cfg: TaskConfig) -> Task:
    """Build the task for evaluation only: `train` is empty and no training question is read.

    Raises ConfigError if its data cannot be read.
    """
    module = _module(cfg)
    return _task(cfg, module, Questions([]), module.heldout(cfg))


def configured(name: str, **given: Any) -> TaskConfig:
    """Read conf/task/NAME.yaml as the group `task`, with `given` keys over it. Raises ConfigError for a wrong value."""
    written = OmegaConf.to_container(OmegaConf.load(group_folder("task") / f"{name}.yaml"))
    return from_dict({"task": {**written, **given}}).task  # type: ignore[dict-item]


def check_trains(cfg: TaskConfig) -> None:
    """Raise ConfigError for a task that is for evaluation only. Reads no data."""
    if hasattr(_module(cfg), "train"):
        return
    others = [name for name in choices_of("task") if hasattr(_module(TaskConfig(name=name)), "train")]
    raise ConfigError(
        f"task={cfg.name} is for evaluation only: a policy trained on it could not be judged by it. "
        f"Type one to train on: task={', '.join(others)}; or python -m qerl_lab.evaluate accuracy run=RUN_DIR "
        f"benchmarks={cfg.name}."
    )


def label(cfg: TaskConfig) -> str:
    """Return the task's display name: its own, or the stem of the user's file."""
    return Path(cfg.module).stem if cfg.module else cfg.name


def is_on_the_hub(cfg: TaskConfig) -> bool:
    """Return whether the task reads its questions from the hub unless task.path is set."""
    module = _module(cfg)
    return hasattr(module, "SOURCE") and not {"train", "heldout"} <= module.own


def _module(cfg: TaskConfig) -> SimpleNamespace:
    """Return the functions of the task's module and, in their place, of the user's file; `own` names the latter."""
    functions = vars(importlib.import_module(f"qerl_lab.tasks.{cfg.name}"))
    if cfg.module is None:
        return SimpleNamespace(**functions, own=frozenset())
    from qerl_lab.tasks import module_file  # it imports Question from here

    own = module_file.load(cfg, functions)
    return SimpleNamespace(**functions | own, own=frozenset(own))


def _task(cfg: TaskConfig, module: SimpleNamespace, train: Questions, heldout: list[Question]) -> Task:
    """Bind a module's functions and questions to a configuration."""
    sets = {"training": train, "heldout": heldout if isinstance(heldout, Questions) else Questions(heldout)}
    said = {
        line: role
        for role, questions in reversed(sets.items())  # list a warning about a shared file once
        for line in [*questions.warnings, *_contradictions(questions)]
    }
    further = module.weights(cfg) if hasattr(module, "weights") else {}
    return Task(
        name=label(cfg),
        instruction=cfg.instruction,
        train=train,
        heldout=heldout,
        weights={"format": cfg.format_reward, "answer": cfg.answer_reward} | further,
        grade=module.grade,
        format_reward_for=cfg.format_reward_for,
        warnings=tuple(f"{role} questions: {line}" for line, role in said.items()),
        data={f"{role}_{key}": value for role, questions in sets.items() for key, value in _summary(questions).items()},
    )


def _contradictions(questions: Sequence[Question]) -> list[str]:
    """Return a warning if the same question has different reference answers, one of which must be wrong."""
    first = dict[str, Question]()
    pairs = [(first.setdefault(wording(one.prompt), one), one) for one in questions]
    differ = [(one, other) for one, other in pairs if wording(one.answer) != wording(other.answer)]
    if not differ:
        return []
    one, other = differ[0]
    return [
        f"{len(differ):,} have another known answer than the same question before them; the first: {other.id} has "
        f"{other.answer!r:.40}, and {one.id} has {one.answer!r:.40}"
    ]


def _summary(questions: Questions) -> dict[str, Any]:
    """Return what the record stores about questions: number, rows left out, and SHA-256 of their content."""
    digest = hashlib.sha256()
    for one in questions:
        content = [one.id, one.prompt, one.answer, dict(one.payload)]
        digest.update(json.dumps(content, sort_keys=True).encode() + b"\n")
    left_out = sum(one.count for one in questions.left_out)
    return {"questions": len(questions), "rows_left_out": left_out, "sha256": digest.hexdigest()}


def is_heldout(key: str, one_in: int = 8) -> bool:
    """Return whether the question with this key is held out: a fixed share, decided by SHA-256.

    The split depends on the question, not on a draw, so training and held-out sets are disjoint for every seed, size
    and process.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % one_in == 0
