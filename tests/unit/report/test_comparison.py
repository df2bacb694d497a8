"""`python -m qerl_lab.report`: the runs that count, the numbers of an arm, and the printed report."""

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from qerl_lab.record.line_files import Sample
from qerl_lab.report import comparison
from qerl_lab.report.runs import Run
from qerl_lab.report.stats import over_seeds
from qerl_lab.tools.samples import format_step
from qerl_lab.tracking.mlflow import resync
from run_directories import config, make_run
from simulated_runs import record


@pytest.fixture
def sweep(here: Path) -> Path:
    """Make two arms of three seeds each."""
    for seed in range(3):
        make_run(here / "sweep" / f"bf16-{seed}", "bf16", seed, after=[0.5 + seed / 8, 0.5, 0.75, 1.0])
        make_run(here / "sweep" / f"nvfp4-{seed}", "nvfp4", seed, after=[0.5 + seed / 8, 0.75, 0.75, 1.0])
    return here / "sweep"


def arms_of(folder: Path, baseline: str | None = None) -> pd.DataFrame:
    return comparison.by_arm(comparison.read([folder]), baseline).set_index("arm")


# --- which runs count


def test_runs_that_do_not_count_are_named_with_the_reason(sweep: Path) -> None:
    make_run(sweep / "again", "bf16", 0, ended=4e9)
    why = f"FloatingPointError: loss is NaN at step 3, {'and more ' * 99}\n\nTraceback"
    make_run(sweep / "failed", "bf16", 3, failed=why)
    ((stopped := make_run(sweep / "stopped", "bf16", 4)) / "DONE").unlink()
    of_two_steps = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]
    (stopped / "metrics.jsonl").write_text("".join(of_two_steps))
    RunDirectory(sweep / "waiting").claim(config("bf16", 5), TypedCommand("the command"))
    found = comparison.read([sweep])
    assert [record.name for record in found.arms["bf16"]] == ["sweep/again", "sweep/bf16-1", "sweep/bf16-2"]
    assert sorted(found.left_out) == [
        "sweep/bf16-0: repeated by sweep/again, with the same settings and seed",
        f"sweep/failed: failed (FloatingPointError: loss is NaN at step 3, {'and more ' * 28}...)",
        "sweep/stopped: interrupted, or still running (step 2 of 4)",
        "sweep/waiting: not run",
    ]
    row = arms_of(sweep).loc["bf16"]
    assert (row["seeds"], row["runs"]) == (3, 6)  # the repeated run finished, too


def test_runs_behind_links_are_read_once(here: Path) -> None:
    make_run(here / "runs" / "nvfp4" / "0", "nvfp4", 0)
    make_run(here / "other disk" / "bf16" / "0", "bf16", 0)
    for name, target in (("disk", here / "other disk"), ("latest", here / "runs" / "nvfp4"), ("loop", here)):
        (here / "runs" / name).symlink_to(target)
    found = comparison.read([here / "runs"])
    assert [run.name for run in found.runs] == ["runs/nvfp4/0", "runs/disk/bf16/0"]
    again = [here / "runs" / "nvfp4" / "0", here / "runs" / ".." / "runs"]
    assert len(comparison.read([here / "runs", *again]).runs) == 2
    assert found.left_out == []


def test_a_run_and_its_copy_count_once(here: Path) -> None:
    """A run that was stopped here, copied to another machine and finished there is one finished run."""
    for seed in range(3):
        run = make_run(here / "runs" / f"bf16-{seed}", "bf16", seed)
        about = json.loads((run / "env.json").read_text())
        (run / "env.json").write_text(json.dumps(about | {"time": f"2026-01-31T12:00:0{seed}+0000"}))
    shutil.copytree(here / "runs", here / "elsewhere")
    for seed in (0, 1):
        (here / "runs" / f"bf16-{seed}" / "DONE").unlink()
    (here / "elsewhere" / "bf16-1" / "DONE").unlink()
    found = comparison.read([here / "runs", here / "elsewhere"])
    assert found.left_out == ["elsewhere/bf16-1: interrupted, or still running (step 4 of 4)"]
    assert comparison.by_arm(found, None).loc[0, ["seeds", "runs"]].tolist() == [2, 3]


def replace(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


DAMAGE = {
    "no settings": (lambda run: (run / "resolved.yaml").unlink(), "resolved.yaml"),
    "cut settings": (lambda run: (run / "resolved.yaml").write_text("model:\n  name: po"), "it lacks 'device'"),
    "an evaluation of garbage": (lambda run: (run / "eval.parquet").write_bytes(b"PAR"), "arquet"),
    "other metrics": (lambda run: replace(run / "metrics.jsonl", "reward/mean", "reward"), "it lacks 'reward/mean'"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_run_is_named_and_an_older_sound_one_counts(here: Path, how: str) -> None:
    break_it, said = DAMAGE[how]
    make_run(here / "runs" / "sound", "bf16", 0, ended=1e9)
    break_it(make_run(here / "runs" / "damaged", "bf16", 0, ended=2e9))
    found = comparison.read([here / "runs"])
    assert [record.name for record in found.arms["bf16"]] == ["runs/sound"]
    (line,) = found.left_out
    assert line.startswith("runs/damaged: damaged (")
    assert said in line
    assert any(note.startswith("The record of 1 run is damaged; the runs left out") for note in comparison.notes(found))


def test_runs_of_two_models_under_one_path_are_not_pooled_and_older_ones_are_named(here: Path) -> None:
    """An older version recorded no hash, so nobody knows which model lay under the path then."""
    for seed, content in enumerate(["a" * 12, "b" * 12, None]):
        folder = here / "runs" / str(seed)
        make_run(folder, "bf16", seed, model__path="/dev/shm/warm", model__hash=content)
        replace(folder / "resolved.yaml", "  hash: null\n", "")
    found = comparison.read([here / "runs"])
    assert sorted(found.arms) == [f"bf16 (model.hash={text})" for text in ("(absent)", "a" * 12, "b" * 12)]
    assert found.left_out == []
    said = "model.hash is not known of 1 run, which an older version began: two models that lay under one path would"
    assert [note for note in comparison.notes(found) if note.startswith(said)]
    shutil.rmtree(here / "runs" / "2")
    assert not any("model.hash is not known" in note for note in comparison.notes(comparison.read([here / "runs"])))


def test_report_resync_and_samples_agree_on_what_is_damaged(tmp_path: Path) -> None:
    """Otherwise resync would replace a complete mirror by a damaged record."""
    run = make_run(tmp_path / "run", "bf16", 0)
    RunDirectory(run).append_samples([Sample(4, "7+5", "?", "12", {"answer": 1.0}, finished=True)])
    assert "step 4" in format_step(run, None)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([*lines[:2], *lines[1:]]))
    says = "metrics.jsonl has 1 step more than once"
    with pytest.raises(ConfigError, match=rf"damaged \({says}"):
        comparison.read([run])
    with pytest.raises(ConfigError, match=f"is damaged, and its mirror stays as it is. {says}"):
        resync(RunDirectory(run), f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(ConfigError, match=says):
        format_step(run, None)


# --- the numbers


@pytest.mark.parametrize("changed", ["training_sha256", "heldout_sha256"])
def test_runs_are_not_pooled_if_the_questions_under_their_path_changed(here: Path, changed: str) -> None:
    """Different questions may have the same id: row 7 of another file is another question."""
    for seed in range(2):
        began = {"data": {"training_sha256": "t", "heldout_sha256": "h"} | {changed: str(seed)}}
        make_run(here / "runs" / str(seed), "bf16", seed, task__path="/one/gsm8k", began=began)
    found = comparison.read([here / "runs"])
    assert len(found.arms) == 2
    assert all(label.startswith("bf16 (task.path=/one/gsm8k #") for label in found.arms)
    assert any("2 different sets of" in note for note in comparison.notes(found))


def test_a_note_tells_that_a_model_changed_on_the_hub_between_the_seeds(here: Path) -> None:
    for seed in range(2):
        for path in ("me/kept", "me/changed"):
            began = {"model": {"hash": f"a{seed if path == 'me/changed' else 0}", "folder": "snapshots/c0ffee"}}
            make_run(here / "runs" / path / str(seed), "bf16", seed, model__path=path, began=began)
    found = comparison.read([here / "runs"])
    said = [note for note in comparison.notes(found) if "on the hub" in note]
    assert said == ["me/changed was 2 different models, since it changed on the hub (env.json)."]


def test_an_arm_is_the_mean_over_its_seeds_with_the_interval_over_seeds_and_questions(sweep: Path) -> None:
    after = [[0.5 + seed / 8, 0.5, 0.75, 1.0] for seed in range(3)]
    row = arms_of(sweep).loc["bf16"]
    mean, low, high = over_seeds(after)
    assert high > 1, "no accuracy exceeds 1"
    assert row[["accuracy_after", "accuracy_after_low", "accuracy_after_high"]].tolist() == pytest.approx(
        [mean, low, 1]
    )
    gains = [[value - before for value, before in zip(row, (0, 0.25, 0.5, 0.75), strict=True)] for row in after]
    assert row[["gain", "gain_low", "gain_high"]].tolist() == pytest.approx(over_seeds(gains))
    assert row[["entropy_first", "entropy_last"]].tolist() == pytest.approx([0.35, 0.2])
    assert row["questions"] == 4


def test_a_difference_is_paired_by_seed_and_question(sweep: Path) -> None:
    """Seeds shift both arms alike, so the arms differ in one question only, by 0.25 in each seed."""
    row = arms_of(sweep, "bf16").loc["nvfp4"]
    expected = over_seeds([[0, 0.25, 0, 0]] * 3)
    names = ["difference", "difference_low", "difference_high"]
    assert row[names].tolist() == pytest.approx(expected)
    assert row[[f"gain_{name}" for name in names]].tolist() == pytest.approx(expected)
    assert math.isnan(arms_of(sweep, "bf16").loc["bf16", "difference"])


def test_only_seeds_and_questions_that_both_arms_have_are_compared(sweep: Path) -> None:
    shutil.rmtree(sweep / "nvfp4-1")
    make_run(sweep / "nvfp4-9", "nvfp4", 9, before=[0.0] * 4, after=[1.0] * 4)
    row = arms_of(sweep, "bf16").loc["nvfp4"]
    assert row["difference"] == pytest.approx(0.0625)
    assert row["seeds"] == 3
    *_, (*_, after, _, difference) = comparison.accuracy_rows(comparison.read([sweep]), "bf16")
    assert after.endswith(" (3)")
    assert difference.startswith("+0.062 [")
    assert difference.endswith(" (2)")


def test_runs_with_different_questions_are_compared_on_shared_questions(
    sweep: Path, printed: Callable[..., str]
) -> None:
    for seed in range(3):
        make_run(sweep / f"more-{seed}", "nvfp4_aqn", seed, before=[0.0] * 6, after=[1.0] * 6)
    assert "Not all runs were asked the same questions" in printed("sweep")
    row = arms_of(sweep, "bf16").loc["nvfp4_aqn"]
    assert row["questions"] == 6
    assert row["difference"] == pytest.approx(1 - (0.5 + 0.625 + 0.75 + 3 * 2.25) / 12)


def test_a_question_that_one_seed_was_not_asked_is_left_out_and_the_seed_counts(sweep: Path) -> None:
    make_run(sweep / "less", "bf16", 3, before=[0.0] * 3, after=[1.0] * 3)
    row = arms_of(sweep).loc["bf16"]
    assert (row["seeds"], row["questions"]) == (4, 3)
    assert row["accuracy_after"] == pytest.approx((0.5 + 0.625 + 0.75 + 3 * 1.25 + 3) / 12)


def test_a_difference_of_gains_may_exceed_one(here: Path) -> None:
    for seed in range(3):
        make_run(here / f"bf16-{seed}", "bf16", seed, before=[1.0] * 4, after=[0.0] * 4)
        make_run(here / f"nvfp4-{seed}", "nvfp4", seed, before=[0.0] * 4, after=[1.0] * 4)
    row = arms_of(here, "bf16").loc["nvfp4"]
    assert row[["difference_high", "gain_difference", "gain_difference_high"]].tolist() == [1.0, 2.0, 2.0]


def test_one_seed_has_no_interval(here: Path, printed: Callable[..., str]) -> None:
    make_run(here / "runs" / "a", "bf16", 0)
    row = arms_of(here / "runs").loc["bf16"]
    assert row["gain"] == 0.25
    assert "gain_low" not in row.index
    out = printed("runs")
    (line,) = [line for line in out.splitlines() if line.startswith("bf16")]
    assert line.split() == [
        "bf16", "1", "of", "1", "0.375", "(1)", "0.625", "(1)", "+0.250", "(1)", "0.350", "->", "0.200",
    ]  # fmt: skip
    note = "Cells: mean [interval] (seeds).\nIntervals are 95%, over seeds and questions; one seed has none.\n"
    assert out.endswith(f"\n{note}")


def test_seeds_of_equal_means_have_no_interval_and_the_table_says_why(here: Path, printed: Callable[..., str]) -> None:
    for seed in (0, 1):
        make_run(here / "runs" / f"{seed}", "bf16", seed)
    out = printed("runs")
    assert "+0.250 [no spread]" in out
    assert "\n[no spread]: neither seeds nor questions show any, perhaps by chance, so there is no interval.\n" in out


def test_a_run_without_evaluation_shows_its_entropy(here: Path, printed: Callable[..., str]) -> None:
    run = make_run(here / "runs" / "a", "bf16", 0, eval__questions=0)
    (run / "eval.parquet").unlink()
    assert "bf16  1 of 1    -       -      -     0.350 -> 0.200" in printed("runs")


# --- the command


def test_the_report_prints_arms_differing_settings_and_left_out_runs(sweep: Path, printed: Callable[..., str]) -> None:
    make_run(sweep / "again", "bf16", 0, after=[0.5, 0.5, 0.75, 1.0], ended=4e9, began={"git_sha": "feedface"})
    out = printed("sweep")
    lines = out.splitlines()
    assert lines[0].split("  ")[0] == "arm"
    assert "after - bf16" in lines[0]
    assert lines[2].startswith("nvfp4  3 of 3    0.375 ")
    assert "+0.062 [-0.136, +0.261]" in lines[2]
    assert lines[1].split()[-3:] == ["0.350", "->", "0.200"]
    assert "arms differ in  format.name\nbf16            bf16\nnvfp4           nvfp4" in out
    assert "2 versions of the code: c0ffee0, feedfac" in out
    assert "Left out, 1 in all:\n  sweep/bf16-0: repeated by sweep/again" in out


@pytest.mark.usefixtures("unrendered")
def test_settings_that_follow_from_the_scale_have_their_own_table(here: Path, printed: Callable[..., str]) -> None:
    """Run directories and stored results give the same output."""
    other = {"scale": "zoo", "rollout__group_size": 4, "rollout__prompts_per_step": 2, "eval__top_p": 0.5}
    for arm in ("bf16", "nvfp4"):
        make_run(here / "runs" / f"{arm}-0", arm, 0)
        make_run(here / "runs" / f"{arm}-1", arm, 0, **other, optim__weight_decay=0.5, optim__beta1=0.5)
    out = printed("runs")
    assert [line.split("  ")[0] for line in out.splitlines()[1:5]] == [
        f"{arm} (scale={scale})" for arm in ("bf16", "nvfp4") for scale in ("zoo", "pocket")
    ]
    assert "Several arms are bf16: for differences type for example baseline='bf16 (scale=zoo)'." in out
    differing = out.partition("\nscales differ in ")[2].partition("\n\n")[0].splitlines()
    assert [line.split() for line in differing] == [
        ["pocket", "zoo"], ["eval.top_p", "0.95", "0.5"], ["optim.beta1", "0.9", "0.5"],
        ["optim.weight_decay", "0.0", "0.5"], ["rollout.group_size", "8", "4"], ["rollout.prompts_per_step", "16", "2"],
    ]  # fmt: skip
    assert re.search(r"\narms differ in +format\.name\n", out)
    printed("runs", "out=results/both")
    assert printed("results/both") == out
    assert "<h3>The scales differ in</h3>" in (here / "results/both/report.html").read_text()


def test_a_difference_that_also_reflects_other_settings_says_so(here: Path, printed: Callable[..., str]) -> None:
    """Settings that an experiment declares are not mentioned. Another learning rate is."""
    make_run(here / "sweep" / "bf16-0", "bf16", 0)
    make_run(here / "sweep" / "nvfp4-0", "nvfp4", 0)
    assert "also differ" not in printed("sweep")
    make_run(here / "sweep" / "lower-0", "nvfp4", 0, optim__learning_rate=3e-4)
    said = "in keys that no experiment sets, which after - bf16 reflects: optim.learning_rate (1 arm)."
    assert f"Arms also differ from bf16 {said}" in printed("sweep")


def test_the_baseline_is_bf16_or_the_given_arm(sweep: Path, printed: Callable[..., str]) -> None:
    said = printed("sweep", "baseline=nvfp4")
    assert "after - nvfp4" in said
    assert "also differ" not in said, "settings that the baseline's experiment declares are not mentioned either"
    assert "after -" not in printed("sweep/bf16-0"), "one arm has nothing to be compared with"
    for seed in range(3):
        shutil.rmtree(sweep / f"bf16-{seed}")
    make_run(sweep / "aqn", "nvfp4_aqn", 0)
    assert "No arm is bf16: for differences type for example baseline=nvfp4." in printed("sweep")


def of_arms(*arms: tuple[str, int]) -> dict[str, list[Run]]:
    """Return a run for each arm, given as (experiment, steps), by a label with both."""
    return {f"{name} (steps={steps})": [record({"steps": str(steps)}, 0, 0.5)] for name, steps in arms}


def test_a_baseline_may_be_named_by_its_experiment_where_it_is_clear_which_arm_that_is() -> None:
    arms = of_arms(("bf16", 5), ("nvfp4", 5), ("nvfp4", 6), ("nf4", 7))
    assert comparison.baseline_of(arms, "bf16") == comparison.baseline_of(arms, None) == "bf16 (steps=5)"
    assert comparison.baseline_of(arms, "nvfp4 (steps=6)") == "nvfp4 (steps=6)"
    assert comparison.baseline_of(arms, "nvfp4") == "nvfp4 (steps=5)", "most arms have 5 steps"
    arms |= of_arms(("nf4", 6))
    with pytest.raises(ConfigError, match=r"nvfp4 is several arms.* nvfp4 \(steps=5\); nvfp4 \(steps=6\)"):
        comparison.baseline_of(arms, "nvfp4")
    with pytest.raises(ConfigError, match=r"baseline=nvfp is none of the arms. Did you mean nvfp4\?"):
        comparison.baseline_of(arms, "nvfp")
    assert comparison.baseline_of(of_arms(("bf16", 5), ("bf16", 6)), None) is None
    assert comparison.baseline_of(of_arms(("bf16", 5)), None) is None, "one arm has nothing to be compared with"
    several = comparison.Comparison({label: [] for label in ("adhoc", "bf16 (steps=5)", "bf16 (steps=6)")}, [], {}, [])
    assert comparison.describe_no_baseline(several, None).endswith("baseline='bf16 (steps=5)'.")


@pytest.mark.parametrize(("words", "said"), [
    (["nowhere"], "nowhere is no directory. Type the directory of a run or of a sweep"),
    (["verdict", "runs"], "verdict is no directory and no command. Did you mean verdicts?"),
    (["empty"], "empty holds no run directory and no runs.parquet of a report. Type"),
    (["unfinished", "out=out"], "no run counts:\n  unfinished/a: interrupted, or still running (step 4 of 4)"),
    (["sweep", "baseline=nvfp"], "baseline=nvfp is none of the arms. Did you mean nvfp4? Allowed: bf16; nvfp4."),
    (["sweep", "out=out", "baseline=nvfp"], "baseline=nvfp is none of the arms."),
    (["sweep", "out=sweep/bf16-0/env.json"], "env.json cannot be written"),
    (["verdicts", "sweep", "out=sweep/bf16-0/env.json"], "env.json cannot be written"),
    (["verdicts", "sweep", "claims=none.yaml"], "claims=none.yaml is not there. Type the path of a YAML file"),
])  # fmt: skip
def test_a_wrong_argument_is_answered_with_what_to_type(
    sweep: Path, printed: Callable[..., str], words: list[str], said: str
) -> None:
    (sweep.parent / "empty").mkdir()
    (make_run(sweep.parent / "unfinished" / "a", "bf16", 0) / "DONE").unlink()
    assert said in printed(*words, code=2)
    assert not list(Path("out").glob("*")), "no part of a report is written"
