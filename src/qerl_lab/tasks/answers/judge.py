"""Decide whether a given answer equals the known one, or leave the pair to math-verify."""

import re
from enum import Enum

from qerl_lab.tasks.answers import number
from qerl_lab.tasks.answers.equality import equal
from qerl_lab.tasks.answers.forms import Form, Named, Relation, Several, Words
from qerl_lab.tasks.answers.reading import read
from qerl_lab.tasks.answers.surface import MAX_ANSWER_CHARACTERS, compact, plain
from qerl_lab.tasks.answers.tokens import Unreadable

MAX_LIBRARY_CHARACTERS = 300
_LIBRARY_MACROS = re.compile(
    r"\\(?:sum|prod|i+nt|oint|lim|sup|inf|max|min|gcd|lcm|cup|cap|setminus|bmod|pmod|mod|det|begin)(?![A-Za-z])"
)
_NOT_FOR_LIBRARY = re.compile(r"[A-Za-z]{4}|[eE][-+]?\d{3}|\d{40}|\^\s*\{?\s*-?\d{4}|[!@]")


class Verdict(Enum):
    """What `judge` decides about two answers."""

    RIGHT = "right"
    WRONG = "wrong"
    UNREADABLE = "unreadable"  # an answer cannot be parsed or evaluated: graded wrong, and counted
    LIBRARY = "library"  # left to math-verify


def judge(given: str, known: str) -> Verdict:
    """Compare the answer text `given` with the reference answer `known`. Raises nothing.

    A text over MAX_ANSWER_CHARACTERS is UNREADABLE, so that hostile text takes little work.
    """
    left, right = number(given), number(known)
    if left is not None and right is not None:
        return Verdict.RIGHT if left == right else Verdict.WRONG
    if max(len(given), len(known)) > MAX_ANSWER_CHARACTERS:
        return Verdict.UNREADABLE
    given, known = plain(given), plain(known)
    if given and compact(given) == compact(known):
        return Verdict.RIGHT
    form, gold = _form(given), _form(known)
    if form is not None and gold is not None:
        try:
            return Verdict.RIGHT if equal(form, gold) else Verdict.WRONG
        except (Unreadable, RecursionError):
            return Verdict.UNREADABLE
    if isinstance(form, Words) or isinstance(gold, Words):
        return Verdict.WRONG if form is not None else Verdict.UNREADABLE
    is_for_library = _is_for_library(form, given) and _is_for_library(gold, known)
    return Verdict.LIBRARY if is_for_library else Verdict.UNREADABLE


def _form(text: str) -> Form | None:
    """Parse a text that `plain` has normalized; None if it cannot be read."""
    try:
        return read(text)
    except (Unreadable, RecursionError):
        return None


def _is_for_library(form: Form | None, text: str) -> bool:
    """Tell whether math-verify may read `text`: it is short, and has no prose and no huge numbers.

    `form` is the parsed text, which must be an expression or a matrix. If it is None, because parsing failed, `text`
    must have one of _LIBRARY_MACROS, such as a sum. Prose is refused, because math-verify picks a number out of it and
    drops words as units.
    """
    form = form.form if isinstance(form, Named) else form
    if isinstance(form, Named | Relation) or (isinstance(form, Several) and form.brackets != "[]"):
        return False
    letters = re.sub(r"\\(?:begin|end)\s*\{[a-z]+\}|\\[A-Za-z]+", " ", text)
    if len(text) > MAX_LIBRARY_CHARACTERS or _NOT_FOR_LIBRARY.search(letters) or "\\text" in text:
        return False
    return form is not None or _LIBRARY_MACROS.search(text) is not None
