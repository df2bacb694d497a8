"""Questions, rows that could not become questions, and the split into training and held-out questions."""

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

    `payload` holds further data, such as the tests for a program or a worked solution.
    """

    id: str
    prompt: str
    answer: str
    payload: Mapping[str, Any] = field(default_factory=dict, hash=False)


class BadRow(ValueError):
    """A row that cannot become a question. The message lacks a subject, because the location of the row precedes it.

    An example is "has no 'answer'", reported as "FILE:3 has no 'answer'".
    """


@dataclass(frozen=True)
class LeftOut:
    """A summary of rows left out: how many (`count`) of all `rows`, and location and error of the first such row."""

    count: int
    rows: int
    first: str

    def __str__(self) -> str:
        return f"{self.count:,} of {self.rows:,} rows are bad and left out; the first: {self.first}"

    def check(self, remedy: str) -> None:
        """Raise ConfigError if over 1% of the rows were left out, because then the file or its columns are wrong.

        The advice `remedy` ends the error message.
        """
        if self.count > 0.01 * self.rows:
            raise ConfigError(f"{self}, and more than 1% is an error. {remedy}")


class Questions(list[Question]):
    """A list of questions, with summaries of rows left out (`left_out`) and notes for the user (`notes`)."""

    def __init__(self, questions: Iterable[Question], left_out: Sequence[LeftOut] = (), notes: Sequence[str] = ()):
        super().__init__(questions)
        self.left_out, self.notes = [rows for rows in left_out if rows.count], list(notes)

    @classmethod
    def of(cls, questions: list[Question]) -> "Questions":
        """Return Questions unchanged, and a plain list as Questions without summaries and notes."""
        return questions if isinstance(questions, Questions) else cls(questions)


def label(cfg: TaskConfig) -> str:
    """Return the task's display name: `cfg.name`, or the file name without .py of `cfg.module` if that is set."""
    return Path(cfg.module).stem if cfg.module else cfg.name


def wording(text: str) -> str:
    """Return the text in lower case, without whitespace. Questions of equal wording are never split.

    They are either all for training or all held out.
    """
    return "".join(text.casefold().split())


def is_heldout(key: str, one_in: int = 8) -> bool:
    """Tell whether the question identified by the text `key` is held out: one in `one_in` is, chosen by SHA-256.

    The choice is the same in every run.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % one_in == 0
