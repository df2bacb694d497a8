"""DAPO-Math-17k: about 17,000 competition problems with integer answers, the training set of DAPO (2503.14476).

BytedTsinghua-SIA/DAPO-Math-17k repeats every row about a hundred times; repeats count once. Each problem stands between
two sentences that ask for a last line `Answer: ...`. They are removed, because `task.instruction` asks for another
format. The dataset has no test split, so one question in 64 is held out by a hash of its text, ignoring whitespace and
case.
"""

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import BadRow, Question
from qerl_lab.tasks.data import Row, Source, as_text, read
from qerl_lab.tasks.grading import grade_math as grade

__all__ = ["SOURCE", "grade", "heldout", "train"]

SOURCE = Source(
    "BytedTsinghua-SIA/DAPO-Math-17k", "default", "train", None,
    {"question": "prompt", "answer": "reward_model.ground_truth", "id": "extra_info.index"}, repeats=True,
    file="dapo-math-17k",
)  # fmt: skip
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def train(cfg: TaskConfig) -> list[Question]:
    """Return the problems outside the held-out share."""
    return read(cfg, SOURCE, False, _question)


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return the held-out share."""
    return read(cfg, SOURCE, True, _question)


def _question(id: str, row: Row) -> Question:
    prompt = _problem(row).removeprefix(BEFORE).removesuffix(AFTER)
    return Question(id, as_text(prompt, row.columns["question"]), row.number("answer"))


def _problem(row: Row) -> str:
    """Return the last message of a chat, or a plain text unchanged. Raises BadRow."""
    column, value = row.columns["question"], row.value("question")
    if not isinstance(value, list):
        return as_text(value, column)
    last = value[-1] if value else None
    if not isinstance(last, dict) or last.get("role") != "user":
        raise BadRow(f"has no message of a user at the end of {column!r}")
    return as_text(last.get("content"), column)
