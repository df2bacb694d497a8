"""RUN_DIR/eval.parquet: held-out answers, a row per question and phase ("before" or "after" training)."""

from pathlib import Path
from typing import TYPE_CHECKING

from qerl_lab.config.message import in_one_line
from qerl_lab.config.option import ConfigError
from qerl_lab.disk import replace_file

if TYPE_CHECKING:
    import pandas as pd

NAME = "eval.parquet"


def read_evaluations(run_dir: Path) -> "dict[str, pd.DataFrame]":
    """Return the rows of each phase; empty if there are none yet. Raises ConfigError for a damaged file."""
    import pandas as pd  # imported here, because it takes a second

    path = run_dir / NAME
    if not path.exists():
        return {}
    try:
        with path.open("rb") as file:  # pandas cannot open a path that is not UTF-8
            rows = pd.read_parquet(file)
        return {str(phase): part.drop(columns="phase") for phase, part in rows.groupby("phase", sort=False)}
    except (OSError, ValueError, KeyError) as error:  # pyarrow's are ValueErrors
        raise ConfigError(
            f"{path} is damaged ({in_one_line(error)}). Move it away; a resumed run asks the questions again."
        ) from None


def write_evaluations(run_dir: Path, phases: "dict[str, pd.DataFrame]") -> None:
    """Write the rows of all phases atomically."""
    import pandas as pd

    data = pd.concat([rows.assign(phase=phase) for phase, rows in phases.items()]).to_parquet(index=False)
    replace_file(run_dir / NAME, data)


def is_whole(run_dir: Path) -> bool:
    """Return whether the file is missing or complete: Parquet has the same bytes at start and end."""
    path = run_dir / NAME
    return not path.exists() or path.read_bytes()[:4] == path.read_bytes()[-4:] == b"PAR1"


def check_whole(run_dir: Path) -> None:
    """Raise ConfigError for a truncated or foreign file, which a resumed run would read."""
    if not is_whole(run_dir):
        path = run_dir / NAME
        raise ConfigError(f"{path} is damaged (no Parquet file). Move it away; the held-out questions are asked again.")
