"""Locate the YAML files: conf/ (options that compose a run) and sweeps/; find the option that matches a run."""

from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from qerl_lab.config.arm import leaves
from qerl_lab.config.schema import RunConfig


def package_data(name: str) -> Path:
    """Return the path of `conf`, `sweeps` or `results/reference`, in the installed package or else the checkout."""
    inside = Path(__file__).parents[1] / name
    return inside if inside.is_dir() else Path(__file__).parents[3] / name


def group_folder(group: str) -> Path:
    """Return the folder with the options of a configuration group: conf/<group>/, or sweeps/."""
    return package_data("sweeps") if group == "sweeps" else package_data("conf") / group


def choices_of(group: str) -> list[str]:
    """List the options of a configuration group: the names of the YAML files in its folder."""
    return sorted(path.stem for path in group_folder(group).glob("*.yaml"))


def default_option_by_group() -> dict[str, str]:
    """Map each group in the defaults list of conf/config.yaml to its option there."""
    entries = yaml.safe_load((package_data("conf") / "config.yaml").read_text(encoding="utf-8"))["defaults"]
    defaults = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]  # not schema, _self_
    return {group.removeprefix("override "): option for group, option in defaults}


def matching_option(group: str, settings: Mapping[str, str], keys: Collection[str]) -> str | None:
    """Return the option of a group in conf/ that agrees with `settings`; of several, the one that sets most keys.

    Returns None if no option agrees.

    Args:
        group: a folder of conf/ and a section of the schema, such as `aqn`.
        settings: values as text by dotted key. An option that sets a key missing here does not agree.
        keys: dotted keys of the group that must agree too, even if the option leaves them at the schema's default.
    """
    defaults = _values_of_option(group, None)
    fit = dict[str, int]()
    for choice in choices_of(group):
        values = _values_of_option(group, choice)
        departures = {key for key, value in values.items() if value != defaults[key]}
        if all(settings.get(key) == values[key] for key in departures.union(keys)):
            fit[choice] = len(departures)
    return max(fit, key=lambda choice: fit[choice], default=None)


@cache
def _values_of_option(group: str, choice: str | None) -> dict[str, str]:
    """Map every dotted key of a group to its value as text, under the option `choice`.

    If `choice` is None, the values are the schema's defaults.
    """
    part = OmegaConf.structured(getattr(RunConfig(), group))
    if choice is not None:
        part = OmegaConf.merge(part, OmegaConf.load(group_folder(group) / f"{choice}.yaml"))
    return {leaf.name: str(leaf.value) for leaf in leaves(OmegaConf.to_object(part), f"{group}.")}
