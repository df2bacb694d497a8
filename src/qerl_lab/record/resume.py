"""Find the step to resume from, and check the files in the run directory. Imports no torch.

Every problem raises one ConfigError: which file, what is wrong, what to do. Nothing is deleted.
"""

import os
import sys
from pathlib import Path
from typing import Any

from qerl_lab.config.arm import ADDED, of_run
from qerl_lab.config.keys import typed
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.record import checkpoint
from qerl_lab.record.metrics import steps_recorded
from qerl_lab.record.sessions import Sessions


def check(run_dir: Path) -> None:
    """Raise ConfigError if the directory is not writable or its files are not a run's. Fast: reads little."""
    for path in (run_dir, *run_dir.iterdir()):
        if not os.access(path, os.W_OK):
            raise ConfigError(f"{path} cannot be written. Make it writable, or copy {run_dir} to where it is.")
    Sessions(run_dir)
    check_evaluations(run_dir)


def check_evaluations(run_dir: Path, is_expected: bool = False) -> None:
    """Raise ConfigError if eval.parquet is truncated or foreign, or missing though `is_expected`.

    Parquet has the same bytes at start and end. Fast: imports no pandas.
    """
    path = run_dir / "eval.parquet"
    if is_expected and not path.exists():
        raise ConfigError(f"{path.name} is missing")
    if path.exists() and not path.read_bytes()[:4] == path.read_bytes()[-4:] == b"PAR1":
        raise ConfigError(f"{path} is no Parquet file. Move it away; a resumed run asks the questions again.")


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
