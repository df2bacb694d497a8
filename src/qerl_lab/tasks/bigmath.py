"""BigMath (levels 3-5 in the paper): competition problems whose answers are LaTeX, compared by math-verify.

`task.path` is a local directory with train.jsonl (fields `prompt`, `solution`) or a hub id; null is the paper's
open-r1/Big-Math-RL-Verified-Processed. The set has no test split, so one question in 64 is held out by the hash of
its text. The paper's final benchmarks (MATH500, AIME, AMC) are not part of this task.
"""

from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import Question, is_heldout
from qerl_lab.tasks.data import read_rows
from qerl_lab.tasks.grading import grade_math as grade

__all__ = ["grade", "heldout", "train"]

HUB_ID, HUB_CONFIG = "open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5"


def train(cfg: TaskConfig) -> list[Question]:
    """The problems outside the held-out share; the first `cfg.train_questions` of them, or all for 0."""
    return _questions(cfg, of_heldout=False)[: cfg.train_questions or None]


def heldout(cfg: TaskConfig) -> list[Question]:
    """The held-out share."""
    return _questions(cfg, of_heldout=True)


def _questions(cfg: TaskConfig, of_heldout: bool) -> list[Question]:
    rows = read_rows(cfg.path or HUB_ID, "train", columns=("prompt", "solution"), hub_config=HUB_CONFIG)
    questions = (Question(f"bigmath-{n}", row["prompt"], row["solution"]) for n, row in enumerate(rows))
    return [question for question in questions if is_heldout(question.prompt, one_in=64) == of_heldout]
