"""Equality of answers in LaTeX, by math-verify. The child of `sandbox` alone imports this: it has no limit of time."""

from math_verify import parse, verify


def is_equal(given: str, known: str) -> bool:
    """Mathematical equality, e.g. of `\\frac{1}{2}` and `0.5`; False where either has no reading.

    Both sides are parsed as LaTeX and as plain expressions: the released code parsed LaTeX only, so that a plain
    `<answer>18</answer>` scored 0.
    """
    left, right = (parse(_as_math(text), parsing_timeout=None) for text in (known, given))
    return bool(left and right and verify(left, right, timeout_seconds=None))


def _as_math(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"
