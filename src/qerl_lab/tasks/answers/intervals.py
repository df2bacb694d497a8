"""Compare sets of real numbers: intervals, inequalities, unions, differences.

An end point is a number where an interval of either set begins or ends. Two sets are equal if they agree on every end
point, on one number between each two neighbouring end points, and on one number beyond the first and the last.
"""

from functools import lru_cache
from itertools import pairwise

from qerl_lab.tasks.answers.expression import Node, Op, Sym, names
from qerl_lab.tasks.answers.forms import Amount, Form, Relation, Several
from qerl_lab.tasks.answers.tokens import Unreadable
from qerl_lab.tasks.answers.value import INFINITY, Value, close, is_finite, is_real, real, value

OPPOSITE = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}


def same_set(left: Form, right: Form) -> bool:
    """Tell whether two forms describe the same set of real numbers.

    False if a form is no such set, if both together have more than one variable, or if none of the two is an
    inequality, a union or a difference: `(1, 2)` alone may be a point.
    """
    if not (_is_set(left) or _is_set(right)) or len(_variables(left) | _variables(right)) > 1:
        return False
    try:
        ends = sorted(end for end in _ends(left) + _ends(right) if is_finite(end))
    except Unreadable:
        return False
    between = [(low + high) / 2 for low, high in pairwise(ends)]
    outside = [ends[0] - 1, ends[-1] + 1] if ends else [real(0)]
    return all(_contains(left, at) == _contains(right, at) for at in ends + between + outside)


def interval(relation: Relation) -> Several | None:
    """Convert an inequality to an interval: `-2 < x <= 7` to (-2, 7], `x > 3` to (3, infinity); else return None."""
    sides, signs = relation.sides, relation.signs
    if signs[0] in (">", ">="):
        sides, signs = sides[::-1], tuple(OPPOSITE[sign] for sign in signs[::-1])
    if any(sign not in ("<", "<=") for sign in signs) or len(sides) not in (2, 3):
        return None
    if len(sides) == 2:
        bounded_above = bool(names(sides[0]))
        sides = (Op("neg", (INFINITY,)), *sides) if bounded_above else (*sides, INFINITY)
        signs = ("<", *signs) if bounded_above else (*signs, "<")
    low, variable, high = sides
    if names(low) or names(high) or not names(variable) or (isinstance(variable, Op) and variable.name != "call"):
        return None
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Several(brackets, (Amount(low), Amount(high)))


def _is_set(form: Form) -> bool:
    """Tell whether a form surely denotes a set: an equation, an inequality, a union or a difference.

    `(1, 2)` is not sure, because it may be an interval or a point.
    """
    return isinstance(form, Relation) or (isinstance(form, Several) and form.brackets in ("or", "minus"))


def _variables(form: Form) -> frozenset[str]:
    """Return the variables of all equations and inequalities in a form; empty if there are none."""
    parts = map(_variables, form.parts) if isinstance(form, Several) else ()
    return frozenset().union(*parts, *(map(names, form.sides) if isinstance(form, Relation) else ()))


def _ends(form: Form) -> list[Value]:
    """Return the numbers where the intervals of a set begin or end, unsorted, infinity included.

    Of a set such as {1, 2} these are its elements. Of an inequality each number is returned with both signs, because
    |x| < 3 ends at -3 and 3. Raises Unreadable if the form is no set of real numbers, or if an end has variables.
    """
    if isinstance(form, Relation):
        numbers = [side for side in form.sides if not names(side)]
        if "=" in form.signs or len(form.sides) - len(numbers) != 1 or not any(map(_is_variable, form.sides)):
            raise Unreadable("no inequality for one variable")
        ends = [_number(Amount(side)) for side in numbers]
        return [*ends, *(-end for end in ends)]  # both are ends of |x| < 3
    if isinstance(form, Several) and form.brackets in ("or", "minus"):
        return [end for part in form.parts for end in _ends(part)]
    if not isinstance(form, Several) or form.brackets[:1] not in ("(", "[", "{"):
        raise Unreadable("no set")
    ends = [_number(part) for part in form.parts]
    if form.brackets == "{}":
        return ends
    closed = [end for end, bracket in zip(ends, form.brackets, strict=False) if bracket in "[]"]
    if len(ends) != 2 or ends[0] >= ends[1] or not all(map(is_finite, closed)):
        raise Unreadable("no interval")
    return ends


@lru_cache(maxsize=1024)  # called again for each test point
def _number(form: Form) -> Value:
    """Return the real number that a form stands for: an end of an interval, or an element of a set.

    Raises Unreadable if the form has variables or a percent sign, or if its value is no real number.
    """
    if isinstance(form, Amount) and not names(form.node) and not form.percent:
        number = real(value(form.node, {}))
        if is_real(number):
            return number.real
    raise Unreadable("no real number")


def _is_variable(node: Node) -> bool:
    """Tell whether an expression is a variable `x` or its absolute value `|x|`."""
    node = node.args[0] if isinstance(node, Op) and node.name == "abs" else node
    return isinstance(node, Sym) and bool(names(node))


def _contains(form: Form, at: Value) -> bool:
    """Tell whether the number `at` belongs to the set `form`. Call only if `_ends(form)` did not raise Unreadable."""
    if isinstance(form, Relation):
        sides = [real(value(side, dict.fromkeys(names(side), at))).real for side in form.sides]
        return all(map(_is_true, sides, form.signs, sides[1:]))
    assert isinstance(form, Several)
    if form.brackets == "or":
        return any(_contains(part, at) for part in form.parts)
    if form.brackets == "minus":
        return _contains(form.parts[0], at) and not any(_contains(part, at) for part in form.parts[1:])
    ends = [_number(part) for part in form.parts]
    if form.brackets == "{}":
        return any(close(at, end) for end in ends)
    signs = ["<=" if bracket in "[]" else "<" for bracket in form.brackets]
    return _is_true(ends[0], signs[0], at) and _is_true(at, signs[1], ends[1])


def _is_true(left: Value, sign: str, right: Value) -> bool:
    """Tell whether `left sign right` holds for two real numbers; `sign` is a key of OPPOSITE."""
    if close(left, right):
        return "=" in sign and sign != "!="
    return sign == "!=" or (left < right) == ("<" in sign)
