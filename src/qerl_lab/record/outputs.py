"""Output directories, tried before the work of a command and not after it."""

import os
import tempfile
from pathlib import Path

from qerl_lab.config.option import ConfigError


def make_directory(folder: Path, given: str) -> None:
    """Make `folder` and a file in it that is gone at once. Raises ConfigError, which repeats `given`, where that fails.

    A directory that was made for nothing is removed again.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        for path in filter(os.path.isdir, missing):
            path.rmdir()
        raise ConfigError(f"{given} cannot be written ({error.strerror}: {folder}). Type another directory.") from None
