"""Write files atomically, also when a process is killed or the disk is full; make directories; lock; check space."""

import errno
import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError
from qerl_lab.config.units import GIB

# Error numbers that mean "no locks here". NFS gives EBADF for a directory, as it locks only files open for writing.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


def lock(opened: int | TextIO, refusal: str | None = None) -> None:
    """Lock an open file or directory until it is closed. Does nothing if the file system has no locks.

    If another process holds the lock, waits, or with `refusal` raises ConfigError with that text. A child process that
    inherits the open file keeps the lock.
    """
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
    except BlockingIOError:
        raise ConfigError(str(refusal)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise


@contextmanager
def exclusive(folder: Path, refusal: str | None = None) -> Iterator[None]:
    """Context manager: lock a folder until the end of the block.

    If another process holds the lock, waits, or with `refusal` raises ConfigError with that text.
    """
    held = os.open(folder, os.O_RDONLY)
    try:
        lock(held, refusal)
        yield
    finally:
        os.close(held)


def temporary_path(path: Path, suffix: str = "tmp") -> Path:
    """Return `path` with `.<suffix>` added to its name; `replace_file` writes there before it replaces `path`."""
    return path.with_name(f"{path.name}.{suffix}")


def replace_file(path: Path, data: bytes, suffix: str = "tmp") -> None:
    """Write `data` to a file atomically, through a temporary file beside it.

    If several processes may write the same file at once, each must give a different `suffix`. Raises an OSError that
    names the file.
    """
    temporary = temporary_path(path, suffix)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        if error.filename is None:  # write errors name no file; the user must know which disk is full
            error.filename = str(path)
        raise


def make_readable(files: Iterable[Path]) -> None:
    """Give files the read and write permissions of their folder.

    safetensors (0.8) writes files that only their owner may read.
    """
    for file in files:
        file.chmod(file.parent.stat().st_mode & 0o666)


def strict_json(content: Any) -> bytes:
    """Encode content as strict JSON; NaN and Infinity become null."""

    def finite_or_null(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: finite_or_null(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [finite_or_null(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite_or_null(content), indent=1, allow_nan=False).encode() + b"\n"


def read_json(path: Path, kind: type) -> Any:
    """Read a JSON file that must hold a `kind`, such as dict or list.

    Raises ConfigError if the file is missing or damaged, or holds another type.
    """
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({in_one_line(error)}). Move it away.") from None
    if not isinstance(values, kind):
        raise ConfigError(f"{path} does not have the content that a run writes: {str(values)[:80]}. Move it away.")
    return values


def hub_home() -> Path:
    """Return the home folder of Hugging Face's libraries: HF_HOME, or ~/.cache/huggingface."""
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()


def cache_folder() -> Path:
    """Return the lab's cache folder, for unpacked GGUF files and kernel times."""
    return hub_home() / "qerl-lab"


def make_directory(folder: Path, given: str) -> None:
    """Create a folder and its parents, and check that the folder is writable.

    Raises ConfigError if it cannot be created or written. The message begins with `given`, the option as the user typed
    it, such as `out=x`.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{given} cannot be written ({error.strerror}: {folder}). Type another directory.") from None


def refuse_full_disk(place: Path, needed: float, what: str, remedy: str) -> None:
    """Raise ConfigError if the disk of `place` has less than `needed` bytes free. `place` need not exist.

    In the message `what` names the things that need the space, and `remedy` says what to type instead.
    """
    above = next(path for path in (place, *place.parents) if path.is_dir())
    free = shutil.disk_usage(above).free
    if needed > free:
        raise ConfigError(
            f"{above} has {free / GIB:.2f} GiB free, and {what} take {math.ceil(needed / 2**20) / 1024:.2f} GiB. "
            f"{remedy}"
        )
