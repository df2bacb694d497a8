"""Tasks: questions with exact answers, and grading, selected by `task.name`.

A task has these functions, defined in `question_sets` or in a module `qerl_lab.tasks.NAME`. Functions of the same names
in the user's file `task.module` replace them.

    train(cfg) -> list[Question]         training questions; missing in a task for evaluation only
    heldout(cfg) -> list[Question]       never in training, disjoint by construction
    grade(texts, questions) -> Scores    one score per completion for each part
    worked(cfg) -> list[Question]        training questions with a worked solution in payload["solution"]; missing in a
                                         task without solutions
    weights(cfg) -> dict[str, float]     reward weights of the parts that `grade` returns beside "format" and "answer";
                                         missing if there are no such parts
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf

from qerl_lab.config.conf_folder import choices_of, group_folder
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import module_file, question_sets
from qerl_lab.tasks.answers.completion import has_thought
from qerl_lab.tasks.questions import (
    UNPARSED,
    BadRow,
    Question,
    Questions,
    Scores,
    is_heldout,
    label,
    note_bad_rows,
    wording,
)

__all__ = ["UNPARSED", "BadRow", "Question", "Scores", "Task", "is_heldout"]

Grade = Callable[[Sequence[str], Sequence[Question]], Scores]


@dataclass(frozen=True)
class Task:
    """A configured task: its questions, the function that grades answers, and the reward weights.

    `grade(texts, questions)` maps each part of the reward, such as "answer", to scores from 0 to 1, of shape
    [len(texts)]. The scores depend on the arguments alone. `grade` does not raise on any model output; an answer that
    takes too long to check gets score 0. Every task has the parts "format" and "answer", because evaluations read them.
    `weights` holds the reward weight of every part except UNPARSED.
    """

    name: str
    instruction: str
    train: list[Question]
    heldout: list[Question]
    weights: dict[str, float]
    grade: Grade
    format_reward_for: str = "any"
    warnings: tuple[str, ...] = ()  # messages for the user, such as the number of rows left out
    data: Mapping[str, Any] = field(default_factory=dict, hash=False)  # description stored in the record

    def messages(self, question: Question) -> list[dict[str, str]]:
        """Return the chat for a question: the instruction as system message (if any), then the question."""
        system = [{"role": "system", "content": self.instruction}] if self.instruction else []
        return [*system, {"role": "user", "content": question.prompt}]

    def weighted(self, scores: Scores, texts: Sequence[str]) -> Scores:
        """Multiply the scores of each part by its reward weight. The sum over the parts is the reward of each text.

        `scores` is the result of `grade` for `texts`. The part UNPARSED is dropped. "format" becomes 0 for texts
        without a thought if `format_reward_for` is "thought", and for texts with a wrong answer if it is "right".
        """
        parts = {part: self.weights[part] * score for part, score in scores.items() if part != UNPARSED}
        if self.format_reward_for == "thought":
            parts["format"] = parts["format"] * [has_thought(text) for text in texts]
        elif self.format_reward_for == "right":
            parts["format"] = parts["format"] * (scores["answer"] == 1)
        return parts


def load(cfg: TaskConfig, training: str | None = "train") -> Task:
    """Read the questions of the task `cfg.name`, and build the Task that grades their answers.

    `training` chooses the training questions: "train" for reinforcement learning; "worked" for supervised training,
    each with a solution in `payload["solution"]`; None for evaluation, without any. Training questions that are also
    held out are removed, then the first `cfg.train_questions` (0: all) are kept. Raises ConfigError if over 1% are
    removed, if questions cannot be read, or if the task has no questions of the kind `training`.
    """
    functions = _functions(cfg, training)
    train = Questions.of(functions[training](cfg) if training else [])
    heldout = Questions.of(functions["heldout"](cfg))
    asked = {wording(question.prompt) for question in heldout}
    kept = [question for question in train if wording(question.prompt) not in asked]
    shared = [f"{question.id} is held out too" for question in train if wording(question.prompt) in asked]
    remedy = "Check task.path." if cfg.path or not cfg.module else f"Check train and heldout in {cfg.module}."
    notes = [*train.notes, *note_bad_rows(shared, len(train), remedy)]
    train = Questions(kept[: cfg.train_questions or None], train.rows_left_out + len(shared), notes)
    sets = {"training": train, "heldout": heldout}
    if repeated := len(heldout) - len(asked):
        heldout.notes.append(f"{repeated:,} of {len(heldout):,} repeat another, and intervals count each as a new one")
    # note -> role of the questions; a note on a file that both share is listed once
    roles = dict.fromkeys(heldout.notes, "heldout") | dict.fromkeys(train.notes, "training")
    further = functions["weights"](cfg) if "weights" in functions else {}
    return Task(
        name=label(cfg),
        instruction=cfg.instruction,
        train=train,
        heldout=heldout,
        weights={"format": cfg.format_reward, "answer": cfg.answer_reward} | further,
        grade=functions["grade"],
        format_reward_for=cfg.format_reward_for,
        warnings=tuple(f"{role} questions: {note}" for note, role in roles.items()),
        data={f"{role}_{key}": value for role, questions in sets.items() for key, value in _summary(questions).items()},
    )


def read_task_config(name: str, **given: Any) -> TaskConfig:
    """Read conf/task/NAME.yaml as a TaskConfig. Values in `given` replace the file's values of the same keys.

    Raises ConfigError if a key is unknown or a value is not allowed.
    """
    written = OmegaConf.to_container(OmegaConf.load(group_folder("task") / f"{name}.yaml"))
    return from_dict({"task": {**written, **given}}).task  # type: ignore[dict-item]


def names_with(function: str) -> tuple[str, ...]:
    """List the built-in tasks that define `function`, for example "worked"."""
    return tuple(name for name in choices_of("task") if function in _functions(TaskConfig(name=name), None))


def check_trains(cfg: TaskConfig) -> None:
    """Raise ConfigError if the task has no function `train`, because it is for evaluation only. Reads no questions."""
    _functions(cfg, "train")


def is_on_the_hub(cfg: TaskConfig) -> bool:
    """Tell whether the task reads questions from the Hugging Face hub if task.path is not set.

    Raises ConfigError if the user's file `task.module` cannot be used.
    """
    functions = module_file.load(cfg, {}) if cfg.module else {}
    return cfg.name in question_sets.SOURCES and not {"train", "heldout"} <= functions.keys()


def makes_questions(cfg: TaskConfig) -> bool:
    """Tell whether the user's file `task.module` has a function that returns questions.

    Such a function may read task.path. Raises ConfigError if the file cannot be used.
    """
    return bool({"train", "heldout", "worked"} & module_file.load(cfg, {}).keys())


def _functions(cfg: TaskConfig, needed: str | None) -> dict[str, Callable[..., Any]]:
    """Return the functions of a task by name, such as "heldout"; the user's file `task.module` can replace them.

    `needed` is the function that must be among them: "train", "worked" for a warm-up, or None. Raises ConfigError if it
    is missing, if the file defines "train" without a needed "worked", or if the file cannot be used.
    """
    if cfg.name in question_sets.SOURCES:
        functions = question_sets.functions(cfg.name)
    else:
        module = vars(importlib.import_module(f"qerl_lab.tasks.{cfg.name}"))
        functions = {name: module[name] for name in module_file.NAMES if name in module}
    if cfg.module:
        functions |= (own := module_file.load(cfg, functions))
        if needed == "worked" and "train" in own and "worked" not in own:
            raise ConfigError(
                f"task.module={cfg.module} defines train but not worked: the solutions would be those of other "
                'questions. Define worked(cfg), which returns questions with payload["solution"].'
            )
    if needed is None or needed in functions:
        return functions
    raise ConfigError(
        f"task={cfg.name} is for evaluation only: a policy trained on it could not be judged by it. Type one to train "
        f"on: task={', '.join(names_with(needed))}; or python -m qerl_lab.evaluate accuracy run=RUN_DIR "
        f"benchmarks={cfg.name}."
    )


def _summary(questions: Questions) -> dict[str, Any]:
    """Describe questions for the run's record: how many, how many rows were left out, SHA-256 of their contents."""
    digest = hashlib.sha256()
    for question in questions:
        content = [question.id, question.prompt, question.answer, dict(question.payload)]
        digest.update(json.dumps(content, sort_keys=True).encode() + b"\n")
    return {"questions": len(questions), "rows_left_out": questions.rows_left_out, "sha256": digest.hexdigest()}
