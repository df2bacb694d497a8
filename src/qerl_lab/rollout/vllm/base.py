"""Provide the directory from which vLLM loads the frozen base, with the policy's weights bit for bit."""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from qerl_lab import formats
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig
from qerl_lab.model.dense import base_tensors
from qerl_lab.model.loading import stored_as
from qerl_lab.model.on_disk import read_model_json
from qerl_lab.model.policy import Policy
from qerl_lab.model.weight_files import WeightFiles, local_folder

IN_MEMORY = Path("/dev/shm")  # RAM, so that a copy never touches a disk
RUN_FOLDERS = f"qerl-lab-{12 * '[0-9a-f]'}-*"  # glob pattern; each process holds a lock on its folder


@contextmanager
def model_folder(policy: Policy, cfg: RunConfig) -> Iterator[Path]:
    """Context manager: yield a model directory with exactly the policy's base weights, for vLLM to load.

    It is the directory of model.path if that is packed, or if the run's format is dense and all stored weights are
    bfloat16. Otherwise it is a temporary copy of the policy's weights, removed at the end.
    """
    source = local_folder(cfg.model.path, cfg.model.revision)
    files = WeightFiles(source)
    unrounded = cfg.format.name == DENSE_FORMAT and all(files.dtype(name) is torch.bfloat16 for name in files.names)
    if unrounded or stored_as(source) is not None:
        yield source
        return
    tensors, config = base_tensors(policy), read_model_json(source / "config.json")
    if cfg.format.name != DENSE_FORMAT:
        dtype = policy.dtype
        config["quantization_config"] = formats.build(cfg.format).quantization_config(cfg.format.ignore, dtype)
    text = json.dumps(config)
    with scratch_folder(size_of(tensors), hashlib.sha256(text.encode()).hexdigest()[:12]) as folder:
        save_torch_state_dict(tensors, folder)
        policy.tokenizer.save_pretrained(folder)  # required by vLLM, though it is sent token ids
        (folder / "config.json").write_text(text)
        yield folder


def size_of(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of all tensors together in bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


@contextmanager
def scratch_folder(size: int, name: str | None = None) -> Iterator[Path]:
    """Context manager: yield a temporary folder, in RAM if `size` bytes fit there.

    First removes the folders that killed runs left in RAM. `name`, 12 hex digits, becomes part of the folder's name;
    None draws one at random.
    """
    remove_leftovers(IN_MEMORY, RUN_FOLDERS)
    has_room = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 1.2 * size
    place = IN_MEMORY if has_room else Path(tempfile.gettempdir())
    with named_folder(f"qerl-lab-{name or secrets.token_hex(6)}", place) as folder:
        yield folder


@contextmanager
def named_folder(name: str, place: Path) -> Iterator[Path]:
    """Context manager: yield a temporary folder `name`-N in `place`, N the lowest number from 0 that is not in use.

    The path is not random, because vLLM's cache of compiled code depends on the model's path: with a random path every
    run would compile again.
    """
    number = 0
    while (held := lock_and_empty(place / f"{name}-{number}")) is None:
        number += 1
    path = place / f"{name}-{number}"
    try:
        yield path
    finally:
        shutil.rmtree(path)
        os.close(held)


def remove_leftovers(place: Path, pattern: str) -> None:
    """Remove the folders of killed processes: those in `place` that match the glob `pattern` and are not locked."""
    for path in place.glob(pattern):
        if (held := lock_and_empty(path)) is not None:
            path.rmdir()
            os.close(held)


def lock_and_empty(path: Path) -> int | None:
    """Lock the folder `path` and empty it; create it if it does not exist.

    Returns the file descriptor that holds the lock until it is closed, or None if another process or user has the
    folder.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    try:
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # the folder is another user's, or its owner has just removed it
        return None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(held), path.stat()):
            raise FileNotFoundError(path)
    except (BlockingIOError, FileNotFoundError):  # in use, or removed after it was opened
        os.close(held)
        return None
    for left in path.iterdir():  # files of a killed process
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    return held
