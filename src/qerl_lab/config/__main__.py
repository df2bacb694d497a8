"""`python -m qerl_lab.config tables`: print every group, option and key as Markdown for docs/configuration.md."""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from qerl_lab.cli.grammar import Command, main_of
from qerl_lab.cli.manual import describe_option
from qerl_lab.cli.overrides import GROUPS
from qerl_lab.config.arm import flatten, is_of_arm, leaves
from qerl_lab.config.conf_folder import choices_of, default_option_by_group, group_folder
from qerl_lab.config.keys import describe_type, spell_value
from qerl_lab.config.option import bounds_in_words, option
from qerl_lab.config.schema import RunConfig
from qerl_lab.system import exits
from qerl_lab.system.terminal import format_path

MARK = "<!-- From here on `python -m qerl_lab.config tables page=docs/configuration.md` writes this page. -->\n"
LABELS = ("experiment", "scale", "differs_in")  # keys that only label an option


@dataclass
class TablesOptions:
    page: str | None = option(None, "Markdown file whose end, after its mark, is written anew; null prints the tables")


def write_tables(options: TablesOptions) -> None:
    """Print the tables of options and keys, or write them into a Markdown file, `options.page`, after the line MARK."""
    if options.page is None:
        print(format_tables(), end="")
        return
    path = Path(options.page).expanduser()
    prose = path.read_text(encoding="utf-8").partition(MARK)[0]
    path.write_text(prose + MARK + format_tables(), encoding="utf-8")
    print(f"written: {format_path(path)}")


def format_tables() -> str:
    """Format two chapters of Markdown: every group with its options, every section of the schema with its keys."""
    text = "\n## Every group\n"
    for group, about in GROUPS.items():
        default = default_option_by_group().get(group)
        text += f"\n### `{group}=`\n\n{about[0].upper()}{about[1:]}.\n\n| option | | sets |\n|---|---|---|\n"
        for name in choices_of(group):
            path = group_folder(group) / f"{name}.yaml"
            sets = " ".join(f"`{word}`" for word in _settings_of_option(path, group))
            text += _format_row(f"`{name}`{' (default)' if name == default else ''}", describe_option(path), sets)
    text += "\n## Every key\n"
    for section, keys in groupby(leaves(RunConfig()), key=lambda leaf: leaf.section):
        text += f"\n### {f'`{section}`' if section else 'Of the run'}\n\n"
        text += "| key | default | unit | allowed | meaning | hash |\n|---|---|---|---|---|---|\n"
        for name, field, default in keys:
            of_key = field.metadata
            allowed = ", ".join(f"`{choice}`" for choice in of_key["choices"] or ())
            allowed = allowed or ": ".join(filter(None, (describe_type(field.type), bounds_in_words(of_key))))
            is_hashed = "yes" if is_of_arm(name) else ""
            text += _format_row(
                f"`{name}`", f"`{spell_value(default)}`", of_key["unit"], allowed, of_key["help"], is_hashed
            )
    return text


def _settings_of_option(path: Path, group: str) -> list[str]:
    """List the settings in an option's YAML file as overrides (`key=value`), without the keys in `LABELS`."""
    content, words = yaml.safe_load(path.read_text(encoding="utf-8")) or {}, []
    for entry in content.pop("defaults", []):
        named = entry if isinstance(entry, dict) else {group: entry}
        words += [f"{key.removeprefix('override ').lstrip('/')}={value}" for key, value in named.items()]
    sweeper = content.pop("hydra", {}).get("sweeper", {})
    words += [f"{key.lstrip('+')}={value}" for key, value in sweeper.get("params", {}).items()]
    prefix = "" if group in ("experiment", "scale", "sweeps") else f"{group}."
    return words + [f"{name}={spell_value(value)}" for name, value in flatten(content, prefix) if name not in LABELS]


def _format_row(*cells: str) -> str:
    """Format a row of a Markdown table; escape pipes, and tags outside of code."""
    escaped = []
    for text in cells:
        parts = text.replace("|", "\\|").split("`")
        escaped.append("`".join(part if n % 2 else part.replace("<", "&lt;") for n, part in enumerate(parts)))
    return f"| {' | '.join(escaped)} |\n"


COMMANDS: dict[str, Command[Any]] = {
    "tables": Command(
        "python -m qerl_lab.config tables",
        "Print every group, option and key with its default, as docs/configuration.md has them.",
        TablesOptions,
        write_tables,
    ),
}
main = main_of(COMMANDS)


if __name__ == "__main__":
    exits.run(main)
