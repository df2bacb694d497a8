"""The words of a command line in Hydra's override grammar, and as a shell takes them."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

_PARTS = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[^,=()\[\]{}'"]+""")  # quoted ones, and runs of plain text
_PLAIN = re.compile(r"[\w./:@%+-]+")
_ADDED = re.compile(r"""(?:^|(?<=[,=()\[\]{}'"]))'([^,=()\[\]{}'"\\]+)'(?=[,=()\[\]{}'"]|$)""")  # by the lab
_FOREIGN = re.compile(r"[^\w\s/+.$%*@?|:-]", re.ASCII)  # what the grammar does not know outside of quotes


def readable(override: str) -> str:
    """The word with quotes around what Hydra would not read without them: umlauts, ~, # and the like.

    Lists, values separated by commas, and what has quotes, backslashes or an interpolation of its own stay as they are.
    """
    key, sign, value = override.partition("=")

    def part(found: re.Match[str]) -> str:
        text = found[0]
        return quoted(text) if text[0] not in "'\"" and "\\" not in text and _FOREIGN.search(text) else text

    is_open = set("'\"") & set(_PARTS.sub("", value))  # a quote without its partner: nothing here can be told apart
    return override if "${" in value or is_open else key + sign + _PARTS.sub(part, value)


def as_text(value: str) -> str:
    """The value of a text key with quotes around each number, which Hydra would round: the commit 7e12345 is no inf."""

    def part(found: re.Match[str]) -> str:
        try:
            float(found[0])
        except ValueError:
            return found[0]
        return quoted(found[0].strip())

    return value if "(" in value or "${" in value else _PARTS.sub(part, value)


def as_typed(override: str) -> str:
    """The word without the quotes that `readable` and `as_text` put into it."""
    return _ADDED.sub(r"\1", override)


def listed(values: Sequence[str]) -> str:
    """Texts as one list in Hydra's override grammar."""
    parts = (value if value.isidentifier() else '"' + value.replace('"', '\\"') + '"' for value in values)
    return f"[{','.join(parts)}]"


def word(key: str, value: str) -> str:
    """The word that gives `key` this text, in quotes where Hydra would part it or not read it."""
    return f"{key}={value if _PLAIN.fullmatch(value) else quoted(value)}"


def shell_word(key: str, value: str | Path) -> str:
    """The same word as it is typed into a shell."""
    return shlex.quote(word(key, str(value)))


def in_double_quotes(key: str, value: str) -> str:
    """`shell_word` as people type it, "KEY='a b'", unless the shell would read something in it."""
    return shell_word(key, value) if set(value) & set('"$`\\!') else f'"{word(key, value)}"'


def shell_line(words: Sequence[str]) -> str:
    """Words as they are typed into a shell, those with an apostrophe as people type them: "KEY='a b'"."""
    in_double = [("'" in one and not set(one) & set('"$`\\!')) for one in words]
    return " ".join(f'"{one}"' if so else shlex.quote(one) for one, so in zip(words, in_double, strict=True))


def resume_word(path: str | Path) -> str:
    """`resume=DIR` as it is typed into a shell; Hydra does not read it."""
    return f"resume={shlex.quote(str(path))}"


def quoted(value: str) -> str:
    """A text as one value in Hydra's override grammar, where backslashes ahead of a quote count twice."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value) + "'"
