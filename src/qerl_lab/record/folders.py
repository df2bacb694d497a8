"""Make directories for runs: under a free name, and without a traceback if the disk refuses."""

import itertools
import os
from pathlib import Path

from qerl_lab.config.option import ConfigError


def make_run_directory(wanted: Path, exist_ok: bool = True) -> None:
    """Create the directory `wanted` and its parents. Raises ConfigError if the system refuses.

    Raises FileExistsError if `wanted` is a file, and with `exist_ok=False` also if it is a directory.
    """
    try:
        wanted.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(
            f"the run directory {wanted} cannot be made: {error.strerror}. "
            "Type another directory: run_dir=DIR, for a sweep hydra.sweep.dir=DIR."
        ) from None


def reserve_directory(wanted: Path) -> Path:
    """Create `wanted`; if it exists, create the first free of NAME-2, NAME-3 ... instead. Return the new path."""
    numbers, candidate = itertools.count(2), wanted
    while True:
        try:
            make_run_directory(candidate, exist_ok=False)
            return candidate
        except FileExistsError:
            candidate = wanted.with_name(f"{wanted.name}-{next(numbers)}")


def first_missing(wanted: Path) -> Path | None:
    """Return the topmost of `wanted` and its parents that does not exist; None if `wanted` exists."""
    missing = [path for path in (wanted, *wanted.parents) if not os.path.exists(path)]
    return missing[-1] if missing else None
