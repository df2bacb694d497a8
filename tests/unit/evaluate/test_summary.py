"""Numbers of an evaluation's answers, by hand, and the pairing of two evaluations."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_rel

import run_directories
from qerl_lab.cli.grammar import parse_options
from qerl_lab.config.option import ConfigError
from qerl_lab.evaluate import __main__ as evaluate
from qerl_lab.evaluate import compare
from qerl_lab.evaluate.evaluate_options import AccuracyOptions
from qerl_lab.evaluate.summary import ABOUT, ROWS, SCHEMA, answer_entropies, summarize, summarize_each, table
from qerl_lab.report.stats import over_seeds

HOT, COOL = "temperature 1, top-p 1, 64 tokens", "temperature 0.6, top-p 0.95, 64 tokens"
IDENTITY = {"format": "bf16", "questions": 0, "seed": 0, "adapter": "x", "max_prompt_tokens": 64}


def answers(
    values_Q_G: list[list[float]], benchmark: str = "gsm8k", engine: str = "own", **columns: Any
) -> pd.DataFrame:
    """Return the rows of an evaluation with the accuracies `values_Q_G`, one row of it per question."""
    samples = len(values_Q_G[0])
    rows = [(f"q{q}", draw, value) for q, row in enumerate(values_Q_G) for draw, value in enumerate(row)]
    frame = pd.DataFrame(rows, columns=["id", "draw", "accuracy"])
    frame["prompt_sha256"] = frame["id"].map(lambda id: f"sha of {id}")
    others = {
        "benchmark": benchmark,
        "engine": engine,
        "sampling": COOL,
        "answer": "1",
        "format": 1.0,
        "truncated": False,
        "completion": "",
    }
    tokens = [10 * (1 + index % samples) for index in range(len(frame))]
    return frame.assign(**others | columns, tokens=tokens)


def test_accuracy_error_and_pass_at_k_by_hand() -> None:
    one = summarize(answers([[1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]))
    assert (one["questions"], one["samples"]) == (4, 4)
    assert one["accuracy"] == pytest.approx(7 / 16)
    assert one["standard_error"] == pytest.approx(np.std([1, 0.25, 0, 0.5], ddof=1) / 2)
    assert one["standard_error_of_draws"] == pytest.approx(np.sqrt((1 / 4 + 1 / 3) / 4) / 4)
    passes = {k: found["mean"] for k, found in one["pass_at"].items()}
    assert passes == pytest.approx({"1": 7 / 16, "2": (1 + 1 / 2 + 0 + 5 / 6) / 4, "4": 3 / 4})
    assert one["low"] < one["accuracy"] < one["high"]
    assert (one["completion_tokens"], one["truncated"]) == (25, 0)


def test_the_entropy_of_final_answers_by_hand() -> None:
    """Equal numbers are one answer, and so are spellings of one text. All samples without an answer are one more."""
    said = [
        ["7", "7.0", "<b>", "8"],
        [r"\dfrac{1}{2}", r"\frac{1}{2}", None, None],
        ["0", "0.0", "-0", "+0"],
        ["a", "b", "c", "d"],
    ]
    texts = [
        f"so {draw}" if one is None else f"<think>x</think><answer>{one}</answer>"
        for group in said
        for draw, one in enumerate(group)
    ]
    rows = answers([[0.0] * 4] * 4).assign(completion=texts)
    expected = [0.5 * np.log(2) + 2 * 0.25 * np.log(4), np.log(2), 0.0, np.log(4)]
    assert answer_entropies(rows).tolist() == pytest.approx(expected, abs=1e-12)
    assert summarize(rows)["answer_entropy"] == pytest.approx(np.mean(expected), abs=1e-12)


def test_a_partly_right_sample_counts_for_the_mean_and_not_for_pass_at_k() -> None:
    one = summarize(answers([[0.5, 0.75], [1.0, 0.0]]))
    assert one["accuracy"] == pytest.approx(2.25 / 4)
    assert one["pass_at"]["2"]["mean"] == 0.5


def test_the_table_has_a_row_for_each_benchmark_and_engine() -> None:
    """The table has pass@k if a benchmark has two samples or more. It lacks pass@1, which is the accuracy."""
    cut = answers([[1, 0], [1, 1]], format=0.5).assign(truncated=[True, False, False, False])
    rows = pd.concat([answers([[1.0]], "aime24"), cut, answers([[1, 0], [1, 1]], engine="common")])
    one, two, common = table(summarize_each(rows)).splitlines()[1:]
    assert [line.split()[:2] for line in (one, two, common)] == [
        ["aime24", "own"], ["gsm8k", "own"], ["gsm8k", "common"],
    ]  # fmt: skip
    assert one.split()[-6:] == ["-", "-", "-", "1.000", "10.0", "0.000"], "one question, one sample"
    assert summarize(answers([[1.0]]))["standard_error_of_draws"] is None
    assert two.split()[-6:] == ["@2", "1.000", "0.000", "0.500", "15.0", "0.250"]


# --- pairs of evaluations


def write(
    folder: Path, rows: pd.DataFrame, seed: int = 0, dense: bool = False, run_seed: int | None = None,
    arm: dict[str, str] | None = None, **identity: Any,
) -> str:  # fmt: skip
    """Write an evaluation. `seed` is for the draw, and for the run unless `run_seed` is given; `arm`: its settings."""
    folder.mkdir(parents=True)
    about = {
        "schema": SCHEMA, "subject": f"run {folder}",
        "identity": IDENTITY | {"seed": seed, "samplings": {name: {} for name in rows["sampling"].unique()}} | identity,
        "run_seed": seed if run_seed is None else run_seed,
        "own_is_common": dense, "benchmarks": {name: {} for name in rows["benchmark"].unique()}, "environment": {},
    }  # fmt: skip
    (folder / ABOUT).write_text(json.dumps(about | {"arm": arm or {}}))
    rows.to_parquet(folder / ROWS)
    return str(folder)


def compared(*folders: str) -> list[compare.Difference]:
    pairs, _ = compare.pair_evaluations(*map(compare.read_arm, folders))
    groups, _ = compare.shared_groups(pairs)
    return list(compare.differences(pairs, groups))


A, B = [[1, 0], [0, 0], [1, 1], [0, 1]], [[1, 1], [1, 0], [1, 1], [0, 0]]


def test_differences_are_paired_by_question_and_not_by_position(tmp_path: Path) -> None:
    shuffled = answers(B).iloc[[4, 5, 0, 1, 6, 7, 2, 3]]
    shuffled.loc[shuffled["id"] == "q1", "completion"] = ["<answer>1</answer>", "<answer>2</answer>"]
    accuracy, passes, entropy = compared(write(tmp_path / "a", answers(A)), write(tmp_path / "b", shuffled))
    assert (accuracy.measure, passes.measure, entropy.measure) == ("accuracy", "pass@2", "answer entropy")
    assert entropy.by_question.iloc[0].to_dict() == pytest.approx({"q0": 0, "q1": np.log(2), "q2": 0, "q3": 0})
    assert accuracy.by_question.iloc[0].to_dict() == {"q0": 0.5, "q1": 0.5, "q2": 0.0, "q3": -0.5}
    assert (accuracy.mean_a, accuracy.mean_b) == (0.5, 0.625)
    assert accuracy.interval()[0] == pytest.approx(0.125)
    assert accuracy.p == pytest.approx(ttest_rel([1, 0.5, 1, 0], [0.5, 0, 1, 0.5]).pvalue)
    assert passes.by_question.iloc[0].to_dict() == {"q0": 0.0, "q1": 1.0, "q2": 0.0, "q3": -1.0}


def test_shared_seeds_are_paired_and_the_interval_is_over_seeds_and_questions(tmp_path: Path) -> None:
    rng, values = np.random.default_rng(0), {}
    for arm in "ab":
        for seed in (0, 1, 2 if arm == "a" else 3):
            values[arm, seed] = rng.integers(0, 2, (6, 2)).astype(float)
            write(tmp_path / arm / f"s{seed}" / "evaluations" / "x", answers(values[arm, seed].tolist()), seed)
    arms = [compare.read_arm(str(tmp_path / arm)) for arm in "ab"]
    pairs, notes = compare.pair_evaluations(*arms)
    assert [one.about["run_seed"] for one, _ in pairs] == [0, 1]
    assert notes == ["seeds [2, 3] are in one of the two only, and left out"]
    accuracy = next(compare.differences(pairs, compare.shared_groups(pairs)[0]))
    expected = over_seeds(np.array([(values["b", seed] - values["a", seed]).mean(1) for seed in (0, 1)]))
    assert accuracy.interval() == pytest.approx(expected)


def test_runs_of_one_arm_may_have_moved_questions_or_come_from_an_older_version(tmp_path: Path) -> None:
    """Questions are compared by content. A run without a newer key counts as a run with the key's default."""
    arms: list[dict[str, str]] = [
        {"task.path": "/one/gsm8k", "training_sha256": "a"}, {"task.path": "/two/gsm8k", "training_sha256": "a"},
        {"task.path": "/one/gsm8k", "training_sha256": "b"}, {"task.path": "/one/gsm8k", "training_sha256": ""},
    ]  # fmt: skip
    engine = {"rollout.engine": "vllm"}
    with_key = engine | {"rollout.vllm.share_base": "False"}
    trained = compare.differing_keys
    assert trained(arms[0] | with_key, arms[1] | engine) == []
    shared = engine | {"rollout.vllm.share_base": "True"}
    assert trained(arms[0] | with_key, arms[1] | shared) == ["rollout.vllm.share_base"]
    assert trained(arms[0], arms[2]) == ["training_sha256"]
    assert (trained(arms[0], arms[3]), trained(arms[1], arms[3])) == ([], ["task.path"])
    assert (trained({}, {}), bool(trained({}, arms[0]))) == ([], True)  # a base without a run


def test_several_seeds_are_named_by_their_folder_and_in_order(tmp_path: Path, capsys) -> None:
    for arm in "ab":
        for seed in (10, 9):
            write(tmp_path / arm / f"{seed}-run" / "evaluations" / "x", answers(A), run_seed=seed)
    assert evaluate.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert f"A: runs in {tmp_path}/a, seeds 9, 10\nB: runs in {tmp_path}/b, seeds 9, 10\n" in capsys.readouterr().out


def test_notes_name_engines_devices_and_seeds_that_differ(tmp_path: Path) -> None:
    """If A is dense, `common` is A's own engine: vLLM on a GPU. B has transformers on a CPU and another draw."""
    mine, theirs = {"rollout": "vllm", "device": "cuda"}, {"rollout": "transformers", "device": "cpu", "seed": 5}
    hows = {"a": mine, "b": {"run_seed": 0} | theirs, "c": mine}
    a, b, c = (compare.read_arm(write(tmp_path / name, answers(A), **how)) for name, how in hows.items())
    assert compare.pair_evaluations(a, c)[1] == []
    assert compare.pair_evaluations(a, b)[1] == [
        "A and B ran with seed=0 and 5, rollout=vllm and transformers, device=cuda and cpu: part of the differences is "
        "theirs, also in engine=common"
    ]


def test_notes_name_two_seeds_and_two_versions_of_the_code(tmp_path: Path) -> None:
    """One evaluation on each side is a pair with any seeds. Several evaluations need a shared seed."""
    folders = [write(tmp_path / side / str(seed), answers(A), seed) for side, seed in (("a", 0), ("b", 1), ("b", 2))]
    for folder, commit in zip(folders, "xyz", strict=True):
        about = json.loads((Path(folder) / ABOUT).read_text())
        (Path(folder) / ABOUT).write_text(json.dumps(about | {"environment": {"git_sha": commit}}))
    first, second = (compare.read_arm(folder) for folder in folders[:2])
    _, notes = compare.pair_evaluations(first, second)
    assert notes[0] == "A has seed 0 and B seed 1: they differ in more than what is compared"
    assert notes[-1] == "they come from 2 versions of the code: x, y"
    with pytest.raises(ConfigError, match=r"A has the seeds \[0\] and B \[1, 2\], none of both"):
        compare.pair_evaluations(first, compare.read_arm(str(tmp_path / "b")))


def test_a_note_on_several_pairs_is_listed_once(tmp_path: Path) -> None:
    for side, device in (("a", "cpu"), ("b", "cuda")):
        for seed in (0, 1):
            write(tmp_path / side / str(seed), answers(A), seed, device=device)
    _, notes = compare.pair_evaluations(*(compare.read_arm(str(tmp_path / side)) for side in "ab"))
    assert len(notes) == 1


def test_leftovers_of_a_stopped_command_are_not_read_as_evaluations(tmp_path: Path) -> None:
    for name in ("x", "y.partial", "z.replaced"):
        write(tmp_path / name, answers(A), seed=3)
    assert list(compare.read_arm(str(tmp_path))) == [3]


def test_an_evaluation_of_another_version_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", answers(A))
    about = json.loads((tmp_path / "a" / ABOUT).read_text())
    (tmp_path / "a" / ABOUT).write_text(json.dumps(about | {"schema": SCHEMA - 1}))
    with pytest.raises(ConfigError, match="of another version of the lab"):
        compare.read_arm(folder)


def test_an_evaluation_from_before_a_run_was_extended_is_refused_unless_its_path_is_typed(tmp_path: Path) -> None:
    run = run_directories.claimed(tmp_path / "run", run_directories.config("bf16", 0, steps=20))
    typed = write(run.path / "evaluations" / "x", answers(A), arm={"steps": "10"})
    write(run.path / "evaluations" / "y", answers(A), run_seed=1)  # of the base without the adapter
    with pytest.raises(ConfigError, match=r"x is of step 10, and the run has 20 steps now. Type .* accuracy run=.*run"):
        compare.read_arm(str(run.path))
    assert compare.read_arm(typed).keys() == {0}
    write(run.path / "new", answers(A), arm={"steps": "20"})
    shutil.rmtree(typed)
    assert compare.read_arm(str(run.path / "new")).keys() == {0}


def test_the_own_engine_of_a_dense_base_is_the_common_engine(tmp_path: Path) -> None:
    packed = pd.concat([answers(A), answers(B, engine="common")])
    found = compared(write(tmp_path / "a", answers(A), dense=True), write(tmp_path / "b", packed))
    assert [(one.engine, one.mean_b - one.mean_a) for one in found if one.measure == "accuracy"] == [
        ("own", 0.0), ("common", 0.125)
    ]  # fmt: skip


def of_engines(*sides: list[str]) -> tuple[list[str], list[str]]:
    """Return the engines that are compared, and the notes on them, for the evaluations of two sides."""
    arms = [{seed: one for folder in side for seed, one in compare.read_arm(folder).items()} for side in sides]
    pairs, _ = compare.pair_evaluations(*arms)
    groups, notes = compare.shared_groups(pairs)
    found = list(compare.differences(pairs, groups))
    return [one.engine for one in found if one.measure == "accuracy"], notes


def test_engines_and_samplings_that_one_evaluation_lacks_are_left_out_with_a_note(tmp_path: Path) -> None:
    both = pd.concat([answers(A), answers(B, engine="common")])
    with_it = [write(tmp_path / f"a{seed}", both, seed) for seed in (0, 1)]
    without = [write(tmp_path / f"b{seed}", answers(B), seed) for seed in (0, 1)]
    note = f"gsm8k, common, {COOL}: not in every evaluation, and left out; type common=true when you evaluate"
    assert of_engines(with_it, without) == of_engines(with_it, [with_it[0], without[1]]) == (["own"], [note])
    assert of_engines(with_it, with_it) == (["own", "common"], [])
    assert of_engines(without, without) == (["own"], [])
    hot = write(tmp_path / "hot", pd.concat([answers(B, sampling=HOT), answers(A)]))
    assert of_engines([hot], without[:1]) == (["own"], [f"gsm8k, own, {HOT}: not in every evaluation, and left out"])


def test_two_dense_bases_are_compared_once(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, answers(values), dense=True) for name, values in (("a", A), ("b", B)))
    assert of_engines([a], [b]) == (["own"], ["both bases are dense, so that engine=own is engine=common too"])


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (answers([*B, [1, 1]]), "0 questions are in A only, 1 in B"),
        (answers(B, "math500"), f"A has gsm8k, own, {COOL} and B math500, own, {COOL}, so that they are no pairs"),
        (answers(B).assign(answer="2"), "4 questions with that answer are in A only, 4 in B"),
        (answers(B).assign(prompt_sha256="x"), "4 questions in those words are in A only, 4 in B"),
        (answers([[1], [1], [1], [0]]), "4 samples are in A only, 0 in B"),
        (answers(B, sampling=HOT), f"own, {COOL} and B gsm8k, own, {HOT}, so that"),
    ],
)
def test_evaluations_with_different_questions_or_samples_are_refused(
    rows: pd.DataFrame, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        compared(write(tmp_path / "a", answers(A)), write(tmp_path / "b", rows))


@pytest.mark.parametrize(("one", "other", "said"), [
    ({}, {}, "both are of seed 0, as the run has it"),
    ({}, {"format": "nf4"}, "they differ in format"),
    # the same questions and format: only the settings of the runs differ
    ({"arm": {"optim.learning_rate": "0.001", "aqn.schedule": "off"}},
     {"arm": {"optim.learning_rate": "0.0001", "aqn.schedule": "off"}, "seed": 1},
     r"they differ in optim\.learning_rate\. Type the directory of one, or of copies"),
    # the default grading is not in the record
    ({}, {"grading": "first_character", "run_seed": 1}, "they differ in grading"),
    ({"grading": "first_character"}, {"run_seed": 1}, "they differ in grading"),
])  # fmt: skip
def test_evaluations_in_a_folder_that_are_not_seeds_of_one_arm_are_refused(
    tmp_path: Path, one: dict[str, Any], other: dict[str, Any], said: str
) -> None:
    for name, how in (("one", one), ("other", other)):
        write(tmp_path / "a" / name, answers(A), **how)
    with pytest.raises(ConfigError, match=said):
        compared(str(tmp_path / "a"), str(tmp_path / "a"))


def test_a_folder_without_an_evaluation_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    (empty := tmp_path / "a b").mkdir()
    a = write(tmp_path / "a", answers(A))
    with pytest.raises(ConfigError, match=r"holds no evaluation\. Type the directory of one\."):
        compared(a, str(empty))
    (empty / "resolved.yaml").touch()  # a run directory
    with pytest.raises(ConfigError, match="holds no evaluation") as told:
        compared(a, str(empty))
    line = str(told.value).partition("accuracy ")[2].partition(" first")[0]
    assert parse_options(AccuracyOptions, shlex.split(line)).run == str(empty)


def test_an_evaluation_is_not_compared_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A link, or the folder above, is the same evaluation by another path. Another run with equal answers is none."""
    a, b = (write(tmp_path / name / "x", answers(A)) for name in "ab")
    (tmp_path / "link").symlink_to(a)
    for same in (a, str(tmp_path / "a"), str(tmp_path / "link")):
        assert evaluate.main(["compare", a, same]) == 2
        assert f"A={a} and B={same} have an evaluation in common" in capsys.readouterr().err
    assert evaluate.main(["compare", a, b]) == 0


def test_with_one_sample_a_question_only_accuracy_is_compared(tmp_path: Path) -> None:
    a, b = (write(tmp_path / name, answers([[1], [value]])) for name, value in (("a", 0), ("b", 1)))
    assert [one.measure for one in compared(a, b)] == ["accuracy"]


def test_the_engines_of_a_benchmark_stand_together(tmp_path: Path) -> None:
    """An evaluation's rows are sorted by engine first."""
    rows = pd.concat([answers(A, name, engine) for engine in ("own", "common") for name in ("b", "a")])
    found = compared(*(write(tmp_path / name, rows) for name in "xy"))
    pairs = [("b", "own"), ("b", "common"), ("a", "own"), ("a", "common")]
    assert [(one.benchmark, one.engine) for one in found if one.measure == "accuracy"] == pairs


def test_differences_have_the_mean_of_each_side_and_the_sampling_if_it_differs() -> None:
    changes = pd.DataFrame([[0.25, 0.2, 0.3] * 20])
    one, other = (compare.Difference("gsm8k", "own", how, "accuracy", 0.5, 0.75, changes) for how in (HOT, COOL))
    head, line = compare.table([one]).splitlines()
    assert "sampling" not in head
    assert line.split()[2:7] == ["accuracy", "60", "0.500", "0.750", "+0.250"]
    assert 0 < float(line.split()[-1]) < 1e-9, "a small p is not printed as 0.000"
    equal = replace(one, by_question=pd.DataFrame([[0.25] * 6] * 2))
    assert equal.p == 2 / 2**6, "a sign test on the questions"
    _, hot, cool = compare.table([one, other]).splitlines()
    assert HOT in hot
    assert COOL in cool


def test_answers_without_completions_have_no_entropy(tmp_path: Path) -> None:
    """The queue drops the completions."""
    a, b = write(tmp_path / "a", answers(A)), write(tmp_path / "b", answers(B).drop(columns="completion"))
    assert [one.measure for one in compared(a, b)] == ["accuracy", "pass@2"]


def test_the_command_prints_the_table(tmp_path: Path, capsys) -> None:
    a, b = write(tmp_path / "a", answers(A)), write(tmp_path / "b", answers(B), grading="first_character")
    assert evaluate.main(["compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "+0.125 [" in out
    assert out.count(a) == 1  # once, as the subject or as the folder
    assert "grading=task and first_character" in " ".join(out.split())
