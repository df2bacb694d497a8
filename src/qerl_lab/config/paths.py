"""Local paths, as a run keeps them: absolute, so that it means the same from every directory. Imports no torch."""

from dataclasses import replace
from pathlib import Path

from qerl_lab.config.schema import RunConfig

SQLITE = "sqlite:///"


def anchored(cfg: RunConfig) -> RunConfig:
    """The same run with model.path, task.path and tracking.uri absolute where local; run_dir is its plan's."""
    uri = cfg.tracking.uri
    if uri is not None and (file := sqlite_file(uri)):
        uri = f"{SQLITE}{_absolute(str(file))}"
    return replace(
        cfg,
        model=replace(cfg.model, path=_anchor(cfg.model.path)),
        task=replace(cfg.task, path=cfg.task.path and _anchor(cfg.task.path)),
        tracking=replace(cfg.tracking, uri=uri),
    )


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
