"""The two scores of the paper: is the asked format kept, and is the final answer right."""

from collections.abc import Callable, Sequence

from qerl_lab.tasks import UNPARSED, Question, Scores
from qerl_lab.tasks.answers.completion import final_answer, keeps_format

Pair = tuple[str, str]  # a final answer, and the known one
SECONDS = 3.0  # CPU time of one comparison by math-verify; a usual one takes 0.02


def grade_answers(
    texts: Sequence[str], questions: Sequence[Question], equal: Callable[[list[Pair]], Sequence[bool | None]]
) -> Scores:
    """Scores "format", "answer" and "unparsed", each 0 or 1 a text, shape [len(texts)].

    Args:
        equal: of each pair of a final answer and the known one, whether they are equal; None where that cannot be
            said, which counts as wrong and as unparsed. It sees no pair twice.
    """
    import numpy as np  # here: checking a command imports tasks too, and should not wait for it

    pairs = [(final_answer(text), question.answer) for text, question in zip(texts, questions, strict=True)]
    asked = list(dict.fromkeys((given, known) for given, known in pairs if given is not None))
    verdicts: dict[tuple[str | None, str], bool | None] = dict(zip(asked, equal(asked), strict=True))
    return {
        "format": np.array([keeps_format(text) for text in texts], np.float64),
        "answer": np.array([verdicts.get(pair, False) is True for pair in pairs], np.float64),
        UNPARSED: np.array([verdicts.get(pair, False) is None for pair in pairs], np.float64),
    }


def grade_math(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """`grade_answers` by equality as docs/answers.md has it; what takes longer than SECONDS to compare is wrong."""
    return grade_answers(texts, questions, answers_equal)


def answers_equal(pairs: Sequence[Pair]) -> list[bool | None]:
    """Of each pair whether its two answers are equal; None where that cannot be said, or not in time."""
    from qerl_lab.tasks.answers.judge import Verdict, judge, spellings  # here, as numpy: they import mpmath
    from qerl_lab.tasks.sandbox import call_each

    verdicts = [judge(*pair) for pair in pairs]
    hard = [n for n, verdict in enumerate(verdicts) if verdict is Verdict.LIBRARY]
    calls = [spellings(*pairs[n]) for n in hard]
    found = dict(zip(hard, call_each("qerl_lab.tasks.answers.library", "is_equal", calls, SECONDS), strict=True))
    decided = {Verdict.RIGHT: True, Verdict.WRONG: False, Verdict.UNREADABLE: None}
    return [found[n] if n in found else decided[verdict] for n, verdict in enumerate(verdicts)]
