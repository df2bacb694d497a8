"""BigMath (levels 3-5 in the paper, 4-5 for its 32B model): competition problems whose answers are LaTeX.

open-r1/Big-Math-RL-Verified-Processed has a configuration for each choice of `task.bigmath.levels`, and its rows have
no level. Of local rows those with a column `level` are chosen by it, and those without are all taken.

The set has no test split, so one question in 64 is held out by the hash of its text, whatever its blanks and case. The
paper's final benchmarks (MATH-500, AIME, AMC) are tasks of their own.
"""

from dataclasses import replace

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import BadRow, Question, Questions
from qerl_lab.tasks.data import Row, Source, read
from qerl_lab.tasks.grading import grade_math as grade

__all__ = ["SOURCE", "grade", "heldout", "train"]

SOURCE = Source(
    "open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5", "train", None, {"question": "prompt", "answer": "solution"}
)
CONFIGS = {"3-5": "level_3_4_5", "4-5": "level_4_5", "all": "all"}


def train(cfg: TaskConfig) -> list[Question]:
    """The problems outside the held-out share."""
    return _questions(cfg, of_heldout=False)


def heldout(cfg: TaskConfig) -> list[Question]:
    """The held-out share."""
    return _questions(cfg, of_heldout=True)


def _questions(cfg: TaskConfig, of_heldout: bool) -> Questions:
    levels, without = cfg.bigmath.levels, 0

    def make(id: str, row: Row) -> Question | None:
        nonlocal without
        without += "level" not in row.values
        chosen = levels == "all" or "level" not in row.values or _level(row.values["level"]) >= int(levels[0])
        return Question(id, row.text("question"), row.latex("answer")) if chosen else None

    found = read(cfg, replace(SOURCE, hub_config=CONFIGS[levels]), of_heldout, make)
    if without and levels != "all" and cfg.path is not None:
        found.notes.append(
            f"{without:,} rows have no level, so that task.bigmath.levels={levels} left none of them out"
        )
    return found


def _level(value: object) -> int:
    """5 of 5, "5", "Level 5", and 5.0, as a column of numbers with gaps has it."""
    text = str(value).removeprefix("Level ").removesuffix(".0")
    if text not in ("1", "2", "3", "4", "5"):
        raise BadRow(f"has the level {value!r}; levels are 1 to 5")
    return int(text)
