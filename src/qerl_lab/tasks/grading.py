"""The paper's two scores: whether a completion keeps the format, and whether its final answer is right."""

from collections.abc import Sequence

from qerl_lab.tasks.answers.completion import final_answer, keeps_format
from qerl_lab.tasks.questions import UNPARSED, Question, Scores


def grade_math(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """Return the scores "format", "answer" and "unparsed" of completions, each 0 or 1 and of shape [len(texts)].

    An answer is right if it equals the reference answer as mathematics (docs/answers.md). If this cannot be decided,
    the answer counts as wrong and as unparsed. Identical pairs of answer and reference are compared once.
    """
    import numpy as np  # imported here, because checking a command does not need it

    from qerl_lab.tasks.answers.judge import judge  # likewise: it imports mpmath

    pairs = [(final_answer(text), question.answer) for text, question in zip(texts, questions, strict=True)]
    verdicts = {(given, known): given is not None and judge(given, known) for given, known in dict.fromkeys(pairs)}
    return {
        "format": np.array([keeps_format(text) for text in texts], np.float64),
        "answer": np.array([verdicts[pair] is True for pair in pairs], np.float64),
        UNPARSED: np.array([verdicts[pair] is None for pair in pairs], np.float64),
    }
