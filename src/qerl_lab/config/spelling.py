"""Quote words of a command line for Hydra's override grammar and for the shell."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_PLAIN = re.compile(r"[\w./:@%+-]+", re.ASCII)  # what Hydra reads as it is, unless it is a number
_ONE_VALUE = re.compile(r"""[^,=()\[\]{}'"$\\]+""")  # no list, sweep, function, interpolation or quoted text


def quote_text(key: str, value: str) -> str:
    """Format KEY=VALUE for Hydra, quoted if the value is one text that Hydra would read otherwise: ~/x, ä, 7e12345."""
    return word(key, value) if _ONE_VALUE.fullmatch(value) and value != "null" else f"{key}={value}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def spell_list(values: Sequence[str]) -> str:
    """Format texts as one list in Hydra's override grammar."""
    parts = (value if value.isidentifier() else '"' + value.replace('"', '\\"') + '"' for value in values)
    return f"[{','.join(parts)}]"


def word(key: str, value: str) -> str:
    """Format KEY=text for Hydra, quoted if Hydra would split it, not read it, or read a number."""
    return f"{key}={value if _PLAIN.fullmatch(value) and not _is_number(value) else quoted(value)}"


def shell_word(key: str, value: str | Path) -> str:
    """Format KEY=text for the shell."""
    return shell_line([word(key, str(value))])


def shell_line(words: Sequence[str]) -> str:
    """Join words into a shell command as people type it: a word with apostrophes becomes "KEY='a b'"."""
    in_double = [("'" in one and not set(one.replace("\\'", "")) & set('"$`\\!')) for one in words]
    return " ".join(f'"{one}"' if so else shlex.quote(one) for one, so in zip(words, in_double, strict=True))


def resume_word(path: str | Path) -> str:
    """Format `resume=DIR` for the shell; Hydra does not read this word."""
    return f"resume={shlex.quote(str(path))}"


def quoted(value: str) -> str:
    """Quote a text for Hydra's override grammar, which halves backslashes before a quote."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"


def unquoted(value: str) -> str:
    """Return the text that `quoted` quoted, in single or double quotes; any other text unchanged."""
    if not _QUOTED.fullmatch(value):
        return value
    return re.sub(rf"(\\+)({value[0]}|\Z)", lambda found: found[1][: len(found[1]) // 2] + found[2], value[1:-1])
