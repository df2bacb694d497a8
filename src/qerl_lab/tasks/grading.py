"""The paper's two scores: whether a completion keeps the format, and whether its final answer is right."""

from collections.abc import Callable, Sequence

from qerl_lab.tasks.answers.completion import final_answer, keeps_format
from qerl_lab.tasks.questions import UNPARSED, Question, Scores

Pair = tuple[str, str]  # (final answer, reference answer)
SECONDS = 3.0  # CPU time limit of one comparison by math-verify; it usually takes 0.02


def grade_answers(
    texts: Sequence[str], questions: Sequence[Question], equal: Callable[[list[Pair]], Sequence[bool | None]]
) -> Scores:
    """Return scores "format", "answer" and "unparsed", each 0 or 1, shape [len(texts)].

    Args:
        equal: returns for each pair of final and reference answer whether they are equal, None if undecided, which
            counts as wrong and as unparsed. It gets no pair twice.
    """
    import numpy as np  # imported here, because checking a command does not need it

    pairs = [(final_answer(text), question.answer) for text, question in zip(texts, questions, strict=True)]
    asked = list(dict.fromkeys((given, known) for given, known in pairs if given is not None))
    verdicts: dict[tuple[str | None, str], bool | None] = dict(zip(asked, equal(asked), strict=True))
    return {
        "format": np.array([keeps_format(text) for text in texts], np.float64),
        "answer": np.array([verdicts.get(pair, False) is True for pair in pairs], np.float64),
        UNPARSED: np.array([verdicts.get(pair, False) is None for pair in pairs], np.float64),
    }


def grade_math(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """Grade with mathematical equality (docs/answers.md). Comparisons longer than SECONDS count as wrong."""
    return grade_answers(texts, questions, answers_equal)


def answers_equal(pairs: Sequence[Pair]) -> list[bool | None]:
    """Return for each pair whether its answers are equal; None if undecided or too slow."""
    from qerl_lab.tasks.answers.judge import Verdict, judge  # imported here, because it imports mpmath
    from qerl_lab.tasks.answers.surface import plain
    from qerl_lab.tasks.sandbox import call_each

    verdicts = [judge(*pair) for pair in pairs]
    hard = [n for n, verdict in enumerate(verdicts) if verdict is Verdict.LIBRARY]
    calls = [tuple(map(plain, pairs[n])) for n in hard]
    found = dict(zip(hard, call_each("qerl_lab.tasks.answers.library", "is_equal", calls, SECONDS), strict=True))
    decided = {Verdict.RIGHT: True, Verdict.WRONG: False, Verdict.UNREADABLE: None}
    return [found[n] if n in found else decided[verdict] for n, verdict in enumerate(verdicts)]
