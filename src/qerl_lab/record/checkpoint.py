"""Save and load checkpoints that survive a `kill -9` at any moment: written aside, checksummed, then renamed.

A checkpoint is a folder `checkpoints/step-000025/`. Its `manifest.json` is written last and has the SHA-256 of every
other file. If a file does not match, the checkpoint is damaged and the previous one is used. Loading runs no code
from a checkpoint.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qerl_lab.config.paths import sha256
from qerl_lab.record.metrics import METRICS_FILE
from qerl_lab.system.exits import FULL

PROBE_BYTES = 2**20
MANIFEST, STATE = "manifest.json", "lab_state.json"


@dataclass(frozen=True)
class Saved:
    """The state of a checkpoint, as `load` verified it.

    Attributes:
        step: number of steps trained.
        prompts_seen: position in the training data.
        config: values of `arm.settings_of_run`, to detect a changed configuration.
        noise: state of `train.noise_level.NoiseLevel`.
        micro_batch_size: completions per forward and backward pass.
    """

    path: Path
    step: int
    prompts_seen: int
    config: dict[str, Any]
    noise: dict[str, Any] = field(default_factory=dict)
    micro_batch_size: int | None = None


def save(folder: Path, state: Mapping[str, Any], write: Callable[[Path], None], keep: int) -> Path:
    """Write the checkpoint of `state["step"]` below `folder` atomically, delete old ones, and return its path.

    Flushes metrics.jsonl, beside `folder`, to the disk before the checkpoint appears: a checkpoint must not survive a
    crash of the machine without its steps. Keeps the newest `keep` checkpoints up to this step. Deletes checkpoints of
    later steps too: they must be damaged, because otherwise the run would have resumed from them.

    Args:
        folder: the run's `checkpoints/`.
        state: the fields of `Saved` except `path`.
        write: writes the trainer's files into the empty directory it receives.

    Raises OSError if the disk is full, whatever error `write` raised, and FileNotFoundError if the run's directory is
    gone.
    """
    final = path_of(folder, state["step"])
    aside = folder / f".{final.name}.{os.getpid()}"
    for leftover in folder.glob(".step-*"):  # of a killed process, or damaged
        shutil.rmtree(leftover)
    folder.mkdir(exist_ok=True)  # without its parents, so that no second directory appears for a renamed run
    aside.mkdir()
    try:
        write(aside)
        (aside / STATE).write_text(json.dumps(state))
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        digests = {str(path.relative_to(aside)): sha256(path) for path in files}
        (aside / MANIFEST).write_text(json.dumps(digests, indent=1))
        for path in [folder.parent / METRICS_FILE.name, *files, aside / MANIFEST, aside]:
            if path.exists():
                _flush_to_disk(path)
    except Exception as error:
        full = None if isinstance(error, OSError) else _find_disk_full(aside, final)
        shutil.rmtree(aside)  # a partial checkpoint would keep a full disk full
        if full:
            raise full from error
        raise
    if final.exists():  # trained again after resuming from an older checkpoint
        shutil.rmtree(final)
    aside.rename(final)
    _flush_to_disk(folder)
    kept = [path for path in _step_folders(folder) if _step_of(path) <= _step_of(final)][-keep:]
    for other in set(_step_folders(folder)) - set(kept):
        shutil.rmtree(other)
    return final


def _find_disk_full(folder: Path, checkpoint: Path) -> OSError | None:
    """Return an OSError that names `checkpoint` if the disk of `folder` is full, else None.

    Writes 1 MiB to find out, because errors of torch.save and safetensors do not say why a write failed. Leaves that
    file in `folder`.
    """
    try:
        (folder / "probe").write_bytes(bytes(PROBE_BYTES))
    except OSError as error:
        if error.errno in FULL:
            return OSError(error.errno, error.strerror, str(checkpoint))
    return None


def path_of(folder: Path, step: int) -> Path:
    """Return where `save` writes the checkpoint of a step: `step-000012` in `folder`, the run's `checkpoints/`."""
    return folder / f"step-{step:06d}"


def last_step(folder: Path) -> int:
    """Return the step of the newest checkpoint; 0 if there is none.

    Verifies nothing: a run sets damaged checkpoints aside when it begins.
    """
    return max(map(_step_of, _step_folders(folder)), default=0)


def newest(folder: Path, *, with_weights: bool = True) -> Saved | None:
    """Return the newest intact checkpoint in `checkpoints/`, or None. Print a warning for each damaged one on stderr.

    With with_weights=False damage to the weights is not found (see `load`), and nothing is printed: the run's process,
    which reads the weights, prints the warnings.
    """
    candidates = _step_folders(folder)
    while candidates:
        path = candidates.pop()
        try:
            return load(path, with_weights=with_weights)
        except (OSError, ValueError) as damage:
            instead = "using the previous one" if candidates else "there is no earlier one, so training starts again"
            if with_weights:
                print(f"warning: checkpoint {path} is damaged ({damage}); {instead}.", file=sys.stderr)
    return None


def set_damaged_aside(folder: Path, step: int) -> None:
    """Rename the checkpoints of steps after `step`, so that no reader finds them: they must be damaged.

    The run resumes from `step`, or with 0 from no checkpoint. The next `save` deletes the renamed ones.
    """
    for path in _step_folders(folder):
        if _step_of(path) > step:
            aside = folder / f".{path.name}.damaged"
            shutil.rmtree(aside, ignore_errors=True)  # of the same step, from an earlier session
            path.rename(aside)


def load(path: Path, *, with_weights: bool = True) -> Saved:
    """Compare the files of the checkpoint in the folder `path` with their SHA-256, and return its state.

    with_weights=False compares the state's file only, because hashing the weights can take minutes.
    Raises OSError if a file is missing; ValueError if one does not match its checksum, or if the state has no checksum
    or other fields than `Saved`.
    """
    digests = json.loads((path / MANIFEST).read_text())
    if not isinstance(digests, dict) or STATE not in digests:
        raise ValueError(f"{STATE} is not in {MANIFEST}")
    for name in digests if with_weights else [STATE]:
        if sha256(path / name) != digests[name]:
            raise ValueError(f"{name} does not match its checksum")
    state = json.loads((path / STATE).read_text())
    try:
        return Saved(path, **state)
    except TypeError as error:
        raise ValueError(f"{STATE} is of another version: {error}") from None


def _step_folders(folder: Path) -> list[Path]:
    """Return the checkpoint folders in `folder` in the order of their steps; none if it does not exist."""
    return sorted((path for path in folder.glob("step-*") if path.is_dir() and path.name[5:].isdecimal()), key=_step_of)


def _step_of(path: Path) -> int:
    """Return the step that a checkpoint folder is named after: 25 for step-000025."""
    return int(path.name.removeprefix("step-"))


def _flush_to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk and survives a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
