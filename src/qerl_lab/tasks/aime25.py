"""AIME 2025, both papers: 30 problems with integer answers from 0 to 999. For evaluation only.

Columns `problem`, `answer` and `id`.
"""

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import Question
from qerl_lab.tasks.aime24 import question
from qerl_lab.tasks.data import Source, read
from qerl_lab.tasks.grading import grade_math as grade

__all__ = ["SOURCE", "grade", "heldout"]

SOURCE = Source("math-ai/aime25", "default", None, "test", {"question": "problem", "answer": "answer", "id": "id"})


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return all 30 problems."""
    return read(cfg, SOURCE, True, question)
