"""BigMath (levels 3-5 in the paper, 4-5 for its 32B model): competition problems with LaTeX answers.

open-r1/Big-Math-RL-Verified-Processed has a configuration for each value of `task.bigmath.levels`; its rows have no
level. Local rows with a column `level` are filtered by it; rows without are all used.

The dataset has no test split, so one question in 64 is held out by a hash of its text, ignoring whitespace and case.
The paper's final benchmarks (MATH-500, AIME, AMC) are separate tasks.
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
    """Return the problems outside the held-out share."""
    return _questions(cfg, of_heldout=False)


def heldout(cfg: TaskConfig) -> list[Question]:
    """Return the held-out share."""
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
    """Parse a level: 5, "5", "Level 5", or 5.0 from a numeric column with gaps. Raises BadRow."""
    text = str(value).removeprefix("Level ").removesuffix(".0")
    if text not in ("1", "2", "3", "4", "5"):
        raise BadRow(f"has the level {value!r}; levels are 1 to 5")
    return int(text)
