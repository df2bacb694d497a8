"""A task or a reward of the user's own: `task.module=FILE.py`, whose functions take the place of the task's.

The file is imported in the process of the run, and may do what the user may do.
"""

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import module_hash
from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import Question, Scores

NAMES = ("train", "heldout", "grade", "weights", "worked")
PARTS = ("format", "answer", "unparsed")  # what every `grade` may return


def load(cfg: TaskConfig) -> dict[str, Callable[..., Any]]:
    """The functions that the file of `cfg.module` defines, by name, each with a check of what it returns.

    Raises ConfigError where the file cannot be imported, defines none of them, or is not the one that the run was
    composed with.
    """
    assert cfg.module is not None
    if cfg.module_hash not in (None, found := module_hash(cfg.module)):
        raise ConfigError(
            f"task.module={cfg.module} was another file when the run was composed (task.module_hash={cfg.module_hash}, "
            f"now {found}). Put it back as it was, or start a new run."
        )
    module = _imported(Path(cfg.module))
    functions = {name: getattr(module, name) for name in NAMES if callable(getattr(module, name, None))}
    if not functions:
        raise ConfigError(f"task.module={cfg.module} defines none of {', '.join(NAMES)}. docs/tasks.md shows one.")
    for role in {"train", "heldout", "worked"} & set(functions):
        functions[role] = _questions(cfg, role, functions[role])
    if "grade" in functions:
        parts = set(functions["weights"](cfg)) if "weights" in functions else set()
        functions["grade"] = _grade(cfg, functions["grade"], {*PARTS, *parts})
    return functions


def _imported(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"qerl_lab_task_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file does when it is imported
        raise ConfigError(
            f"task.module={file} cannot be imported: {type(error).__name__}: {first_line(error)}"
        ) from error
    return module


def _questions(cfg: TaskConfig, name: str, function: Callable[..., Any]) -> Callable[[TaskConfig], list[Question]]:
    def checked(of: TaskConfig) -> list[Question]:
        found = function(of)
        if not isinstance(found, list) or not all(isinstance(one, Question) for one in found):
            raise ConfigError(f"task.module={cfg.module}: {name}(cfg) must return a list of qerl_lab.tasks.Question.")
        if len({one.id for one in found}) < len(found):
            raise ConfigError(f"task.module={cfg.module}: {name}(cfg) returned two questions of one id.")
        return found

    return checked


def _grade(cfg: TaskConfig, function: Callable[..., Any], parts: set[str]) -> Callable[..., Scores]:
    def checked(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
        import numpy as np

        said = f"task.module={cfg.module}: grade(texts, questions)"
        given = function(texts, questions)
        if not isinstance(given, dict) or not {"format", "answer"} <= set(given):
            raise ConfigError(f"{said} must return a dict of scores with the keys format and answer.")
        if unknown := sorted(set(given) - parts):
            raise ConfigError(
                f"{said} returned {', '.join(unknown)}, for which weights(cfg) of the file has no weight."
            )
        scores = {part: np.asarray(values, np.float64) for part, values in given.items()}
        for part, values in scores.items():
            if values.shape != (len(texts),) or not ((values >= 0) & (values <= 1)).all():
                raise ConfigError(f"{said} must return in {part!r} a score from 0 to 1 for each of the texts.")
        return scores

    return checked
