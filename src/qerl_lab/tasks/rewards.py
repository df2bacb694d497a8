"""Rewards of the paper: a format part and an exact-answer part. Pure, and they never raise on model output."""

import re
from collections.abc import Callable

from qerl_lab.tasks.answers import final_answer

Reward = Callable[[str, str], float]
# One think block, then one answer block, and nothing else. `[^<]*`, and `<` only where no tag follows, instead of `.*?`
# keep the match linear in the length of a hostile completion.
_FORMAT = re.compile(r"\s*<think>[^<]*(?:<(?!/?think>|/?answer>)[^<]*)*</think>\s*<answer>[^<]+</answer>\s*")


def format_reward(completion: str) -> float:
    """1 if the whole completion is `<think>..</think><answer>..</answer>`, else 0.

    Stricter than the released code, which accepts the tags anywhere in any amount of other text.
    """
    return float(_FORMAT.fullmatch(completion) is not None)


def answer_reward(completion: str, answer: str, is_correct: Callable[[str, str], bool]) -> float:
    """1 if the text in the last `<answer>` equals the known answer, else 0."""
    given = final_answer(completion)
    return float(given is not None and is_correct(given, answer))
