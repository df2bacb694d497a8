"""`python -m qerl_lab.evaluate compare A B`: compare two evaluations, paired by question and by seed."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from qerl_lab.config.arm import completed, of_arm
from qerl_lab.config.message import in_one_line, some_of
from qerl_lab.config.option import ConfigError
from qerl_lab.config.spelling import shell_word
from qerl_lab.disk import read_json, replace_file
from qerl_lab.evaluate.options import CompareOptions
from qerl_lab.evaluate.summary import ABOUT, COMMON, OWN, ROWS, SCHEMA, TRAINED_ON, passes_of, shares
from qerl_lab.report.arms import QUESTIONS
from qerl_lab.report.passes import powers_of_two
from qerl_lab.report.stats import Interval, between, crossed_interval, p_value, paired_interval
from qerl_lab.terminal import columns, near

HOW_IT_IS_ASKED = ("questions", "max_prompt_tokens")
HOW_IT_RAN = ("rollout", "device", "dtype", "batch_size")  # these affect kernels and random draws
OF_A_SEED = ("seed", "adapter")  # keys that may differ between the seeds of one arm
HOW_TO_READ = """\
Differences are B - A, paired by question{seeds}, with intervals of 95%. Of differences that are 0, one in 20 has
p < 0.05; engine=common is the one in which both bases are dequantized to BF16."""


@dataclass(frozen=True)
class Examined:
    """One evaluation: its folder, settings and results (evaluation.json), and a row per completion (eval.parquet)."""

    folder: Path
    about: dict[str, Any]
    rows: pd.DataFrame

    @property
    def seed(self) -> int:
        return int(self.about["run_seed"])

    @property
    def samplings(self) -> list[str]:
        """Names of the ways in which it was sampled."""
        return list(self.about["identity"]["samplings"])

    def answers(self, benchmark: str, engine: str, sampling: str) -> pd.DataFrame:
        """Return the rows of one benchmark, engine and sampling. A dense base's own engine is also the common one."""
        engine = OWN if engine == COMMON and self.about["own_is_common"] else engine
        chosen = (self.rows["benchmark"] == benchmark) & (self.rows["engine"] == engine)
        return self.rows[chosen & (self.rows["sampling"] == sampling)]


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
            return crossed_interval(self.by_question.to_numpy(), level)
        after = self.by_question.iloc[0]
        return paired_interval(0 * after, after, level)

    @property
    def p(self) -> float:
        return p_value(self.interval, self.by_question.shape[1])


def run(options: CompareOptions) -> None:
    """Print the table and write the CSV if requested. Raises ConfigError if A and B cannot be paired."""
    arms = [_one_arm(find(Path(folder).expanduser()), folder) for folder in options.directories]
    pairs, notes = paired(*arms)
    found = list(differences(pairs, notes))
    for name, arm, folder in zip("AB", arms, options.directories, strict=True):
        subject, seeds = next(iter(arm.values())).about["subject"], ", ".join(map(str, arm))
        print(f"{name}: {subject} ({folder}), seed{'s' if len(arm) > 1 else ''} {seeds}")
    print(f"\n{table(found)}\n\n{HOW_TO_READ.format(seeds=' and seed' if len(pairs) > 1 else '')}")
    for note in notes:
        print(f"note: {note}")
    if options.csv:
        write_csv(found, Path(options.csv).expanduser())


def find(folder: Path) -> list[Examined]:
    """Return the evaluation in a folder, or all below it. Raises ConfigError if there is none."""
    files = [folder / ABOUT] if (folder / ABOUT).is_file() else sorted(_below(folder))
    if not files:
        raise ConfigError(
            f"{folder} holds no evaluation. Type python -m qerl_lab.evaluate accuracy {shell_word('run', folder)} "
            "first, or the directory that it wrote."
        )
    return [_read(file.parent) for file in files]


def _below(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.endswith((".partial", ".replaced")))
        if ABOUT in files:
            yield Path(path) / ABOUT


def _read(folder: Path) -> Examined:
    about = read_json(folder / ABOUT, dict)
    if about.get("schema") != SCHEMA:
        raise ConfigError(f"{folder / ABOUT} is of another version of the lab. Evaluate again.")
    try:
        return Examined(folder, about, pd.read_parquet(folder / ROWS))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / ROWS} cannot be read ({in_one_line(error)}). Evaluate again.") from None


def _one_arm(found: list[Examined], given: str) -> dict[int, Examined]:
    """Return the evaluations of one arm by seed.

    Raises ConfigError if two share a seed, or were asked or trained differently. Evaluations by an older version do not
    say how their runs were trained.
    """
    by_seed: dict[int, Examined] = {}
    for one in found:
        first = found[0]
        mine, others = one.about["identity"], first.about["identity"]
        differ = [key for key in others if key not in OF_A_SEED and mine.get(key) != others[key]]
        differ += _trained_otherwise(one.about.get("arm"), first.about.get("arm"))
        if one.seed in by_seed or differ:
            why = f"they differ in {some_of(differ)}" if differ else f"both are of seed {one.seed}, as the run has it"
            raise ConfigError(
                f"{given} holds several evaluations that are not the seeds of one arm: {near(first.folder)} and "
                f"{near(one.folder)}, {why}. Type the directory of one."
            )
        by_seed[one.seed] = one
    return by_seed


def _trained_otherwise(mine: Mapping[str, str] | None, others: Mapping[str, str] | None) -> list[str]:
    """Return the keys in which the arms of two runs differ; empty if one arm is unknown.

    Training questions are compared by hash if both have one, otherwise by path.
    """
    if mine is None or others is None:
        return []
    one, other = (of_arm(completed(arm)) for arm in (mine, others))
    idle = QUESTIONS if TRAINED_ON in one and TRAINED_ON in other else TRAINED_ON
    return sorted(key for key in {*one, *other} - {idle} if one.get(key) != other.get(key))


def paired(a: dict[int, Examined], b: dict[int, Examined]) -> tuple[list[tuple[Examined, Examined]], list[str]]:
    """Pair the evaluations by seed; return the pairs and notes. A single evaluation on each side is always a pair.

    Raises ConfigError if no seed is in both, or a pair was asked differently.
    """
    shared, alone = sorted(a.keys() & b.keys()), sorted(a.keys() ^ b.keys())
    notes: list[str] = []
    if len(a) == len(b) == 1:
        pairs = [(a[min(a)], b[min(b)])]
        if not shared:
            notes.append(f"A has seed {min(a)} and B seed {min(b)}: they differ in more than what is compared")
    elif not shared:
        raise ConfigError(f"A has the seeds {sorted(a)} and B {sorted(b)}, none of both. Evaluate the same seeds.")
    else:
        pairs = [(a[seed], b[seed]) for seed in shared]
        notes += [f"seeds {alone} are in one of the two only, and left out"] if alone else []
    for pair in pairs:
        _refuse_asked_otherwise(*pair)
    return pairs, [*notes, *_also_differ(pairs)]


def _refuse_asked_otherwise(one: Examined, other: Examined) -> None:
    """Raise ConfigError if a pair was asked with different settings."""
    a, b = one.about["identity"], other.about["identity"]
    for key in HOW_IT_IS_ASKED:
        if a[key] != b[key]:
            raise ConfigError(
                f"A was asked with {key}={a[key]} and B with {key}={b[key]}, so that they are no pairs. "
                f"Evaluate B again with {key}={a[key]}."
            )


def _also_differ(pairs: Sequence[tuple[Examined, Examined]]) -> Iterator[str]:
    """Yield notes on other differences between A and B: draws, engines, versions of the code."""
    drawn = [(one.about["identity"]["seed"], other.about["identity"]["seed"]) for one, other in pairs]
    if seeds := sorted({f"{a} and {b}" for a, b in drawn if a != b}):
        yield f"A and B were drawn with seed={', '.join(seeds)}: they differ in their draws too"
    a, b = (examined.about["identity"] for examined in pairs[0])
    if ran := [f"{key}={a.get(key)} and {b.get(key)}" for key in HOW_IT_RAN if a.get(key) != b.get(key)]:
        yield f"A and B ran with {', '.join(ran)}: a part of the differences is theirs, also in engine=common"
    codes = {examined.about["environment"].get("git_sha") for pair in pairs for examined in pair}
    if len(codes) > 1:
        yield f"they come from {len(codes)} versions of the code: {', '.join(sorted(map(str, codes)))}"


def differences(pairs: Sequence[tuple[Examined, Examined]], notes: list[str]) -> Iterator[Difference]:
    """Yield the differences in accuracy and pass@k for every benchmark, engine and sampling in both evaluations.

    Appends to `notes` what only one side has, and that two dense bases are compared once. Raises ConfigError if no
    benchmark or sampling is in both, or questions, prompts or sample counts differ.
    """
    samplings = _samplings(pairs[0], notes)
    named = [list(one.about["benchmarks"]) for one in pairs[0]]
    shared = [name for name in named[0] if name in named[1]]
    if not shared:
        raise ConfigError(f"A was asked {', '.join(named[0])}, B {', '.join(named[1])}: no benchmark of both.")
    if alone := sorted(set(named[0]) ^ set(named[1])):
        notes.append(f"{', '.join(alone)}: in one of the two only, and left out")
    are_dense = all(one.about["own_is_common"] for pair in pairs for one in pair)
    if are_dense:
        notes.append(f"both bases are dense, so that engine={OWN} is engine={COMMON} too")
    for benchmark in shared:
        for engine, sampling in product((OWN,) if are_dense else (OWN, COMMON), samplings):
            rows = [[one.answers(benchmark, engine, sampling) for one in pair] for pair in pairs]
            answered = [len(part) > 0 for pair in rows for part in pair]
            if all(answered):
                yield from _measured(benchmark, engine, sampling, rows)
            elif any(answered) and sampling == samplings[0]:
                notes.append(_who_lacks(benchmark, engine, pairs, rows))


def _samplings(pair: tuple[Examined, Examined], notes: list[str]) -> list[str]:
    """Return the samplings that both sides have; append the others to `notes`. Raises ConfigError if there are none."""
    a, b = (one.samplings for one in pair)
    shared = [name for name in a if name in b]
    if not shared:
        raise ConfigError(
            f"A was sampled with {'; '.join(a)} and B with {'; '.join(b)}, so that they are no pairs. Evaluate B again "
            "with the temperature=, top_p= and max_completion_tokens= of A."
        )
    notes += [f"sampling {name}: in one of the two only, and left out" for name in [*a, *b] if name not in shared]
    return shared


def _who_lacks(
    benchmark: str, engine: str, pairs: Sequence[tuple[Examined, Examined]], rows: Sequence[Sequence[pd.DataFrame]]
) -> str:
    """Return a note on which sides and seeds have no answers by an engine."""
    sides = []
    for side, name in enumerate("AB"):
        seeds = [pair[side].seed for pair, parts in zip(pairs, rows, strict=True) if not len(parts[side])]
        of_seeds = f" with seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
        if seeds:
            sides.append(f"{name}{of_seeds if len(seeds) < len(pairs) else ''}")
    who = f"{' and '.join(sides)} {'have' if len(sides) > 1 else 'has'}"
    asks = f": type {COMMON}=true when you evaluate" if engine == COMMON else ""
    return f"{benchmark}: {who} no answers by engine={engine}, which is left out{asks}"


def _measured(
    benchmark: str, engine: str, sampling: str, rows: list[list[pd.DataFrame]]
) -> Iterator[Difference]:  # fmt: skip
    """Yield the differences of one benchmark, engine and sampling: accuracy and each pass@k."""
    for pair in rows:
        check_pair(benchmark, *pair)
    samples = int(rows[0][0]["draw"].max()) + 1
    measures = {"accuracy": shares} | {
        f"pass@{k}": lambda part, k=k: passes_of(part, k) for k in powers_of_two(samples) if k > 1
    }
    for measure, of in measures.items():
        a, b = (pd.DataFrame([of(pair[side]) for pair in rows]) for side in (0, 1))
        by_question = (b[a.columns] - a).reset_index(drop=True)
        means = float(a.to_numpy().mean()), float(b.to_numpy().mean())
        yield Difference(benchmark, engine, sampling, measure, *means, by_question)


def check_pair(benchmark: str, a: pd.DataFrame, b: pd.DataFrame) -> None:
    """Raise ConfigError unless both have the same questions (two or more), prompts and number of samples."""
    asked = [part.drop_duplicates("id").set_index("id")[["prompt_sha256", "answer"]] for part in (a, b)]
    said = f"{benchmark}: A and B are no pairs"
    if set(asked[0].index) != set(asked[1].index):
        only = len(set(asked[0].index) ^ set(asked[1].index))
        raise ConfigError(f"{said}, {only} questions are in one of them only. Evaluate both on the same questions.")
    for column, what in (("prompt_sha256", "in other words (task or instruction)"), ("answer", "with another answer")):
        differ = asked[0][column] != asked[1].reindex(asked[0].index)[column]
        if differ.any():
            raise ConfigError(f"{said}, {int(differ.sum())} questions were asked {what}, the first "
                              f"{asked[0].index[differ.to_numpy()][0]}. Evaluate both alike.")  # fmt: skip
    counts = [part.groupby("id").size().unique().tolist() for part in (a, b)]
    if counts[0] != counts[1] or len(counts[0]) != 1:
        raise ConfigError(
            f"{said}, A has {counts[0]} samples a question and B {counts[1]}. Evaluate with one samples=."
        )
    if len(asked[0]) < 2:
        raise ConfigError(f"{said} of two questions or more: there is one. Leave questions=1 out.")


def table(found: Sequence[Difference]) -> str:
    """Format the differences: a row per benchmark, engine, sampling (named if several) and measure."""
    several = len({one.sampling for one in found}) > 1
    head = ["benchmark", "engine", *["sampling"] * several, "measure", "questions", "A", "B"]
    rows = [[*head, "B - A, 95% interval", "p"]]
    for one in found:
        mean, low, high = one.interval()
        cells = [one.benchmark, one.engine, *[one.sampling] * several, one.measure, f"{one.by_question.shape[1]:,}"]
        cells += [f"{one.mean_a:.3f}", f"{one.mean_b:.3f}", f"{mean:+.3f} {between(low, high)}"]
        rows.append([*cells, f"{one.p:.3f}" if one.p >= 0.001 else f"{one.p:.1g}"])
    return columns(rows)


def write_csv(found: Sequence[Difference], file: Path) -> None:
    """Write a row per measure and question: the mean difference over seeds. Raises ConfigError if writing fails."""
    frames = [
        pd.DataFrame({"benchmark": one.benchmark, "engine": one.engine, "sampling": one.sampling,
                      "measure": one.measure,
                      "id": one.by_question.columns, "difference": one.by_question.mean().to_numpy()})
        for one in found
    ]  # fmt: skip
    try:
        replace_file(file, pd.concat(frames).to_csv(index=False, float_format="%.6g").encode())
    except OSError as error:
        raise ConfigError(f"csv={file} cannot be written ({error.strerror}). Type another file.") from None
