r"""Compare with math-verify what `reading` cannot parse: integrals, sums, limits.

math-verify bounds neither time nor memory, so only the worker processes of `sandbox` import this. It reads three things
wrongly: it adds two numbers that are multiplied without a sign (`2(3)` is 5, as if it were a mixed number), drops a
subscript behind a number, and reads a capital as a small letter. `_with_signs` and `_letters` prevent this.
"""

import re

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify
from sympy import Expr

# `surface.plain` has normalized the text; what the library would remove can be part of the answer.
_AS_IT_STANDS = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none", equations=False
)
_DIFFERENTIAL = re.compile(r"(?<![A-Za-z\\])d +([A-Za-z])(?![A-Za-z])")  # math-verify reads dx, not d x
_READING = [LatexExtractionConfig(normalization_config=_AS_IT_STANDS)]
_LIMIT = r"\s*[_^]\s*(?:\{(?:[^{}]|\{[^{}]*\})*\}|\\[A-Za-z]+|-?\w)"  # `_{k=1}`, `^{2^{n}}`, `_-1`
# Macros with limits or exponents, and an opening bracket behind them: `\sum_{k=1}^n (`. Their argument is no factor.
_OPERATORS = rf"(?:(?:\\(?:begin|end)\s*\{{\w+\}}|\\[A-Za-z]+)(?:{_LIMIT})*\s*)+[(\[|]?"
_FACTOR = re.compile(
    r"(?<=[\d)\]}!])\s*(?=[(\[|]|\\(?:det|binom|begin|sqrt|lfloor|lceil)(?![A-Za-z]))"
    rf"|(?<=[)\]}}!])\s*(?=\\frac(?![A-Za-z]))|{_OPERATORS}"
)
_REFUSED = re.compile(rf"{_OPERATORS}|(\d\s+\d|[)\]}}!]\s*\d|[\d)\]}}]\s*_)")
_LETTER = re.compile(r"\\(?:begin|end)\s*\{\w+\}|\\[A-Za-z]+|([A-Za-z])")


def is_equal(given: str, reference: str) -> bool | None:
    """Tell whether two LaTeX texts are mathematically equal; None if either cannot be parsed."""
    texts = [_with_signs(_DIFFERENTIAL.sub(r"d\1", text).replace(r"\row", r"\\")) for text in (reference, given)]
    sides = [
        parse(f"${text}$", _READING, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None)
        for text in texts
        if text
    ]
    if len(sides) < 2 or not all(sides):
        return None
    a, b = (side[0] for side in sides)
    if isinstance(a, Expr) and isinstance(b, Expr) and a.free_symbols != b.free_symbols:
        return False  # math-verify would first simplify both for 0.1 s
    variables = "".join(str(symbol) for side in (a, b) for symbol in getattr(side, "free_symbols", ())).lower()
    cases = [{letter for letter in _letters(text) if letter.lower() in variables} for text in texts]
    return cases[0] == cases[1] and bool(verify(*sides, timeout_seconds=None))


def _with_signs(text: str) -> str:
    r"""Insert `\cdot` between factors that math-verify could read as a mixed number: `2(3)` becomes `2\cdot (3)`.

    Returns "" if math-verify would misread the text all the same, as it does `2 3`, `(2)3`, `3_9`, and a letter in both
    cases.
    """
    letters = _letters(text)
    if any(found[1] for found in _REFUSED.finditer(text)) or any(letter.swapcase() in letters for letter in letters):
        return ""
    return _FACTOR.sub(
        lambda found: found[0] if found[0].strip() or _closes_bar(text, found.end()) else r"\cdot ", text
    )


def _closes_bar(text: str, at: int) -> bool:
    """Tell whether the character at index `at` is the second bar of an absolute value."""
    return text[at] == "|" and text.count("|", 0, at) % 2 == 1


def _letters(text: str) -> set[str]:
    """Return the letters in a text outside of macros."""
    return set(_LETTER.findall(text)) - {""}
