"""Checkpoints that survive a `kill -9` at any moment: written aside, checksummed, then renamed.

A checkpoint is the folder `checkpoints/step-000025/`. Its `manifest.json`, written last, holds the SHA-256 of every
other file, so that a truncated or altered one is recognized and the checkpoint before it is used. Nothing in it can
run code when read: safetensors, JSON, and tensors that torch loads with `weights_only=True`.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

MANIFEST, STATE = "manifest.json", "lab_state.json"


@dataclass(frozen=True)
class Saved:
    """A verified checkpoint. `step` counts rollouts, `prompts_seen` is the position in the training data."""

    path: Path
    step: int
    prompts_seen: int
    mlflow_run_id: str | None


def save(folder: Path, state: Mapping[str, int | str | None], write: Callable[[Path], None], keep: int) -> Path:
    """Write the checkpoint of `state["step"]` atomically, then drop all but the newest `keep` up to it.

    A checkpoint of a later step goes too: it is damaged, or this run would have continued from it.

    Args:
        folder: the run's `checkpoints/`.
        state: step, prompts_seen, mlflow_run_id.
        write: fills the (existing, empty) directory that it is given with the trainer's files.
    """
    final = folder / f"step-{state['step']:06d}"
    aside = folder / f".{final.name}.{os.getpid()}"
    _discard_leftovers(folder)
    aside.mkdir(parents=True)
    write(aside)
    (aside / STATE).write_text(json.dumps(state))
    digests = {str(path.relative_to(aside)): _sha256(path) for path in _files(aside)}
    (aside / MANIFEST).write_text(json.dumps(digests, indent=1))
    for path in [*_files(aside), aside]:
        _flush_to_disk(path)
    if final.exists():  # the same step again, after a resume from an older checkpoint
        shutil.rmtree(final)
    aside.rename(final)
    _flush_to_disk(folder)
    kept = [path for path in _named(folder) if path.name <= final.name][-keep:]
    for other in set(_named(folder)) - set(kept):
        shutil.rmtree(other)
    return final


def newest(folder: Path) -> Saved | None:
    """The newest checkpoint whose every file matches its checksum; None if there is none.

    Says on stderr which damaged ones it passes over, and why.
    """
    for path in reversed(_named(folder)):
        if damage := verify(path):
            print(f"warning: checkpoint {path} is damaged ({damage}); using the one before it.", file=sys.stderr)
            continue
        return _saved(path)
    return None


def verify(path: Path) -> str:
    """What is wrong with a checkpoint folder, in a few words; empty if nothing."""
    try:
        digests = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return f"no {MANIFEST}"
    except ValueError:
        return f"{MANIFEST} is not JSON"
    if not isinstance(digests, dict) or STATE not in digests:
        return f"{STATE} is not in {MANIFEST}"
    for name, digest in digests.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        if _sha256(path / name) != digest:
            return f"{name} does not match its checksum"
    try:
        _saved(path)
    except (ValueError, TypeError) as error:
        return f"{STATE} is of another version: {error}"
    return ""


def _saved(path: Path) -> Saved:
    return Saved(path, **json.loads((path / STATE).read_text()))


def _named(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _discard_leftovers(folder: Path) -> None:
    """Remove what a killed process left half-written."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
