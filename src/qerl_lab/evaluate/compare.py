"""`python -m qerl_lab.evaluate compare A B`: compare two evaluations, paired by question and by seed.

An arm is one configuration with all of its seeds. The module `summary` explains the engines "own" and "common".
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from qerl_lab.config.arm import fill_added_keys, settings_of_arm
from qerl_lab.config.message import some_of
from qerl_lab.config.option import ConfigError
from qerl_lab.config.spelling import shell_override
from qerl_lab.evaluate import summary
from qerl_lab.evaluate.evaluate_options import BY_TASK
from qerl_lab.evaluate.summary import ABOUT, COMMON, GROUP, OWN, ROWS, SCHEMA, TRAINED_ON
from qerl_lab.report.stats import Interval, format_interval, over_seeds, p_value, paired_interval, powers_of_two
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


class Evaluated(NamedTuple):
    """One evaluation: its settings and results (evaluation.json), and a row per completion (eval.parquet)."""

    about: dict[str, Any]
    rows: pd.DataFrame


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
        after = self.by_question.iloc[0]
        return paired_interval(0 * after, after, level)

    @property
    def p(self) -> float:
        """Two-sided p-value against the hypothesis that the mean of B - A is 0."""
        return p_value(self.interval, self.by_question.shape[1])


Pairs = list[tuple[Evaluated, Evaluated]]


def run(a_path: str, b_path: str) -> None:
    """Print the table of differences B - A between evaluations, with notes.

    Each path is the folder of one evaluation, or a folder above the evaluations of several seeds. Raises ConfigError if
    A and B cannot be paired.
    """
    a, b = read_arm(a_path), read_arm(b_path)
    pairs, notes = pair_evaluations(a, b)
    found = list(differences(pairs, notes))
    for name, arm, path in (("A", a, a_path), ("B", b, b_path)):
        subject, seeds = next(iter(arm.values())).about["subject"], ", ".join(map(str, arm))
        print(f"{name}: {subject} ({path}), seed{'s' if len(arm) > 1 else ''} {seeds}")
    print(f"\n{table(found)}\n\n{HOW_TO_READ.format(seeds=' and seed' if len(pairs) > 1 else '')}")
    for note in notes:
        print(f"note: {note}")


def read_arm(path: str) -> dict[int, Evaluated]:
    """Read the evaluation in a folder, or all evaluations below it; return them by seed of their run.

    Raises ConfigError if there is none, if another version of the lab wrote one, or if they are not the seeds of one
    arm: two have the same seed, or they were asked or trained differently.
    """
    top = Path(path).expanduser()
    files = [top / ABOUT] if (top / ABOUT).is_file() else sorted(top.rglob(ABOUT))
    folders = [file.parent for file in files if not file.parent.name.endswith((".partial", ".replaced"))]
    if not folders:
        raise ConfigError(
            f"{top} holds no evaluation. Type python -m qerl_lab.evaluate accuracy {shell_override('run', top)} "
            "first, or the directory that it wrote."
        )
    found: dict[int, Evaluated] = {}
    for folder in folders:
        about = read_json(folder / ABOUT, dict)
        if about.get("schema") != SCHEMA:
            raise ConfigError(f"{folder / ABOUT} is of another version of the lab. Evaluate again.")
        first, seed = next(iter(found.values())).about if found else about, int(about["run_seed"])
        mine, others = identity_of(about), identity_of(first)
        differ = [key for key in others if key not in OF_A_SEED and mine.get(key) != others[key]]
        differ += differing_keys(about.get("arm"), first.get("arm"))
        if seed in found or differ:
            why = f"they differ in {some_of(differ)}" if differ else f"both are of seed {seed}, as the run has it"
            raise ConfigError(
                f"{path} holds several evaluations that are not the seeds of one arm: {format_path(folders[0])} and "
                f"{format_path(folder)}, {why}. Type the directory of one."
            )
        found[seed] = Evaluated(about, pd.read_parquet(folder / ROWS))
    return found


def identity_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that identify an evaluation from its evaluation.json, always with `grading`.

    evaluation.json leaves `grading` out if it is the default.
    """
    return {"grading": BY_TASK} | about["identity"]


def differing_keys(mine: Mapping[str, str] | None, others: Mapping[str, str] | None) -> list[str]:
    """Return, sorted, the settings in which two runs' arms differ; none if one is None, as in older evaluations.

    Arms map dotted keys to values as text. Training questions are compared by hash if both arms have one, else by path.
    """
    if mine is None or others is None:
        return []
    one, other = (settings_of_arm(fill_added_keys(arm)) for arm in (mine, others))
    idle = "task.path" if TRAINED_ON in one and TRAINED_ON in other else TRAINED_ON
    return sorted(key for key in {*one, *other} - {idle} if one.get(key) != other.get(key))


def pair_evaluations(a: dict[int, Evaluated], b: dict[int, Evaluated]) -> tuple[Pairs, list[str]]:
    """Pair evaluations of the same seed in `a` and `b`, which map seeds to evaluations; return the pairs and notes.

    One evaluation on each side makes a pair even if the seeds differ. Notes name what else differs between A and B.
    Raises ConfigError if no seed is in both.
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
        notes += [f"seeds {alone} are in one of the two only, and left out"] if alone else []
    for mine, others in ((identity_of(one.about), identity_of(other.about)) for one, other in pairs):
        how = [f"{key}={mine.get(key)} and {others.get(key)}" for key in HOW_IT_RAN if mine.get(key) != others.get(key)]
        if how:
            notes.append(f"A and B ran with {', '.join(how)}: part of the differences is theirs, also in engine=common")
    codes = {one.about["environment"].get("git_sha") for pair in pairs for one in pair}
    if len(codes) > 1:
        notes.append(f"they come from {len(codes)} versions of the code: {', '.join(sorted(map(str, codes)))}")
    return pairs, list(dict.fromkeys(notes))


def differences(pairs: Pairs, notes: list[str]) -> Iterator[Difference]:
    """Yield B - A in each measure, for every benchmark, engine and sampling that all evaluations have.

    Measures are accuracy, and for several samples pass@k and, if the completions are there (`tools.queue` drops them),
    answer entropy (nats). Appends to `notes` what is left out. Raises ConfigError if nothing is in all evaluations, or
    if A and B differ in questions, prompts, answers or numbers of samples.
    """
    groups = [[rows_by_group(one) for one in pair] for pair in pairs]
    every = [of_one for of_pair in groups for of_one in of_pair]
    names = list(dict.fromkeys(name for of_one in every for name in of_one))
    if all(one.about["own_is_common"] for pair in pairs for one in pair):
        notes.append(f"both bases are dense, so that engine={OWN} is engine={COMMON} too")
        names = [name for name in names if name[1] == OWN]
    shared = [name for name in names if all(name in of_one for of_one in every)]
    if not shared:
        a, b = ("; ".join(", ".join(name) for name in of_one) for of_one in groups[0])
        raise ConfigError(f"A has {a} and B {b}, so that they are no pairs. Evaluate B again as A was.")
    for name in names:
        if name not in shared:
            advice = f"; type {COMMON}=true when you evaluate" if name[1] == COMMON else ""
            notes.append(f"{', '.join(name)}: not in every evaluation, and left out{advice}")
    benchmarks = [name[0] for name in shared]
    for name in sorted(shared, key=lambda name: benchmarks.index(name[0])):
        rows = [[of_one[name] for of_one in of_pair] for of_pair in groups]
        for of_pair in rows:
            for what, keys in PAIRED.items():
                one, other = (set(side[keys].itertuples(index=False, name=None)) for side in of_pair)
                if one != other:
                    raise ConfigError(
                        f"{name[0]}: A and B are no pairs, {len(one - other)} {what} are in A only, "
                        f"{len(other - one)} in B. Evaluate both alike."
                    )
        samples = int(rows[0][0]["draw"].max()) + 1
        measures: dict[str, Callable[[pd.DataFrame], pd.Series]] = {"accuracy": summary.scores}
        measures |= {f"pass@{k}": partial(summary.pass_rates, k=k) for k in powers_of_two(samples) if k > 1}
        if samples > 1 and all("completion" in side for of_pair in rows for side in of_pair):
            measures["answer entropy"] = summary.answer_entropies
        for measure, of in measures.items():
            before, after = (pd.DataFrame([of(of_pair[side]) for of_pair in rows]) for side in (0, 1))
            by_question = (after[before.columns] - before).reset_index(drop=True)
            means = float(before.to_numpy().mean()), float(after.to_numpy().mean())
            yield Difference(name[0], name[1], name[2], measure, *means, by_question)


def rows_by_group(one: Evaluated) -> dict[tuple[str, ...], pd.DataFrame]:
    """Return an evaluation's rows by (benchmark, engine, sampling).

    With a dense base there are rows of the engine "own" only. They are returned for "common" too, because both engines
    compute the same.
    """
    found = {tuple(map(str, name)): rows for name, rows in one.rows.groupby(GROUP, sort=False)}
    common = {(name[0], COMMON, name[2]): rows for name, rows in found.items()} if one.about["own_is_common"] else {}
    return found | common


def table(compared: list[Difference]) -> str:
    """Format the differences as the printed table; the column `sampling` is left out if all rows have the same."""
    several = len({one.sampling for one in compared}) > 1
    head = ["benchmark", "engine", *["sampling"] * several, "measure", "questions", "A", "B"]
    rows = [[*head, "B - A, 95% interval", "p"]]
    for one in compared:
        mean, low, high = one.interval()
        cells = [one.benchmark, one.engine, *[one.sampling] * several, one.measure, f"{one.by_question.shape[1]:,}"]
        cells += [f"{one.mean_a:.3f}", f"{one.mean_b:.3f}", f"{mean:+.3f} {format_interval(low, high)}"]
        rows.append([*cells, f"{one.p:.3f}" if one.p >= 0.001 else f"{one.p:.1g}"])
    return columns(rows)
