"""`python -m qerl_lab.report DIR ... KEY=VALUE ...`: the arms of run directories in one table. Needs no MLflow."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from qerl_lab import exits

with exits.starting(__name__):
    from qerl_lab.cli.grammar import Command
    from qerl_lab.config.option import ConfigError, option


@dataclass
class ReportOptions:
    baseline: str | None = option(None, "arm that the others are compared with; null is bf16, if there is one")
    runs_csv: str | None = option(None, "file to write, a row a run")
    arms_csv: str | None = option(None, "file to write, a row an arm")
    plot: str | None = option(None, "PNG file to write: reward and entropy by step, an arm a color")
    directories: list[str] = option([], "directories of runs or of sweeps; the key may be left out")


def report(options: ReportOptions) -> None:
    """Print the arms, and write the files that were asked for."""
    from qerl_lab.report import comparison, plots  # pandas, scipy and matplotlib take a second

    found = comparison.read([Path(folder).expanduser() for folder in options.directories])
    baseline = comparison.baseline_of(list(found.arms), options.baseline)
    arms = comparison.by_arm(found, baseline)
    for path, write in (
        (options.runs_csv, lambda file: comparison.write_csv(comparison.by_run(found), file)),
        (options.arms_csv, lambda file: comparison.write_csv(arms, file)),
        (options.plot, lambda file: plots.save_arms(comparison.curves(found), file)),
    ):
        if path:
            _write(Path(path).expanduser(), write)
    print(comparison.text(found, arms, baseline))


def _write(path: Path, write: Callable[[Path], None]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Type another file.") from None


COMMAND = Command(
    "python -m qerl_lab.report DIR ...",
    "The arms of run directories side by side: held-out accuracy, gain and entropy, with intervals over seeds.",
    ReportOptions,
    report,
    examples=(
        ("python -m qerl_lab.report runs", "every run below runs/"),
        (
            "python -m qerl_lab.report runs/sweeps/weight_formats/TIME baseline=nvfp4 arms_csv=arms.csv",
            "one sweep; the table as a file too",
        ),
    ),
    required=("directories",),
    bare="directories",
)


@exits.command
def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    return COMMAND.run(words)


if __name__ == "__main__":
    exits.run(main)
