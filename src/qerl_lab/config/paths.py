"""Make the local paths of a run absolute, to resume it from any directory, and hash its files. Imports no torch."""

import hashlib
from copy import deepcopy
from pathlib import Path

from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import POCKET, RunConfig

WEIGHTS = "adapter_model.safetensors"
CLAIMS = "claims.yaml"  # beside results: the claims that they test
QUEUE = "queue.yaml"  # beside claims: the runs that they need
SQLITE = "sqlite:///"


def with_absolute_paths(cfg: RunConfig) -> RunConfig:
    """Return the configuration with local paths made absolute, except run_dir, and with hashes of the local files.

    A model on the hub gets no hash, because the local copy may differ from the hub. Raises ConfigError if an adapter or
    file is missing, or if a hash in `cfg` does not match its file.
    """
    cfg = deepcopy(cfg)
    tracking, model, task, lora = cfg.tracking, cfg.model, cfg.task, cfg.lora
    if tracking.uri is not None and (file := sqlite_file(tracking.uri)):
        tracking.uri = sqlite_uri(file.expanduser().absolute())

    model.path = _absolute_model_path(model.path)
    if Path(model.path).is_absolute() and (found := model_hash(Path(model.path))):
        model.hash = _check_hash("model.hash", model.hash, found, model.path)

    task.path = task.path and _absolute_model_path(task.path)
    if task.module is not None:
        found, task.module = module_hash(task.module), _absolute_path(task.module)  # an error repeats what was typed
        task.module_hash = _check_hash("task.module_hash", task.module_hash, found, task.module)

    if lora.start_from is not None:
        weights = adapter_folder(_absolute_path(lora.start_from)) / WEIGHTS
        if not weights.is_file():
            raise ConfigError(
                f"lora.start_from={lora.start_from} holds no {WEIGHTS}; allowed: the directory of a finished run, not "
                "of lora=full, or of a PEFT adapter. Type lora.start_from=RUN_DIR."
            )
        lora.start_from = _absolute_path(lora.start_from)
        lora.start_hash = _check_hash("lora.start_hash", lora.start_hash, file_hash(weights), str(weights))

    if cfg.preregistration is not None:
        file = Path(_absolute_path(cfg.preregistration))
        if not file.is_file():
            raise ConfigError(
                f"preregistration={cfg.preregistration} is no file. Write the claims there and commit them before the "
                "runs (docs/verdicts.md), or leave preregistration out."
            )
        digest = _check_hash("preregistration_sha256", cfg.preregistration_sha256, sha256(file), str(file))
        cfg.preregistration, cfg.preregistration_sha256 = str(file), digest
    return cfg


def _check_hash(key: str, given: str | None, found: str, path: str) -> str:
    """Return `found`, the hash of the file at `path`.

    Raises ConfigError if the configuration gives another hash: `given` is the value of the key `key`, None if not set.
    """
    if given not in (None, found):
        raise ConfigError(f"{key}={given} does not match {path}, which has {found}. Leave {key} out.")
    return found


def adapter_folder(path: str) -> Path:
    """Return the folder of the adapter for lora.start_from: `adapter/` in a run's directory, else the path itself."""
    folder = Path(path).expanduser()
    return folder / "adapter" if (folder / "resolved.yaml").is_file() else folder


def sha256(file: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits. Reads in pieces, so that a large file needs little memory."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def file_hash(file: Path) -> str:
    """Return the first 12 hex digits of a file's SHA-256."""
    return sha256(file)[:12]


def module_hash(file: str, prefix: str = "task.module=") -> str:
    """Return the first 12 hex digits of the SHA-256 of `file`, the Python file that task.module names.

    `prefix` is what users type before the path. Raises ConfigError if the file is missing, or if its name does not end
    with .py.
    """
    if file.endswith(".py") and (path := Path(file).expanduser()).is_file():
        return file_hash(path)
    reason = "is not there" if file.endswith(".py") else "is no Python file"
    raise ConfigError(f"{prefix}{file} {reason}. Type the path of a Python file: {prefix}FILE.py.")


def sqlite_file(uri: str) -> Path | None:
    """Return the database file of a URI sqlite:///FILE. None for any other URI, and for a URI with parameters."""
    name = uri.removeprefix(SQLITE)
    return None if name in (uri, "") or "?" in name else Path(name)


def sqlite_uri(file: Path) -> str:
    """Return the URI sqlite:///FILE of a database file."""
    return f"{SQLITE}{file}"


def _absolute_model_path(path: str) -> str:
    """Return a local path made absolute; a hub id and `pocket` (the embedded policy) stay as they are."""
    is_local = path.startswith(("/", ".", "~")) or (path not in ("", POCKET) and Path(path).exists())
    return _absolute_path(path) if is_local else path


def _absolute_path(path: str) -> str:
    """Return a path made absolute, with ~ expanded."""
    return str(Path(path).expanduser().absolute())
