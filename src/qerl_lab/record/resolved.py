"""RUN_DIR/resolved.yaml: the complete configuration of a run."""

import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from qerl_lab.config.arm import ADDED, OF_SWEEPS, REGISTERED, fill_added_keys, flatten, values_of
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.keys import FIELDS
from qerl_lab.config.message import in_one_line, some_of
from qerl_lab.config.option import ConfigError
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import RunConfig
from qerl_lab.system.disk import replace_file

NAME = "resolved.yaml"
PARTS = ("format.name", "aqn.schedule", "task.name", "algorithm.name", "rollout.engine")  # users add some of their own
_REPLACE = "Put it back as it was (MLflow keeps it among the run's artifacts), or start a new run."


def write_config(run_dir: Path, cfg: RunConfig) -> None:
    """Write a new resolved.yaml. Raises FileExistsError if there is one, because another process was first."""
    with open(run_dir / NAME, "x", encoding="utf-8") as file:
        yaml.safe_dump(asdict(cfg), file, sort_keys=False)


def replace_config(run_dir: Path, cfg: RunConfig) -> None:
    """Replace the existing resolved.yaml atomically."""
    replace_file(run_dir / NAME, yaml.safe_dump(asdict(cfg), sort_keys=False).encode())


def read_config(run_dir: Path) -> RunConfig:
    """Read and check the configuration; set its `run_dir` to where the directory is now.

    Raises ConfigError if resolved.yaml is missing, damaged or invalid, or lacks a key, because the default of the key
    could differ from the value that the run started with. These keys may be missing: keys of sweeps, tracking and the
    preregistration, keys added later, and model.hash (null: unknown).
    """
    path, values = run_dir / NAME, _parse_values(run_dir)
    try:
        cfg = from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {_unknown_part(values) or error}") from None
    known = {*dict(flatten(values)), *OF_SWEEPS, *ADDED, *REGISTERED, "model.hash"}
    lacking = [name for name in values_of(RunConfig()) if name not in known and not name.startswith("tracking.")]
    if lacking:
        raise ConfigError(f"{path} lacks {some_of(lacking)}: it was cut off, or another version wrote it. {_REPLACE}")
    if cfg.task.module is not None and cfg.task.module_hash is None:  # without the hash any file could run as this user
        raise ConfigError(
            f"{path} has task.module={cfg.task.module} without task.module_hash, and every run records the hash of "
            f"this file. {_REPLACE}"
        )
    cfg.run_dir = str(run_dir.absolute())
    return cfg


def _unknown_part(values: dict[str, Any]) -> str:
    """Say which part of the lab the run used that this installation lacks, e.g. its format; "" if it has all `PARTS`.

    `values` are the nested values in resolved.yaml. The checks of a new run would advise another part, and the run
    would be another one with it.
    """
    given = dict(flatten(values))
    for key in PARTS:
        known = FIELDS[key].metadata["choices"] or choices_of(key.partition(".")[0])
        if isinstance(name := given.get(key), str) and name not in known:
            return (
                f"the run was made with {key}={name}, which this installation does not know; it knows "
                f"{', '.join(known)}. Put the files of {name} back: docs/architecture.md lists them (To add something)."
            )
    return ""


def read_settings(run_dir: Path) -> dict[str, str]:
    """Return the value of every key in resolved.yaml as text, by dotted key, whatever version of the lab wrote it.

    Raises ConfigError if the file is missing, cannot be read or has no configuration.
    """
    return fill_added_keys({name: str(value) for name, value in flatten(_parse_values(run_dir))})


def _parse_values(run_dir: Path) -> dict[str, Any]:
    """Parse resolved.yaml. Raises ConfigError if it is missing, cannot be read or has no configuration."""
    path = run_dir / NAME
    if not os.path.isfile(path):  # Path.is_file raises if the name is too long
        what = f"has no {NAME}, so it is no run directory" if os.path.isdir(run_dir) else "is no directory"
        raise ConfigError(
            f"{run_dir} {what}. "
            "Type the directory that the run printed, for example runs/nvfp4_aqn/seed0/20260131-120000."
        )
    try:
        values = _parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {in_one_line(error)}. {_REPLACE}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no configuration. {_REPLACE}")
    return values


def _parse_yaml(text: str) -> Any:
    """Parse YAML with libyaml where PyYAML has it: eight times as fast, and a report parses the file of every run.

    PyYAML's own parser reads again what libyaml refuses: it explains errors in its own words, and it accepts the
    escaped bytes of a path that is not UTF-8. Raises YAMLError if that parser refuses the text too.
    """
    if yaml.__with_libyaml__:
        with suppress(yaml.YAMLError):
            return yaml.CSafeLoader(text).get_single_data()
    return yaml.safe_load(text)
