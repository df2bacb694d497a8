"""Quote words of a command line for Hydra's override grammar and for the shell."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

_PARTS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,=()\[\]{}'"]+""")  # quoted parts, and runs of plain text
_QUOTED = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*\"""", re.DOTALL)
_PLAIN = re.compile(r"[\w./:@%+-]+")
_ADDED = re.compile(r"""(?:^|(?<=[,=()\[\]{}'"]))'([^,=()\[\]{}'"\\]+)'(?=[,=()\[\]{}'"]|$)""")  # by the lab
_FOREIGN = re.compile(r"[^\w\s/+.$%*@?|:-]", re.ASCII)  # characters that the grammar rejects outside of quotes


def quote_override(override: str, is_text: bool = False) -> str:
    """Quote what Hydra would not read as it was meant: umlauts, ~, # and the like; numbers if `is_text`.

    Hydra would read the commit 7e12345 as infinity. Words with unbalanced quotes or interpolations stay as they are.
    """
    key, sign, value = override.partition("=")
    is_text = is_text and "(" not in value

    def part(found: re.Match[str]) -> str:
        text = found[0]
        if text[0] in "'\"":
            return text
        if is_text and _is_number(text):
            return quoted(text.strip())
        return quoted(text) if "\\" not in text and _FOREIGN.search(text) else text

    is_open = set("'\"") & set(_PARTS.sub("", value))
    return override if "${" in value or is_open else key + sign + _PARTS.sub(part, value)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def unquote_override(override: str) -> str:
    """Remove the quotes that `quote_override` added."""
    return _ADDED.sub(r"\1", override)


def spell_list(values: Sequence[str]) -> str:
    """Format texts as one list in Hydra's override grammar."""
    parts = (value if value.isidentifier() else '"' + value.replace('"', '\\"') + '"' for value in values)
    return f"[{','.join(parts)}]"


def word(key: str, value: str) -> str:
    """Format KEY=text for Hydra, quoted if Hydra would split it or not read it."""
    return f"{key}={value if _PLAIN.fullmatch(value) else quoted(value)}"


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
