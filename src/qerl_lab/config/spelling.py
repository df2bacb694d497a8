"""Quote command-line overrides (`key=value`) for Hydra's grammar and for the shell."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)  # what Hydra reads as it is, unless it is of another type
_NUMBER = re.compile(r"[+-]?(?:[\d._]*\d[\d._]*(?:e[+-]?\d[\d_]*)?|inf|infinity|nan)", re.IGNORECASE)  # as Hydra reads
_WORD = re.compile(r"null|true|false", re.IGNORECASE)  # what Hydra reads as None, True or False
_ONE_VALUE = re.compile(r"""[^,=()\[\]{}'"$\\]+""")  # no list, sweep, function, interpolation or quoted text
_CORE = re.compile(r"\S(?:.*\S)?", re.DOTALL)  # a value of a sweep without the blanks around it


def typed_override(key: str, value: str) -> str:
    """Format `key=value` for Hydra from a value as typed, for a key of text: quote what Hydra would not read as text.

    Quotes each value of a sweep `a,b` by itself. Leaves as is: a list, a function such as choice(a,b), an
    interpolation, null, true, false, and a quoted value.
    """
    values = value.split(",")
    if not all(_ONE_VALUE.fullmatch(one) or _QUOTED.fullmatch(one.strip()) for one in values):
        return f"{key}={value}"

    def spell(one: str) -> str:
        return one if _QUOTED.fullmatch(one) or _WORD.fullmatch(one) else _spell_text(one)

    if len(values) == 1:
        return f"{key}={spell(value)}"
    return f"{key}={','.join(_CORE.sub(lambda found: spell(found[0]), one) for one in values)}"


def spell_list(values: Sequence[str]) -> str:
    """Format texts as one list `[a,"b c"]` in Hydra's override grammar."""
    parts = (value if value.isidentifier() and _is_read_as_text(value) else quoted(value, '"') for value in values)
    return f"[{','.join(parts)}]"


def hydra_override(key: str, value: str) -> str:
    """Format `key=value` for Hydra, where the value is a text.

    Quotes a value that has special characters, or that Hydra would read as a number, null, true or false.
    """
    return f"{key}={_spell_text(value)}"


def _spell_text(value: str) -> str:
    """Return `value`, in quotes if Hydra would not read it as this text without them."""
    return value if _is_read_as_text(value) else quoted(value)


def _is_read_as_text(value: str) -> bool:
    """Tell whether Hydra reads `value` as this text without quotes."""
    return bool(_PLAIN.fullmatch(value)) and not _NUMBER.fullmatch(value) and not _WORD.fullmatch(value)


def shell_override(key: str, value: str | Path) -> str:
    """Format `key=value` with the value quoted for Hydra and for the shell."""
    return shell_line([hydra_override(key, str(value))])


def shell_line(arguments: Sequence[str]) -> str:
    """Join command-line arguments into a line for the shell, each in quotes if it needs them."""
    return " ".join(map(_quote_for_shell, arguments))


def _quote_for_shell(text: str) -> str:
    """Quote an argument for the shell. One with an apostrophe gets double quotes if possible: "KEY='a b'".

    Double quotes are not possible around a character that the shell interprets inside them too. A backslash before an
    apostrophe does not matter: the shell keeps it.
    """
    fits_double_quotes = set(text.replace("\\'", "")).isdisjoint('"$`\\!')
    return f'"{text}"' if "'" in text and fits_double_quotes else shlex.quote(text)


def resume_override(path: str | Path) -> str:
    """Format `resume=DIR` quoted for the shell; Hydra does not read it."""
    return f"resume={shlex.quote(str(path))}"


def quoted(value: str, quote: str = "'") -> str:
    """Put a text in quotes, ' or ", and escape it, so that Hydra's override grammar reads this text."""
    from hydra.core.override_parser.types import Quote, QuotedString  # Hydra's import would slow every command's start

    return QuotedString(value, Quote.single if quote == "'" else Quote.double).with_quotes()


def unquoted(value: str) -> str:
    """Return the text inside quotes of Hydra's override grammar; a text without quotes unchanged.

    Halves a run of backslashes before a quote of the same kind or the end, rounded down, as Hydra does. Other
    backslashes stay.
    """
    if not _QUOTED.fullmatch(value):
        return value
    return re.sub(rf"(\\+)({value[0]}|\Z)", lambda found: found[1][: len(found[1]) // 2] + found[2], value[1:-1])
