"""Sets of real numbers: intervals, inequalities, and their unions, as spans that can be compared."""

from functools import reduce
from itertools import chain

from qerl_lab.tasks.answers.expression import Op, Sym, names
from qerl_lab.tasks.answers.forms import Amount, Form, Relation, Several
from qerl_lab.tasks.answers.tokens import Unreadable
from qerl_lab.tasks.answers.value import INFINITY, Value, close, is_real, real, value

OPPOSITE = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_MINUS_INFINITY = Op("neg", (INFINITY,))
_REALS = Several("()", (Amount(_MINUS_INFINITY), Amount(INFINITY)))

Span = tuple[Value, Value, bool, bool]  # from and to, and whether each of the two belongs to it


def same_set(left: Form, right: Form) -> bool:
    """Whether both hold the same real numbers; False where one is no such set, or could be a point: `(1, 2)`."""
    if not (_is_set(left) or _is_set(right)) or len(_variables(left) | _variables(right)) > 1:
        return False
    try:
        a, b = _spans(left), _spans(right)
    except Unreadable:
        return False
    return len(a) == len(b) and all(map(_same, a, b))


def interval(relation: Relation) -> Several | None:
    """`-2 < x <= 7` as (-2, 7]; `x > 3` as (3, infinity); None for other relations."""
    sides, signs = relation.sides, relation.signs
    if signs[0] in (">", ">="):
        sides, signs = sides[::-1], tuple(OPPOSITE[sign] for sign in signs[::-1])
    if any(sign not in ("<", "<=") for sign in signs) or len(sides) not in (2, 3):
        return None
    if len(sides) == 2:
        bounded_above = bool(names(sides[0]))
        sides = (_MINUS_INFINITY, *sides) if bounded_above else (*sides, INFINITY)
        signs = ("<", *signs) if bounded_above else (*signs, "<")
    low, variable, high = sides
    if names(low) or names(high) or not names(variable) or (isinstance(variable, Op) and variable.name != "call"):
        return None
    brackets = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    return Several(brackets, (Amount(low), Amount(high)))


def _is_set(form: Form) -> bool:
    """Whether it can be no point."""
    return isinstance(form, Relation) or (isinstance(form, Several) and form.brackets in ("or", "minus"))


def _variables(form: Form) -> frozenset[str]:
    parts = map(_variables, form.parts) if isinstance(form, Several) else ()
    return frozenset().union(*parts, *(map(names, form.sides) if isinstance(form, Relation) else ()))


def _spans(form: Form) -> list[Span]:
    """The spans in order, none touching the next. Raises Unreadable for anything else, and for ends in variables."""
    if isinstance(form, Relation):
        form = interval(form) or _all_but(form)
    if not isinstance(form, Several) or form.brackets == "":
        raise Unreadable("no set of numbers")
    if form.brackets in ("or", "minus"):
        return reduce(_union if form.brackets == "or" else _difference, map(_spans, form.parts))
    ends = [_real_number(part) for part in form.parts]
    if form.brackets == "{}":
        return _union([(end, end, True, True) for end in ends], [])
    if len(ends) != 2 or ends[0] >= ends[1]:
        raise Unreadable("no interval")
    return [(ends[0], ends[1], form.brackets[0] == "[", form.brackets[1] == "]")]


def _all_but(relation: Relation) -> Several:
    """The reals without the number that `x != 2` excludes."""
    variable, number = relation.sides[:2] if names(relation.sides[0]) else relation.sides[1::-1]
    if relation.signs != ("!=",) or not isinstance(variable, Sym):
        raise Unreadable("no set of numbers")
    return Several("minus", (_REALS, Several("{}", (Amount(number),))))


def _real_number(form: Form) -> Value:
    if isinstance(form, Amount) and not names(form.node) and not form.percent and form.scale == 1:
        number = real(value(form.node, {}))
        if is_real(number):
            return number.real
    raise Unreadable("no real number")


def _union(left: list[Span], right: list[Span]) -> list[Span]:
    found = list[Span]()
    for low, high, has_low, has_high in sorted(left + right, key=lambda span: (span[0], not span[2])):
        if found and (low < found[-1][1] or (close(low, found[-1][1]) and (has_low or found[-1][3]))):
            first, end, has_first, has_end = found.pop()
            has_high = (has_high or has_end) if close(high, end) else (has_high if high > end else has_end)
            low, high, has_low = first, max(high, end), has_first
        found.append((low, high, has_low, has_high))
    return found


def _difference(spans: list[Span], points: list[Span]) -> list[Span]:
    """Spans without points. Raises Unreadable where something longer than a point is taken away."""
    for at, end, *_ in points:
        if at != end:
            raise Unreadable("no point")
        pieces = [
            [span] if not span[0] <= at <= span[1] else [(span[0], at, span[2], False), (at, span[1], False, span[3])]
            for span in spans
        ]
        spans = [piece for piece in chain(*pieces) if piece[0] < piece[1] or piece[2:] == (True, True)]
    return spans


def _same(left: Span, right: Span) -> bool:
    return close(left[0], right[0]) and close(left[1], right[1]) and left[2:] == right[2:]
