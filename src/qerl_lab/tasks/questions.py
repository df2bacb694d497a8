"""Questions, the rows that could not become one, and the split into training and held-out questions."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import TaskConfig

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

    def __str__(self) -> str:
        return f"{self.count:,} of {self.rows:,} rows are bad and left out; the first: {self.first}"

    def check(self, remedy: str) -> None:
        """Raise ConfigError, which ends with `remedy`, if over 1% of the rows are bad: then the columns are wrong."""
        if self.count > 0.01 * self.rows:
            raise ConfigError(f"{self}, and more than 1% is an error. {remedy}")


class Questions(list[Question]):
    """Questions, the rows left out, and notes for the user."""

    def __init__(self, questions: Iterable[Question], left_out: Sequence[LeftOut] = (), notes: Sequence[str] = ()):
        super().__init__(questions)
        self.left_out, self.notes = [some for some in left_out if some.count], list(notes)


def label(cfg: TaskConfig) -> str:
    """Return the task's display name: `cfg.name`, or the file name without .py of `cfg.module` if that is set."""
    return Path(cfg.module).stem if cfg.module else cfg.name


def wording(text: str) -> str:
    """Return the text without case and whitespace. Questions with equal wording are on the same side of a split."""
    return "".join(text.casefold().split())


def is_heldout(key: str, one_in: int = 8) -> bool:
    """Tell whether the question with the text `key` is held out, in every run: one in `one_in`, chosen by SHA-256."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % one_in == 0


def without_heldout(train: list[Question], heldout: list[Question], size: int) -> Questions:
    """Remove from `train` the questions with the `wording` of one in `heldout`; return the first `size` left (0: all).

    Counts the removed ones in `left_out` of the result. Raises ConfigError if they are more than 1% of `train`.
    """
    asked = {wording(question.prompt) for question in heldout}
    kept = [question for question in train if wording(question.prompt) not in asked]
    shared = [question for question in train if wording(question.prompt) in asked]
    leaked = LeftOut(len(shared), len(train), f"{shared[0].id} is held out too" if shared else "")
    leaked.check("Check task.path.")
    known = train if isinstance(train, Questions) else Questions(train)
    return Questions(kept[: size or None], [*known.left_out, leaked], known.notes)
