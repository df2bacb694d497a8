"""Parse QUEUE.yaml into planned runs, and ledger.csv, which records how each ended. Imports Hydra, no torch.

QUEUE.yaml, in a folder of results:

    words: [scale=qwen1_5b, tracking=none]            # for every line; a line's own words take precedence
    seconds: 480                                      # per run, until the ledger or results/bench has measurements
    parts:                                            # in the order in which they are made
      - name: formats
        lines: ["+experiment=bf16,nvfp4"]             # each a grid of the main command, without seeds
        seeds: [0, 1, 2]                              # seeds of each; 0 to 4 if left out
        after: ["accuracy benchmarks=math500:$MATH500"]    # `evaluate accuracy` for every finished run; texts may have
                                                      # environment variables of the machine; none if left out
        into: pilot                                   # folder of the results, in the folder of QUEUE.yaml;
                                                      # if left out, the folder of QUEUE.yaml
        preregistered: false                          # may run while PREREGISTRATION.md is incomplete; true if left out

Runs of preregistered parts record the hash of `claims.yaml` if that file lies beside QUEUE.yaml. A run that several
parts list is made once, at its first position. It gets the evaluations of all these parts, and its results go to the
folder of each.
"""

import csv
import hashlib
import io
import itertools
import json
import os
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from qerl_lab.cli.compose import Job, make_plan
from qerl_lab.cli.grammar import parse_options
from qerl_lab.config.arm import settings_of_arm, values_of
from qerl_lab.config.fields import LIST, NUMBER, SWITCH, TEXT, TEXTS, WHOLES, check_fields, parse_number
from qerl_lab.config.keys import FIELDS
from qerl_lab.config.message import in_one_line, with_noun
from qerl_lab.config.option import ConfigError, check_bounds, did_you_mean
from qerl_lab.config.paths import CLAIMS, file_hash
from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate.evaluate_options import AccuracyOptions, check_combination
from qerl_lab.system import terminal
from qerl_lab.system.disk import replace_file

LEDGER, PREREGISTRATION, PILOT = "ledger.csv", "PREREGISTRATION.md", "PILOT:"
COLUMNS = ("run", "seed", "part", "state", "host", "card", "start", "seconds", "commit", "preregistration",
           "adapter_sha256", "evaluations", "words")  # fmt: skip
DONE, FAILED, ATTEMPTS = "done", "failed", 2
WHERE = ("model.hash", "task.path")  # settings that can differ between machines for the same run
OF_FILE, OPTIONAL_OF_FILE = {"parts": LIST}, {"words": TEXTS, "seconds": NUMBER}
OF_PART = {"name": TEXT, "lines": TEXTS}
OPTIONAL_OF_PART = {"seeds": WHOLES, "after": TEXTS, "into": TEXT, "preregistered": SWITCH}
Row = Mapping[str, str]


@dataclass(frozen=True)
class Part:
    """A part of the queue: runs, evaluations of each finished run, and where results go (see the module docstring)."""

    name: str
    lines: Sequence[str]
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    after: Sequence[str] = ()
    into: str = ""
    preregistered: bool = True


@dataclass(frozen=True)
class Planned:
    """A run that the queue plans. `key` is its name on every machine; `overrides` are for the main command.

    `parts` are the parts of the queue that list it, in the order of the file: all of them preregistered, or none.
    """

    key: str
    parts: Sequence[Part]
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def part(self) -> Part:
        """Return the first part that lists the run; the ledger names this one."""
        return self.parts[0]

    @property
    def after(self) -> list[str]:
        """Return the evaluate commands of all parts that list the run, each once."""
        return list(dict.fromkeys(line for part in self.parts for line in part.after))

    def part_in(self, chosen: Sequence[Part]) -> Part | None:
        """Return the first of the `chosen` parts that lists the run; None if none does."""
        return next((part for part in chosen if part in self.parts), None)


class Estimate(NamedTuple):
    """How many seconds a run takes with its evaluations, and in `source` where this number is from."""

    seconds: float
    source: str


@dataclass(frozen=True)
class Queue:
    """A parsed QUEUE.yaml: its distinct runs in order, and the rows of its ledger.

    `chosen` are the parts that the user asked for. `default_seconds`, the key `seconds` of the file, is the time of a
    run for which nothing was measured.
    """

    folder: Path
    parts: Sequence[Part]
    chosen: Sequence[Part]
    runs: Sequence[Planned]
    rows: Sequence[Row]
    default_seconds: float

    def is_done(self, key: str) -> bool:
        """Tell whether the ledger has a finished run with this key."""
        return any(row["run"] == key and row["state"] == DONE for row in self.rows)

    def has_attempt(self, row: Row) -> bool:
        """Tell whether the ledger has the attempt of `row`, ended in the same state."""
        return any(all(other[name] == row[name] for name in ("run", "start", "state")) for other in self.rows)

    def failures(self, key: str) -> int:
        """Count the failed attempts at the run with this key in the ledger."""
        return sum(row["run"] == key and row["state"] == FAILED for row in self.rows)

    def left(self) -> list[Planned]:
        """Return the runs that are not done and have not failed twice, in the order of the queue."""
        return [run for run in self.runs if not self.is_done(run.key) and self.failures(run.key) < ATTEMPTS]

    @cached_property
    def shared(self) -> set[tuple[str, str]]:
        """Return (run, start) of the ledger's attempts that shared their GPU (without a GPU, their host) with another.

        Two attempts share it if they overlap by more than half of the shorter one. Successive attempts seem to overlap
        by the start of an engine, because `seconds` begin before `start`, when a run wrote env.json.
        """
        spans = [(row, datetime.fromisoformat(row["start"]).timestamp(), float(row["seconds"])) for row in self.rows]
        return {
            (row["run"], row["start"])
            for (row, begin, seconds), (other, first, taken) in itertools.permutations(spans, 2)
            if (row["host"], row["card"]) == (other["host"], other["card"])
            and min(begin + seconds, first + taken) - max(begin, first) > min(seconds, taken) / 2
        }

    def estimate(self, planned: Planned, jobs: int) -> Estimate:
        """Estimate how long a run takes with its evaluations, if `jobs` runs share a GPU.

        The estimate is the median over finished runs of this queue in the ledger: if possible over runs that had their
        GPU alone (with `jobs` above 1: that shared it), and with as many evaluations as `planned`. It uses the first of
        these groups that is not empty: the run's arm with any seed, its experiment, its part, all. Without finished
        runs the estimate is `estimate_from_bench`, else `seconds` of QUEUE.yaml. Other ledger rows do not count,
        because their runs had other settings, such as another scale.
        """
        made = {run.key: run for run in self.runs}
        config, wanted = planned.config, f" of {len(planned.after)}"
        whole = [row for row in self.rows if row["state"] == DONE and not missing_evaluations(row)]
        known = [row for row in whole if row["run"] in made]
        done = [row for row in known if ((row["run"], row["start"]) in self.shared) == (jobs > 1)] or known
        alike = [row for row in done if row["evaluations"].endswith(wanted)] or done
        timed = [(made[row["run"]], float(row["seconds"])) for row in alike]
        for group, taken in (
            ("its arm", [seconds for run, seconds in timed if replace(run.config, seed=config.seed) == config]),
            (config.experiment, [seconds for run, seconds in timed if run.config.experiment == config.experiment]),
            (f"part {planned.part.name}", [seconds for run, seconds in timed if run.part.name == planned.part.name]),
            ("the queue", [seconds for _, seconds in timed]),
        ):
            if taken:
                return Estimate(statistics.median(taken), f"median of {with_noun(len(taken), 'run')} of {group}")
        if seconds := estimate_from_bench(config):
            return Estimate(seconds, "from the tokens/s in results/bench, each completion at its longest")
        return Estimate(self.default_seconds, "`seconds` of the queue's file, nothing is measured")

    def parts_of(self, row: Row) -> Sequence[Part]:
        """Return the parts that a ledger row belongs to: those that list its run, else the part that it names.

        Empty if the queue has lost both the run and the part.
        """
        listing = [part for run in self.runs if run.key == row["run"] for part in run.parts]
        return listing or [part for part in self.parts if part.name == row["part"]]

    def preregistration_hash(self) -> str:
        """Return the first 12 hex digits of the SHA-256 of PREREGISTRATION.md; empty if the file is missing."""
        file = self.folder / PREREGISTRATION
        return file_hash(file) if file.exists() else ""

    def of_another_preregistration(self) -> list[str]:
        """Return the keys of preregistered runs with an attempt under another version of PREREGISTRATION.md.

        Compares the hash in each row of the ledger with the hash of the present file. Runs that the queue no longer
        lists do not count, because it makes none of them.
        """
        now = self.preregistration_hash()
        other = {row["run"] for row in self.rows if row["preregistration"] != now}
        return [run.key for run in self.runs if run.part.preregistered and run.key in other]

    def refuse_unregistered(self, runs: Sequence[Planned]) -> None:
        """Raise ConfigError if one of `runs` is preregistered, and PREREGISTRATION.md is missing or has `PILOT:`."""
        file = self.folder / PREREGISTRATION
        counting = [run.part.name for run in runs if run.part.preregistered]
        lacks = f"has {PILOT}" if file.exists() else "is missing"
        if counting and (not file.exists() or PILOT in file.read_text(encoding="utf-8")):
            raise ConfigError(
                f"part {counting[0]} is preregistered, and {file} {lacks}. Complete the file first, or type "
                "parts=[NAME] with a pilot: a part with `preregistered: false`."
            )


def read(path: Path, extra: Sequence[str] = (), chosen: Sequence[str] = ()) -> Queue:
    """Read the queue file at `path` and the ledger beside it.

    Overrides in `extra` win over the overrides in the file. `chosen` names the parts of `Queue.chosen`; none is all.
    Raises ConfigError if the file is invalid, or has no part with a name in `chosen`.
    """
    try:
        content = check_fields(yaml.safe_load(path.read_text(encoding="utf-8")), OF_FILE, OPTIONAL_OF_FILE, "the file")
        parts = [_parse_part(values) for values in content["parts"]]
        seconds = parse_number(content.get("seconds", 600), "the file: seconds", 0)
        if not parts:
            raise ValueError("the file: parts is empty; allowed: at least one entry")
        names = [part.name for part in parts]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"two parts have the name {twice[0]}; give each its own")
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ConfigError(
            f"{path} is no queue ({in_one_line(error)}). Type the path of a file such as results/qwen1_5b/queue.yaml."
        ) from None
    if "seed" in (word.lstrip("+").partition("=")[0] for word in extra):
        raise ConfigError(
            f"words={shlex.join(extra)} sets a seed, and each part of {path} sets its seeds. Leave seed out."
        )
    for name in chosen:
        if name not in names:
            hint = did_you_mean(name, names) or f" Type for example parts={names[0]}."
            raise ConfigError(f"parts={name} is not a part of the queue; allowed: {', '.join(names)}.{hint}")
    for part in parts:
        for line in part.after:
            _check_evaluation(line, f"part {part.name}, after `{line}`")
    runs: dict[str, Planned] = {}
    folder, words = path.parent, content.get("words", [])
    claims = [f"preregistration={folder / CLAIMS}"] if (folder / CLAIMS).exists() else []
    with terminal.ProgressBar("composing the runs", len(parts), unit="part") as bar:  # takes ten seconds for 300 runs
        for part in parts:
            words_of_part = [*words, *claims] if part.preregistered else words
            for run in _runs_of_part(part, words_of_part, extra):
                known = runs.setdefault(run.key, run)
                if known.part.preregistered != part.preregistered:
                    raise ConfigError(
                        f"{path}: parts {known.part.name} and {part.name} both list {run.key}, and only one of them "
                        "is preregistered. Give one part other seeds or lines."
                    )
                if part not in known.parts:
                    runs[run.key] = replace(known, parts=[*known.parts, part])
            bar.advance(1)
    wanted = [part for part in parts if not chosen or part.name in chosen]
    return Queue(folder, parts, wanted, list(runs.values()), read_ledger(folder), seconds)


def _parse_part(values: Any) -> Part:
    """Build one part of the queue from `values`, its entry in the file. Raises ValueError for an invalid field."""
    where = f"part {values.get('name') if isinstance(values, dict) else values}"
    fields = check_fields(values, OF_PART, OPTIONAL_OF_PART, where)
    for name in ("lines", "seeds"):
        if fields.get(name) == []:
            raise ValueError(f"{where}: {name} is empty; allowed: at least one entry")
    return Part(**fields)


def _check_evaluation(line: str, where: str) -> None:
    """Raise ConfigError unless `line`, of `after`, is a valid `evaluate accuracy` command.

    Without this check it would fail only after the run's training. `where` names the line in the message.
    """
    command, *words = split_words(os.path.expandvars(line), where) or [""]
    if command != "accuracy":  # the other commands take no run
        raise ConfigError(
            f"{where} evaluates no run; allowed: accuracy KEY=VALUE ... Write for example accuracy questions=256."
        )
    try:
        check_combination(parse_options(AccuracyOptions, ["run=RUN_DIR", *words], "run"))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def split_words(line: str, where: str) -> list[str]:
    """Split a line of overrides as a shell does. Raises ConfigError for an open quote; `where` names the line."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise ConfigError(f"{where} cannot be read: {in_one_line(error)}. Close the quotes.") from None


def _runs_of_part(part: Part, words: Sequence[str], extra: Sequence[str]) -> list[Planned]:
    """List a part's runs, seed by seed.

    The overrides of a line win over `words`, and `extra` wins over both. Composes each line once for all seeds. Raises
    ConfigError for a line that the main command refuses, or that would make no run.
    """
    runs = []
    for line in part.lines:
        where = f"part {part.name}, line `{line}`"
        try:
            jobs = _compose(*join_overrides(words, split_words(line, where), extra, ["seed=0"]))
            check_bounds("seeds", FIELDS["seed"].metadata, list(part.seeds))  # the jobs have another
            if any(job.config.dry_run for job in jobs):
                raise ConfigError("dry_run=true makes no run. Leave dry_run out; `plan` starts nothing.")
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        for job, seed in itertools.product(jobs, part.seeds):
            config = replace(job.config, seed=seed)
            overrides = join_overrides(job.overrides, [f"seed={seed}"])
            runs.append(Planned(key_of(config), [part], tuple(overrides), config))
    return sorted(runs, key=lambda run: run.config.seed)


@cache  # parts may have the same lines with other seeds, and a job takes Hydra 0.1 s
def _compose(*overrides: str) -> Sequence[Job]:
    """Compose and check the jobs of a grid, as `make_plan` does. Raises ConfigError if one is not allowed."""
    return make_plan(overrides, multirun=True).jobs


def join_overrides(*overrides: Sequence[str]) -> list[str]:
    """Join lists of command-line overrides (`key=value`), keeping the last override for each key."""
    return list({word.lstrip("+").partition("=")[0]: word for word in itertools.chain(*overrides)}.values())


def key_of(config: RunConfig) -> str:
    """Return a run's key EXPERIMENT-seedN-HASH, equal on every machine.

    The hash covers the settings that define the run's arm (`settings_of_arm`), without paths that differ between
    machines. Settings at their default are left out, so that adding a key to the schema changes no hash.
    """
    usual = values_of(RunConfig())
    values = settings_of_arm(values_of(config) | {"model.hash": None})
    values["model.path"] = str(values["model.path"]).removeprefix(f"{Path.cwd()}/")
    kept = {name: value for name, value in values.items() if name not in WHERE and value != usual[name]}
    digits = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:8]
    return f"{config.experiment}-seed{config.seed}-{digits}"


def estimate_from_bench(config: RunConfig, folder: Path = Path("results/bench")) -> float | None:
    """Estimate a run's seconds from benchmarks (step_*.json in `folder`), as if all completions had full length.

    Uses the tokens per second of the fastest arm measured for the run's model on one GPU, without baselines and arms
    that died; None if there is none. The measured steps had completions of 1,024 or 2,048 tokens, so a run with longer
    completions takes longer.
    """
    rows: list[dict[str, Any]] = []
    for file in sorted(folder.glob("step_*.json")):
        rows += json.loads(file.read_text(encoding="utf-8"))["rows"]
    of_model = [row for row in rows if _letters(row["model"]) == _letters(config.model.name) and row["gpus"] == 1]
    speeds = [row["tokens_per_second"] for row in of_model if not row["baseline"] and "died" not in row]
    tokens = config.steps * config.completions_per_step * config.rollout.max_completion_tokens
    return tokens / max(speeds) if speeds else None


def _letters(name: str) -> str:
    """Keep only letters and digits of a model's name, so that qwen2.5-7b and qwen2_5_7b compare equal."""
    return "".join(filter(str.isalnum, name))


def missing_evaluations(row: Row) -> int:
    """Return how many evaluations a run lacks: 1 if its ledger row has "1 of 2" in the column `evaluations`."""
    made, _, wanted = row["evaluations"].partition(" of ")
    return int(wanted) - int(made)


def read_ledger(folder: Path) -> list[Row]:
    """Read the rows of ledger.csv; none if the file is missing."""
    file = folder / LEDGER
    if not file.exists():
        return []
    with file.open(encoding="utf-8", newline="") as opened:  # words may hold line ends, which csv reads itself
        return list(csv.DictReader(opened))


def write_ledger(folder: Path, rows: Sequence[Row]) -> None:
    """Write ledger.csv, one row per attempt at a run."""
    out = csv.DictWriter(text := io.StringIO(), COLUMNS, lineterminator="\n")
    out.writeheader()
    out.writerows(rows)
    replace_file(folder / LEDGER, text.getvalue().encode())
