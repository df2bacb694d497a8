"""Custom tasks and rewards: functions in `task.module=FILE.py` replace functions of the task.

The file is imported into the run's process with the user's permissions.
"""

import importlib.util
import json
import math
import reprlib
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import module_hash
from qerl_lab.config.schema import TaskConfig
from qerl_lab.record.metrics import METRICS
from qerl_lab.tasks.questions import UNPARSED, Question, Questions, Scores

NAMES = ("train", "heldout", "grade", "weights", "worked")
PARTS = ("format", "answer", UNPARSED)  # parts that every `grade` may return
# Columns that evaluations put beside the parts of the reward. mypy finds an evaluation with a column that is not here.
Column = Literal["benchmark", "engine", "sampling", "prompt_sha256", "id", "answer", "draw", "accuracy", "format",
                 "tokens", "truncated", "completion", "entropy_nats"]  # fmt: skip


class GraderFailed(RuntimeError):
    """The user's function `grade` raised an error, which is the cause of this one and may be a bug in the function.

    Not a ValueError, because commands print a ValueError in one line, and finding a bug needs its traceback.
    """


def load(cfg: TaskConfig, of_task: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """Return the functions defined in the file `cfg.module`, by name, wrapped to check their results.

    `of_task` maps names to the functions that the task has without the file; its `weights` apply if the file defines
    none. Raises ConfigError if the file cannot be imported, breaks the contract in docs/tasks.md, or has changed since
    the run was composed.
    """
    assert cfg.module is not None
    if cfg.module_hash is not None and not Path(cfg.module).exists():
        raise ConfigError(
            f"task.module={cfg.module} was the file of task.module_hash={cfg.module_hash} when the run was composed, "
            "and is gone. Put that file there; a link to it will do."
        )
    found = module_hash(cfg.module)
    if cfg.module_hash not in (None, found):
        raise ConfigError(
            f"task.module={cfg.module} was another file when the run was composed (task.module_hash={cfg.module_hash}, "
            f"now {found}). Put it back as it was, or start a new run."
        )
    spec = importlib.util.spec_from_file_location(f"qerl_lab_task_{Path(cfg.module).stem}", cfg.module)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # a dataclass or a pickle looks up the module of its class there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # importing the file can raise anything
        del sys.modules[spec.name]
        raise ConfigError(
            f"task.module={cfg.module} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from error
    functions = {name: getattr(module, name) for name in NAMES if callable(getattr(module, name, None))}
    if not functions:
        raise ConfigError(f"task.module={cfg.module} defines none of {', '.join(NAMES)}. docs/tasks.md shows one.")
    notes, there = list[str](), [name for name in ("train", "heldout") if name in functions]
    if len(there) == 1:  # the other name may be misspelled
        missing, role = ("heldout", "held-out") if there == ["train"] else ("train", "training")
        notes = [
            f"{cfg.module} defines {there[0]} but not {missing}: the {role} questions are those of task={cfg.name}"
        ]
    for name in {"train", "heldout", "worked"} & set(functions):
        where = f"task.module={cfg.module}: {name}(cfg)"
        functions[name] = partial(_checked_questions, where, functions[name], notes, name == "worked")
    if "weights" in functions and "grade" not in functions:
        raise ConfigError(f"task.module={cfg.module} defines weights without grade. Define grade too.")
    if "grade" in functions:
        weights = functions.get("weights") or of_task.get("weights")
        parts = _weighted_parts(cfg, weights) if weights else set()
        functions["grade"] = partial(_checked_grade, cfg.module, functions["grade"], parts, "weights" in functions)
    return functions


def _result_of(where: str, function: Callable[..., Any], cfg: TaskConfig) -> Any:
    """Return `function(cfg)`, a call into the user's file; turn its ValueError, OSError or exit into a ConfigError.

    The message begins with `where`, the name of the call, and has the line of the error.
    """
    try:
        return function(cfg)
    except ConfigError:  # of a function of the lab that the file calls
        raise
    except (ValueError, OSError, SystemExit) as error:
        raise ConfigError(f"{where} raised {_describe_error(error, str(cfg.module))}.") from error


def _weighted_parts(cfg: TaskConfig, weights: Callable[..., Any]) -> set[str]:
    """Check the result of `weights(cfg)`, and return the names of the parts in it.

    Raises ConfigError unless the result is a dict of finite numbers by name. A name may not be in PARTS, may not be a
    column of evaluations (`Column`), and `reward/NAME` may not be a metric already.
    """
    where = f"task.module={cfg.module}: weights(cfg)"
    given = _result_of(where, weights, cfg)
    if not isinstance(given, dict) or not all(
        isinstance(part, str) and isinstance(weight, int | float) and math.isfinite(weight)
        for part, weight in given.items()
    ):
        raise ConfigError(f"{where} must return a dict of a number for each part, and returned {given!r:.80}.")
    known = {*PARTS, *get_args(Column)}
    if taken := sorted(part for part in given if part in known or f"reward/{part}" in METRICS):
        raise ConfigError(
            f"{where} weighs {', '.join(taken)}, the name of another part, of another metric or of a column of "
            "evaluations. Rename the part; format and answer have the keys task.format_reward and task.answer_reward."
        )
    return set(given)


def _checked_questions(
    where: str, function: Callable[..., Any], notes: Sequence[str], needs_solution: bool, cfg: TaskConfig
) -> list[Question]:
    """Return the questions of the user's `function(cfg)`, as `Questions` with `notes` added to its notes.

    `where` names the function in error messages. With `needs_solution` each payload must have a text `solution`.
    Raises ConfigError for invalid questions or equal ids.
    """
    questions = _result_of(where, function, cfg)
    if not isinstance(questions, list) or not all(isinstance(question, Question) for question in questions):
        raise ConfigError(f"{where} must return a list of qerl_lab.tasks.Question.")
    for question in questions:
        try:
            json.dumps(payload := dict(question.payload))
            solution: Any = payload.get("solution") if needs_solution else ""
            "".join((question.id, question.prompt, question.answer, solution))  # raises TypeError for what is no text
        except (TypeError, ValueError) as error:
            with_solution = ", with the text of a solution" if needs_solution else ""
            raise ConfigError(
                f"{where} returned the question {question.id!r:.80}; its id, prompt and answer must be text, and "
                f"its payload what JSON holds{with_solution}: {first_line(error)}."
            ) from error
    if twice := [id for id, count in Counter(question.id for question in questions).items() if count > 1]:
        raise ConfigError(f"{where} returned two questions with the id {twice[0]!r:.80}. Give each an id of its own.")
    known = Questions.of(questions)
    return Questions(known, known.rows_left_out, [*known.notes, *notes])


def _checked_grade(
    module: str, function: Callable[..., Any], weighted: set[str], are_required: bool,
    texts: Sequence[str], questions: Sequence[Question],
) -> Scores:  # fmt: skip
    """Return the scores of `function(texts, questions)`, where `function` is `grade` of the user's file `module`.

    Raises GraderFailed if `function` raises, and ConfigError unless each part of the result is one score from 0 to 1
    per text. Parts in PARTS and `weighted` are allowed. "format" and "answer" are required, and all of `weighted` if
    `are_required`.
    """
    import numpy as np

    where = f"task.module={module}: grade(texts, questions)"
    try:
        given = function([*texts], [*questions])  # copies, because the caller uses its lists again
    except (Exception, SystemExit) as error:  # the user's code can raise anything
        raise GraderFailed(f"{where} raised {_describe_error(error, module)}.") from error
    required = {"format", "answer", *(weighted if are_required else ())}
    if not isinstance(given, dict) or not required <= set(given) <= {*PARTS, *weighted}:
        keys = f"the keys {', '.join(map(str, given)) or 'none'}" if isinstance(given, dict) else f"{given!r:.80}"
        raise ConfigError(
            f"{where} must return a dict of scores with the keys format, answer and those of weights(cfg), here "
            f"{', '.join(sorted(weighted)) or 'none'}; and returned {keys}."
        )
    scores: Scores = {}
    for part, values in given.items():
        asked = f"{where} must return in {part!r} a score from 0 to 1 for each of the texts, here {len(texts)}"
        try:
            scores[part] = np.asarray(values, np.float64).copy()  # the function may write to its array in a later call
        except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor that needs a gradient
            scores[part] = np.array(np.nan)
        if scores[part].shape != (len(texts),):
            raise ConfigError(f"{asked}, and returned {reprlib.repr(values)}.")
        wrong = ~((scores[part] >= 0) & (scores[part] <= 1))  # also NaN
        if wrong.any():
            at = int(wrong.argmax())
            raise ConfigError(
                f"{asked}, and returned {scores[part][at]:g} for text {at + 1}, an answer to question "
                f"{questions[at].id}."
            )
    return scores


def _describe_error(error: BaseException, module: str) -> str:
    """Format an error that the user's file `module` raised, with the number of the line that raised or led to it."""
    file = str(Path(module).absolute())
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"{type(error).__name__}: {first_line(error)}" + (f" (line {lines[-1]})" if lines else "")
