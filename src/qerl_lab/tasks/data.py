"""Rows of a question set from a local directory or from the Hugging Face hub."""

import json
from pathlib import Path
from typing import Any

from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError


def read_rows(path: str, split: str, columns: tuple[str, ...], hub_config: str) -> list[dict[str, Any]]:
    """Rows of `split` as dicts with at least `columns`.

    Args:
        path: a directory with `<split>.jsonl`, or a hub id such as `openai/gsm8k`.

    Raises:
        ConfigError: the file is missing or malformed, a column is absent, or the hub cannot be reached.
    """
    local = Path(path).expanduser()
    rows = _read_jsonl(local / f"{split}.jsonl") if local.is_dir() else _read_hub(path, split, hub_config)
    for number, row in enumerate(rows):
        if missing := [column for column in columns if not isinstance(row.get(column), str)]:
            raise ConfigError(
                f"{path}, split {split}, row {number} lacks text in {missing}; it has {sorted(row)}. Check task.path."
            )
    return rows


def _read_jsonl(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        raise ConfigError(f"task.path={file.parent} has no {file.name}; it must hold train.jsonl and test.jsonl.")
    rows = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:  # no JSON, or no UTF-8
                raise ConfigError(f"{file}:{number} is not JSON ({error}). Check task.path.") from error
            if not isinstance(rows[-1], dict):
                raise ConfigError(f"{file}:{number} is JSON but no object: {line[:80]!r}. Check task.path.")
    return rows


def _read_hub(path: str, split: str, hub_config: str) -> list[dict[str, Any]]:
    from datasets import load_dataset

    try:
        return load_dataset(path, hub_config, split=split).to_list()
    except (OSError, ValueError, RuntimeError) as error:  # offline, unknown id, unknown split
        raise ConfigError(
            f"the question set {path!r} is no local directory and could not be loaded from the hub "
            f"({type(error).__name__}: {first_line(error)}). "
            "Type task.path=DIRECTORY with train.jsonl and test.jsonl."
        ) from error
