"""Find free names for run directories, make directories, and remove them if a run is refused."""

import itertools
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from qerl_lab.config.option import ConfigError


def make_run_directory(wanted: Path, exist_ok: bool = True) -> None:
    """Create a run's directory. Raises FileExistsError if it must not exist, ConfigError if creating fails."""
    try:
        wanted.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise ConfigError(
            f"the run directory {wanted} cannot be made: {error.strerror}. "
            "Type another: run_dir=DIR, for a sweep hydra.sweep.dir=DIR."
        ) from None


def reserve_directory(wanted: Path) -> Path:
    """Create a new directory of this name, or with the next free number if it exists; return its path."""
    candidates = numbered_paths(wanted)
    while True:
        candidate = next(candidates)
        with suppress(FileExistsError):
            make_run_directory(candidate, exist_ok=False)
            return candidate


def is_unused(path: Path) -> bool:
    """Return whether the path does not exist or is an empty directory."""
    if not os.path.exists(path):  # Path.exists raises if the name is too long
        return True
    return path.is_dir() and not any(path.iterdir())


def numbered_paths(wanted: Path) -> Iterator[Path]:
    """Yield NAME, NAME-2, NAME-3 ... without end."""
    yield wanted
    yield from (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))


def first_missing(wanted: Path) -> Path | None:
    """Return the topmost missing directory on the path; None if the path exists."""
    missing = [path for path in (wanted, *wanted.parents) if not os.path.exists(path)]
    return missing[-1] if missing else None


def remove_empty_directories(folder: Path, topmost: Path | None) -> None:
    """Remove a directory and its parents up to `topmost`, as long as they are empty."""
    for path in (folder, *folder.parents) if topmost else ():
        if any(path.iterdir()):
            return
        path.rmdir()
        if path == topmost:
            return
