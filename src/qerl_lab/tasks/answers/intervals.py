"""Compare sets of real numbers: intervals, inequalities, unions, differences.

An end point is a number where an interval of either set begins or ends. Two sets are equal if they agree on every end
point, on one number between each two neighbouring end points, and on one number beyond the first and the last.
"""

from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from qerl_lab.tasks.answers.expression import Node, Op, Sym, names
from qerl_lab.tasks.answers.forms import Amount, Form, Relation, Several
from qerl_lab.tasks.answers.tokens import Unreadable
from qerl_lab.tasks.answers.value import Value, close, is_finite, is_less, is_real, to_mpmath, value

OPPOSITE = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


def same_set(left: Form, right: Form) -> bool:
    """Tell whether two forms describe the same set of real numbers.

    False if a form is no such set, if inequalities bound different variables, or if neither is an inequality, a union
    or a difference: `(1, 2)` alone may be a point.
    """
    is_sure = any(
        isinstance(form, Relation) or (isinstance(form, Several) and form.kind in ("or", "minus"))
        for form in (left, right)
    )
    if not is_sure or len(_bounded_terms(left) | _bounded_terms(right)) > 1:
        return False
    try:
        ends = [end for end in _ends(left) + _ends(right) if is_finite(end)]
    except Unreadable:
        return False
    if not all(isinstance(end, Fraction) for end in ends):
        ends = [*map(to_mpmath, ends)]
    ends.sort()
    between = [(low + high) / 2 for low, high in pairwise(ends)]
    # In proportion to the ends, because 10^50 + 1 is 10^50 to 40 digits.
    outside = [ends[0] - abs(ends[0]) - 1, ends[-1] + abs(ends[-1]) + 1] if ends else [0]
    return all(_contains(left, at) == _contains(right, at) for at in ends + between + outside)


def _bounded_terms(form: Form) -> frozenset[Node]:
    """Return the terms that inequalities in a form bound, such as `x` in `x < 3` and `|x| < 3`; empty without any."""
    if isinstance(form, Several):
        return frozenset().union(*map(_bounded_terms, form.parts))
    sides = filter(names, form.sides) if isinstance(form, Relation) else ()
    return frozenset(side.args[0] if isinstance(side, Op) and side.name == "abs" else side for side in sides)


def _ends(form: Form) -> list[Value]:
    """Return the numbers where the intervals of a set begin or end, unsorted, infinity included.

    For a set such as {1, 2} it returns the elements, and for an inequality also the negatives, which are ends of
    |x| < 3. Raises Unreadable if the form is no set of real numbers.
    """
    if isinstance(form, Relation):
        numbers = [side for side in form.sides if not names(side)]
        is_variable = all(
            isinstance(term, Sym) or (isinstance(term, Op) and term.name == "call") for term in _bounded_terms(form)
        )
        if "=" in form.signs or len(form.sides) - len(numbers) != 1 or not is_variable:
            raise Unreadable("no inequality for one variable")
        ends = [_number(Amount(side)) for side in numbers]
        return [*ends, *(-end for end in ends)]
    if not isinstance(form, Several):
        raise Unreadable("no set")
    if form.kind in ("or", "minus"):
        return [end for part in form.parts for end in _ends(part)]
    if form.kind[:1] not in ("(", "[", "{"):
        raise Unreadable("no set")
    ends = [_number(part) for part in form.parts]
    if form.kind == "{}":
        if not all(map(is_finite, ends)):
            raise Unreadable("no set of numbers")
        return ends
    closed = [end for end, bracket in zip(ends, form.kind, strict=False) if bracket in "[]"]
    if len(ends) != 2 or not is_less(*ends) or not all(map(is_finite, closed)):
        raise Unreadable("no interval")
    return ends


@lru_cache(maxsize=1024)  # called again for each test point
def _number(form: Form) -> Value:
    """Return the real number that a form stands for. Raises Unreadable if it is none, or has a percent sign."""
    if isinstance(form, Amount) and not names(form.node) and not form.percent:
        number = value(form.node, {})
        if is_real(number):
            return number.real
    raise Unreadable("no real number")


def _contains(form: Form, at: Value) -> bool:
    """Tell whether the number `at` belongs to the set `form`. Call only if `_ends(form)` did not raise Unreadable."""
    if isinstance(form, Relation):
        bounded = dict.fromkeys(_bounded_terms(form), at)
        sides = [bounded.get(side, abs(at)) if names(side) else _number(Amount(side)) for side in form.sides]
        return all(map(_is_true, sides, form.signs, sides[1:]))
    assert isinstance(form, Several)
    if form.kind == "or":
        return any(_contains(part, at) for part in form.parts)
    if form.kind == "minus":
        return _contains(form.parts[0], at) and not any(_contains(part, at) for part in form.parts[1:])
    ends = [_number(part) for part in form.parts]
    if form.kind == "{}":
        return any(close(at, end) for end in ends)
    signs = ["<=" if bracket in "[]" else "<" for bracket in form.kind]
    return _is_true(ends[0], signs[0], at) and _is_true(at, signs[1], ends[1])


def _is_true(left: Value, sign: str, right: Value) -> bool:
    """Tell whether `left sign right` holds for two real numbers; `sign` is a key of OPPOSITE."""
    if close(left, right):
        return "=" in sign and sign != "!="
    return sign == "!=" or is_less(left, right) == ("<" in sign)
