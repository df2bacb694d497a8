"""Compare with math-verify what `reading` cannot parse: integrals, sums, limits.

math-verify bounds neither time nor memory, so only the worker processes of `sandbox` import this.
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


def is_equal(given: str, known: str) -> bool | None:
    """Tell whether two LaTeX texts are mathematically equal; None if either cannot be parsed."""
    sides = []
    for text in (known, given):
        text = _DIFFERENTIAL.sub(r"d\1", text).replace(r"\row", r"\\")
        sides.append(parse(
            f"${text}$", _READING, fallback_mode="no_fallback", extraction_mode="first_match", parsing_timeout=None
        ))  # fmt: skip
    if not all(sides):
        return None
    a, b = (side[0] for side in sides)
    if isinstance(a, Expr) and isinstance(b, Expr) and a.free_symbols != b.free_symbols:
        return False  # math-verify would first simplify both for 0.1 s
    return bool(verify(*sides, timeout_seconds=None))
