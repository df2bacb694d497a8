"""MATH-500: 500 test problems of MATH (hendrycks/math, MIT) chosen by openai/prm800k. For evaluation only.

Columns `problem`, `answer` (LaTeX) and `unique_id`.
"""

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import Question
from qerl_lab.tasks.data import Row, Source, read
from qerl_lab.tasks.grading import grade_math as grade

__all__ = ["SOURCE", "grade", "heldout"]

SOURCE = Source(
    "HuggingFaceH4/MATH-500", "default", None, "test", {"question": "problem", "answer": "answer", "id": "unique_id"}
)


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return all 500 problems."""
    return read(cfg, SOURCE, True, _question)


def _question(id: str, row: Row) -> Question:
    return Question(id, row.text("question"), row.latex("answer"))
