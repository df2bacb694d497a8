"""`python -m qerl_lab.report DIR ... KEY=VALUE ...`: the arms of run directories in one table. Needs no MLflow.

`python -m qerl_lab.report verdicts DIR ...` holds them against the paper's claims.
"""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from qerl_lab import exits

with exits.starting(__name__):
    from qerl_lab.cli.grammar import Command, choose
    from qerl_lab.config.option import ConfigError, option
    from qerl_lab.record.atomic import replace_file
    from qerl_lab.terminal import near


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


@dataclass
class VerdictsOptions:
    out: str | None = option(None, "directory to write: verdicts.json, verdicts.md; null writes none")
    directories: list[str] = option([], "directories of runs or of sweeps; the key may be left out")


def verdicts(options: VerdictsOptions) -> None:
    """Print the verdicts on the paper's claims, and write the files that were asked for."""
    from qerl_lab.report import comparison, verdict_tables
    from qerl_lab.report.verdicts import judge

    found = comparison.read([Path(folder).expanduser() for folder in options.directories])
    rows = judge([record for records in found.arms.values() for record in records], found.found)
    print(verdict_tables.text(found, rows))
    if options.out:
        out = Path(options.out).expanduser()
        line = f"{VERDICTS} {shlex.join(options.directories)}"
        for name, page in (
            ("verdicts.json", verdict_tables.as_json(found, rows, line)),
            ("verdicts.md", verdict_tables.markdown(found, rows, line)),
        ):
            _write(out / name, partial(replace_file, data=page.encode()))
        print(f"\nwritten: {near(out)}  (verdicts.json, verdicts.md)")


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
        ("python -m qerl_lab.report verdicts runs", "the paper's claims; verdicts --help says more"),
    ),
    required=("directories",),
    bare="directories",
)


VERDICTS = "python -m qerl_lab.report verdicts"
COMMANDS: dict[str, Command[Any]] = {
    "verdicts": Command(
        f"{VERDICTS} DIR ...",
        "The paper's claims against run directories: supported, contradicted or undecided, and by which numbers.",
        VerdictsOptions,
        verdicts,
        examples=(
            (f"{VERDICTS} runs", "every run below runs/"),
            (f"{VERDICTS} runs/sweeps out=results/NAME", "the table as files too"),
        ),
        required=("directories",),
        bare="directories",
    ),
}


@exits.command
def main(words: list[str]) -> int:
    """Run the command and return its exit code."""
    if words and words[0] in COMMANDS:
        return choose(COMMANDS, words)
    return COMMAND.run(words)


if __name__ == "__main__":
    exits.run(main)
