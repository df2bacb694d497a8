"""The directory `out` that a command writes: when it may replace an existing one, and how it is built. No torch.

It is built as OUT.partial and renamed to OUT when it is complete. A journal in OUT.partial holds the options of the
command and the names of complete files. So the same command continues after an interruption, and a command with other
options cannot write into the directory.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from qerl_lab.config.keys import spell_value
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import sha256
from qerl_lab.config.spelling import shell_line
from qerl_lab.system.disk import exclusive, make_directory, make_readable, read_json, replace_file, temporary_path

JOURNAL = "journal.json"


class OutputOptions:
    """Base class for options of a command that writes a directory `out`, replacing an existing one if `overwrite`."""

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


class Unfinished:
    """The directory NAME.partial, locked by this process until the end of the `with` block.

    An error in the block deletes the directory if no file in it is complete.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], overwrite: bool) -> None:
        """Create `out`.partial, or continue the work of an earlier process with the same identity.

        `identity` holds the options that determine the content, by name. Empties the directory if its journal lists no
        complete file, or with `overwrite` if it has another identity. Raises ConfigError if the directory cannot be
        written, is not from this command, or is in use; without `overwrite` also for another identity.
        """
        self.out, self.folder = out, out.with_name(out.name + ".partial")
        make_directory(self.folder, f"out={out}")
        self._journal: dict[str, Any] = {"identity": json.loads(json.dumps(dict(identity))), "files": {}}
        with ExitStack() as held:
            held.enter_context(
                exclusive(self.folder, f"another process is writing {self.folder} now. Wait for it, or stop it.")
            )
            self._take_over(overwrite)
            self._held = held.pop_all()

    def _take_over(self, overwrite: bool) -> None:
        """Continue with what the directory holds, or empty it and begin a journal. Raises ConfigError as `__init__`."""
        if (self.folder / JOURNAL).exists():
            begun = read_json(self.folder / JOURNAL, dict)
            if begun.get("identity") == self._journal["identity"]:
                self._journal = begun
            elif not overwrite:
                raise _other_options_error(self.folder, begun.get("identity") or {}, self._journal["identity"])
        # A kill in the first journal leaves its temporary file alone in the directory.
        elif any(path != temporary_path(self.folder / JOURNAL) for path in self.folder.iterdir()):
            raise ConfigError(
                f"{self.folder} has files that this command did not write. Type another out, or remove it."
            )
        if not self._journal["files"]:
            self.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._held:
            if kind is not None and not self._journal["files"]:  # nothing to continue
                shutil.rmtree(self.folder)

    def clear(self) -> None:
        """Delete everything in the unfinished directory, and begin a new journal."""
        for path in self.folder.iterdir():
            if path.name != JOURNAL:  # kept until replaced: without it the next command would refuse the directory
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        self._journal["files"] = {}
        self.note()

    def has(self, file: str) -> bool:
        """Tell whether the journal lists `file` as complete, and the file still has the size recorded there."""
        path = self.folder / file
        return path.exists() and self._journal["files"].get(file) == path.stat().st_size

    def note(self, *files: str) -> None:
        """Record in the journal that `files`, paths within the directory, are complete."""
        self._journal["files"] |= {file: (self.folder / file).stat().st_size for file in files}
        replace_file(self.folder / JOURNAL, json.dumps(self._journal, indent=1).encode() + b"\n")

    def hashes(self) -> dict[str, str]:
        """Return the SHA-256 of every file except the journal, by path within the directory."""
        files = sorted(file for file in self.folder.rglob("*") if file.is_file() and file.name != JOURNAL)
        return {str(file.relative_to(self.folder)): sha256(file) for file in files}

    def finish(self) -> None:
        """Rename the directory to `out`, replacing an existing one, and delete the journal.

        Gives safetensors files the read and write rights of the directory, because the library writes them for their
        owner only.
        """
        make_readable(self.folder.glob("*.safetensors"))
        before = self.out.with_name(self.out.name + ".replaced")
        if self.out.exists():
            shutil.rmtree(before, ignore_errors=True)  # left by a process killed below
            self.out.rename(before)
        self.folder.rename(self.out)
        (self.out / JOURNAL).unlink()
        shutil.rmtree(before, ignore_errors=True)


def _other_options_error(folder: Path, begun: Mapping[str, Any], now: Mapping[str, Any]) -> ConfigError:
    """Return the error that names the options in which the journal (`begun`) and this command (`now`) differ."""
    differ = [key for key in {**now, **begun} if now.get(key) != begun.get(key)]
    keys = [key for key in differ if not isinstance(now.get(key), dict)]
    if not keys:
        return ConfigError(
            f"{folder} was begun from other files than {differ[0]} has now. Type overwrite=true to start again."
        )
    then, given = (shell_line([f"{key}={spell_value(values.get(key))}" for key in keys]) for values in (begun, now))
    return ConfigError(
        f"{folder} was begun with {then}, and now {given} is given. "
        f"Type {then} to continue, another out, or overwrite=true to start again."
    )
