"""Evaluate expressions: rational ones exactly, others to 100 digits; with variables, at chosen points.

Two expressions count as equal if their values agree to 40 digits at several points. The size of each result is checked
before it is computed, so that hostile text takes little work: Unreadable is raised for a result that is too large.
"""

import functools
import hashlib
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any

import mpmath

from qerl_lab.tasks.answers.expression import CONSTANTS, Node, Num, Sym
from qerl_lab.tasks.answers.tokens import Unreadable

MAX_BITS = 1 << 14  # largest exact number
MAX_LOG2 = 1 << 20  # largest rounded number
MAX_FACTORIAL = 1000
_CTX = mpmath.MPContext()  # a private context: mpmath.mp is shared by the whole process
_CTX.dps = 100
_PI, _E, _I = _CTX.pi + 0, _CTX.e + 0, _CTX.mpc(0, 1)  # adding 0 rounds mpmath's constants to 100 digits
_CONSTANTS = dict(zip(CONSTANTS, (_PI, _E, _CTX.inf, _I, _I), strict=True))
_CLOSE, _ZERO = _CTX.mpf(10) ** -40, _CTX.mpf(10) ** -70
_SIZES = (1, 1, 3, 3, 3, 3, 30, 30)  # magnitude of the variables, by draw
POINTS = len(_SIZES)  # number of points at which expressions with variables must agree

Value = Any  # Fraction, or a real or complex mpmath number (mpmath is untyped)
Point = Mapping[str, Value]


def point(variables: frozenset[str], draw: int) -> Point:
    """Return the point number `draw`, from 0 to POINTS - 1: a fixed value for each variable, chosen by a hash.

    Values of points 0 and 1 are at most 1 in magnitude, where most functions are real. Values of the last two points
    can be up to 30, to expose rounding to integers. Only points with an odd number may have negative values.
    """
    found = {}
    for name in variables:
        digest = hashlib.sha256(f"{draw} {name}".encode()).digest()
        size = _CTX.mpf(int.from_bytes(digest[:24], "big") + 1) / 2**192 * _SIZES[draw]
        below = draw % 2 == 1 and (len(variables) == 1 or digest[31] % 2 == 1)
        found[name] = -size if below else size
    return found


def value(node: Node, at: Point) -> Value:
    """Evaluate `node` with the variables' values in `at`: rational operations exactly, others to 100 digits.

    Raises Unreadable if the value is undefined or too large.
    """
    if isinstance(node, Num):
        return node.value
    if isinstance(node, Sym):
        return _CONSTANTS[node.name] if node.name in _CONSTANTS else at[node.name]
    try:
        return _bounded(_apply(node.name, [value(arg, at) for arg in node.args]))
    except (ArithmeticError, ValueError, TypeError, NotImplementedError, _CTX.NoConvergence) as error:
        raise Unreadable(node.name) from error


def exact_values(nodes: Iterable[Node], variables: frozenset[str], draw: int) -> list[Fraction] | None:
    """Compute `nodes` exactly at a point of small rational numbers; each `draw`, from 0, is another point.

    Returns None if a value is undefined, too large or not rational.
    """
    at = {name: Fraction(2 * n + 3, draw + 1) for n, name in enumerate(sorted(variables))}
    try:
        found = [value(node, at) for node in nodes]
    except Unreadable:
        return None
    return found if all(isinstance(number, Fraction) for number in found) else None


def close(left: Value, right: Value) -> bool:
    """Tell whether two values are equal: exactly if both are rational, else to 40 digits."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    left, right = to_mpmath(left), to_mpmath(right)
    if _CTX.isinf(left) or _CTX.isinf(right):
        return bool(left == right)
    return bool(abs(left - right) <= max(_CLOSE * max(abs(left), abs(right)), _ZERO))


def is_less(left: Value, right: Value) -> bool:
    """Tell whether the real number `left` is less than `right`: exactly if both are rational, else to 100 digits."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left < right
    return bool(to_mpmath(left) < to_mpmath(right))


def is_real(given: Value) -> bool:
    """Tell whether a value has no imaginary part."""
    return isinstance(given, Fraction) or not isinstance(given, _CTX.mpc) or abs(given.imag) <= _ZERO


def is_finite(given: Value) -> bool:
    """Tell whether a value is neither infinite nor NaN."""
    return isinstance(given, Fraction) or bool(_CTX.isfinite(given))


def is_rounded(decimal: Value, exact: Value, places: int) -> bool:
    """Tell whether `decimal` is `exact` rounded or truncated to `places` decimal places."""
    decimal, exact, unit = to_mpmath(decimal), to_mpmath(exact), _CTX.mpf(10) ** -places
    error = abs(decimal - exact)
    return bool(2 * error <= unit or (abs(decimal) <= abs(exact) and error < unit))


def to_mpmath(given: Value) -> Value:
    """Convert a Fraction to an mpmath number; return an mpmath number, real or complex, unchanged."""
    return _CTX.mpf(given.numerator) / given.denominator if isinstance(given, Fraction) else given


def _bounded(result: Value) -> Value:
    """Return `result`. Raises Unreadable if it is NaN, or too large for MAX_BITS (exact) or MAX_LOG2 (rounded)."""
    if isinstance(result, Fraction):
        if max(result.numerator.bit_length(), result.denominator.bit_length()) > MAX_BITS:
            raise Unreadable("too large")
    elif _CTX.isnan(result) or (_CTX.isfinite(result) and result != 0 and abs(_CTX.mag(result)) > MAX_LOG2):
        raise Unreadable("too large")
    return result


def _apply(name: str, args: list[Value]) -> Value:
    """Apply the operation or function `name` (see `Op`) to the values `args`.

    Raises Unreadable if the result has two values or is too large. An undefined result raises ZeroDivisionError or
    another error, which `value` converts to Unreadable.
    """
    if name in _ARITHMETIC:
        return _ARITHMETIC[name](*args)
    if name in ("floor", "ceil"):
        is_exact = isinstance(args[0], Fraction)
        return Fraction(getattr(math, name)(args[0])) if is_exact else getattr(_CTX, name)(args[0])
    if name in ("log", "ln", "lg"):
        return _log(name, *args)
    if name in ("pm", "mp"):
        raise Unreadable("two values")
    angle = to_mpmath(args[0])
    if name == "call":  # a function known only by name: choose one that satisfies no identity
        name, angle = "cos", 50 * angle * (to_mpmath(args[1]) + angle)
    if _CTX.mag(angle) > 64:  # reducing a huge angle takes as many digits as the angle has
        raise Unreadable("too large")
    if name.startswith("arc"):
        return getattr(_CTX, "a" + name[3:])(angle)
    return getattr(_CTX, name)(angle)


def _fold(operation: Callable[[Any, Any], Any]) -> Callable[..., Value]:
    """Turn an operation of two values into a function of any number of values, which applies it from the left.

    Results of Fractions are exact. The function raises Unreadable if a result is too large.
    """

    def apply(left: Value, right: Value) -> Value:
        exact = isinstance(left, Fraction) and isinstance(right, Fraction)
        return _bounded(operation(left, right) if exact else operation(to_mpmath(left), to_mpmath(right)))

    return lambda *args: functools.reduce(apply, args)


divide = _fold(operator.truediv)


def _power(base: Value, exponent: Value) -> Value:
    """Return `base` to the power of `exponent`. Raises Unreadable if too large, ZeroDivisionError for 0^-1.

    For Fractions the result is exact if the exponent is an integer, or if the root is rational: (8/27)^(2/3) is 4/9.
    """
    if isinstance(base, Fraction) and isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            bits = max(base.numerator.bit_length(), base.denominator.bit_length())
            if abs(exponent.numerator) * bits > MAX_BITS:
                raise Unreadable("too large")
            return base**exponent.numerator
        if base > 0 and (root := _exact_root(base, exponent.denominator)) is not None:
            return _power(root, Fraction(exponent.numerator))
    base, exponent = to_mpmath(base), to_mpmath(exponent)
    if base != 0 and abs(exponent) * (abs(_CTX.mag(base)) + 1) > MAX_LOG2:
        raise Unreadable("too large")
    return base**exponent


def _root(base: Value, degree: Value) -> Value:
    """Return the root of `base` of degree `degree`. For a negative base and an odd degree it is the real root."""
    is_odd = isinstance(degree, Fraction) and degree.denominator == 1 and degree % 2
    negative = is_odd and is_real(base) and to_mpmath(base).real < 0
    root = _power(-base if negative else base, divide(Fraction(1), degree))
    return -root if negative else root


def _exact_root(base: Fraction, degree: int) -> Fraction | None:
    """Return the root of a positive number if that root is rational, else None. None too for a degree above 64."""
    if degree > 64:
        return None
    with _CTX.workprec(max(base.numerator.bit_length(), base.denominator.bit_length()) // degree + 64):
        parts = [int(_CTX.nint(_CTX.root(part, degree))) for part in (base.numerator, base.denominator)]
    root = Fraction(parts[0], parts[1])
    return root if root**degree == base else None


def _factorial(number: Value) -> Value:
    """Return the factorial, by the gamma function if `number` is no natural number. Raises Unreadable if too large."""
    if isinstance(number, Fraction) and number.denominator == 1 and 0 <= number <= MAX_FACTORIAL:
        return Fraction(math.factorial(int(number)))
    if abs(to_mpmath(number)) > MAX_FACTORIAL:
        raise Unreadable("too large")
    return _CTX.gamma(to_mpmath(number) + 1)


def _binomial(above: Value, below: Value) -> Value:
    """Return "above choose below", exact for natural numbers. Raises Unreadable if the numbers are too large."""
    whole = all(isinstance(part, Fraction) and part.denominator == 1 for part in (above, below))
    if whole and 0 <= below <= MAX_FACTORIAL and 0 <= above < 1 << 64:
        return Fraction(math.comb(int(above), int(below)))
    if max(abs(to_mpmath(above)), abs(to_mpmath(below))) > MAX_FACTORIAL:
        raise Unreadable("too large")
    return _CTX.binomial(to_mpmath(above), to_mpmath(below))


def _log(name: str, number: Value, base: Value = None) -> Value:
    """Return the natural logarithm if `name` is "ln", else the logarithm to `base`, or to 10 if no base is given.

    Problem sets write `\\log` for base 10. If the number is an integer power of a rational base, the result is exact.
    Raises ZeroDivisionError for 0.
    """
    if number == 0:
        raise ZeroDivisionError
    if name == "ln":
        return _CTX.ln(to_mpmath(number))
    base = Fraction(10) if base is None else base
    logarithm = _CTX.ln(to_mpmath(number)) / _CTX.ln(to_mpmath(base))
    if isinstance(number, Fraction) and isinstance(base, Fraction) and number > 0 and base > 1 and abs(logarithm) < 65:
        exponent = int(_CTX.nint(logarithm))
        if _power(base, Fraction(exponent)) == number:
            return Fraction(exponent)
    return logarithm


_ARITHMETIC: dict[str, Callable[..., Value]] = {
    "+": _fold(operator.add), "-": _fold(operator.sub), "*": _fold(operator.mul), "/": divide, "^": _power,
    "inverse": lambda number: divide(Fraction(1), number),
    "root": _root, "neg": operator.neg, "abs": abs, "sqrt": lambda number: _root(number, Fraction(2)),
    "factorial": _factorial, "binom": _binomial, "degrees": lambda number: to_mpmath(number) * _PI / 180,
    "cis": lambda angle: _power(_E, _I * to_mpmath(angle)),
    "exp": lambda number: _power(_E, number),
}  # fmt: skip
