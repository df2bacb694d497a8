"""`python -m qerl_lab.report verdicts`: its output and its page, for whole sweeps and for parts of sweeps."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import comb
from pathlib import Path

import pandas as pd
import pytest
import yaml

from qerl_lab.config.paths import sha256
from qerl_lab.report import comparison
from qerl_lab.report.__main__ import main
from qerl_lab.report.claims import of_paper, read
from qerl_lab.report.measures import MEASURES
from qerl_lab.report.verdict_tables import collapses, measured_cells, pipe_table
from qerl_lab.report.verdicts import Row, family_sizes, judge
from qerl_lab.system import exits
from run_directories import make_run, save_results
from simulated_runs import record

CLAIMS = of_paper()

ON_GSM8K = {"task__name": "gsm8k", "eval__samples": 100}  # the accuracies below are in hundredths


@pytest.fixture
def sweep(here: Path) -> Path:
    """Make two arms of four seeds, and a fifth run of one arm that failed. Every other arm is missing."""
    for seed in range(4):
        luck = seed / 50
        make_run(here / "runs" / f"bf16-{seed}", "bf16", seed, after=[0.5 - luck, 0.5, 0.75, 1.0], **ON_GSM8K)
        make_run(here / "runs" / f"aqn-{seed}", "nvfp4_aqn", seed, after=[0.75, 0.75 + luck, 1.0, 1.0], **ON_GSM8K)
    why = "FloatingPointError: loss is NaN at step 3"
    make_run(here / "runs" / "failed", "nvfp4_aqn", 4, failed=why, **ON_GSM8K)
    return here / "runs"


def judged(*words: str, runs: str = "runs") -> list[Row]:
    """Run `verdicts` with these words, which writes results/mine/verdicts.md, and return the rows of that page."""
    assert main(["verdicts", runs, *words, "out=results/mine"]) == exits.OK
    found = comparison.read([Path(runs)])
    files = [Path(word.removeprefix("claims=")) for word in words]
    return judge(found.counted, found.runs, [claim for file in files for claim in read(file, str(file))] or None)


def line_of(text: str, *words: str) -> str:
    (line,) = (line for line in text.splitlines() if all(word in line for word in words))
    return " ".join(line.split())


def test_verdicts_prints_what_was_measured_and_the_commands_for_the_rest(
    sweep: Path, printed: Callable[..., str]
) -> None:
    text = printed("verdicts", "runs")
    found = line_of(text, "final_accuracy")
    assert found.startswith("final_accuracy nvfp4_aqn against bf16 4 +0.2")
    assert "+0.076 (Table 1 3B, inside), +0.027 (Table 1 7B, inside)" in found
    assert "nf4 against" not in text  # no run of it, so its contrasts are only counted
    without_runs = line_of(text, "contrasts an arm has no runs")
    assert without_runs.startswith("In 33 of 41 contrasts an arm has no runs: 3 of initial_entropy, 3 of entropy_order")
    assert "4 of aqn_accuracy," in without_runs
    assert "final" not in without_runs
    assert line_of(text, "+sweeps=lora_rank") == "python -m qerl_lab +sweeps=lora_rank # rank_insensitivity"
    assert "add what the runs had beside their sweep, such as scale=NAME" in text
    assert line_of(text, "nvfp4_aqn", "4 of 5").startswith("nvfp4_aqn 4 of 5 0.375 [")
    assert "runs/failed: failed (FloatingPointError: loss is NaN at step 3)" in text


def test_the_rows_and_the_page_have_every_number(sweep: Path) -> None:
    found = judged()
    assert len(found) == sum(len(claim.contrasts) for claim in CLAIMS)
    assert family_sizes(found) == {"growth": 2, "gain": 1, "final": 2}
    (row,) = (row for row in found if row.claim.name == "final_accuracy")
    assert (row.finished, row.started, row.numbers.seeds, row.numbers.questions) == ((4, 4), (5, 4), 4, 4)
    assert row.numbers.at_least.mean(1) == pytest.approx([0.1875 + seed / 100 for seed in range(4)])
    assert row.numbers.effect[0] == pytest.approx(0.2025)
    assert [effect for _, effect in row.contrast.printed] == pytest.approx([0.076, 0.027])
    page = Path("results/mine/verdicts.md").read_text()
    assert "By `python -m qerl_lab.report verdicts runs`." in page
    assert "| 4 of 5, 4 of 4 |" in page
    assert page.count("\n| final_") == 2
    assert page.count("\n| growth_area |") == 1  # the others lack an arm
    growth = line_of(page, "| growth_gain |").split(" | ")
    assert all(re.match(r"[+-]0\.\d{3} (\[[+-]|\[no spread\])", cell) for cell in growth[4:6]), growth
    # claims that the runs answer; the others are only named
    answered = ["growth_area", "growth_steps", "growth_gain", "final_accuracy", "final_pass"]
    assert [line.split("`")[1] for line in page.splitlines() if line.startswith("- `")] == answered
    without_runs = line_of(page, "In 33 of 41 contrasts an arm has no runs: ")
    assert "2 of growth_area," in without_runs
    at_one_rate = ["growth_area_best", "growth_steps_best", "growth_gain_best"]  # have runs, but no best rate
    assert line_of(page, "These runs say nothing of").split("`")[1:-3:2] == at_one_rate
    for claim in CLAIMS:
        assert claim.name in answered or f" of {claim.name}" in without_runs or claim.name in at_one_rate
    reasons = {(row.claim.name, row.contrast.name): row.why for row in found}
    assert reasons["initial_entropy", "nf4 against bf16"] == "no finished run of nf4 (0 started)"


def test_a_contrast_has_a_row_if_a_run_of_each_arm_was_started(sweep: Path, printed: Callable[..., str]) -> None:
    for run in sweep.glob("aqn-*"):
        shutil.rmtree(run)
    text = printed("verdicts", "runs")
    assert line_of(text, "final_accuracy", "undecided").endswith("undecided: no finished run of nvfp4_aqn (1 started)")
    assert "final" not in line_of(text, "contrasts an arm has no runs")
    shutil.rmtree(sweep / "failed")
    assert "In 41 of 41 contrasts an arm has no runs: 3 of initial_entropy, " in printed("verdicts", "runs")


CLAIMS_FILE = """\
committed: 2026-11-26
seeds: 4
conditions: {task.name: gsm8k}
analysis: one look, at four seeds
arms:
  plain: {format.name: bf16, aqn.schedule: "off"}
  noisy: {format.name: nvfp4, aqn.schedule: exponential}
claims:
- {name: ours, says: noise helps, where: our plan, family: one, measure: accuracy_after, direction: 1, smallest: 0.01,
   reason: a point, sweep: weight_formats, free: [format, aqn], contrasts: [{treated: noisy, control: plain}]}
"""


def test_claims_of_a_file_are_judged_and_say_whether_the_runs_record_its_hash(sweep: Path) -> None:
    Path("claims.yaml").write_text(CLAIMS_FILE)
    digest = sha256(Path("claims.yaml"))
    for recorded, said in ((None, "not preregistered: 0 of 8"), (digest, "preregistered: all 8")):
        for run in sweep.glob("*-*"):
            settings = yaml.safe_load((run / "resolved.yaml").read_text())
            settings |= {"preregistration": "claims.yaml", "preregistration_sha256": recorded}
            (run / "resolved.yaml").write_text(yaml.safe_dump(settings))
        (row,) = judged("claims=claims.yaml")
        assert row.registered.startswith(said)
        assert row.claim.file.sha256 == digest
        page = Path("results/mine/verdicts.md").read_text()
        assert f"SHA-256 {digest[:12]}" in page
        assert "claims=claims.yaml`" in page
    save_results("runs", "results/page")  # Parquet keeps the hash
    (row,) = judged("claims=claims.yaml", runs="results/page")
    assert row.registered.startswith("preregistered: all 8")


def test_a_claims_file_beside_the_results_that_was_not_typed_is_named(sweep: Path, printed: Callable[..., str]) -> None:
    save_results("runs", "results/page")
    assert "claims of their own" not in printed("verdicts", "results/page")
    Path("results/page/claims.yaml").write_text(CLAIMS_FILE)
    line = "python -m qerl_lab.report verdicts results/page claims=results/page/claims.yaml"
    said = f"The results have claims of their own, not tested here. To test them:\n\n    {line}\n"
    assert said in printed("verdicts", "results/page")
    assert said not in printed(*line.split()[3:])


@pytest.mark.usefixtures("unrendered")
def test_a_report_asks_for_the_claims_that_its_runs_were_made_to_test(sweep: Path, printed: Callable[..., str]) -> None:
    Path("mine.yaml").write_text(CLAIMS_FILE)
    digest = sha256(Path("mine.yaml"))
    for run in list(sweep.glob("*-*"))[:2]:
        settings = yaml.safe_load((run / "resolved.yaml").read_text()) | {"preregistration_sha256": digest}
        (run / "resolved.yaml").write_text(yaml.safe_dump(settings))
    said = f"runs were made to test other claims (SHA-256 {digest[:12]}): "
    assert f"{said}copy their file to results/page/claims.yaml and type the same line" in printed(
        "runs", "out=results/page"
    )
    shutil.copy("mine.yaml", "results/page/claims.yaml")
    assert said not in printed("runs", "out=results/page")
    assert f"{said}type claims=FILE" in printed("verdicts", "runs")
    assert said not in printed("verdicts", "runs", "claims=mine.yaml")


@pytest.mark.usefixtures("unrendered")
def test_a_report_elsewhere_tests_the_claims_beside_the_results(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_results("runs", "results/page")
    Path("results/page/claims.yaml").write_text(CLAIMS_FILE)
    assert main(["results/page", "out=results/copy"]) == exits.OK
    assert "claims: those of results/page/claims.yaml, copied to results/copy" in capsys.readouterr().out
    assert Path("results/copy/claims.yaml").read_text() == CLAIMS_FILE
    assert "- `ours`: noise helps" in Path("results/copy/verdicts.md").read_text()
    Path("results/copy/claims.yaml").write_text(CLAIMS_FILE.replace("noise helps", "noise is good"))
    assert main(["results/page", "results/copy", "out=results/both"]) == exits.OK
    assert Path("results/both/claims.yaml").read_text() == CLAIMS_FILE, "the claims of the first folder"
    assert main(["results/page", "out=results/copy"]) == exits.OK
    assert "noise is good" in Path("results/copy/claims.yaml").read_text(), "claims that the copy already has stay"


def test_missing_runs_are_made_by_the_queue_beside_the_claims(sweep: Path, printed: Callable[..., str]) -> None:
    """A sweep may have its own values, as exploration_controls has a temperature of the pocket scale."""
    claims = Path("my results/claims.yaml")
    claims.parent.mkdir()
    claims.write_text(CLAIMS_FILE.replace("seeds: 4", "seeds: 5"))
    text = printed("verdicts", "runs", f"claims={claims}")
    assert "where a sweep has other values than the arms in my results/claims.yaml, type those of the arms):" in text
    assert "python -m qerl_lab +sweeps=weight_formats  # ours" in text
    claims.with_name("queue.yaml").write_text("parts: []")
    text = printed("verdicts", "runs", f"claims={claims}")
    assert "    python -m qerl_lab.tools.queue plan 'my results/queue.yaml'  # ours" in text
    assert "+sweeps" not in text
    assert "other values" not in printed("verdicts", "runs")  # the paper's claims have the arms of their sweeps


@pytest.mark.parametrize(("change", "said"), [
    (("smallest: 0.01,", ""), "claim ours lacks smallest"),
    (("smallest: 0.01,", "smalest: 0.01,"), "claim ours has smalest, which is none of added, best_of, contrasts,"),
    (("measure: accuracy_after", "measure: accuracy"), "measure accuracy is none of"),
    (("free: [format, aqn]", "free: [format.nam]"), "format.nam is no key of a run. Did you mean format.name?"),
    (("free: [format, aqn]", "free: [seed]"), "claim ours: seed defines no arm; write keys that do"),
    (("task.name: gsm8k", "scale: pocket"), "conditions: scale defines no arm; write keys that do"),
    (('aqn.schedule: "off"', "experiment: bf16"), "experiment defines no arm; write keys that do, such as format"),
    (('aqn.schedule: "off"', "aqn.schedule: off"), 'write "off" with its quotes'),
    (("format.name: nvfp4", "format.name: nvpf4"), "arm noisy: format.name nvpf4 is none of bf16, fp8, "),
    (("task.name: gsm8k", "task.name: gsmk8"), "conditions: task.name gsmk8 is none of "),
    (("treated: noisy", "treated: noise"), "noise is none of the arms. Did you mean noisy?"),
    (("control: plain", "control: noisy"), "claim ours: noisy is compared with itself; write two arms"),
    (("seeds: 4", "seeds: 1"), "seeds=1 is no whole number of at least 2"),
    (("control: plain}", "control: plain, printed: [{where: {table: Table 0}, treated: {}, control: {}}]}"),
     "0 numbers of the paper have"),
    (("claims:", "claims: ["), "; allowed: a YAML file of claims."),
    (("free: [format, aqn]", "free: [[format]]"), "claim ours: ['format'] is no key of a run"),
    (("smallest: 0.01", "smallest: .nan"), "claim ours: smallest nan is no number above 0"),
    (("smallest: 0.01", "smallest: 0.01, guardrail: {measure: pass_after, margin: .nan}"), "margin nan is no number"),
    (('aqn.schedule: "off"', "optim.learning_rate: fast"), "optim.learning_rate fast is no number"),
    (("control: plain}", "control: plain, printed: [{where: {table: 1}, treated: {}, control: {}}]}"),
     "table=1 is no text"),
    (('aqn.schedule: "off"', "lora.rank: many"), "lora.rank=many is not allowed; allowed: a whole number"),
    (("{treated: noisy, control: plain}", "{treated: noisy, control: plain}, {treated: noisy, control: plain}"),
     "claim ours compares noisy against plain twice"),
    (("[{treated: noisy, control: plain}]", "[]"), "claim ours: contrasts is empty, and there is nothing to compare"),
    ((CLAIMS_FILE, "committed: now\nseeds: 4\nclaims: []"), "claims is empty, and there is nothing to test"),
])  # fmt: skip
def test_a_claims_file_that_cannot_be_tested_is_refused(
    here: Path, printed: Callable[..., str], change: tuple[str, str], said: str
) -> None:
    Path("claims.yaml").write_text(CLAIMS_FILE.replace(*change))
    assert said in printed("verdicts", "runs", "claims=claims.yaml", code=exits.USAGE)


def test_collapsed_runs_are_counted_at_shared_rates_and_compared_by_fishers_test() -> None:
    """Only the treated arm has rate 3, and there all its runs fall. The control's runs fall at rate 2."""
    (claim,) = (claim for claim in CLAIMS if claim.name == "rank_insensitivity")
    contrast, rise, fall = claim.contrasts[0], [0.1, 0.2, 0.4, 0.8], [0.1, 0.8, 0.4, 0.3]
    records = [
        replace(
            record({**settings, "optim.learning_rate": rate}, seed, 0.3),
            steps=pd.DataFrame({"reward/answer": fall if rate == falls else rise}, index=range(1, 5)),
        )
        for settings, rates, falls in ((contrast.treated_settings, "123", "3"), (contrast.control_settings, "12", "2"))
        for rate in rates
        for seed in range(5)
    ]
    failed = [replace(run, seed=5, status="failed") for run in records if run.seed == 0]  # one more run at each rate
    own = replace(claim, contrasts=(contrast,), mean_over="optim.learning_rate")
    (row,) = judge(records, [*records, *failed], [own])
    assert (row.finished, row.started, row.collapsed) == ((10, 10), (12, 12), (0, 5))
    p = comb(10, 5) / comb(20, 5)  # all five in one arm; all five in the other is as likely
    assert collapses([row])[1:] == [[claim.name, contrast.name, "0 of 10", "5 of 10", f"{2 * p:.3f}"]]
    assert collapses([replace(row, collapsed=(0, 0))]) == []


def test_the_gain_of_an_arm_may_be_negative() -> None:
    """A gain lies between -1 and 1. The interval of a share would be cut at 0."""
    (claim,) = (claim for claim in CLAIMS if claim.name == "growth_gain")
    contrast, falling = claim.contrasts[0], [0.8, 0.4, 0.2, 0.1]
    records = [
        replace(record(settings, seed, 0.3), steps=pd.DataFrame({"reward/answer": falling}, index=range(1, 5)))
        for settings in (contrast.treated_settings, contrast.control_settings)
        for seed in range(3)
    ]
    records[0].steps["reward/answer"] /= 2
    (row,) = judge(records, records, [replace(claim, contrasts=(contrast,))])
    assert measured_cells(row)["treated"] == "-0.583 [-1.000, -0.081] (3)"
    assert measured_cells(row)["control"] == "-0.700 [no spread] (3)"


def row_of_own_claim(old: str, new: str) -> Row:
    """Judge the runs by CLAIMS_FILE with `old` replaced by `new`, and return the row."""
    Path("claims.yaml").write_text(CLAIMS_FILE.replace(old, new))
    (row,) = judged("claims=claims.yaml")
    return row


def test_runs_without_the_conditions_of_the_claims_are_not_judged_by_them(sweep: Path) -> None:
    row = row_of_own_claim("task.name: gsm8k", "task.name: bigmath")
    assert row.why == "no finished run of noisy (0 started) and of plain (0 started)"


def test_fewer_seeds_than_planned_have_an_interval_and_no_verdict(sweep: Path) -> None:
    judged, early = row_of_own_claim("seeds: 4", "seeds: 4"), row_of_own_claim("seeds: 4", "seeds: 5")
    assert judged.numbers.p.above < 0.5
    assert "seeds would decide it" in judged.why
    assert (early.verdict, early.why) == ("undecided", "4 of 5 seeds: an interval, no verdict yet")
    assert early.numbers.effect == judged.numbers.effect
    assert early.judged is None
    page = Path("results/mine/verdicts.md").read_text()
    assert "Corrected for" not in page
    assert "To make what verdicts lack" in page
    for seed in (2, 3):  # an interval of two seeds says nothing
        shutil.rmtree(next(Path("runs").glob(f"*{seed}")))
    assert row_of_own_claim("seeds: 4", "seeds: 5").numbers is None


def test_a_row_names_the_conditions_of_its_runs(sweep: Path, printed: Callable[..., str]) -> None:
    for seed in range(3):
        for arm in ("bf16", "nvfp4_aqn"):
            make_run(sweep / f"fast-{arm}-{seed}", arm, seed, optim__learning_rate=0.5, **ON_GSM8K)
    judged()
    page = Path("results/mine/verdicts.md").read_text()
    assert "The verdicts are of 3 sets of conditions" in page  # two rates, and the best of both
    for letter in "ABC":
        line = line_of(page, f"- {letter}: model.path=pocket")
        for key in ("importance_correction", "rollout.temperature", "eval.temperature", "updates_per_rollout"):
            assert key in line
    assert line_of(page, "| final_accuracy", "learning_rate=0.5").split(" | ")[2] in "AB"
    assert "The arms differ in conditions (optim.learning_rate)" in printed("runs")


def test_a_page_of_runs_that_answer_nothing_says_so(here: Path) -> None:
    make_run(here / "runs" / "bf16", "bf16", 0)
    judged()
    page = Path("results/mine/verdicts.md").read_text()
    assert "No claim was measured." in page
    assert all(f" of {claim.name}" in line_of(page, "In 41 of 41 contrasts an arm has no runs") for claim in CLAIMS)
    assert "| bf16 | 1 of 1 |" in page
    assert (
        "\n## Held-out accuracies\n\n| arm | finished | before | after | gain |\n" in page
    )  # Table 1 is of another task


def test_rows_of_two_tasks_name_their_task_and_the_output_warns(sweep: Path, printed: Callable[..., str]) -> None:
    for seed in range(3):
        for arm in ("bf16", "nvfp4_aqn"):
            make_run(sweep / f"other-{arm}-{seed}", arm, seed, **ON_GSM8K | {"task__name": "arithmetic"})
    text, of = printed("verdicts", "runs"), "final_accuracy nvfp4_aqn against bf16 (task=gsm8k)"
    assert line_of(text, "final_accuracy", "task=gsm8k").startswith(of)
    assert line_of(text, "final_accuracy", "task=arithmetic")
    assert "The runs are of 2 tasks, arithmetic, gsm8k: compare arms of one task." in text


def test_throughputs_of_the_paper_become_a_ratio_and_rows_a_pipe_table() -> None:
    claims = {claim.name: claim for claim in CLAIMS}
    speed = claims["rollout_throughput"]
    assert speed.contrasts[0].printed == (("Figure 1 7B", pytest.approx(2092 / 1641)),)
    assert pipe_table([["a", "b"], ["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


def test_docs_verdicts_has_every_measure_that_a_claim_can_name() -> None:
    page = (Path(__file__).parents[3] / "docs" / "verdicts.md").read_text(encoding="utf-8")
    rows = page.partition("### Measures")[2].partition("###")[0].splitlines()
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1] if row else "")}
    assert {*MEASURES} - named == set(), "add a row to docs/verdicts.md#measures"


def test_docs_verdicts_has_every_claim_with_its_family_sweep_and_guardrail() -> None:
    page = (Path(__file__).parents[3] / "docs" / "verdicts.md").read_text(encoding="utf-8")
    claims, guardrails = page.partition("## The claims")[2].split("Guardrails, of the treated arm")
    rows = {line.split("`")[1]: line for line in claims.splitlines() if line.startswith("| `")}
    assert list(rows) == [claim.name for claim in CLAIMS]
    for claim in CLAIMS:
        assert rows[claim.name].endswith(f"| {claim.family} | `{claim.sweep.removesuffix(' scale=smollm2')}` |")
        assert f"{claim.smallest:g}" in rows[claim.name].split("|")[4]
        margins = [line.split("|")[2].split()[0] for line in guardrails.splitlines() if f"`{claim.name}`" in line]
        assert margins == ([f"{claim.guardrail.margin:g}"] if claim.guardrail else [])
