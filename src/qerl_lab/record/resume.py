"""Find the step to resume from, and check the files in the run directory. Imports no torch.

Every problem raises one ConfigError: which file, what is wrong, what to do. Nothing is deleted.
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
    """Raise ConfigError if the directory is not writable or its files are not a run's. Fast: reads little."""
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
    """Return the newest intact checkpoint with all its steps in metrics.jsonl; None to start from step 0.

    Prints a warning for each checkpoint it skips. Raises ConfigError if no checkpoint precedes a missing step, or the
    configuration has changed since the checkpoint.
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
    """Raise ConfigError if the questions differ from those the run started with.

    Args:
        env: env.json of the first session; older versions of the lab do not record the questions.
        data: the task's current description of its questions.
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
    """Raise ConfigError if the run would resume on another kind of device. None means it has not started.

    Checkpoints record the device too. This check covers runs killed before their first checkpoint.
    """
    if began_on not in (None, device):
        raise ConfigError(
            f"{run_dir} began on {began_on}, and here it would go on on {device}: one record of two computations. "
            "Resume it where it began, or start a new run."
        )


def _refuse_other_config(run_dir: Path, saved: checkpoint.Saved, cfg: RunConfig) -> None:
    """Raise ConfigError if the configuration has changed since the checkpoint."""
    then, now = {**ADDED, **saved.config}, of_run(cfg)
    if then.get("steps") in cfg.extended:  # the checkpoint is older than the extension
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
