"""Tracking commands: `python -m qerl_lab.tracking resync RUN_DIR [uri=URI]` and `... tracking table`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qerl_lab.cli.grammar import Command, main_of
from qerl_lab.config.option import option
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.metrics import metrics_table
from qerl_lab.system import exits
from qerl_lab.tracking.mlflow import resync


@dataclass
class ResyncOptions:
    uri: str | None = option(
        None,
        "MLflow store; null is the run's tracking.uri, without it MLFLOW_TRACKING_URI, without both the store in the "
        "run's mlflow.json, and at last sqlite:///mlflow.db here",
    )
    run_dir: str = option("", "directory of the run; the key may be left out")


@dataclass
class TableOptions:
    """No options."""


COMMANDS: dict[str, Command[Any]] = {
    "resync": Command(
        "python -m qerl_lab.tracking resync RUN_DIR",
        "Fill MLflow from a run directory, without duplicates.",
        ResyncOptions,
        lambda options: print(resync(RunDirectory(Path(options.run_dir).expanduser()), options.uri)),
        examples=(
            ("python -m qerl_lab.tracking resync runs/nvfp4_aqn/seed0/20260131-120000", "into the run's own store"),
            (
                "python -m qerl_lab.tracking resync runs/nvfp4_aqn/seed0/20260131-120000 uri=sqlite:///mlflow.db",
                "into another",
            ),
        ),
        required=("run_dir",),
        bare="run_dir",
    ),
    "table": Command(
        "python -m qerl_lab.tracking table",
        "Print every metric with its unit and meaning, as docs/metrics.md has them.",
        TableOptions,
        lambda options: print(metrics_table(), end=""),
    ),
}


main = main_of(COMMANDS)


if __name__ == "__main__":
    exits.run(main)
