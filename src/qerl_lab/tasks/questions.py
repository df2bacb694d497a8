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


class Questions(list[Question]):
    """A list of questions, with the number of rows that were left out as bad, and notes for the user."""

    def __init__(self, questions: Iterable[Question], rows_left_out: int = 0, notes: Iterable[str] = ()):
        super().__init__(questions)
        self.rows_left_out, self.notes = rows_left_out, list(notes)

    @classmethod
    def of(cls, questions: list[Question]) -> "Questions":
        """Return Questions unchanged; convert a plain list to Questions without rows left out and without notes."""
        return questions if isinstance(questions, Questions) else cls(questions)


def note_bad_rows(bad: Sequence[str], rows: int, remedy: str) -> list[str]:
    """Return a list of one note that counts the bad rows; [] if there are none.

    `bad` has location and error of each bad row; `rows` counts all rows. Raises ConfigError if over 1% are bad, because
    then the file or its columns are wrong; `remedy` ends the message.
    """
    if not bad:
        return []
    note = f"{len(bad):,} of {rows:,} rows are bad and left out; the first: {bad[0]}"
    if len(bad) > 0.01 * rows:
        raise ConfigError(f"{note}, and more than 1% is an error. {remedy}")
    return [note]


def label(cfg: TaskConfig) -> str:
    """Return the task's display name: `cfg.name`, or the file name without .py of `cfg.module` if that is set."""
    return Path(cfg.module).stem if cfg.module else cfg.name


def wording(text: str) -> str:
    """Return the text in lower case, without whitespace. Questions of one wording are held out together, or none is."""
    return "".join(text.casefold().split())


def is_heldout(key: str, one_in: int = 8) -> bool:
    """Tell whether the question identified by the text `key` is held out: one in `one_in` is, chosen by SHA-256.

    The choice is the same in every run.
    """
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % one_in == 0
