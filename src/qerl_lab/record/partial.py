"""Build a directory as NAME.partial and rename it to NAME when complete.

A journal in NAME.partial holds the options of the command and the names of complete files. So the same command
continues after an interruption, and a command with other options cannot write into the directory.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from qerl_lab.config.keys import spell_value
from qerl_lab.config.option import ConfigError
from qerl_lab.config.spelling import shell_line
from qerl_lab.system.disk import lock, make_directory, make_readable, read_json, replace_file

JOURNAL = "journal.json"


class Unfinished:
    """The directory NAME.partial, locked by this process until the end of the `with` block.

    An error in the block deletes the directory if no file in it is complete.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], overwrite: bool) -> None:
        """Create `out`.partial, or continue the work of an earlier process with the same identity.

        `identity` holds the options that determine the content, by name. Raises ConfigError if `out` is not writable,
        another process is writing `out`.partial, or that directory is not from this command. With another identity in
        its journal, `overwrite` clears the directory; without `overwrite` this raises ConfigError too.
        """
        self.out, self.folder = out, out.with_name(out.name + ".partial")
        make_directory(self.folder, f"out={out}")
        self._lock = os.open(self.folder, os.O_RDONLY)
        self._journal: dict[str, Any] = {"identity": json.loads(json.dumps(dict(identity))), "files": {}}
        try:
            lock(self._lock, f"another process is writing {self.folder} now. Wait for it, or stop it.")
            if not (self.folder / JOURNAL).exists():
                if any(self.folder.iterdir()):
                    raise ConfigError(
                        f"{self.folder} has files that this command did not write. Type another out, or remove it."
                    )
                self.clear()
                return
            begun = read_json(self.folder / JOURNAL, dict)
            if begun.get("identity") == self._journal["identity"]:
                self._journal = begun
            elif overwrite:
                self.clear()
            else:
                raise _other_options_error(self.folder, begun.get("identity") or {}, self._journal["identity"])
        except BaseException:
            os.close(self._lock)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and not self._journal["files"]:  # nothing to continue
            shutil.rmtree(self.folder)
        os.close(self._lock)

    def clear(self) -> None:
        """Delete everything in the unfinished directory, and begin a new journal."""
        for path in self.folder.iterdir():
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
