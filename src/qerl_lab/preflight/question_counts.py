"""Count the questions of a run's task, as far as they are on this machine, and refuse a run with too few.

Imports no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from qerl_lab import tasks
from qerl_lab.config.message import with_noun
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import build_config
from qerl_lab.config.schema import POCKET, RunConfig
from qerl_lab.config.task import ARITHMETIC
from qerl_lab.tasks import question_files, question_sets


def check(cfg: RunConfig) -> list[str]:
    """Return notes to print: on a task unfit for the model, rows left out, and settings with too many questions.

    Counts only questions that are on this machine. Raises ConfigError for a task that is for evaluation only, or too
    few questions to train on or to evaluate.
    """
    tasks.check_trains(cfg.task)
    has_own_questions = cfg.task.module is not None and not tasks.is_on_the_hub(cfg.task)
    notes = list[str]()
    if cfg.model.path == POCKET and cfg.task.name != ARITHMETIC and not has_own_questions:
        notes.append(
            f"model={POCKET} was trained on task={ARITHMETIC} alone: expect no right answer to task={cfg.task.name}, "
            "and nothing to learn but the format. "
            "Type scale=smollm2, or scale=custom model.path=DIR, for a language model"
        )
    if not are_questions_here(cfg):
        return notes
    task = _load_task(json.dumps(asdict(cfg.task)))
    return [*notes, *task.warnings, *check_counts(cfg, len(task.train), len(task.heldout))]


def recorded_questions(cfg: RunConfig) -> Mapping[str, Any]:
    """Return what a run records about its questions, such as their number and SHA-256 by role (`data` of env.json).

    Empty unless task.path is a local path.
    """
    if cfg.task.path is None or not question_files.is_local(cfg.task.path):
        return {}
    return _load_task(json.dumps(asdict(cfg.task))).data


def are_questions_here(cfg: RunConfig) -> bool:
    """Tell whether a run's questions are on this machine, so that they can be counted."""
    path = cfg.task.path
    return not tasks.is_on_the_hub(cfg.task) if path is None else question_files.is_local(path)


@cache
def _load_task(task: str) -> tasks.Task:
    """Load a task from its configuration section `task` as JSON. Cached, hence JSON: a dict has no hash."""
    return tasks.load(build_config({"task": json.loads(task)}).task)


def check_counts(cfg: RunConfig, train: int, heldout: int) -> list[str]:
    """Check that `train` training and `heldout` held-out questions are enough for a run.

    Returns a note for each setting that asks for more questions than exist. Raises ConfigError if there is none to
    train on, or if an evaluation has fewer than two.
    """
    more = "a larger task.arithmetic.max_operand" if cfg.task.name == ARITHMETIC else "another task.path"
    keys = [f"task.{key}={given}" for key in ("path", "module") if (given := getattr(cfg.task, key))]
    source = keys[0] if keys else f"task={cfg.task.name} at this difficulty"
    if train == 0:
        is_made_by_file = cfg.task.module and not cfg.task.path
        remedy = "Let its function train return some." if is_made_by_file else f"Type {more}."
        raise ConfigError(f"{source} has no training question. {remedy}")
    if (unasked := overrides_without_evaluation(cfg)) and heldout < 2:
        remedy = f"Type {more}, or"
        if cfg.task.path:
            remedy = f"Add {_what_to_add(cfg.task.name, Path(cfg.task.path).expanduser())}, or type"
        elif cfg.task.module:
            remedy = "Let its function heldout return more, or type"
        raise ConfigError(
            f"{source} has {with_noun(heldout, 'held-out question')}, and an evaluation needs two. {remedy} {unasked}."
        )
    notes = []
    if cfg.eval.questions > heldout:
        notes.append(f"eval.questions={cfg.eval.questions}: there are {heldout:,}, all of them are asked")
    if cfg.task.train_questions > train:
        notes.append(f"task.train_questions={cfg.task.train_questions}: there are {train:,}, all of them are used")
    return notes


def _what_to_add(task: str, path: Path) -> str:
    """Return what to add to `path` so that more questions are held out, as words for an error message."""
    source = question_sets.SOURCES.get(task)
    if path.is_file() or (source and source.test is None and not question_files.has_test_file(str(path), source)):
        return f"rows, of which one in {question_files.ONE_IN} is held out"
    return "some to test.jsonl"


def overrides_without_evaluation(cfg: RunConfig) -> str:
    """Return the overrides that switch off held-out evaluation, as one text; empty if the run has no evaluation."""
    return " ".join(f"eval.{key}=0" for key in ("questions", "every") if getattr(cfg.eval, key))
