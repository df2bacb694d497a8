"""Files that are whole or not there, whoever is killed and however full the disk is."""

import json
import os
from pathlib import Path
from typing import Any

from qerl_lab.config.option import ConfigError


def replace_file(path: Path, data: bytes) -> None:
    """Write aside, then rename: whoever is killed here leaves the old file or the new one, and a full disk no half."""
    aside = path.with_name(path.name + ".tmp")
    try:
        with aside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read_json(path: Path, kind: type) -> Any:
    """Read a JSON file of a run directory. Raises ConfigError naming the file if it holds no `kind`."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({' '.join(str(error).split())}). Move it away.") from None
    if not isinstance(values, kind):
        raise ConfigError(f"{path} is not what a run writes there: {str(values)[:80]}. Move it away.")
    return values
