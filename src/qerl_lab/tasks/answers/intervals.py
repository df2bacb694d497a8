"""Sets of real numbers: intervals, inequalities, and their unions, as spans that can be compared."""

from collections.abc import Sequence

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
    return isinstance(form, Relation) or (isinstance(form, Several) and form.brackets in ("or", "minus", ""))


def _variables(form: Form) -> frozenset[str]:
    parts = form.parts if isinstance(form, Several) else ()
    sides = form.sides if isinstance(form, Relation) else ()
    return frozenset().union(*map(_variables, parts), *map(names, sides))


def _spans(form: Form) -> list[Span] | None:
    """The spans in order, none touching the next; None for anything else, and for ends in variables."""
    if excluded := _excluded(form):
        form = Several("minus", (_REALS, Several("{}", excluded)))
    found = interval(form) if isinstance(form, Relation) else form
    if not isinstance(found, Several):
        return None
    if found.brackets == "or":
        parts = [_spans(part) for part in found.parts]
        return None if None in parts else _merged([span for part in parts for span in part or ()])
    if found.brackets == "minus":
        spans, points = _spans(found.parts[0]), _numbers(found.parts[1:])
        for point in points or ():
            spans = [piece for span in spans or () for piece in _without(span, point)]
        return None if points is None else spans
    ends = _numbers((found,) if found.brackets == "{}" else found.parts)
    if ends is None or found.brackets == "":
        return None
    if found.brackets == "{}":
        return _merged([(end, end, True, True) for end in ends])
    is_span = len(ends) == 2 and ends[0] < ends[1]
    return [(ends[0], ends[1], found.brackets[0] == "[", found.brackets[1] == "]")] if is_span else None


def _excluded(form: Form) -> tuple[Form, ...]:
    """The numbers that `x != 2`, or a list of such relations, takes away; none for anything else."""
    parts = form.parts if isinstance(form, Several) and form.brackets == "" else (form,)
    found = [part.sides if names(part.sides[0]) else part.sides[::-1] for part in parts if _is_unequal(part)]
    are_points = len(found) == len(parts) and all(isinstance(side[0], Sym) for side in found)
    return tuple(Amount(side[1]) for side in found) if are_points else ()


def _is_unequal(form: Form) -> bool:
    return isinstance(form, Relation) and form.signs == ("!=",)


def _numbers(forms: Sequence[Form]) -> list[Value] | None:
    """The real numbers that the parts are, sets of points among them; None where one is anything else."""
    found = list[Value]()
    for form in forms:
        if isinstance(form, Several) and form.brackets == "{}":
            inside = _numbers(form.parts)
        else:
            is_number = isinstance(form, Amount) and not names(form.node) and not form.percent and form.scale == 1
            inside = [real(value(form.node, {}))] if is_number else None  # type: ignore[union-attr]
        if inside is None or not all(map(is_real, inside)):
            return None
        found += [number.real for number in inside]
    return found


def _merged(spans: list[Span]) -> list[Span]:
    """The union of spans, sorted."""
    found = list[Span]()
    for low, high, has_low, has_high in sorted(spans, key=lambda span: (span[0], not span[2])):
        if found and (low < found[-1][1] or (close(low, found[-1][1]) and (has_low or found[-1][3]))):
            first, end, has_first, has_end = found.pop()
            has_high = (has_high or has_end) if close(high, end) else (has_high if high > end else has_end)
            low, high, has_low = first, max(high, end), has_first
        found.append((low, high, has_low, has_high))
    return found


def _without(span: Span, point: Value) -> list[Span]:
    low, high, has_low, has_high = span
    if point < low or point > high:
        return [span]
    pieces = [(low, point, has_low, False), (point, high, False, has_high)]
    return [piece for piece in pieces if piece[0] < piece[1]]


def _same(left: Span, right: Span) -> bool:
    return close(left[0], right[0]) and close(left[1], right[1]) and left[2:] == right[2:]
