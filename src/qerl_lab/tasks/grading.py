"""The paper's two scores: whether a completion keeps the format, and whether its final answer is right."""

from collections.abc import Sequence

from qerl_lab.tasks.answers.completion import final_answer, keeps_format
from qerl_lab.tasks.questions import UNPARSED, Question, Scores

Pair = tuple[str, str]  # (final answer, reference answer)
SECONDS = 3.0  # CPU time limit of one comparison by math-verify; it usually takes 0.02


def grade_math(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """Return the scores "format", "answer" and "unparsed" of completions, each 0 or 1 and of shape [len(texts)].

    An answer is right if it equals the reference answer as mathematics (docs/answers.md). If this cannot be decided,
    the answer counts as wrong and as unparsed. Identical pairs of answer and reference are compared once.
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
    """Tell for each pair of final answer and reference answer whether both are equal as mathematics.

    None if this cannot be decided: an answer cannot be parsed, or math-verify fails or takes over SECONDS of CPU time.
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
