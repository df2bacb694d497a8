"""AIME 2024, both papers: 30 problems with integer answers from 0 to 999. For evaluation only.

Columns `problem`, `answer` and `id`; the dataset's only split is named train.
"""

import re

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import BadRow, Question
from qerl_lab.tasks.data import Row, Source, read
from qerl_lab.tasks.grading import grade_math as grade

__all__ = ["SOURCE", "grade", "heldout"]

SOURCE = Source(
    "HuggingFaceH4/aime_2024", "default", None, "train", {"question": "problem", "answer": "answer", "id": "id"}
)


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return all 30 problems."""
    return read(cfg, SOURCE, True, question)


def question(id: str, row: Row) -> Question:
    """Make an AIME question of any year from a row."""
    return Question(id, row.text("question"), _whole_number(row))


def _whole_number(row: Row) -> str:
    """Return the answer, an integer from 0 to 999. Raises BadRow."""
    gold = row.number_or_text("answer")
    if re.fullmatch(r"[0-9]{1,3}", gold) is None:
        raise BadRow(f"has no whole number from 0 to 999 in {row.columns['answer']!r}: {gold[:80]!r}")
    return gold
