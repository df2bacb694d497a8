"""`python -m qerl_lab.evaluate compare A B`: compare two evaluations, paired by question and by seed.

An arm is one configuration with all of its seeds. The module `summary` explains the engines "own" and "common".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from qerl_lab.config.arm import fill_added_keys, settings_of_arm
from qerl_lab.config.message import some_of
from qerl_lab.config.option import ConfigError
from qerl_lab.config.spelling import shell_override
from qerl_lab.evaluate import summary
from qerl_lab.evaluate.evaluate_options import BY_TASK
from qerl_lab.evaluate.summary import ABOUT, COMMON, GROUP, OWN, ROWS, SCHEMA
from qerl_lab.record.directory import RunDirectory
from qerl_lab.report.stats import Interval, format_interval, over_seeds, p_value, paired_interval, values_of_k
from qerl_lab.system.disk import read_json
from qerl_lab.system.terminal import columns, format_path

# Keys of an evaluation's identity that change kernels, random draws or grading.
HOW_IT_RAN = ("seed", "rollout", "device", "dtype", "batch_size", "grading")
OF_A_SEED = ("seed", "adapter")  # keys that may differ between the seeds of one arm
PAIRED = {  # columns that two evaluations must share
    "questions": ["id"], "questions in those words": ["id", "prompt_sha256"],
    "questions with that answer": ["id", "answer"], "samples": ["id", "draw"],
}  # fmt: skip
HOW_TO_READ = """\
Differences are B - A, paired by question{seeds}, with intervals of 95%. Of differences that are 0, one in 20 has
p < 0.05; engine=common is the one in which both bases are dequantized to BF16."""


Group = tuple[str, ...]  # benchmark, engine, sampling


class Evaluated(NamedTuple):
    """One evaluation: its settings and results (evaluation.json), and a row per completion (eval.parquet) by group."""

    about: dict[str, Any]
    groups: dict[Group, pd.DataFrame]


@dataclass(frozen=True)
class Difference:
    """Difference B - A of two evaluations in one measure, for one benchmark, engine and sampling."""

    benchmark: str
    engine: str
    sampling: str
    measure: str
    mean_a: float
    mean_b: float
    by_question: pd.DataFrame  # B - A [seeds, questions]

    def interval(self, level: float = 0.95) -> Interval:
        """Return (mean, low, high) of B - A, over questions, or over seeds and questions if there are several seeds."""
        if len(self.by_question) > 1:
            return over_seeds(self.by_question.to_numpy(), level)
        change = self.by_question.iloc[0]
        return paired_interval(0 * change, change, level)

    @property
    def p(self) -> float:
        """Return the two-sided p-value of the hypothesis that the mean of B - A is 0."""
        return p_value(self.interval, self.by_question.shape[1])


Pairs = list[tuple[Evaluated, Evaluated]]


def run(a_path: str, b_path: str) -> None:
    """Print the table of differences B - A between evaluations, with notes.

    Each path is the folder of one evaluation, or a folder above the evaluations of several seeds. Raises ConfigError if
    A and B cannot be paired, or have an evaluation in common.
    """
    a, b = read_arm(a_path), read_arm(b_path)
    pairs, notes = pair_evaluations(a, b)
    if any(one.about == other.about for one, other in pairs):  # the record has the seconds, which no other repeats
        raise ConfigError(f"A={a_path} and B={b_path} have an evaluation in common; allowed: two. Type another B.")
    groups, left_out = shared_groups(pairs)
    compared = list(differences(pairs, groups))
    for name, arm, path in (("A", a, a_path), ("B", b, b_path)):
        subject = f"runs in {path}" if len(arm) > 1 else next(iter(arm.values())).about["subject"]
        where = "" if subject.endswith(f" {path}") else f" ({path})"
        print(f"{name}: {subject}{where}, seed{'s' if len(arm) > 1 else ''} {', '.join(map(str, sorted(arm)))}")
    print(f"\n{table(compared)}\n\n{HOW_TO_READ.format(seeds=' and seed' if len(pairs) > 1 else '')}")
    for note in [*notes, *left_out]:
        print(f"note: {note}")


def read_arm(path: str) -> dict[int, Evaluated]:
    """Read the evaluation in a folder, or all evaluations below it; return them by seed of their run.

    Raises ConfigError if there is none, if they are not the seeds of one arm, or if a run got more steps since.
    """
    top = Path(path).expanduser()
    files = [top / ABOUT] if (top / ABOUT).is_file() else sorted(top.rglob(ABOUT))
    folders = [file.parent for file in files if not file.parent.name.endswith((".partial", ".replaced"))]
    if not folders:
        command = f"Type python -m qerl_lab.evaluate accuracy {shell_override('run', path)} first, or"
        raise ConfigError(
            f"{path} holds no evaluation. {command if RunDirectory(top).is_claimed else 'Type'} the directory of one."
        )
    by_seed: dict[int, Evaluated] = {}
    for folder in folders:
        about = read_json(folder / ABOUT, dict)
        if about.get("schema") != SCHEMA:
            raise ConfigError(f"{folder / ABOUT} is of another version of the lab. Evaluate again with overwrite=true.")
        if folder != top:
            _refuse_outgrown(folder, about)
        first = next(iter(by_seed.values())).about if by_seed else about
        seed = int(about["run_seed"])
        mine, others = identity_of(about), identity_of(first)
        differ = [key for key in others if key not in OF_A_SEED and mine.get(key) != others[key]]
        differ += differing_keys(about["arm"], first["arm"])
        if seed in by_seed or differ:
            why = f"they differ in {some_of(differ)}" if differ else f"both are of seed {seed}, as the run has it"
            raise ConfigError(
                f"{path} holds several evaluations that are not the seeds of one arm: {format_path(folders[0])} and "
                f"{format_path(folder)}, {why}. Type the directory of one, or of copies of those to compare."
            )
        by_seed[seed] = Evaluated(about, rows_by_group(pd.read_parquet(folder / ROWS), about["own_is_common"]))
    return by_seed


def _refuse_outgrown(folder: Path, about: Mapping[str, Any]) -> None:
    """Raise ConfigError if the evaluation in `folder` is out of date, because its run was trained further since.

    `about` is the evaluation's evaluation.json. An evaluation of the base alone records no steps and passes.
    """
    run, steps = RunDirectory(folder.parent.parent), about["arm"].get("steps")
    if steps is None or not run.is_claimed:
        return
    now = run.settings()["steps"]
    if now != steps:
        raise ConfigError(
            f"{format_path(folder)} is of step {steps}, and the run has {now} steps now. Type python -m "
            f"qerl_lab.evaluate accuracy {shell_override('run', format_path(run.path))} and move the older evaluation "
            "out of the run, or type the directory of one."
        )


def identity_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry `identity` of `about`, an evaluation.json, with the default `grading` if the entry lacks it."""
    return {"grading": BY_TASK} | about["identity"]


def differing_keys(mine: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """List, sorted, the settings in which the arms `mine` and `others` of two runs differ.

    Both map dotted keys to values as text; a model without a run has none. Training questions are compared by hash if
    both runs recorded one, else by path.
    """
    mine, others = (settings_of_arm(fill_added_keys(arm)) for arm in (mine, others))
    idle = "task.path" if mine.get("training_sha256") and others.get("training_sha256") else "training_sha256"
    return sorted(key for key in {*mine, *others} - {idle} if mine.get(key) != others.get(key))


def pair_evaluations(a: dict[int, Evaluated], b: dict[int, Evaluated]) -> tuple[Pairs, list[str]]:
    """Pair the evaluations of each seed that is in both `a` and `b` (seed -> evaluation); return the pairs and notes.

    If each has one evaluation, the two are a pair whatever their seeds are; otherwise raises ConfigError if no seed is
    in both. Notes name the seeds left out, and what else differs between A and B.
    """
    shared, alone = sorted(a.keys() & b.keys()), sorted(a.keys() ^ b.keys())
    notes: list[str] = []
    if len(a) == len(b) == 1:
        pairs = [(a[min(a)], b[min(b)])]
        if alone:
            notes.append(f"A has seed {min(a)} and B seed {min(b)}: they differ in more than what is compared")
    elif not shared:
        raise ConfigError(f"A has the seeds {sorted(a)} and B {sorted(b)}, none of both. Evaluate the same seeds.")
    else:
        pairs = [(a[seed], b[seed]) for seed in shared]
        if alone:
            notes.append(f"seeds {alone} are in one of the two only, and left out")
    for pair in pairs:
        mine, others = (identity_of(evaluated.about) for evaluated in pair)
        how = [f"{key}={mine.get(key)} and {others.get(key)}" for key in HOW_IT_RAN if mine.get(key) != others.get(key)]
        if how:
            notes.append(f"A and B ran with {', '.join(how)}: part of the differences is theirs, also in engine=common")
    codes = {evaluated.about["environment"].get("git_sha") for pair in pairs for evaluated in pair}
    if len(codes) > 1:
        notes.append(f"they come from {len(codes)} versions of the code: {', '.join(sorted(map(str, codes)))}")
    return pairs, list(dict.fromkeys(notes))


def shared_groups(pairs: Pairs) -> tuple[list[Group], list[str]]:
    """Return the groups (benchmark, engine, sampling) that all evaluations have, and notes on those left out.

    The groups of one benchmark follow each other. If all bases are dense, only groups of the engine "own" are returned,
    because both engines compute the same. Raises ConfigError if no group is in all evaluations.
    """
    notes = list[str]()
    every = list(chain(*pairs))
    groups = list(dict.fromkeys(chain(*(evaluated.groups for evaluated in every))))  # each once
    if all(evaluated.about["own_is_common"] for evaluated in every):
        notes.append(f"both bases are dense, so that engine={OWN} is engine={COMMON} too")
        groups = [group for group in groups if group[1] == OWN]
    shared = [group for group in groups if all(group in evaluated.groups for evaluated in every)]
    if not shared:
        a, b = ("; ".join(", ".join(group) for group in evaluated.groups) for evaluated in pairs[0])
        raise ConfigError(f"A has {a} and B {b}, so that they are no pairs. Evaluate B again as A was.")
    for group in groups:
        if group not in shared:
            advice = f"; type {COMMON}=true when you evaluate" if group[1] == COMMON else ""
            notes.append(f"{', '.join(group)}: not in every evaluation, and left out{advice}")
    benchmarks = [group[0] for group in shared]
    return sorted(shared, key=lambda group: benchmarks.index(group[0])), notes


def differences(pairs: Pairs, groups: Sequence[Group]) -> Iterator[Difference]:
    """Yield B - A in each measure, for each of `groups` (from `shared_groups`).

    The first measure is accuracy. With several samples per question there is also pass@k, and answer entropy (nats) if
    the completions were kept (`tools.queue` drops them). Raises ConfigError if A and B differ in questions, prompts,
    answers or numbers of samples.
    """
    for group in groups:
        benchmark, engine, sampling = group
        rows_a, rows_b = [a.groups[group] for a, _ in pairs], [b.groups[group] for _, b in pairs]  # of each seed
        for seed_a, seed_b in zip(rows_a, rows_b, strict=True):
            for what, key in PAIRED.items():
                in_a, in_b = (set(rows[key].itertuples(index=False, name=None)) for rows in (seed_a, seed_b))
                if in_a != in_b:
                    raise ConfigError(
                        f"{benchmark}: A and B are no pairs, {len(in_a - in_b)} {what} are in A only, "
                        f"{len(in_b - in_a)} in B. Evaluate both alike."
                    )
        samples = int(rows_a[0]["draw"].max()) + 1
        measures: dict[str, Callable[[pd.DataFrame], pd.Series]] = {"accuracy": summary.accuracies}
        measures |= {f"pass@{k}": partial(summary.pass_rates, k=k) for k in values_of_k(samples) if k > 1}
        if samples > 1 and all("completion" in rows for rows in [*rows_a, *rows_b]):
            measures["answer entropy"] = summary.answer_entropies
        for measure, by_id in measures.items():
            values_a = pd.DataFrame([by_id(rows) for rows in rows_a])
            values_b = pd.DataFrame([by_id(rows) for rows in rows_b])
            by_question = (values_b[values_a.columns] - values_a).reset_index(drop=True)
            mean_a, mean_b = float(values_a.to_numpy().mean()), float(values_b.to_numpy().mean())
            yield Difference(benchmark, engine, sampling, measure, mean_a, mean_b, by_question)


def rows_by_group(rows: pd.DataFrame, own_is_common: bool) -> dict[Group, pd.DataFrame]:
    """Return an evaluation's rows by (benchmark, engine, sampling).

    With a dense base (`own_is_common`) there are rows of the engine "own" only. They are returned for "common" too,
    because both engines compute the same.
    """
    found = {tuple(map(str, name)): of_group for name, of_group in rows.groupby(GROUP, sort=False)}
    if not own_is_common:
        return found
    return found | {(benchmark, COMMON, sampling): own for (benchmark, _, sampling), own in found.items()}


def table(compared: list[Difference]) -> str:
    """Format the differences as the printed table; the column `sampling` is left out if all rows have the same."""
    rows = [["benchmark", "engine", "sampling", "measure", "questions", "A", "B", "B - A, 95% interval", "p"]]
    for difference in compared:
        (mean, low, high), p = difference.interval(), difference.p
        rows.append([
            difference.benchmark, difference.engine, difference.sampling, difference.measure,
            f"{difference.by_question.shape[1]:,}", f"{difference.mean_a:.3f}", f"{difference.mean_b:.3f}",
            f"{mean:+.3f} {format_interval(low, high)}", f"{p:.3f}" if p >= 0.001 else f"{p:.1g}",
        ])  # fmt: skip
    if len({difference.sampling for difference in compared}) <= 1:
        sampling = rows[0].index("sampling")
        for row in rows:
            del row[sampling]
    return columns(rows)
