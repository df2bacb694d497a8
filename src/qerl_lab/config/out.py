"""`out`: the directory that a command writes, and what `overwrite=true` may replace. Imports no torch."""

from collections.abc import Callable
from pathlib import Path

from qerl_lab.config.option import ConfigError


class Writes:
    """Options of a command that writes the directory `out`."""

    out: str

    @property
    def folder(self) -> Path:
        """`out` as an absolute path."""
        return Path(self.out).expanduser().absolute()


def check_apart(options: Writes, model: str) -> None:
    """Raise ConfigError where `model` is here, and it and `out` lie within each other."""
    source, out = Path(model).expanduser().resolve(), options.folder.resolve()
    if source.exists() and (source.is_relative_to(out) or out.is_relative_to(source)):
        raise ConfigError(f"out={options.out} and model={model} lie within each other. Type an out beside the model.")


def check_free(
    options: Writes, overwrite: bool, is_own: Callable[[Path], bool], other: str = "was not made by this command"
) -> None:
    """Raise ConfigError where something is at `out`, unless it is to be replaced, and `is_own` of that folder.

    `other` says what is wrong with what is not.
    """
    if not options.folder.exists():
        return
    if not overwrite:
        raise ConfigError(f"out={options.out} exists. Type another out, or overwrite=true to replace it.")
    if not is_own(options.folder):
        raise ConfigError(f"out={options.out} {other}, so overwrite=true does not remove it. Type another out.")
