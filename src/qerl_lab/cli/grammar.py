"""Parse KEY=VALUE words, in Hydra's override grammar, into a dataclass of `option` fields.

The dataclass also produces `--help`. Hydra is imported only to parse a word, so that `--help` prints at once.
"""

import os
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, get_origin, get_type_hints

from qerl_lab.config.arm import leaves
from qerl_lab.config.keys import TEXT, has_type, of_others, type_words, typed, unknown_key, wrong_type
from qerl_lab.config.option import ConfigError, bounds_in_words, check_bounds, did_you_mean
from qerl_lab.config.spelling import as_text, in_double_quotes, readable
from qerl_lab.exits import OK, Main, command
from qerl_lab.processes import refuse_several

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

Options = TypeVar("Options")
WIDTH = 100
HELP = ("--help", "-h")


@dataclass(frozen=True)
class Command(Generic[Options]):
    """A command beside the main one: its usage, its purpose, and the function that takes its options."""

    usage: str  # the command line before KEY=VALUE
    about: str
    options: type[Options]
    work: Callable[[Options], None]
    examples: tuple[tuple[str, str], ...] = ()  # (command, meaning)
    required: tuple[str, ...] = ()  # options that must be given; "a|b" requires one of the two
    bare: str = ""  # option whose values may be typed without KEY=
    alone: bool = False  # runs in one process: each of several would repeat the whole work

    def run(self, words: list[str]) -> int:
        """Print the manual, or run the command on the words. Raises ConfigError, and whatever the work raises."""
        if set(HELP) & set(words) or (self.required and not words):
            print(manual(self))
            return OK
        if self.alone:
            refuse_several(os.environ)
        self.work(self.read(words))
        return OK

    def read(self, words: Sequence[str]) -> Options:
        """Read the words into options. Raises ConfigError for a wrong word and for a missing one."""
        options = read(self.options, words, self.bare)
        for name in self.required:
            if not any(getattr(options, each) for each in name.split("|")):
                line = self.examples[0][0]
                example = next((word for word in line.split() if word.startswith(f"{name}=")), line)
                raise ConfigError(f"{name.replace('|', '= or ')}= is missing. Type for example {example}.")
        return options


def choose(commands: Mapping[str, Command[Any]], words: list[str]) -> int:
    """Run the subcommand that the first word names; without words list the subcommands."""
    name, *rest = words or HELP
    if name in HELP:
        width = max(len(command.usage) for command in commands.values()) + 2
        print("\n".join(line for command in commands.values() for line in entry(command.usage, command.about, width)))
        return OK
    if name not in commands:
        hint = did_you_mean(name, list(commands))
        raise ConfigError(f"{name} is not a command.{hint} Allowed: {', '.join(commands)}.")
    return commands[name].run(rest)


def main_of(commands: Mapping[str, Command[Any]]) -> Main:
    """Make the `main` of a module with subcommands; it returns the exit code."""

    def main(words: list[str]) -> int:
        return choose(commands, words)

    return command(main)


def read(kind: type[Options], words: Sequence[str], bare: str = "") -> Options:
    """Parse a command's words into a flat dataclass. Raises ConfigError for the first word that does not fit.

    Words without a key are values of the option `bare`. They are paths from the shell, and are not parsed.
    """
    types, defaults = get_type_hints(kind), kind()
    given: dict[str, Any] = {}
    typed_for: list[tuple[str, str]] = []  # key, word
    paths: list[str] = []
    for word in words:
        if bare and not _has_key(word, types):
            paths.append(word)
            continue
        override = parse(word, types)
        key = override.get_key_element().lstrip("+")
        if key not in types:
            raise unknown_key(key, list(types), _hint(key, list(types)))
        given[key] = _value(override, key, types[key], getattr(defaults, key), word.partition("=")[2])
        typed_for.append((key, word))
    if paths and get_origin(types[bare]) is list:
        given[bare] = paths
        typed_for.append((bare, " ".join(paths)))
    elif paths:
        given[bare] = paths[0]
        typed_for += [(bare, path) for path in paths]
    refuse_twice(typed_for)
    return _made(kind, given)


def _hint(key: str, keys: list[str]) -> str:
    """Return ` Did you mean x?` for what a run or another program calls a key, or for a close name; else nothing."""
    meant = (of_others(key) or "").partition("=")[0]
    ends = (meant.rpartition(".")[2], meant.partition(".")[0])
    return next((f" Did you mean {end}?" for end in ends if end in keys), did_you_mean(key, keys))


def _has_key(word: str, keys: Collection[str]) -> bool:
    """Tell whether a word is KEY=VALUE or a flag. A path may have an equals sign in it, too."""
    key, sign, _ = word.lstrip("+").partition("=")
    return word.startswith("-") or (sign != "" and (key in keys or not os.path.exists(os.path.expanduser(word))))


def parse(word: str, keys: Mapping[str, Any]) -> "Override":
    """Parse a word by Hydra's grammar. Raises ConfigError for a flag, and for anything but KEY=VALUE."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if word.startswith("-"):
        raise not_a_flag(word, {key: f"{key}=VALUE" for key in keys}, HELP)
    key, sign, value = word.partition("=")
    spelled = key + sign + (as_text(value) if keys.get(key.lstrip("+")) in TEXT else value)
    try:
        override = OverridesParser.create().parse_override(readable(spelled))
    except HydraException:
        raise unreadable(word, keys) from None
    if override.is_delete() or not override.key_or_group:
        raise unreadable(word, keys)
    return override


def not_a_flag(word: str, keys: Mapping[str, str], flags: Sequence[str]) -> ConfigError:
    """Return the error for a word with dashes; `keys` has what to type for a key, `flags` are the known flags."""
    key, sign, _ = word.lstrip("-").partition("=")
    key = key.replace("-", "_")
    close = did_you_mean(key, list(keys)) if sign else did_you_mean(word, list(flags))
    hint = f" Type {keys[key]}." if key in keys else close
    return ConfigError(f"{word} is not a flag; keys take no dashes.{hint or ' Type --help for what may be typed.'}")


def unreadable(word: str, keys: Mapping[str, Any]) -> ConfigError:
    """Return the error for a word outside of Hydra's grammar, or without a value; `keys` has the type of each."""
    if word in keys:
        return ConfigError(f"{word} has no value. Type {word}=VALUE.")
    key, sign, value = word.partition("=")
    if not sign:
        return ConfigError(f"{word} cannot be read. Type KEY=VALUE, or leave {word} out.")
    one = f" As one value that is {in_double_quotes(key, value)}." if keys.get(key.lstrip("+")) in TEXT else ""
    return ConfigError(
        f"{typed(word)} cannot be read. Type KEY=VALUE, and put a value that has one of , = ( ) [ ] {{ }} "
        f"or spaces in it between quotes, inside the shell's: \"KEY='a, b'\".{one}"
    )


def _value(override: "Override", key: str, kind: Any, default: Any, text: str) -> Any:
    """Return an override's value as `kind`. Raises ConfigError for another type, or for several values."""
    value = override.value()
    if get_origin(kind) is list:
        value = _as_list(override, value)
    elif override.is_sweep_override() and kind in TEXT:
        one = in_double_quotes(key, text)
        raise ConfigError(f"{key}={text} is several values. Type one of them, or {one} if the comma is part of it.")
    elif override.is_sweep_override():
        raise ConfigError(wrong_type(key, kind, text, default))
    if isinstance(value, str) and "${" in value:
        return value  # interpolation: OmegaConf checks its type
    if not has_type(value, kind):
        shown = text if override.is_sweep_override() else value
        raise ConfigError(wrong_type(key, kind, shown, default))
    return value


def _as_list(override: "Override", value: Any) -> Any:
    """Read `a` and `a,b` as `[a]` and `[a,b]` for a list key: these commands have no sweeps."""
    from hydra.core.override_parser.types import QuotedString

    if override.is_sweep_override():
        if not override.is_discrete_sweep():
            return value
        return [item.text if isinstance(item, QuotedString) else item for item in override.sweep_iterator()]
    return [value] if isinstance(value, str | int | float) and "${" not in str(value) else value


def refuse_twice(lines: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError if two of the (key, word) pairs have the same key."""
    words: dict[str, list[str]] = {}
    for key, word in lines:
        words.setdefault(key, []).append(word)
    for key, given in words.items():
        if len(given) > 1:
            raise ConfigError(f"{key} is given {len(given)} times: {' '.join(given)}. Type one of them.")


def _made(kind: type[Options], given: dict[str, Any]) -> Options:
    """Build the dataclass through OmegaConf, which resolves interpolations, and check its bounds."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    types, config = get_type_hints(kind), OmegaConf.structured(kind)
    try:
        for key, value in given.items():
            config[key] = value
        made = OmegaConf.to_object(config)
    except OmegaConfBaseException as error:  # an interpolation without a target, or with one of another type
        place = str(error.full_key)  # key[0] for an item of a list
        allowed = type_words(types[place.partition("[")[0]])
        raise ConfigError(f"{place}: {str(error).splitlines()[0].rstrip('.')}; allowed: {allowed}.") from None
    assert isinstance(made, kind)
    for name, field, value in leaves(made):
        if not has_type(value, types[name]):  # OmegaConf does not check the items of an interpolated list
            raise ConfigError(wrong_type(name, types[name], value, getattr(kind(), name)))
        check_bounds(name, field.metadata, value)
    return made


def manual(command: Command[Any]) -> str:
    """Format the text of `--help`: examples, then every key with its default and meaning."""
    options = leaves(command.options())
    lines = [command.about, "", f"  {command.usage}{' KEY=VALUE ...' if options else ''}"]
    lines += ["", "Examples:"] if command.examples else []
    for line, meaning in command.examples:
        lines += [f"  {line}", f"      {meaning}"]
    lines += ["", "Keys and their defaults:"] if options else []
    for name, field, default in options:
        lines += key_entry(name, field, default, 26)
    return "\n".join([*lines, "", "Exit codes: 0 done, 1 failed, 2 a wrong command or input, 130 interrupted."])


def key_entry(name: str, field: Any, default: Any, width: int) -> list[str]:
    """Format the lines of the manual for one key."""
    shown = typed(default)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    return entry(f"{name}={shown}", field.metadata["help"] + _bounds(field.metadata), width)


def entry(name: str, text: str, width: int) -> list[str]:
    """Format `  name    text` with the text wrapped in its column; a long name gets its own line."""
    lines = textwrap.wrap(text, WIDTH - width - 2) or [""]
    head = [f"  {name}"] if len(name) >= width else [f"  {name:<{width}}{lines.pop(0)}"]
    return head + [" " * (width + 2) + line for line in lines]


def _bounds(metadata: Any) -> str:
    """Format the allowed values of a key, in brackets."""
    if metadata["choices"]:
        return f" ({', '.join(metadata['choices'])})"
    bounds = bounds_in_words(metadata)
    return f" ({bounds})" if bounds else ""
