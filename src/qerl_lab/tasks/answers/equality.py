"""Compare the forms of two answers. Every rule is symmetric."""

import re
from contextlib import suppress
from fractions import Fraction

from qerl_lab.tasks.answers.expression import Node, Num, Op, names, read_expression
from qerl_lab.tasks.answers.forms import Amount, Form, Named, Relation, Several, Words
from qerl_lab.tasks.answers.intervals import OPPOSITE, same_set
from qerl_lab.tasks.answers.tokens import Unreadable
from qerl_lab.tasks.answers.value import (
    POINTS,
    close,
    divide,
    exact_values,
    is_finite,
    is_real,
    is_rounded,
    point,
    to_mpmath,
    value,
)

ENOUGH_DIGITS = 6  # digits of a decimal that may stand for an endless one: 0.333333 for 1/3
HUNDREDTH = Num(Fraction(1, 100))


def equal(left: Form, right: Form) -> bool:
    """Tell whether two parsed answers (see forms.py) are the same answer.

    Raises Unreadable if the value of an expression is undefined or too large.
    """
    left, right = _unwrap_single(left), _unwrap_single(right)
    if same_set(left, right):
        return True
    match left, right:
        case Named(), _:
            return _compare_named(left, right)
        case _, Named():
            return _compare_named(right, left)
        case Relation(), Relation():
            return _compare_relations(left, right)
        case Amount(), Relation():
            return _is_result(left, right)
        case Relation(), Amount():
            return _is_result(right, left)
        case Amount(), Amount():
            return _compare_amounts(left, right)
        case Several(), Several():
            return _compare_several(left, right)
        case Words(), Words():
            return left == right
        case Words(), Amount():
            return left.product is not None and _compare_nodes(left.product, right.node)
        case Amount(), Words():
            return right.product is not None and _compare_nodes(right.product, left.node)
    return False


def _unwrap_single(form: Form) -> Form:
    """Replace a list or set with one part by that part, repeatedly; return other forms unchanged."""
    if isinstance(form, Several) and form.kind in ("", "{}") and len(form.parts) == 1:
        return _unwrap_single(form.parts[0])
    return form


def _compare_named(left: Named, right: Form) -> bool:
    """Tell whether a named value and another form are equal: `x = 5` equals 5, but not `y = 5`.

    Two different names, or a name and an equation, are compared as equations if both can be read as one: `x = y+1` and
    `y = x-1`.
    """
    if isinstance(right, Named):
        short, long = sorted((left.name, right.name), key=len)
        arguments = re.fullmatch(r"\([A-Za-z,]+\)", long.removeprefix(short))
        if short == long or (long.startswith(short) and arguments):  # y(t) is y, and f(2) is not f
            return equal(left.form, right.form)
    equation, other = _as_relation(left), _as_relation(right)
    if equation is not None and other is not None:
        return _compare_relations(equation, other)
    if isinstance(right, Named):
        return False
    variables = frozenset().union(*map(names, right.sides)) if isinstance(right, Relation) else frozenset()
    return (not variables or variables == names(read_expression(left.name))) and equal(left.form, right)


def _as_relation(form: Form) -> Relation | None:
    """Return a relation unchanged, and a named amount such as `y = 2x` as an equation.

    Returns None for other forms, and for a name that is no expression.
    """
    if isinstance(form, Named) and isinstance(form.form, Amount):
        with suppress(Unreadable):
            return Relation((read_expression(form.name), form.form.node), ("=",))
    return form if isinstance(form, Relation) else None


def _compare_amounts(left: Amount, right: Amount) -> bool:
    """Tell whether two amounts are equal. 50% equals 0.5 and 50; a unit counts only if both amounts have one.

    A unit also counts as variables (`2 m` as 2 times m) if the other amount has such a unit, or variables in its
    expression. A long decimal also equals the number from which it was rounded, see `_is_rounding_of`.
    """
    if left.letters is not None and right.letters is not None and _compare_nodes(left.letters, right.letters):
        return True
    for amount, other in ((left, right), (right, left)):  # two metres, `2 m`, may also be 2 times m
        if amount.letters is not None and names(other.node) and _compare_nodes(amount.letters, other.node):
            return True
    if left.unit and right.unit and left.unit != right.unit:
        return False
    a, b = left.node, right.node
    if left.percent == right.percent:
        return _compare_nodes(a, b) or _is_rounding_of(a, b)
    as_part = (Op("*", (a, HUNDREDTH)), b) if left.percent else (a, Op("*", (b, HUNDREDTH)))
    return _compare_nodes(a, b) or _compare_nodes(*as_part) or _is_rounding_of(*as_part)


def _compare_nodes(left: Node, right: Node) -> bool:
    """Tell whether two expressions are equal, by their values at several points.

    The values must agree wherever both are real: |x| is not x, while 2 ln x equals ln x^2. If both are real nowhere,
    their complex values must agree wherever both are defined, and there must be such a point. At one more point, values
    that are rational must be the same, because 40 digits do not show the difference of 10^50 and 10^50 + x.
    """
    if left == right:
        return True
    variables = names(left) | names(right)
    if not variables:
        return close(value(left, {}), value(right, {}))
    if any(name.startswith("text ") for name in names(left) ^ names(right)):  # 0 \text{ not } x is no 0
        return False
    are_real_somewhere, complex_agree = False, list[bool]()
    for draw in range(POINTS):
        at = point(variables, draw)
        try:
            a, b = value(left, at), value(right, at)
        except Unreadable:  # undefined or too large at this point
            continue
        agree = close(a, b)
        if not (is_real(a) and is_real(b)):
            complex_agree.append(agree)
        elif not agree:
            return False
        else:
            are_real_somewhere = True
    exact = exact_values((left, right), variables, 0)
    if exact is not None and exact[0] != exact[1]:
        return False
    return are_real_somewhere or (bool(complex_agree) and all(complex_agree))


def _is_rounding_of(left: Node, right: Node) -> bool:
    """Tell whether `left` or `right` is the other number rounded or truncated to a decimal, such as 0.333333 for 1/3.

    The decimal must have at least ENOUGH_DIGITS digits. The other number must be real, with endless decimals and
    without variables.
    """
    for decimal, exact in ((left, right), (right, left)):
        places = _places(decimal)
        if places is None or _places(exact) is not None or names(exact):
            continue
        number, exactly = value(decimal, {}), value(exact, {})
        # The decimals of a fraction end if its denominator divides a power of ten.
        ends = isinstance(exactly, Fraction) and pow(10, exactly.denominator.bit_length(), exactly.denominator) == 0
        if not ends and is_finite(exactly) and is_real(exactly) and is_rounded(number, exactly, places):
            return True
    return False


def _places(node: Node) -> int | None:
    r"""Return how many decimal places a written decimal has; None if it has fewer than ENOUGH_DIGITS digits.

    A factor that is a power of ten counts: 2.50000 \times 10^{-3} has 8 places.
    """
    while isinstance(node, Op) and node.name == "neg":
        node = node.args[0]
    if isinstance(node, Op) and node.name == "*" and len(node.args) == 2 and not names(node.args[1]):
        if (places := _places(node.args[0])) is None:
            return None
        power = value(Op("log", (Op("abs", (node.args[1],)),)), {})  # of ten, as in 2.5 \times 10^{-3}
        return places - int(power) if isinstance(power, Fraction) and power.denominator == 1 else None
    return node.places if isinstance(node, Num) and node.digits >= ENOUGH_DIGITS else None


def _compare_several(left: Several, right: Several) -> bool:
    """Tell whether two forms with several parts are equal: in any order for lists, sets and unions, else in order.

    Both must be of the same kind, with these exceptions: a list may equal a set, a list or a one-column matrix may
    equal a point, and `10:30` equals `10:30 am` and `10:30 pm`.
    """
    kinds = {left.kind, right.kind}
    if kinds == {"[]", "()"}:
        left, right = _column(left), _column(right)  # of the matrix; a point stays
    if len(left.parts) != len(right.parts):
        return False
    if kinds <= {"", "{}"} or kinds == {"or"}:
        rest = list(right.parts)
        for form in left.parts:
            at = next((n for n, other in enumerate(rest) if equal(form, other)), None)
            if at is None:
                return False
            rest.pop(at)
        return True
    digits = all(isinstance(part, Amount) and isinstance(part.node, Num) for part in left.parts + right.parts)
    is_time = digits and kinds in ({":", "am"}, {":", "pm"})
    ordered = left.kind == right.kind or kinds == {"", "()"} or is_time
    return ordered and all(equal(a, b) for a, b in zip(left.parts, right.parts, strict=True))


def _column(form: Several) -> Several:
    """Convert a matrix of one column to a point; return other forms unchanged."""
    rows = [part for part in form.parts if isinstance(part, Several) and part.kind == "[]" and len(part.parts) == 1]
    is_column = form.kind == "[]" and len(rows) == len(form.parts)
    return Several("()", tuple(row.parts[0] for row in rows)) if is_column else form


def _is_result(amount: Amount, relation: Relation) -> bool:
    """Tell whether `relation` is a calculation of `amount`: 18 and `9+9=18`, but not 18 and `5=18`."""
    if set(relation.signs) != {"="}:
        return False
    names_first = len(relation.sides) > 2 and bool(names(relation.sides[0]))  # m+n in m+n=9+9=18
    steps = relation.sides[names_first:]
    return any(isinstance(side, Op) for side in steps) and all(_compare_nodes(side, amount.node) for side in steps)


def _compare_relations(left: Relation, right: Relation) -> bool:
    """Tell whether two relations are equal, side by side or turned around: `a < b` and `b > a`.

    Two relations that each have a single sign (such as = or <) are also equal if one is a constant multiple of the
    other: `2x = 4` and `x = 2`. Then the quotient of their differences (left side - right side) is the same at several
    points. Raises Unreadable if a value is undefined or too large.
    """
    if len(left.sides) != len(right.sides):
        return False
    turned = Relation(right.sides[::-1], tuple(OPPOSITE[sign] for sign in right.signs[::-1]))
    for other in (right, turned):
        if left.signs == other.signs and all(map(_compare_nodes, left.sides, other.sides)):
            return True
    if len(left.signs) > 1 or left.signs[0] not in (right.signs[0], turned.signs[0]):
        return False
    differences = Op("-", left.sides), Op("-", right.sides)
    variables, zero, first = names(differences[0]), Fraction(0), None
    if not variables or names(differences[1]) != variables:
        return False
    for draw in range(POINTS):
        a, b = (value(difference, point(variables, draw)) for difference in differences)
        if close(a, zero) or close(b, zero):
            return False
        ratio = divide(a, b)
        first = ratio if first is None else first
        is_lopsided = close(ratio, zero) or close(divide(b, a), zero)  # also with infinity
        if is_lopsided or not close(first, ratio):
            return False
    exact = [exact_values(differences, variables, draw) for draw in range(2)]
    if exact[0] and exact[1] and exact[0][0] * exact[1][1] != exact[0][1] * exact[1][0]:
        return False  # 40 digits do not show the 1 in x + y = 10^50 + 1
    if left.signs[0] in ("=", "!="):
        return True
    return is_real(first) and (to_mpmath(first).real > 0) == (left.signs == right.signs)
