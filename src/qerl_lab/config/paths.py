"""Local paths, as a run keeps them: absolute, so that it means the same from every directory. Imports no torch."""

import hashlib
from dataclasses import replace
from pathlib import Path

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig, TaskConfig

SQLITE = "sqlite:///"


def anchored(cfg: RunConfig) -> RunConfig:
    """The same run with the paths of model, task and tracking.uri absolute where local; run_dir is its plan's.

    task.module_hash then says what is in the file of task.module. Raises ConfigError where there is no such file.
    """
    uri = cfg.tracking.uri
    if uri is not None and (file := sqlite_file(uri)):
        uri = f"{SQLITE}{_absolute(str(file))}"
    return replace(
        cfg,
        model=replace(cfg.model, path=_anchor(cfg.model.path)),
        task=_anchored_task(cfg.task),
        tracking=replace(cfg.tracking, uri=uri),
    )


def _anchored_task(task: TaskConfig) -> TaskConfig:
    path, module = task.path and _anchor(task.path), task.module
    if module is None:
        return replace(task, path=path)
    file = _absolute(module)
    found = module_hash(file)
    if task.module_hash not in (None, found):
        raise ConfigError(
            f"task.module_hash={task.module_hash} is not that of {file}, which is {found}. Leave task.module_hash out."
        )
    return replace(task, path=path, module=file, module_hash=found)


def module_hash(file: str) -> str:
    """First 12 hex digits of the SHA-256 of a file of task.module. Raises ConfigError where there is none."""
    if not file.endswith(".py") or not Path(file).is_file():
        raise ConfigError(f"task.module={file} is no Python file. Type task.module=FILE.py.")
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]


def sqlite_file(uri: str) -> Path | None:
    """The database file of an sqlite URI; None for anything else."""
    name = uri.removeprefix(SQLITE)
    return None if name in (uri, "") or "?" in name else Path(name)


def _anchor(path: str) -> str:
    """`pocket` is the embedded policy and not a directory of that name; a hub id looks like a relative path."""
    is_local = path.startswith(("/", ".", "~")) or (path not in ("", "pocket") and Path(path).exists())
    return _absolute(path) if is_local else path


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
