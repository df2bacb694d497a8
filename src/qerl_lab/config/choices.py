"""Find the option of a group in conf/ that matches the settings of a run, to label them with one word."""

from collections.abc import Collection, Mapping
from functools import cache

from omegaconf import OmegaConf

from qerl_lab.config.arm import leaves
from qerl_lab.config.conf_folder import choices_of, group_folder
from qerl_lab.config.schema import RunConfig


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
        own = {key for key, value in values.items() if value != defaults[key]}
        if all(settings.get(key) == values[key] for key in own.union(keys)):
            fit[choice] = len(own)
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
