"""The words KEY=VALUE of a command beside the main one, and its manual, both from a dataclass of `option` fields.

Imports no torch and no Hydra, so that a wrong word is refused, and `--help` answered, at once.
"""

import textwrap
from dataclasses import fields
from typing import Any, TypeVar, get_args, get_type_hints

from qerl_lab.checks import typed, wrong_type
from qerl_lab.config import ConfigError, check_bounds, did_you_mean, leaves

Options = TypeVar("Options")
WIDTH = 100
HELP = ("--help", "-h")


def read(kind: type[Options], words: list[str]) -> Options:
    """A dataclass without nested ones from `KEY=VALUE` words. Raises ConfigError for the first that does not fit."""
    types = get_type_hints(kind)
    defaults = {f.name: value for f, value in _options(kind())}
    given: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        _check_key(word, key, equals, list(types))
        if key in given:
            raise ConfigError(f"{key} is given twice. Type it once.")
        given[key] = _value(key, types[key], text, defaults[key])
    made = kind(**given)
    for field, value in _options(made):
        check_bounds(field.name, field.metadata, value)
    return made


def _options(options: Any) -> list[tuple[Any, Any]]:
    return [(f, getattr(options, f.name)) for f in fields(options)]


def _check_key(word: str, key: str, equals: str, known: list[str]) -> None:
    if word.startswith("-"):
        bare = word.lstrip("-").partition("=")[0].replace("-", "_")
        hint = f" Type {bare}=VALUE." if bare in known else ""
        raise ConfigError(f"{word} is not a flag; keys take no dashes.{hint} Allowed: {HELP[0]}.")
    if key not in known:
        raise ConfigError(f"{key} is not a known key.{did_you_mean(key, known)} Allowed: {', '.join(known)}.")
    if not equals:
        raise ConfigError(f"{word} cannot be read as KEY=VALUE. Type {key}=VALUE.")


def _value(key: str, kind: Any, text: str, default: Any) -> Any:
    """`text` as a value of the type `kind`, spelled as the main command has it: null, true, [a,b]."""
    if type(None) in get_args(kind):
        if text == "null":
            return None
        kind = get_args(kind)[0]
    if kind == list[str]:
        inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
        return [part.strip() for part in inner.split(",") if part.strip()]
    if kind is bool and text in ("true", "false"):
        return text == "true"
    try:
        return {str: str, int: int, float: float}[kind](text)
    except (KeyError, ValueError):
        raise ConfigError(wrong_type(key, kind, text, default)) from None


def manual(about: str, command: str, options: Any, examples: tuple[tuple[str, str], ...]) -> str:
    """What `--help` prints: examples, then every key with its default and its meaning."""
    lines = [about, "", f"  {command} KEY=VALUE ...", "", "Examples:"]
    for line, meaning in examples:
        lines += [f"  {line}", f"      {meaning}"]
    lines += ["", "Keys and their defaults:"]
    for name, field, default in leaves(options):
        lines += key_entry(name, field, default, 26)
    return "\n".join([*lines, "", "Exit codes: 0 done, 1 failed, 2 a wrong command or input, 130 interrupted."])


def key_entry(name: str, field: Any, default: Any, width: int) -> list[str]:
    """The lines of the manual for one key."""
    return entry(f"{name}={_short(typed(default))}", field.metadata["help"] + _bounds(field.metadata), width)


def entry(name: str, text: str, width: int) -> list[str]:
    """`  name    text`, the text wrapped in its column; a long name gets a line of its own."""
    lines = textwrap.wrap(text, WIDTH - width - 2) or [""]
    head = [f"  {name}"] if len(name) >= width else [f"  {name:<{width}}{lines.pop(0)}"]
    return head + [" " * (width + 2) + line for line in lines]


def _short(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."


def _bounds(metadata: Any) -> str:
    """The allowed values of a key, in brackets."""
    if metadata["choices"]:
        return f" ({', '.join(metadata['choices'])})"
    words = (("at_least", "at least"), ("above", "above"), ("at_most", "at most"))
    parts = [f"{word} {metadata[name]}" for name, word in words if metadata[name] is not None]
    return f" ({', '.join(parts)})" if parts else ""
