"""`python -m qerl_lab.report DIR ... KEY=VALUE ...`: compare the arms of run directories in one table.

`python -m qerl_lab.report verdicts DIR ...` tests the paper's claims on these runs. Neither command reads MLflow.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qerl_lab.cli.grammar import Command, run_subcommand
from qerl_lab.config.conf_folder import package_data
from qerl_lab.config.message import with_noun
from qerl_lab.config.option import ConfigError, did_you_mean, option
from qerl_lab.config.paths import CLAIMS, sha256
from qerl_lab.system import exits
from qerl_lab.system.disk import make_directory, replace_file
from qerl_lab.system.terminal import format_path

if TYPE_CHECKING:
    from qerl_lab.report.runs import Run

WHERE = "directories of runs, sweeps or results; the key may be left out"


@dataclass
class ReportOptions:
    sweep: list[str] = option([], WHERE)
    out: str | None = option(None, "directory to write: report.html, tables, figures, and the runs as Parquet")
    baseline: str | None = option(None, "arm to compare the others with; null: bf16, if there is one")
    bench: list[str] = option([], "results of python -m qerl_lab.bench, files or folders, to add to report.html")


def report(options: ReportOptions) -> None:
    """Run the command `report`: print a table that compares arms, and write the folder `options.out` if it is given.

    Copies the first claims.yaml in a folder of `options.sweep` to `options.out`, unless that has one, so that the
    report tests these claims. Raises ConfigError for `bench` without `out`, and as `comparison.read`.
    """
    from qerl_lab.report import comparison  # pandas and scipy take a second

    if options.bench and not options.out:
        raise ConfigError(
            f"bench={','.join(options.bench)} does nothing without out. Type for example out=results/NAME."
        )
    sources = [Path(source).expanduser() for source in options.sweep]
    compared = comparison.read(sources)
    if options.out:
        from qerl_lab.report import page  # matplotlib takes another

        folder = Path(options.out).expanduser()
        make_directory(folder, f"out={options.out}")
        claims_files = [source / CLAIMS for source in sources if (source / CLAIMS).is_file()]
        if claims_files and not (folder / CLAIMS).exists():
            replace_file(folder / CLAIMS, claims_files[0].read_bytes())
            print(f"claims: those of {format_path(claims_files[0])}, copied to {format_path(folder)}")
        written = page.write(folder, compared, options.baseline, [Path(file).expanduser() for file in options.bench])
        size = sum(path.stat().st_size for path in written)
        print(f"written: {format_path(folder)}  (report.html, {len(written) - 1} other files; {size / 1e6:.1f} MB)\n")
        copy = f"copy their file to {format_path(folder / CLAIMS)} and type the same line again"
        if note := _note_other_claims(compared.counted, [*folder.glob(CLAIMS)], copy):
            print(f"{note}\n")
    print(comparison.text(compared, comparison.baseline_of(compared.arms, options.baseline)))


def _note_other_claims(runs: "Sequence[Run]", tested: Sequence[Path], remedy: str) -> str:
    """Return a note that counts the runs that were made to test other claims than `tested`; empty if there are none.

    `tested` lists files of claims; an empty list stands for the paper's claims. A run records only the SHA-256 of its
    file of claims, so the user must give that file; `remedy` says how.
    """
    hashes = Counter(run.origin.claims_sha256 for run in runs if run.origin.claims_sha256)
    for file in tested or [package_data("results/reference") / CLAIMS]:
        del hashes[sha256(file)]
    files = ", ".join(digest[:12] for digest in hashes)
    were = f"note: {hashes.total()} of {with_noun(len(runs), 'run')} were made to test other claims"
    return f"{were} (SHA-256 {files}): {remedy}" if hashes else ""


@dataclass
class VerdictsOptions:
    sweep: list[str] = option([], WHERE)
    claims: list[str] = option([], "files of claims to test; empty: the paper's, results/reference/claims.yaml")
    out: str | None = option(None, "directory for verdicts.md; null writes none")


def verdicts(options: VerdictsOptions) -> None:
    """Run the command `verdicts`: test claims on the runs in `options.sweep`, and print the verdicts.

    The claims are those in the files `options.claims`, or the paper's if none is given. With `options.out` also writes
    verdicts.md there. Raises ConfigError as `claims.read` and `comparison.read`.
    """
    from qerl_lab.report import claims, comparison, verdict_tables
    from qerl_lab.report.verdicts import judge

    files = [Path(file).expanduser() for file in options.claims]
    read = [claim for file, called in zip(files, options.claims, strict=True) for claim in claims.read(file, called)]
    sources = [Path(source).expanduser() for source in options.sweep]
    compared = comparison.read(sources)
    rows = judge(compared.counted, compared.runs, read or None)
    print(verdict_tables.text(compared, rows))
    beside = [str(source / CLAIMS) for source in sources if (source / CLAIMS).is_file()]
    if beside and not options.claims:
        words = shlex.join([*options.sweep, f"claims={','.join(beside)}"])
        print(f"\nThe results have claims of their own, not tested here. To test them:\n\n    {VERDICTS} {words}")
    elif note := _note_other_claims(compared.counted, files, "type claims=FILE for their verdicts"):
        print(f"\n{note}")
    if options.out:
        folder = Path(options.out).expanduser()
        make_directory(folder, f"out={options.out}")
        named = [f"claims={','.join(options.claims)}"] if options.claims else []
        line = f"{VERDICTS} {shlex.join([*options.sweep, *named])}"
        replace_file(folder / "verdicts.md", verdict_tables.markdown(compared, rows, line).encode())
        print(f"\nwritten: {format_path(folder)}  (verdicts.md)")


COMMAND = Command(
    "python -m qerl_lab.report DIR ...",
    "Compare arms of run directories: held-out accuracy, gain and entropy, with intervals over seeds.",
    ReportOptions,
    report,
    examples=(
        ("python -m qerl_lab.report runs", "every run below runs/"),
        ("python -m qerl_lab.report runs/sweeps/weight_formats/TIME baseline=nvfp4", "one sweep"),
        ("python -m qerl_lab.report runs out=results/NAME", "small files to commit, which reproduce the report"),
        ("python -m qerl_lab.report runs out=results/NAME bench=results/bench", "speed and memory on the page too"),
        ("python -m qerl_lab.report results/NAME", "the same from those files, without the runs"),
        ("python -m qerl_lab.report verdicts runs", "test the paper's claims; see verdicts --help"),
    ),
    required=("sweep",),
    bare="sweep",
)


VERDICTS = "python -m qerl_lab.report verdicts"
COMMANDS: dict[str, Command[Any]] = {
    "verdicts": Command(
        f"{VERDICTS} DIR ...",
        "Test the paper's claims, or those of a file, on run directories; print verdicts and their numbers.",
        VerdictsOptions,
        verdicts,
        examples=(
            (f"{VERDICTS} runs", "every run below runs/"),
            (f"{VERDICTS} runs/sweeps out=results/NAME", "the table as a file too"),
            (f"{VERDICTS} runs claims=results/NAME/claims.yaml", "claims of your own, committed before the runs"),
        ),
        required=("sweep",),
        bare="sweep",
    ),
}


@exits.command
def main(arguments: list[str]) -> int:
    """Run `python -m qerl_lab.report` with the given command-line arguments, and return the exit code.

    Raises ConfigError if the arguments are refused, or if the first argument is neither a directory nor a command.
    """
    if arguments and arguments[0] in COMMANDS:
        return run_subcommand(COMMANDS, arguments)
    if arguments and not Path(arguments[0]).exists() and (hint := did_you_mean(arguments[0], list(COMMANDS))):
        raise ConfigError(f"{arguments[0]} is no directory and no command.{hint}")
    return COMMAND.run(arguments)


if __name__ == "__main__":
    exits.run(main)
