r"""Normalize the spelling of an answer: `$\dfrac{1}{2}$.`, `\[ \frac12 \]` and `½` become the same text.

Removes what carries no mathematics: delimiters, sizes, thin spaces, fonts, lead-ins, ornaments.
"""

# ruff: noqa: RUF001 (signs that look like others are what this file is about)

import re
from unicodedata import normalize

from qerl_lab.tasks.answers.tokens import FUNCTIONS, GREEK_LETTERS

MAX_ANSWER_CHARACTERS = 2000  # a longer text is no final answer; bounds the work on hostile output

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
_UNICODE = {
    "\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{EM DASH}": "-", "\N{HYPHEN}": "-", "\N{NON-BREAKING HYPHEN}": "-",
    "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "\N{FRACTION SLASH}": "/",
    "\N{DIVISION SLASH}": "/", "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "°": r"^\circ ", "±": r"\pm ",
    "∓": r"\mp ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "∈": r"\in ",
    "∪": r"\cup ", "∩": r"\cap ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}", "′": "'", "’": "'", "“": '"', "”": '"',
    "€": r"\euro ", "£": r"\pound ", "¥": r"\yen ", "₹": r"\rupee ", "¢": r"\text{cent}", "、": ",", "。": ".",
    "\N{ZERO WIDTH SPACE}": "", "\N{WORD JOINER}": "", "\N{ZERO WIDTH NO-BREAK SPACE}": "",
    "\N{NO-BREAK SPACE}": " ", "\N{NARROW NO-BREAK SPACE}": " ", "\N{THIN SPACE}": " ",
} | {sign: rf"\{name} " for sign, name in GREEK_LETTERS.items()}  # fmt: skip
_PARTS = {sign: normalize("NFKC", sign).split("\N{FRACTION SLASH}") for sign in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"}
_FRACTIONS = {sign: rf"\frac{{{above}}}{{{below}}}" for sign, (above, below) in _PARTS.items()}
_FULL_WIDTH = {0xFEE0 + code: chr(code) for code in range(ord("!"), ord("~") + 1)}  # full-width ASCII
_TRANSLATION = str.maketrans(_UNICODE | _FRACTIONS) | _FULL_WIDTH

# The end of a macro: `\le` must not match the beginning of `\left`.
_END = r"(?![A-Za-z])"
_FONTS = r"text|mbox|hbox|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathsf|mathtt|operatorname\*?|rm|bf"
# A regular expression, and what replaces it. `plain` applies one after the other, so a later one sees what an earlier
# one wrote.
_REPLACEMENTS = [
    # sizes and limits have no meaning: \left( becomes (; a row of a matrix ends with \row
    (r"\\(?:left|right|middle)\s*\.(?!\d)", " "),
    (
        rf"\\(?:m?left|m?right|middle|[Bb]igg?[lrm]?|[lL]arge|LARGE|[hH]uge|displaystyle|textstyle|(?:no)?limits){_END}",
        " ",
    ),
    (r"\\\\(?:\[[^\[\]]*\])?", r"\\row "),
    # currencies, and a sign in words: USD 5 becomes \dollar 5, minus 5 becomes -5
    (r"\\\$", r"\\dollar "),
    (r"\b(?:USD?\s*\\dollar|USD|US\$)(?![A-Za-z])", r"\\dollar "),
    (r"\bEUR(?![A-Za-z])", r"\\euro "),
    (r"\bGBP(?![A-Za-z])", r"\\pound "),
    (r"\b(?:INR|Rs\.?)(?=\s*\d)", r"\\rupee "),
    (r"(?<![\w-])(?:negative|minus)\s+(?=[\d.\\])", "-"),
    # delimiters of mathematics, {,} and spaces: \(x{,}y\) becomes x,y
    (r"\\[\[\]()]", " "),
    (r"\s*\{\s*,\s*\}", ","),
    (r"\\!\s*", ""),
    (r"\\[,;: >]|(?<=[^\s$])~|\\(?:q?quad|thinspace|enspace|medspace|hspace\{[^{}]*\})(?![A-Za-z])", " "),
    # one macro for each sign: \dfrac becomes \frac, \leq becomes \le
    (rf"\\[dtc](frac|binom){_END}", r"\\\1"),
    (rf"\\(le|ge|ne)q(?:slant|q)?{_END}", r"\\\1 "),
    (rf"\\(?:lbrace){_END}", r"\\{"),
    (rf"\\(?:rbrace){_END}", r"\\}"),
    (rf"\\(?:lvert|rvert|vert){_END}", "|"),
    (rf"\\(?:infin){_END}", r"\\infty "),
    (rf"\\(?:varnothing){_END}", r"\\emptyset "),
    (rf"\\var(phi|epsilon|theta|rho|pi|sigma|kappa){_END}", r"\\\1 "),
    (
        r"\^\s*\{\s*\\(?:circ|degree)(?![A-Za-z])\s*\}|\^\s*\\(?:circ|degree)(?![A-Za-z])|\\(?:degree|degrees)(?![A-Za-z])",
        r"^\\circ ",
    ),
    (r"\\not\s*=", r"\\ne "),
    # other ways to write a product, a binomial, a modulus, a percentage, a prime: {n \choose k} becomes \binom{n}{k}
    (r"(?<=\d)\s*[xX]\s*(?=10\s*(?:\^|\*\*))", r"\\times "),
    (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"\{([^{}]*)\\over(?![A-Za-z])([^{}]*)\}", r"\\frac{\1}{\2}"),
    (r"\(?\s*\\[pb]?mod(?![A-Za-z])\s*\{?\s*(\w+)\s*\}?\s*\)?", r" \\mod \1"),
    (r"\\%", "%"),
    (r"\^\s*(?:\\prime(?![A-Za-z])|\{\s*\\prime\s*\})", "'"),
    (r"\^\s*\{\s*\\prime\s*\\prime\s*\}", "''"),
    # braces around the rows of a system of equations
    (r"\\\{\s*\\begin\{array\}\{[lcr]*\}([^&]*)\\end\{array\}(?!\s*\\\})", r" \1 "),
    (r"(?:\\\{\s*)?\\begin\{(cases|aligned)\}([^&]*)\\end\{\1\}", r" \2 "),
    # fonts: around a letter, a number, a currency, a function or a word that joins they have no meaning
    (rf"\\(?:{_FONTS})\s*\{{\s*([eid])\s*\}}", r" \1 "),
    (r"\\(?:mathbf|mathit|boldsymbol|bm|pmb)\s*\{([^{}]*)\}", r" \1 "),
    (rf"\\(?:{_FONTS})\s*\{{", r"\\text{"),
    (r"\\text\{\s*((?:\\dollar\s*)?-?\d[\d,.]*)\s*\}", r" \1 "),
    (r"\\text\{\s*\\(dollar|euro|pound|yen)\s*\}", r"\\\1 "),
    (r"\\text\{\s*(and|or)\s*,?\s*\}", r" \1 "),
    (r"\\text\{\s*(cis|(?:a|ar|arc)?(?:sin|cos|tan)h?|csc|cot|ln|log|exp|gcd|lcm|floor|ceil)\s*\}", r"\\\1 "),
    (r"\\frac\s*\{\\text\{([^{}]*)\}\}\s*\{\\text\{([^{}]*)\}(\^\{?\d\}?)?\}", r"\\text{\1/\2}\3"),
    # signs of logic become words
    (r"\\(?:lor|vee)(?![A-Za-z])", " or "),
    (r"\\(?:land|wedge)(?![A-Za-z])", " and "),
]
_COMPILED_REPLACEMENTS = [(re.compile(pattern), replacement) for pattern, replacement in _REPLACEMENTS]
_DOLLAR = re.compile(r"(?<!\\)\$")  # `$`, but not `\$`
# TeX's separators of thousands separate nothing else, so they also count in brackets, where `1,800` is two numbers.
_COMMA = r"\s*(?:\{\s*,\s*\}|,\s*\\!|\\,)\s*"
_TYPESET_NUMBER = re.compile(rf"(?<![\w.,])\d{{1,3}}(?:{_COMMA}\d{{3}})+(?!{_COMMA}\d|\d|[, ]\d{{3}})", re.ASCII)
_ESCAPED_TWICE = re.compile(r"(?:[^\\]|\\\\)*\\\\[A-Za-z]{2}(?:[^\\]|\\\\)*")  # every backslash is doubled
_BOXED = re.compile(r"\\(?:boxed|fbox|framebox)\s*(?=\{)")  # `\boxed{5}`
_SO = r"(?:(?:so|thus|hence|therefore|final|finally)\b[\s,:]*)"
_ANSWER = r"(?:(?:the|my|our)\s+)?(?:(?:final|correct|right|exact)\s+)?(?:answer|result|solution|value|ans)s?"
_LEAD_IN = re.compile(  # `The answer is 5`, `So the final answer: 5`, `Thus, 5`, `is 5`; `the answer 5`; `option C`
    rf"{_SO}*{_ANSWER}\s*(?:(?:is|are|to be|equals|:|=)\s*)+|(?:{_SO}+|(?:is|are|equals)\s)(?=\S)"
    rf"|{_ANSWER}\s+(?=[-+]?[\d.]|[(\[\\])"
    r"|(?:option|choice)\s+(?=\(?[A-Z]\b)",
    re.IGNORECASE,
)
_LEAD_OUT = re.compile(rf"(?<=\S)\s+(?:is|are)\s+{_ANSWER}\Z", re.IGNORECASE)  # `5 is the answer`
_SENTENCE = re.compile(  # `Tom has 5`, `The cost of a ticket is: 5`
    r"[A-Za-z][A-Za-z' ]{0,80}\b(?:is|are|was|were|be|equals|has|have|makes|gets|needs|costs|earns)[\s:]+(?=\S)"
)
_LABEL = re.compile(  # `Total cost:`, `Total cost =`; a single word before `=` is a name, handled in `reading`
    r"([A-Za-z]{3,}[A-Za-z' ]{0,80}?)\s*:\s*(?=\S)|([A-Za-z]{3,}(?: [A-Za-z']{2,})+)\s*=\s*(?=\S)"
)
_ORNAMENTS = "✅✔✓☑★⭐✨🌟🎉🎊🎯🏆👍👉💡📝📌🔥🚀😀😃😄😊🙂🥳\N{VARIATION SELECTOR-16}"  # none means no, or a number
_ORNAMENT = re.compile(rf"^(?:[{_ORNAMENTS}]|#{{1,6}}\s)\s*|\s*[{_ORNAMENTS}]$")  # `✅ 5`, `## 5`, `5 🎉`
_EMPHASIS = re.compile(  # `**5**`, `_5_`, `*5*, *6* and *7*`
    r"(?:^|(?<=[,;] )|(?<=\band )|(?<=\bor ))(\*{1,3}|_{1,3})(?=[^\s*_])((?:(?!\1).)+)(?<=[^\s*_])\1(?![\w*])"
)
DOUBTS = re.compile(
    r"\b(?:not|never|no|nor|or|and|\w+n't|cannot|nobody|nothing|none|hardly|excluding|"
    r"but|except|either|neither|about|around|almost|nearly|less|more|fewer|"
    r"greater|least|most|over|under|between|half|twice|double|triple|negative|minus|if|unless|maybe|perhaps|than|"
    r"wrong|incorrect|false)\b",
    re.IGNORECASE,
)


def plain(text: str) -> str:
    """Normalize an answer's spelling: LaTeX with few macros, single spaces, no lead-in words, no final punctuation."""
    if _ESCAPED_TWICE.fullmatch(text):
        text = text.replace(r"\\", "\\")
    text = text.translate(_TRANSLATION)
    for signs, mark in ((_SUPERSCRIPTS, "^"), (_SUBSCRIPTS, "_")):  # x² is x^{2}
        table = str.maketrans(signs)
        text = re.sub(f"[{''.join(signs)}]+", lambda run: f"{mark}{{{run[0].translate(table)}}}", text)  # noqa: B023
    if len(_DOLLAR.findall(text)) == 1:  # money, and no delimiter
        text = re.sub(rf"{_DOLLAR.pattern}(?=\s*-?[\d.])", r"\\dollar ", text)
    text = _DOLLAR.sub(" ", text)
    text = _TYPESET_NUMBER.sub(lambda found: re.sub(r"\D", "", found[0]), text)
    for pattern, replacement in _COMPILED_REPLACEMENTS:
        text = pattern.sub(replacement, text)
    while (found := _BOXED.search(text)) and (end := closing_brace(text, found.end())) >= 0:
        rest = text[end + 1 :]
        comma = "," if _BOXED.match(rest.lstrip()) else ""  # two boxes are two answers, and no product
        text = f"{text[: found.start()]} {text[found.end() + 1 : end]}{comma} {rest}"
    text = _without_wrapping(" ".join(text.split()))
    return _without_wrapping(_without_lead_in(text))


def compact(text: str) -> str:
    """Remove all spaces but those between two digits."""
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def closing_brace(text: str, start: int) -> int:
    """Return the index of the `}` that closes the `{` at index `start`; -1 if there is none."""
    depth = 0
    for found in re.compile(r"\\.|[{}]").finditer(text, start):
        depth += {"{": 1, "}": -1}.get(found[0], 0)
        if depth == 0:
            return found.start()
    return -1


def _without_wrapping(text: str) -> str:
    """Remove ornaments, heading signs, emphasis, quotes, fonts and braces around the text, and final punctuation."""
    before = None
    while text != before:
        before = text
        text = text.strip()
        if not text.endswith("..."):
            text = re.sub(r"(?<!\\)(?:[.,;:]+|\\)$", "", text).rstrip()
        text = _EMPHASIS.sub(r"\2", _ORNAMENT.sub("", text))
        for mark in ("**", "__", "`", '"'):
            if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
                text = text[len(mark) : -len(mark)]
        for opening in (r"\text{", "{"):
            if text.startswith(opening) and closing_brace(text, len(opening) - 1) == len(text) - 1:
                text = text[len(opening) : -1]
    return text


def _without_lead_in(text: str) -> str:
    """Remove words that introduce an answer: "The answer is 5", "Total cost: 5" and "Tom has 5" all become "5".

    Also removes "is the answer" at the end. A label such as "Total cost:" or words such as "Tom has" stay if they
    contain the name of a function or a word of DOUBTS such as "not", or if no digit or backslash follows them.
    """
    text = _LEAD_OUT.sub("", text)
    if found := _LEAD_IN.match(text):
        return text[found.end() :]
    found = _LABEL.match(text) or _SENTENCE.match(text)
    if not found or DOUBTS.search(found[0]) or not re.search(r"\d|\\", text[found.end() :]):
        return text
    is_mathematics = not FUNCTIONS.isdisjoint(re.findall("[a-z]+", found[0].lower()))  # sin x = 0.5
    return text if is_mathematics else text[found.end() :]
