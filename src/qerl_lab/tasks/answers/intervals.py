"""Sets of real numbers: intervals, inequalities, and their unions, as spans that can be compared."""

from itertools import chain

from qerl_lab.tasks.answers.expression import Op, Sym, names
from qerl_lab.tasks.answers.forms import Amount, Form, Relation, Several
from qerl_lab.tasks.answers.value import INFINITY, Value, close, is_real, real, value

OPPOSITE = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_MINUS_INFINITY = Op("neg", (INFINITY,))
_REALS = Several("()", (Amount(_MINUS_INFINITY), Amount(INFINITY)))

Span = tuple[Value, Value, bool, bool]  # from and to, and whether each of the two belongs to it


def same_set(left: Form, right: Form) -> bool:
    """Whether both hold the same real numbers; False where one is no such set. Raises Unreadable, as `value`."""
    if not (_is_set(left) or _is_set(right)) or len(_variables(left) | _variables(right)) > 1:
        return False
    a, b = _spans(left), _spans(right)
    return a is not None and b is not None and len(a) == len(b) and all(map(_same, a, b))


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
    """Whether it cannot be a point, as `(1, 2)` can."""
    return isinstance(form, Relation) or (isinstance(form, Several) and form.brackets in ("or", "minus"))


def _variables(form: Form) -> frozenset[str]:
    parts = map(_variables, form.parts) if isinstance(form, Several) else ()
    return frozenset().union(*parts, *(map(names, form.sides) if isinstance(form, Relation) else ()))


def _spans(form: Form) -> list[Span] | None:
    """The spans in order, none touching the next; None for anything else, and for ends in variables."""
    found = _as_several(form)
    if found is None:
        return None
    if found.brackets in ("or", "minus"):
        parts = [_spans(part) for part in found.parts]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return _merged([*chain(*known)]) if found.brackets == "or" else _difference(*known)
    ends = [_real_number(part) for part in found.parts]
    if None in ends:
        return None
    if found.brackets == "{}":
        return _merged([(end, end, True, True) for end in ends])
    is_span = len(ends) == 2 and found.brackets != "" and ends[0] < ends[1]
    return [(*ends, found.brackets[0] == "[", found.brackets[1] == "]")] if is_span else None


def _as_several(form: Form) -> Several | None:
    if isinstance(form, Relation) and form.signs == ("!=",):
        variable, number = form.sides if names(form.sides[0]) else form.sides[::-1]
        return Several("minus", (_REALS, Several("{}", (Amount(number),)))) if isinstance(variable, Sym) else None
    found = interval(form) if isinstance(form, Relation) else form
    return found if isinstance(found, Several) else None


def _real_number(form: Form) -> Value | None:
    if not isinstance(form, Amount) or names(form.node) or form.percent or form.scale != 1:
        return None
    number = real(value(form.node, {}))
    return number.real if is_real(number) else None


def _merged(spans: list[Span]) -> list[Span]:
    """The union of spans."""
    found = list[Span]()
    for low, high, has_low, has_high in sorted(spans, key=lambda span: (span[0], not span[2])):
        if found and (low < found[-1][1] or (close(low, found[-1][1]) and (has_low or found[-1][3]))):
            first, end, has_first, has_end = found.pop()
            has_high = (has_high or has_end) if close(high, end) else (has_high if high > end else has_end)
            low, high, has_low = first, max(high, end), has_first
        found.append((low, high, has_low, has_high))
    return found


def _difference(spans: list[Span], points: list[Span]) -> list[Span] | None:
    """Spans without points; None where something longer than a point is taken away."""
    for at, end, *_ in points:
        if at != end:
            return None
        pieces = [
            [span] if not span[0] <= at <= span[1] else [(span[0], at, span[2], False), (at, span[1], False, span[3])]
            for span in spans
        ]
        spans = [piece for piece in chain(*pieces) if piece[0] < piece[1] or piece[2:] == (True, True)]
    return spans


def _same(left: Span, right: Span) -> bool:
    return close(left[0], right[0]) and close(left[1], right[1]) and left[2:] == right[2:]
