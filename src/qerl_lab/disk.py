"""Files that are whole or not there, whoever is killed and however full the disk is; directories and locks."""

import errno
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError

# What a file system without locks says; and NFS of a directory, for it locks only what may be written (flock(2)).
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBADF)


def lock(opened: int | TextIO, refusal: str | None = None) -> bool:
    """Lock an open file or directory until it is closed; False where there are no locks, and nothing is guarded.

    Where another process has it this waits, or raises ConfigError with the `refusal`. A child that inherits it keeps
    the lock.
    """
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | (fcntl.LOCK_NB if refusal else 0))
    except BlockingIOError:
        raise ConfigError(str(refusal)) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Wait until no other process of this machine is in such a block of this folder; False where there are no locks."""
    held = os.open(folder, os.O_RDONLY)
    try:
        yield lock(held)
    finally:
        os.close(held)


def replace_file(path: Path, data: bytes, aside: str = "tmp") -> None:
    """Write aside, then rename: whoever is killed here leaves the old file or the new one, and a full disk no half.

    `aside` is the ending of the name until then: one of each process, where several may write the file at once.
    """
    beside = path.with_name(f"{path.name}.{aside}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        if error.filename is None:  # a write does not say to what: of several disks one is full
            error.filename = str(path)
        raise


def let_read(files: Iterable[Path]) -> None:
    """Let whoever may list their folder read weights: safetensors (0.8) writes files for their owner alone."""
    for file in files:
        file.chmod(file.parent.stat().st_mode & 0o666)


def strict_json(content: Any) -> bytes:
    """A file of strict JSON, which knows no NaN or Infinity: a number that is not finite becomes null."""

    def known(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: known(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [known(one) for one in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(known(content), indent=1, allow_nan=False).encode() + b"\n"


def read_json(path: Path, kind: type) -> Any:
    """Read a JSON file of a run directory. Raises ConfigError naming the file if it holds no `kind`."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({in_one_line(error)}). Move it away.") from None
    if not isinstance(values, kind):
        raise ConfigError(f"{path} is not what a run writes there: {str(values)[:80]}. Move it away.")
    return values


def hub_home() -> Path:
    """Folder of Hugging Face's libraries, as they decide it."""
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()


def cache_folder() -> Path:
    """Folder of what this machine needs once: unpacked GGUF files, times of kernels. Beside the hub's downloads."""
    return hub_home() / "qerl-lab"


def make_directory(folder: Path, given: str) -> None:
    """Make `folder` and a file in it that is gone at once. Raises ConfigError, which repeats `given`, where that fails.

    So a command learns before its work, and not after it, that it could write nothing. A directory that was made for
    nothing is removed again.
    """
    missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        for path in filter(os.path.isdir, missing):
            path.rmdir()
        raise ConfigError(f"{given} cannot be written ({error.strerror}: {folder}). Type another directory.") from None
