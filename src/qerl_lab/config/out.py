"""The key `out`: the directory that a command writes, and when it may replace an existing one. Imports no torch."""

from pathlib import Path

from qerl_lab.config.option import ConfigError


class OutputOptions:
    """Base class for the options of a command that writes a directory `out`.

    `overwrite` is an option of most of them; a command without it, such as the search, replaces nothing.
    """

    out: str
    overwrite: bool = False

    @property
    def folder(self) -> Path:
        """Return the directory `out` as an absolute path."""
        return Path(self.out).expanduser().absolute()


def check_apart(options: OutputOptions, model: str) -> None:
    """Raise ConfigError if the directory `out` contains the local path `model`, or lies in it. Accepts any hub id."""
    source, out = Path(model).expanduser().resolve(), options.folder.resolve()
    if source.exists() and (source.is_relative_to(out) or out.is_relative_to(source)):
        raise ConfigError(f"out={options.out} and model={model} lie within each other. Type an out beside the model.")


def check_free(folder: Path, out: str, record: str, *, overwrite: bool) -> None:
    """Raise ConfigError if `folder` exists, unless `overwrite` is set and this command wrote it.

    `out` is the folder as the user typed it. `record` is the name of the file that the command leaves in its output.
    """
    if not folder.exists():
        return
    if not (folder / record).is_file():
        raise ConfigError(
            f"out={out} was not made by this command, so overwrite=true does not remove it. Type another out."
        )
    if not overwrite:
        raise ConfigError(f"out={out} exists. Type another out, or overwrite=true to replace it.")
