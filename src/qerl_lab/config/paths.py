"""Local paths, as a run keeps them: absolute, so that it means the same from every directory. Imports no torch."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote

from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import POCKET, LoraConfig, ModelConfig, RunConfig, TaskConfig

WEIGHTS = "adapter_model.safetensors"
SQLITE = "sqlite:///"


def anchored(cfg: RunConfig) -> RunConfig:
    """The same run with the paths of model, task and tracking.uri absolute where local; run_dir is its plan's.

    model.hash, lora.start_hash, task.module_hash and preregistration_sha256 then say what is there. Raises ConfigError
    where there is no such adapter or file, and where a hash was given that is not the one found.
    """
    uri = cfg.tracking.uri
    if uri is not None and (file := sqlite_file(uri)):
        uri = sqlite_uri(Path(_absolute(str(file))))
    return replace(
        _registered(cfg),
        model=_anchored_model(cfg.model),
        lora=_anchored_lora(cfg.lora),
        task=_anchored_task(cfg.task),
        tracking=replace(cfg.tracking, uri=uri),
    )


def _registered(cfg: RunConfig) -> RunConfig:
    if cfg.preregistration is None:
        return cfg
    file = Path(_absolute(cfg.preregistration))
    if not file.is_file():
        raise ConfigError(
            f"preregistration={cfg.preregistration} is no file. Write the claims there and commit them before the runs "
            "(docs/verdicts.md), or leave preregistration out."
        )
    if cfg.preregistration_sha256 not in (None, found := sha256(file)):
        raise ConfigError(
            f"preregistration_sha256={cfg.preregistration_sha256} is not that of {file}, which is {found}: the claims "
            "were changed. Put them back as they were, or leave preregistration_sha256 out."
        )
    return replace(cfg, preregistration=str(file), preregistration_sha256=found)


def _anchored_model(model: ModelConfig) -> ModelConfig:
    """A hub id gets no hash: what is on this disk need not be what the hub gives the run."""
    path = _anchor(model.path)
    found = model_hash(Path(path)) if Path(path).is_absolute() else None
    if found is None:
        return replace(model, path=path)
    if model.hash not in (None, found):
        raise ConfigError(f"model.hash={model.hash} is not that of {path}, which is {found}. Leave model.hash out.")
    return replace(model, path=path, hash=found)


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


def _anchored_lora(lora: LoraConfig) -> LoraConfig:
    if lora.start_from is None:
        return lora
    path = _absolute(lora.start_from)
    if not (file := adapter_folder(path) / WEIGHTS).is_file():
        raise ConfigError(
            f"lora.start_from={lora.start_from} holds no {WEIGHTS}; allowed: the directory of a finished run, or of a "
            "PEFT adapter. Type lora.start_from=RUN_DIR."
        )
    found = file_hash(file)
    if lora.start_hash not in (None, found):
        raise ConfigError(
            f"lora.start_hash={lora.start_hash} is not that of {file}, which is {found}. Leave lora.start_hash out."
        )
    return replace(lora, start_from=path, start_hash=found)


def adapter_folder(path: str) -> Path:
    """The directory of the adapter that lora.start_from means: that of a run's, or itself."""
    folder = Path(path).expanduser()
    return folder / "adapter" if (folder / "resolved.yaml").is_file() else folder


def sha256(file: Path) -> str:
    """The SHA-256 of a file, read piece by piece, as 64 hex digits."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def file_hash(file: Path) -> str:
    """First 12 hex digits of the SHA-256 of a file."""
    return sha256(file)[:12]


def module_hash(file: str) -> str:
    """First 12 hex digits of the SHA-256 of a file of task.module. Raises ConfigError where there is none."""
    if not file.endswith(".py") or not Path(file).is_file():
        raise ConfigError(f"task.module={file} is no Python file. Type task.module=FILE.py.")
    return file_hash(Path(file))


def sqlite_file(uri: str) -> Path | None:
    """The database file of an sqlite URI, in which %XX is a character; None for anything else."""
    name = uri.removeprefix(SQLITE)
    return None if name in (uri, "") or "?" in name else Path(unquote(name))


def sqlite_uri(file: Path) -> str:
    """The URI of a database file, as MLflow and `sqlite_file` read it: a % of the path is %25 there, a ? is %3F.

    A slash behind such a character is %2F: MLflow makes the folders that it reads in a URI without decoding it.
    """
    path = str(file)
    before = re.split("[%?]", path)[0]
    plain = before[: before.rfind("/") + 1]
    coded = path[len(plain) :].replace("%", "%25").replace("?", "%3F").replace("/", "%2F")
    return f"{SQLITE}{plain}{coded}"


def _anchor(path: str) -> str:
    """`pocket` is the embedded policy and not a directory of that name; a hub id looks like a relative path."""
    is_local = path.startswith(("/", ".", "~")) or (path not in ("", POCKET) and Path(path).exists())
    return _absolute(path) if is_local else path


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
