"""AMC 12 of 2023: 40 problems with numeric answers. For evaluation only.

Columns `question`, `answer` (27.0 is 27) and `id`.
"""

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import Question
from qerl_lab.tasks.data import Row, Source, read
from qerl_lab.tasks.grading import grade_math as grade

__all__ = ["SOURCE", "grade", "heldout"]

SOURCE = Source("math-ai/amc23", "default", None, "test", {"question": "question", "answer": "answer", "id": "id"})


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return all 40 problems."""
    return read(cfg, SOURCE, True, _question)


def _question(id: str, row: Row) -> Question:
    return Question(id, row.text("question"), row.number("answer"))
