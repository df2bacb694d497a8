"""Count the questions of a task on this machine, and refuse a run that asks for more than it can go without.

Imports no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from qerl_lab import tasks
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import build_config
from qerl_lab.config.schema import RunConfig, TaskConfig
from qerl_lab.tasks import arithmetic, question_files


def check(cfg: RunConfig) -> list[str]:
    """Return the task's warnings, such as rows left out, and notes if the run asks for more questions than exist.

    Counts nothing if the questions are not on this machine. Raises ConfigError for a task that is for evaluation only,
    a blank task.path, or too few questions to train on or to evaluate.
    """
    tasks.check_trains(cfg.task)
    if cfg.task.path is not None and not cfg.task.path.strip():
        raise ConfigError("task.path= is empty; allowed: a directory, a file or a hub id. Leave task.path out.")
    if not are_questions_here(cfg):
        return []
    if cfg.task == replace(TaskConfig(), instruction=cfg.task.instruction):  # skips a count that takes half a second
        return note_cut_questions(cfg, arithmetic.TRAIN_QUESTIONS, arithmetic.HELDOUT_QUESTIONS)
    found = _load_task(json.dumps(asdict(cfg.task)))
    return [*found.warnings, *note_cut_questions(cfg, len(found.train), len(found.heldout))]


def recorded_questions(cfg: RunConfig) -> Mapping[str, Any]:
    """Return what a run records about its local files of questions, such as hashes; empty if it has none."""
    lie_here = cfg.task.path is not None and question_files.is_local(cfg.task.path)
    return _load_task(json.dumps(asdict(cfg.task))).data if lie_here else {}


def are_questions_here(cfg: RunConfig) -> bool:
    """Tell whether a run's questions are on this machine, so that they can be counted."""
    path = cfg.task.path
    return not tasks.is_on_the_hub(cfg.task) if path is None else question_files.is_local(path)


@cache
def _load_task(task: str) -> tasks.Task:
    """Load a task whose questions are on this machine, from its configuration as JSON. Cached."""
    return tasks.load(build_config({"task": json.loads(task)}).task)


def note_cut_questions(cfg: RunConfig, train: int, heldout: int) -> list[str]:
    """Return a note for each number of questions above the available `train` and `heldout` ones.

    Raises ConfigError if there are too few to train on or to evaluate.
    """
    more = "a larger task.arithmetic.max_operand" if cfg.task.name == "arithmetic" else "another task.path"
    keys = [f"task.{key}={given}" for key in ("module", "path") if (given := getattr(cfg.task, key))]
    source = keys[0] if keys else f"task={cfg.task.name} at this difficulty"
    if train == 0:
        raise ConfigError(f"{source} has no training question. Type {more}.")
    if (unasked := overrides_without_evaluation(cfg)) and heldout < 2:
        remedy = "Add some to test.jsonl, or type" if cfg.task.path else f"Type {more}, or"
        raise ConfigError(
            f"{source} has {heldout} held-out questions, and an evaluation needs two. {remedy} {unasked}."
        )
    said = []
    if cfg.eval.questions > heldout:
        said.append(f"eval.questions={cfg.eval.questions}: there are {heldout:,}, all of them are asked")
    if cfg.task.train_questions > train:
        said.append(f"task.train_questions={cfg.task.train_questions}: there are {train:,}, all of them are used")
    return said


def overrides_without_evaluation(cfg: RunConfig) -> str:
    """Return the overrides that switch off held-out evaluation, in one text; empty if it is off."""
    return " ".join(f"eval.{key}=0" for key in ("questions", "every") if getattr(cfg.eval, key))
