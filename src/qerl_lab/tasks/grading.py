"""The paper's two scores: whether a completion keeps the format, and whether its final answer is right."""

from collections.abc import Sequence

from qerl_lab.tasks.answers.completion import final_answer, keeps_format
from qerl_lab.tasks.questions import UNPARSED, Question, Scores

Pair = tuple[str, str]  # (final answer, reference answer)
SECONDS = 3.0  # CPU time limit of one comparison by math-verify; it usually takes 0.02


def grade_math(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """Return scores "format", "answer" and "unparsed", each 0 or 1, shape [len(texts)].

    Answers are right if they are equal as mathematics (docs/answers.md). Pairs that `answers_equal` cannot decide count
    as wrong and as unparsed. Equal pairs are compared once.
    """
    import numpy as np  # imported here, because checking a command does not need it

    pairs = [(final_answer(text), question.answer) for text, question in zip(texts, questions, strict=True)]
    asked = list(dict.fromkeys((given, known) for given, known in pairs if given is not None))
    verdicts: dict[tuple[str | None, str], bool | None] = dict(zip(asked, answers_equal(asked), strict=True))
    return {
        "format": np.array([keeps_format(text) for text in texts], np.float64),
        "answer": np.array([verdicts.get(pair, False) is True for pair in pairs], np.float64),
        UNPARSED: np.array([verdicts.get(pair, False) is None for pair in pairs], np.float64),
    }


def answers_equal(pairs: Sequence[Pair]) -> list[bool | None]:
    """Return for each pair of final and reference answer whether they are equal.

    None if that cannot be decided, or not within SECONDS.
    """
    from qerl_lab.tasks.answers.judge import Verdict, judge  # imported here, because it imports mpmath
    from qerl_lab.tasks.answers.surface import plain
    from qerl_lab.tasks.sandbox import call_each

    verdicts = [judge(*pair) for pair in pairs]
    hard = [n for n, verdict in enumerate(verdicts) if verdict is Verdict.LIBRARY]
    calls = [tuple(map(plain, pairs[n])) for n in hard]
    found = dict(zip(hard, call_each("qerl_lab.tasks.answers.library", "is_equal", calls, SECONDS), strict=True))
    decided = {Verdict.RIGHT: True, Verdict.WRONG: False, Verdict.UNREADABLE: None}
    return [found[n] if n in found else decided[verdict] for n, verdict in enumerate(verdicts)]
