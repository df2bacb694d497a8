"""The step from which a run goes on, and the files that its directory must hold for that. Imports no torch.

What is wrong ends in one ConfigError: which file, what is wrong with it, what to do. Nothing is deleted.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qerl_lab.config.arm import ADDED, of_run
from qerl_lab.config.keys import typed
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.record import checkpoint, evaluations
from qerl_lab.record.metrics import steps_recorded
from qerl_lab.record.mirror import MirrorRecord
from qerl_lab.record.sessions import Sessions

FILES = (
    "metrics.jsonl",
    "samples.jsonl",
    "eval.parquet",
    "mlflow.json",
    "sessions.json",
    "env.json",
    "curves.png",
    "DONE",
    "FAILED",
)
FOLDERS = ("checkpoints", "adapter")


def check(run_dir: Path) -> None:
    """Refuse a directory that cannot be written, or whose files are not what a run leaves. Costs next to nothing."""
    for path in (run_dir, *(run_dir / name for name in (*FILES, *FOLDERS) if (run_dir / name).exists())):
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{path} cannot be written. Make it writable, or copy {run_dir} to where it is.")
    for name in FILES:
        if (run_dir / name).is_dir():
            raise ConfigError(f"{run_dir / name} is a directory where a file belongs. Move it away.")
    for path in [*(run_dir / name for name in FOLDERS), *(run_dir / "checkpoints").glob("step-*")]:
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file where a directory belongs. Move it away.")
    MirrorRecord(run_dir)
    Sessions(run_dir)
    evaluations.check_whole(run_dir)


def starting_point(run_dir: Path, cfg: RunConfig) -> checkpoint.Saved | None:
    """The newest sound checkpoint whose every step metrics.jsonl has; None where the run starts from its beginning.

    Says on stderr what it passes over. Raises ConfigError where the record lacks a step that no checkpoint precedes,
    and where the checkpoint is of another configuration.
    """
    folder, (last, why) = run_dir / "checkpoints", steps_recorded(run_dir)
    saved = checkpoint.newest(folder)
    if saved and saved.step > last:
        path, lost = run_dir / "metrics.jsonl", saved.step
        saved = checkpoint.newest(folder, at_most=last)
        if saved is None:
            raise ConfigError(
                f"{path} {why}, and no checkpoint is old enough to train step {last + 1} again; the newest is of step "
                f"{lost}. Put metrics.jsonl back as it was, or move {folder} away to train from the start."
            )
        print(f"warning: {path} {why}; training again from step {saved.step}.", file=sys.stderr)
    if saved:
        _refuse_other_config(run_dir, saved, cfg)
    return saved


def refuse_other_data(env: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    """Raise ConfigError where a run would go on with other questions than it began with.

    Args:
        env: env.json of the run's first session; one of an older version of the lab says nothing of the questions.
        data: what a task says of its questions now.
    """
    then = env.get("data") or {}
    for role in ("training", "heldout"):
        count, digest = f"{role}_questions", f"{role}_sha256"
        if digest in then and then[digest] != data[digest]:
            raise ConfigError(
                f"the {role} questions are not those that the run began with: {data[count]:,} of SHA-256 "
                f"{data[digest][:12]}, where there were {then[count]:,} of {then[digest][:12]}. "
                "Put the data back as it was, or start a new run."
            )


def refuse_other_device(run_dir: Path, began_on: str | None, device: str) -> None:
    """Raise ConfigError where a run would go on on another kind of device; None is one that has not begun.

    A checkpoint says as much of itself. A run that was killed before its first has answers and steps all the same.
    """
    if began_on not in (None, device):
        raise ConfigError(
            f"{run_dir} began on {began_on}, and here it would go on on {device}: one record of two computations. "
            "Resume it where it began, or start a new run."
        )


def _refuse_other_config(run_dir: Path, saved: checkpoint.Saved, cfg: RunConfig) -> None:
    then, now = {**ADDED, **saved.config}, of_run(cfg)
    if then.get("steps") in cfg.extended:  # a checkpoint of before the run was extended
        now |= {"steps": then["steps"], "extended": cfg.extended[: cfg.extended.index(then["steps"])]}
    differ = [key for key in now | then if key not in now or key not in then or now[key] != then[key]]
    changed = [f"{key}={_shown(now, key)} (was {_shown(then, key)})" for key in differ]
    if changed:
        raise ConfigError(
            f"{run_dir / 'resolved.yaml'} is not the configuration that {saved.path.name} was trained with: "
            f"{', '.join(changed)}. Put it back as it was, or start a new run."
        )


def _shown(values: dict[str, Any], key: str) -> str:
    return typed(values[key]) if key in values else "nothing"
