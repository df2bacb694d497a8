"""Decide whether a given answer equals the known one; where this package cannot, ask math-verify."""

import re

from qerl_lab.tasks import sandbox
from qerl_lab.tasks.answers import number
from qerl_lab.tasks.answers.equality import equal
from qerl_lab.tasks.answers.forms import Form, Named, Relation, Several, Words
from qerl_lab.tasks.answers.reading import read
from qerl_lab.tasks.answers.surface import MAX_ANSWER_CHARACTERS, compact, plain
from qerl_lab.tasks.answers.tokens import Unreadable

SECONDS = 3.0  # CPU time limit of one comparison by math-verify; it usually takes 0.02
MAX_LIBRARY_CHARACTERS = 300
_LIBRARY_MACROS = re.compile(
    r"\\(?:sum|prod|i+nt|oint|lim|sup|inf|max|min|gcd|lcm|cup|cap|setminus|bmod|pmod|mod|det|begin)(?![A-Za-z])"
)
_NOT_FOR_LIBRARY = re.compile(r"[A-Za-z]{4}|[eE][-+]?\d{3}|\d{40}|\^\s*\{?\s*-?\d{4}|[!@]")


def judge(given: str, known: str) -> bool | None:
    """Tell whether the answer text `given` equals the reference answer `known` as mathematics.

    None if this cannot be decided: an answer cannot be parsed or evaluated, or math-verify fails or takes over SECONDS
    of CPU time. A text over MAX_ANSWER_CHARACTERS is not parsed, so that hostile text takes little work. Raises
    RuntimeError if math-verify is needed and cannot be imported.
    """
    left, right = number(given), number(known)
    if left is not None and right is not None:
        return left == right
    if max(len(given), len(known)) > MAX_ANSWER_CHARACTERS:
        return None
    given, known = plain(given), plain(known)
    if given and compact(given) == compact(known):
        return True
    form, gold = _form(given), _form(known)
    if form is not None and gold is not None:
        try:
            return equal(form, gold)
        except (Unreadable, RecursionError):
            return None
    if isinstance(form, Words) or isinstance(gold, Words):
        return None if form is None else False
    if _is_for_library(form, given) and _is_for_library(gold, known):
        found: bool | None = sandbox.call("qerl_lab.tasks.answers.library", "is_equal", (given, known), SECONDS)
        return found
    return None


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
