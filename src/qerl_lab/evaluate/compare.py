"""`python -m qerl_lab.evaluate compare A B`: compare two evaluations, paired by question and by seed.

An arm is one configuration with all of its seeds. `summary` explains the own and the common engine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab.config.arm import fill_added_keys, settings_of_arm
from qerl_lab.config.message import some_of
from qerl_lab.config.option import ConfigError
from qerl_lab.config.spelling import shell_override
from qerl_lab.evaluate.evaluate_options import CompareOptions
from qerl_lab.evaluate.summary import ABOUT, COMMON, OWN, ROWS, SCHEMA, TRAINED_ON, answer_entropies, pass_rates, scores
from qerl_lab.report.stats import Interval, format_interval, over_seeds, p_value, paired_interval, powers_of_two
from qerl_lab.system.disk import read_json
from qerl_lab.system.terminal import columns, format_path

HOW_IT_RAN = ("seed", "rollout", "device", "dtype", "batch_size")  # these affect kernels and random draws
OF_A_SEED = ("seed", "adapter")  # keys that may differ between the seeds of one arm
GROUP = ["benchmark", "engine", "sampling"]
PAIRED = {  # columns that two evaluations must share
    "questions": ["id"], "questions in those words": ["id", "prompt_sha256"],
    "questions with that answer": ["id", "answer"], "samples": ["id", "draw"],
}  # fmt: skip
HOW_TO_READ = """\
Differences are B - A, paired by question{seeds}, with intervals of 95%. Of differences that are 0, one in 20 has
p < 0.05; engine=common is the one in which both bases are dequantized to BF16."""


@dataclass(frozen=True)
class Evaluated:
    """One evaluation: its folder, settings and results (evaluation.json), and a row per completion (eval.parquet)."""

    folder: Path
    about: dict[str, Any]
    rows: pd.DataFrame

    @property
    def seed(self) -> int:
        """Seed of the run that was evaluated."""
        return int(self.about["run_seed"])

    @property
    def rows_by_setting(self) -> dict[tuple[str, ...], pd.DataFrame]:
        """Rows by (benchmark, engine, sampling). If the base is dense, the same rows stand for both engines."""
        found = {tuple(map(str, name)): rows for name, rows in self.rows.groupby(GROUP, sort=False)}
        if self.about["own_is_common"]:
            found |= {(name[0], COMMON, name[2]): rows for name, rows in found.items()}
        return found


@dataclass(frozen=True)
class Difference:
    """Difference in one measure of one benchmark, engine and sampling.

    `by_question` is B - A [seeds, questions].
    """

    benchmark: str
    engine: str
    sampling: str
    measure: str
    mean_a: float
    mean_b: float
    by_question: pd.DataFrame

    def interval(self, level: float = 0.95) -> Interval:
        """Return mean and interval of B - A: over questions for one seed, over seeds and questions for several."""
        if len(self.by_question) > 1:
            return over_seeds(self.by_question.to_numpy(), level)
        after = self.by_question.iloc[0]
        return paired_interval(0 * after, after, level)

    @property
    def p(self) -> float:
        """p-value of the mean of B - A against 0."""
        return p_value(self.interval, self.by_question.shape[1])


Pairs = Sequence[tuple[Evaluated, Evaluated]]


def run(options: CompareOptions) -> None:
    """Print the table of differences between two evaluations. Raises ConfigError if A and B cannot be paired."""
    arms = [read_arm(folder) for folder in options.directories]
    pairs, notes = pair_evaluations(*arms)
    found = list(differences(pairs, notes))
    for name, arm, folder in zip("AB", arms, options.directories, strict=True):
        subject, seeds = next(iter(arm.values())).about["subject"], ", ".join(map(str, arm))
        print(f"{name}: {subject} ({folder}), seed{'s' if len(arm) > 1 else ''} {seeds}")
    print(f"\n{table(found)}\n\n{HOW_TO_READ.format(seeds=' and seed' if len(pairs) > 1 else '')}")
    for note in notes:
        print(f"note: {note}")


def read_arm(path: str) -> dict[int, Evaluated]:
    """Read the evaluation in a folder, or all evaluations below it; return them by seed of their run.

    Raises ConfigError if there is none, or if two share a seed, or were asked or trained differently. Evaluations by an
    older version do not say how their runs were trained.
    """
    folder = Path(path).expanduser()
    files = [folder / ABOUT] if (folder / ABOUT).is_file() else sorted(folder.rglob(ABOUT))
    found = [_read_results(file.parent) for file in files if not file.parent.name.endswith((".partial", ".replaced"))]
    if not found:
        raise ConfigError(
            f"{folder} holds no evaluation. Type python -m qerl_lab.evaluate accuracy {shell_override('run', folder)} "
            "first, or the directory that it wrote."
        )
    first, by_seed = found[0], dict[int, Evaluated]()
    for one in found:
        mine, others = one.about["identity"], first.about["identity"]
        differ = [key for key in others if key not in OF_A_SEED and mine.get(key) != others[key]]
        differ += differing_keys(one.about.get("arm"), first.about.get("arm"))
        if one.seed in by_seed or differ:
            why = f"they differ in {some_of(differ)}" if differ else f"both are of seed {one.seed}, as the run has it"
            raise ConfigError(
                f"{path} holds several evaluations that are not the seeds of one arm: {format_path(first.folder)} and "
                f"{format_path(one.folder)}, {why}. Type the directory of one."
            )
        by_seed[one.seed] = one
    return by_seed


def _read_results(folder: Path) -> Evaluated:
    """Read one evaluation. Raises ConfigError if another version of the lab wrote it."""
    about = read_json(folder / ABOUT, dict)
    if about.get("schema") != SCHEMA:
        raise ConfigError(f"{folder / ABOUT} is of another version of the lab. Evaluate again.")
    return Evaluated(folder, about, pd.read_parquet(folder / ROWS))


def differing_keys(mine: Mapping[str, str] | None, others: Mapping[str, str] | None) -> list[str]:
    """Return the keys in which the arms of two runs differ; empty if one arm is unknown.

    Training questions are compared by hash if both have one, otherwise by path.
    """
    if mine is None or others is None:
        return []
    one, other = (settings_of_arm(fill_added_keys(arm)) for arm in (mine, others))
    idle = "task.path" if TRAINED_ON in one and TRAINED_ON in other else TRAINED_ON
    return sorted(key for key in {*one, *other} - {idle} if one.get(key) != other.get(key))


def pair_evaluations(a: dict[int, Evaluated], b: dict[int, Evaluated]) -> tuple[Pairs, list[str]]:
    """Pair the evaluations by seed; return the pairs and notes. A single evaluation on each side is always a pair.

    The notes name other differences between A and B: seeds, draws, engines, versions of the code. Raises ConfigError
    if no seed is in both.
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
    for mine, others in ((one.about["identity"], other.about["identity"]) for one, other in pairs):
        how = [f"{key}={mine.get(key)} and {others.get(key)}" for key in HOW_IT_RAN if mine.get(key) != others.get(key)]
        if how:
            notes.append(f"A and B ran with {', '.join(how)}: part of the differences is theirs, also in engine=common")
    codes = {one.about["environment"].get("git_sha") for pair in pairs for one in pair}
    if len(codes) > 1:
        notes.append(f"they come from {len(codes)} versions of the code: {', '.join(sorted(map(str, codes)))}")
    return pairs, list(dict.fromkeys(notes))


def differences(pairs: Pairs, notes: list[str]) -> Iterator[Difference]:
    """Yield B - A in each measure, for every benchmark, engine and sampling that all evaluations have.

    Appends to `notes` what some lack, and that two dense bases are compared once. Raises ConfigError if nothing is in
    all, or questions, prompts or sample counts differ.
    """
    answers = [[one.rows_by_setting for one in pair] for pair in pairs]
    every = [of_one for of_pair in answers for of_one in of_pair]
    names = list(dict.fromkeys(name for of_one in every for name in of_one))
    if all(one.about["own_is_common"] for pair in pairs for one in pair):
        notes.append(f"both bases are dense, so that engine={OWN} is engine={COMMON} too")
        names = [name for name in names if name[1] == OWN]
    shared = [name for name in names if all(name in of_one for of_one in every)]
    if not shared:
        a, b = ("; ".join(", ".join(name) for name in of_one) for of_one in answers[0])
        raise ConfigError(f"A has {a} and B {b}, so that they are no pairs. Evaluate B again as A was.")
    for name in names:
        if name not in shared:
            advice = f"; type {COMMON}=true when you evaluate" if name[1] == COMMON else ""
            notes.append(f"{', '.join(name)}: not in every evaluation, and left out{advice}")
    benchmarks = [name[0] for name in shared]
    for name in sorted(shared, key=lambda name: benchmarks.index(name[0])):
        rows = [[of_one[name] for of_one in of_pair] for of_pair in answers]
        for a_rows, b_rows in rows:
            check_pair(name[0], a_rows, b_rows)
        for measure, of in measures_per_question([one for pair in rows for one in pair]).items():
            a, b = (pd.DataFrame([of(pair[side]) for pair in rows]) for side in (0, 1))
            by_question = (b[a.columns] - a).reset_index(drop=True)
            means = float(a.to_numpy().mean()), float(b.to_numpy().mean())
            yield Difference(name[0], name[1], name[2], measure, *means, by_question)


def measures_per_question(evaluations: Sequence[pd.DataFrame]) -> dict[str, Callable[[pd.DataFrame], pd.Series]]:
    """Return measures by name: accuracy, and for several samples pass@k and answer entropy, per question.

    The entropy (nats) needs the completions, which the queue drops.
    """
    samples = int(evaluations[0]["draw"].max()) + 1
    measures: dict[str, Callable[[pd.DataFrame], pd.Series]] = {"accuracy": scores}
    if samples > 1:
        measures |= {f"pass@{k}": partial(pass_rates, k=k) for k in powers_of_two(samples) if k > 1}
        if all("completion" in rows for rows in evaluations):
            measures["answer entropy"] = answer_entropies
    return measures


def check_pair(benchmark: str, a: pd.DataFrame, b: pd.DataFrame) -> None:
    """Raise ConfigError unless two evaluations have the same questions, prompts, answers and number of samples."""
    for what, keys in PAIRED.items():
        one, other = (set(rows[keys].itertuples(index=False, name=None)) for rows in (a, b))
        if one != other:
            raise ConfigError(
                f"{benchmark}: A and B are no pairs, {len(one - other)} {what} are in A only, {len(other - one)} in B. "
                "Evaluate both alike."
            )


def table(compared: Sequence[Difference]) -> str:
    """Format the differences: a row per benchmark, engine, sampling (named if several) and measure."""
    several = len({one.sampling for one in compared}) > 1
    head = ["benchmark", "engine", *["sampling"] * several, "measure", "questions", "A", "B"]
    rows = [[*head, "B - A, 95% interval", "p"]]
    for one in compared:
        mean, low, high = one.interval()
        cells = [one.benchmark, one.engine, *[one.sampling] * several, one.measure, f"{one.by_question.shape[1]:,}"]
        cells += [f"{one.mean_a:.3f}", f"{one.mean_b:.3f}", f"{mean:+.3f} {format_interval(low, high)}"]
        rows.append([*cells, f"{one.p:.3f}" if one.p >= 0.001 else f"{one.p:.1g}"])
    return columns(rows)
