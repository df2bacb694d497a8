"""The two scores of the paper: is the asked format kept, and is the final answer right."""

import re
from collections.abc import Callable, Sequence

from qerl_lab.tasks import Question, Scores
from qerl_lab.tasks.answers import final_answer, numbers_equal
from qerl_lab.tasks.sandbox import call_each

Pair = tuple[str, str]  # a final answer, and the known one
SECONDS = 4.0  # CPU time of one comparison by math-verify; a usual one takes 0.02
# One think block, then one answer block, and nothing else. `[^<]*`, and `<` only where no tag follows, instead of `.*?`
# keep the match linear in the length of a hostile completion.
_FORMAT = re.compile(r"\s*<think>[^<]*(?:<(?!/?think>|/?answer>)[^<]*)*</think>\s*<answer>[^<]+</answer>\s*")


def keeps_format(completion: str) -> bool:
    """Whether the whole completion is `<think>..</think><answer>..</answer>`.

    Stricter than the released code, which accepts the tags anywhere in any amount of other text.
    """
    return _FORMAT.fullmatch(completion) is not None


def grade_answers(
    texts: Sequence[str], questions: Sequence[Question], equal: Callable[[list[Pair]], Sequence[bool]]
) -> Scores:
    """Scores "format" and "answer", each 0 or 1 a text, shape [len(texts)].

    Args:
        equal: of each pair of a final answer and the known one, whether they are equal. It sees no pair twice.
    """
    import numpy as np  # here: checking a command imports tasks too, and should not wait for it

    pairs = [(final_answer(text), question.answer) for text, question in zip(texts, questions, strict=True)]
    given = list(dict.fromkeys((answer, known) for answer, known in pairs if answer is not None))
    right = {pair for pair, is_equal in zip(given, equal(given), strict=True) if is_equal}
    return {
        "format": np.array([keeps_format(text) for text in texts], np.float64),
        "answer": np.array([pair in right for pair in pairs], np.float64),
    }


def grade_numbers(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """`grade_answers` where the final answer is one number, compared exactly."""
    return grade_answers(texts, questions, lambda pairs: [numbers_equal(*pair) for pair in pairs])


def grade_math(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """`grade_answers` by mathematical equality; an answer that takes longer than SECONDS to compare is wrong."""
    return grade_answers(texts, questions, lambda pairs: call_each("qerl_lab.tasks.latex", "is_equal", pairs, SECONDS))
