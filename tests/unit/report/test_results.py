"""Results as Parquet: small tidy files, whatever state the runs are in. (test_page.py makes a report from them.)"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from qerl_lab.config.arm import ADDED, REMOVED, as_recorded, is_of_arm, keys_of_arm, leaves
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.report import comparison, results
from qerl_lab.report.runs import KEPT, Origin, normalize
from run_directories import config, make_run, save_results

COMMITTED_BELOW = Path(__file__).parents[3] / "results"
COMMITTED = sorted(COMMITTED_BELOW.rglob(results.RUNS))


@pytest.fixture
def sweep(here: Path) -> Path:
    """Make two arms of three seeds, a failed run, a repeated run and a damaged run."""
    for seed in range(3):
        for arm in ("bf16", "nvfp4_aqn"):
            make_run(here / "runs" / f"{arm}-{seed}", arm, seed)
    about = {"git_sha": "feedface", "dirty": True, "command": "python -m qerl_lab", "cpus_usable": 2, "cpu": "Xeon"}
    about |= {"packages": {"torch": "2.13.0"}, "gpus": [{"name": "H200", "driver": "580"}] * 2}
    about |= {"time": "2026-01-31T12:00:00+0000", "host": "one"}
    resumed = {"git_sha": "0ddba11", "packages": {"torch": "2.14.0"}, "gpus": []}
    resumed |= {"time": "2026-02-01T12:00:00+0000", "host": "two"}
    (here / "runs" / "bf16-0" / "env.json").write_text(json.dumps(about))
    (here / "runs" / "bf16-0" / "env.2.json").write_text(json.dumps(about | resumed))
    make_run(here / "runs" / "old", "bf16", 1, ended=1e9)
    make_run(here / "runs" / "failed", "nvfp4_aqn", 3, failed="FloatingPointError: loss is NaN")
    (make_run(here / "runs" / "damaged", "bf16", 4) / "eval.parquet").unlink()
    return here / "runs"


def test_the_files_are_tidy(sweep: Path) -> None:
    save_results("runs", "results/mine")
    runs, steps, asked = (pd.read_parquet(f"results/mine/{name}.parquet") for name in ("runs", "steps", "questions"))
    assert len(runs) == 9
    row = runs.set_index("run").loc["runs/bf16-0"]
    assert row[["arm", "seed", "state", "format.name", "aqn.schedule", "seconds"]].tolist() == [
        "bf16", 0, "finished", "bf16", "off", 8
    ]  # fmt: skip
    assert row["machine"] == "2 x H200 (driver 580), 2 CPUs: Xeon then 2 CPUs: Xeon"
    assert row["code"] == "feedfac with changes then 0ddba11 with changes"
    assert (row["began"], row["place"]) == ("2026-01-31T12:00:00+0000", "one two")
    assert json.loads(row["versions"]) == {"torch": "2.13.0"}
    assert json.loads(row["settings"])["optim.learning_rate"] == str(config("bf16", 0).optim.learning_rate)
    states = runs.set_index("run")["state"]
    assert states["runs/failed"] == "failed (FloatingPointError: loss is NaN)"
    assert states["runs/damaged"].startswith("damaged (eval.parquet is missing")
    assert runs.set_index("run")["arm"].isna().sum() == 3  # failed, damaged and repeated runs do not count
    assert set(steps["run"]) == set(asked["run"]) == set(runs.loc[runs["arm"].notna(), "run"])
    assert set(steps.columns) - {"run", "step"} <= set(KEPT)
    assert set(steps.dtypes.drop(["run", "step"])) == {np.dtype("float32")}
    assert sorted(set(asked["phase"])) == ["after", "before"]


def test_no_setting_has_the_name_of_a_column() -> None:
    assert not results.NOT_SETTINGS & {name for name, _, _ in leaves(config("bf16", 0)) if is_of_arm(name)}
    assert set(Origin.__dataclass_fields__) <= results.NOT_SETTINGS


@pytest.mark.parametrize("name", [results.RUNS, results.STEPS, results.QUESTIONS])
def test_a_damaged_file_is_refused_with_the_command_that_makes_it_again(
    sweep: Path, printed: Callable[..., str], name: str
) -> None:
    save_results("runs", "results/mine")
    Path("results/mine", name).write_bytes(b"PAR1")
    said = printed("results/mine", code=2)
    assert said.startswith("error: results/mine does not hold what a report writes (")
    assert f"results/mine/{name}" in said
    assert said.endswith("Make it again: python -m qerl_lab.report RUNS out=results/mine.\n")
    pd.DataFrame({"run": ["x"], "phase": ["x"], "step": [1]}).to_parquet(Path("results/mine", name))
    assert "results/mine does not hold what a report writes" in printed("results/mine", code=2)


@pytest.mark.parametrize("name", [results.STEPS, results.QUESTIONS])
def test_a_missing_file_is_named(sweep: Path, printed: Callable[..., str], name: str) -> None:
    save_results("runs", "results/mine")
    Path("results/mine", name).unlink()
    said = printed("results/mine", code=2)
    assert said.startswith("error: results/mine does not hold what a report writes (")
    assert f"results/mine/{name}" in said


def test_results_of_two_machines_are_kept_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each machine calls its run runs/0. A run that is read twice counts once."""
    for machine, arm in (("one", "bf16"), ("two", "nvfp4")):
        monkeypatch.chdir(make_run(tmp_path / machine / "runs" / "0", arm, 0).parents[1])
        save_results("runs", "results")
    monkeypatch.chdir(tmp_path)
    found = comparison.read([Path("one/results"), Path("two/results")])
    assert [run.name for run in found.runs] == ["runs/0", "runs/0 of two/results"]
    assert list(found.arms) == ["bf16", "nvfp4"]
    again = comparison.read([Path("one/results"), Path("one/results")])
    assert ([run.name for run in again.runs], again.left_out) == (["runs/0"], [])


def test_results_from_before_a_key_was_added_or_removed_are_of_the_same_arm(sweep: Path) -> None:
    """A record that lacks an added key did what the key's default does. A removed key does nothing."""
    save_results("runs", "results/mine")
    file = Path("results/mine") / results.RUNS
    table = pd.read_parquet(file)
    known = table["settings"].notna()  # the damaged run has no settings
    lacking = [
        json.dumps({key: value for key, value in json.loads(text).items() if key not in ADDED} | {REMOVED[0]: "1"})
        for text in table.loc[known, "settings"]
    ]
    table.loc[known, "settings"] = lacking
    table.to_parquet(file, index=False)
    make_run(Path("today/bf16-7"), "bf16", 7)
    found = comparison.read([Path("results/mine"), Path("today")])
    assert {arm: [record.seed for record in records] for arm, records in found.arms.items()} == {
        "bf16": [0, 1, 2, 7], "nvfp4_aqn": [0, 1, 2]
    }  # fmt: skip


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: str(file.parent.relative_to(COMMITTED_BELOW)))
def test_new_runs_can_join_the_arms_of_the_committed_results(file: Path) -> None:
    """A key that only the older or only the newer record has would make another arm of every new run."""
    today = as_recorded(RunConfig())
    for run in results.read(file.parent)[0]:
        assert run.settings.keys() <= today.keys(), "enter what is deleted in REMOVED of config/arm.py"
        new = normalize(today | dict(run.settings))
        lacking = (keys_of_arm(new) - run.settings.keys()) - {"model.hash"}  # of a run from before it, None
        assert lacking == set(), "enter them in ADDED of config/arm.py, with the value that older runs used"


def test_the_wait_for_a_step_sampled_ahead_does_not_count_as_generation(here: Path) -> None:
    """A step has 100 tokens, the sampler makes 200 a second, and a step sampled ahead waits a tenth of that time."""
    path = make_run(here / "runs" / "ahead", "bf16", 0) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["metrics"] |= {"rollout/staleness": float(number > 0)} | ({"seconds/rollout": 0.05} if number else {})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_results("runs", "results/mine")
    for folder in ("runs", "results/mine"):
        (run,) = comparison.read([Path(folder)]).runs
        assert run.summary["rollout_tokens_per_second"] == pytest.approx(200)


def test_arms_of_two_task_files_of_a_user_are_named_by_the_files(here: Path) -> None:
    for name in ("brief", "kind of"):
        changes = {"task__module": f"/home/me/{name}.py", "task__module_hash": name[0] * 12}
        make_run(here / "runs" / name, "bf16", 0, **changes)
    save_results("runs", "results/mine")
    for folder in ("runs", "results/mine"):
        arms = comparison.read([Path(folder)]).arms
        assert {*arms} == {"bf16 (task.module=brief.py)", "bf16 (task.module=kind_of.py)"}


def test_runs_in_a_folder_that_also_has_results_are_read_too(sweep: Path) -> None:
    """More seeds may follow `report runs out=runs`. Read from the result files alone, they would never count."""
    (sweep / "bf16-2" / "DONE").rename("DONE")
    save_results("runs", "runs")
    Path("DONE").rename(sweep / "bf16-2" / "DONE")
    shutil.copy(sweep / "bf16-2" / "eval.parquet", sweep / "damaged")  # repaired
    make_run(sweep / "bf16-7", "bf16", 7)
    found = comparison.read([Path("runs")])
    assert [record.seed for record in found.arms["bf16"]] == [0, 1, 2, 4, 7]
    assert found.damaged == {}
    shutil.rmtree(sweep / "bf16-0")
    assert [record.seed for record in comparison.read([Path("runs")]).arms["bf16"]] == [0, 1, 2, 4, 7]


def test_results_are_found_from_the_folder_of_the_notebooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "results" / "x").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "notebooks"):
        monkeypatch.chdir(folder)
        assert results.find_folder("results/x").resolve() == tmp_path / "results" / "x"
    with pytest.raises(ConfigError, match=r"results/y is no directory, here or in the folder above .*whole path"):
        results.find_folder("results/y")
