"""Grade completions: do they keep the paper's format, is the final answer right, and how much do answers vary?

`judge` says what "right" means, step by step; docs/answers.md has the rules with examples.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from decimal import Decimal

from qerl_lab.tasks import sandbox
from qerl_lab.tasks.answers.completion import final_answer, keeps_format
from qerl_lab.tasks.answers.forms import Form, Named, Relation, Several, Words
from qerl_lab.tasks.answers.reading import read
from qerl_lab.tasks.answers.surface import MAX_ANSWER_CHARACTERS, compact, plain
from qerl_lab.tasks.answers.tokens import Unreadable
from qerl_lab.tasks.questions import UNPARSED, Question, Scores

MAX_DIGITS = 1000  # a longer text is no plain number
_NUMBER = re.compile(r"([-+]?)\s*(?:\\?\$\s*)?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)", re.ASCII)
LIBRARY_SECONDS = 3.0  # CPU time limit of one comparison by math-verify; it usually takes 0.02
MAX_LIBRARY_CHARACTERS = 300
_LIBRARY_MACROS = re.compile(r"\\(?:sum|prod|i+nt|oint|lim|sup|inf|max|min|cup|cap|setminus|det|begin)(?![A-Za-z])")
_NOT_FOR_LIBRARY = re.compile(r"[A-Za-z]{4}|[eE][-+]?\d{3}|\d{40}|\^\s*\{?\s*-?\d{4}|[!@]")
# math-verify compares only one side of a relation. A sign in braces is a bound, as in \sum_{k=1}; but not in \{ \}.
_RELATION = re.compile(r"(?:[=<>]|\\(?:[lg]e|ne|equiv|mod|in|approx)(?![A-Za-z]))(?![^{}]*(?<!\\)\})")


def grade_math(texts: Sequence[str], questions: Sequence[Question]) -> Scores:
    """Return the scores "format", "answer" and "unparsed" of completions, each 0 or 1 and of shape [len(texts)].

    An answer is right if it equals the reference answer as mathematics (docs/answers.md). If this cannot be decided,
    the answer counts as wrong and as unparsed. Identical pairs of answer and reference are compared once.
    """
    import numpy as np  # imported here, because checking a command does not need it

    pairs = [(final_answer(text), question.answer) for text, question in zip(texts, questions, strict=True)]
    verdicts = {
        (given, reference): given is not None and judge(given, reference) for given, reference in dict.fromkeys(pairs)
    }
    return {
        "format": np.array([keeps_format(text) for text in texts], np.float64),
        "answer": np.array([verdicts[pair] is True for pair in pairs], np.float64),
        UNPARSED: np.array([verdicts[pair] is None for pair in pairs], np.float64),
    }


def judge(given: str, reference: str) -> bool | None:
    """Tell whether the answer text `given` equals the reference answer as mathematics.

    The first step that applies decides:

    1. Two plain numbers are compared exactly (`number`). The references of GSM8K and AIME are plain numbers.
    2. Two texts are equal if their spelling is the same once it is normalized (answers/surface.py).
    3. If both can be parsed (answers/reading.py), their forms are compared (answers/equality.py): expressions by value,
       a list in any order, a point in order.
    4. If only one can be parsed, and it is words: wrong if that is `given`, undecided if it is `reference`.
    5. math-verify compares what only math-verify reads, such as integrals (answers/library.py).

    Returns None if this cannot be decided: an answer cannot be parsed or evaluated, or math-verify fails or takes over
    LIBRARY_SECONDS of CPU time. A text over MAX_ANSWER_CHARACTERS is not parsed, so that hostile text takes little
    work. Raises RuntimeError if math-verify is needed and cannot be imported.
    """
    left, right = number(given), number(reference)
    if left is not None and right is not None:
        return left == right
    if max(len(given), len(reference)) > MAX_ANSWER_CHARACTERS:
        return None
    given, reference = plain(given), plain(reference)
    if given and compact(given) == compact(reference):
        return True
    given_form, reference_form = read(given), read(reference)
    if given_form is not None and reference_form is not None:
        from qerl_lab.tasks.answers.equality import equal  # imports mpmath, which checking a command does not need

        try:
            return equal(given_form, reference_form)
        except (Unreadable, RecursionError):
            return None
    if isinstance(given_form, Words):
        return False
    if isinstance(reference_form, Words):
        return None
    if _is_for_library(given_form, given) and _is_for_library(reference_form, reference):
        found: bool | None = sandbox.call(
            "qerl_lab.tasks.answers.library", "is_equal", (given, reference), LIBRARY_SECONDS
        )
        return found
    return None


def number(text: str) -> Decimal | None:
    """Parse a text that is one number, such as "-1,234.5", "$3" or "7.", exactly; return None for any other text.

    Nothing around the number is skipped, because a second number, an exponent or a word can change its value. A text
    over MAX_DIGITS characters gives None too.
    """
    text = text.strip().replace("\N{MINUS SIGN}", "-")
    found = _NUMBER.fullmatch(text.removesuffix(".")) if len(text) <= MAX_DIGITS else None
    return Decimal(found[1] + found[2].replace(",", "")) if found else None


def answer_entropy(completions: Iterable[str]) -> float:
    """Return the entropy in nats of the final answers to one question, at most log(len(completions)).

    Two answers are the same if they are equal numbers, or else equal normalized texts. All completions without a final
    answer count as one answer.
    """
    import numpy as np  # both imported here, because checking a command does not need them
    from scipy.special import entr

    counts = Counter[Decimal | str]()
    for completion in completions:
        text = final_answer(completion) or ""
        answer: Decimal | str | None = number(text)
        if answer is None:
            answer = compact(plain(text)) if len(text) <= MAX_ANSWER_CHARACTERS else text
        counts[answer] += 1
    shares = np.array([*counts.values()]) / counts.total()
    return float(entr(shares).sum())


def _is_for_library(form: Form | None, text: str) -> bool:
    """Tell whether math-verify may read `text`: it is short, and has no relation, no prose and no huge numbers.

    `form` is the parsed text, which must be an expression or a matrix. If it is None, because parsing failed, `text`
    must have one of _LIBRARY_MACROS, such as a sum. Prose is refused, because math-verify picks a number out of it and
    drops words as units.
    """
    form = form.form if isinstance(form, Named) else form
    if isinstance(form, Named | Relation) or (isinstance(form, Several) and form.kind != "[]"):
        return False
    letters = re.sub(r"\\(?:begin|end)\s*\{[a-z]+\}|\\[A-Za-z]+", " ", text)
    if len(text) > MAX_LIBRARY_CHARACTERS or _NOT_FOR_LIBRARY.search(letters):
        return False
    if "\\text" in text or _RELATION.search(text):
        return False
    return form is not None or _LIBRARY_MACROS.search(text) is not None
