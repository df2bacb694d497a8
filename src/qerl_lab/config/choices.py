"""What the choices of a group of conf/ set, so that settings can be called by the one word that was typed for them."""

from collections.abc import Collection, Mapping
from functools import cache

from omegaconf import OmegaConf

from qerl_lab.config.arm import leaves
from qerl_lab.config.files import choices_of, group_folder
from qerl_lab.config.schema import RunConfig


def choice_with(group: str, settings: Mapping[str, str], keys: Collection[str]) -> str | None:
    """Return the choice of a group that gives `keys`, and all that it sets itself, the values of `settings`.

    Args:
        group: a folder of conf/ and a part of the schema, as `aqn`.
        settings: values as text by dotted key. One that is not there is no choice's.
        keys: dotted, of the group.

    Of several the one that sets most; None where none fits.
    """
    defaults = _values(group, None)
    fit = dict[str, int]()
    for choice in choices_of(group):
        values = _values(group, choice)
        own = {key for key, value in values.items() if value != defaults[key]}
        if all(settings.get(key) == values[key] for key in own.union(keys)):
            fit[choice] = len(own)
    return max(fit, key=lambda choice: fit[choice], default=None)


@cache
def _values(group: str, choice: str | None) -> dict[str, str]:
    """All settings of a group as text, by dotted key; without a choice the schema's."""
    part = OmegaConf.structured(getattr(RunConfig(), group))
    if choice is not None:
        part = OmegaConf.merge(part, OmegaConf.load(group_folder(group) / f"{choice}.yaml"))
    return {key: str(value) for key, _, value in leaves(OmegaConf.to_object(part), f"{group}.")}
