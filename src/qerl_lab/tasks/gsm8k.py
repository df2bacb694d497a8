"""GSM8K: 7,473 training and 1,319 test problems of grade-school mathematics (openai/grade-school-math, MIT).

`task.path` is a local directory with train.jsonl and test.jsonl (fields `question`, `answer`, gold number after
`####`), or a hub id; null is openai/gsm8k on the hub.
"""

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import TaskConfig
from qerl_lab.tasks import Question
from qerl_lab.tasks.answers import number
from qerl_lab.tasks.data import read_rows
from qerl_lab.tasks.grading import grade_numbers as grade

__all__ = ["grade", "heldout", "train"]

HUB_ID, HUB_CONFIG = "openai/gsm8k", "main"


def train(cfg: TaskConfig) -> list[Question]:
    """The training problems; the first `cfg.train_questions` of them, or all for 0."""
    return _questions(cfg, "train")[: cfg.train_questions or None]


def heldout(cfg: TaskConfig) -> list[Question]:
    """The official test problems."""
    return _questions(cfg, "test")


def _questions(cfg: TaskConfig, split: str) -> list[Question]:
    rows = read_rows(cfg.path or HUB_ID, split, columns=("question", "answer"), hub_config=HUB_CONFIG)
    return [
        Question(f"gsm8k-{split}-{n}", row["question"], _gold(row["answer"], split, n)) for n, row in enumerate(rows)
    ]


def _gold(answer: str, split: str, row: int) -> str:
    gold = answer.rpartition("####")[2].strip()
    if "####" not in answer or number(gold) is None:
        raise ConfigError(f"GSM8K {split} row {row} has no number after `####`: {answer[-80:]!r}. Check task.path.")
    return gold.replace(",", "")
