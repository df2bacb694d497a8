"""Reports, sweeps, `resync` and `samples` refuse a damaged record with the same sentence."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qerl_lab.config.arm import REMOVED, settings_of_run
from qerl_lab.config.option import ConfigError
from qerl_lab.record import checkpoint
from qerl_lab.record.directory import RunDirectory
from run_directories import make_run, write_config


def without_step_2(path: Path) -> None:
    first, _, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, *rest]))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1] if path.exists() else b"")


def with_half_a_line(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"step": 4, "time"')


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("DONE", lambda path: path.write_text("[1]"), r"DONE .*Move it away\."),
        ("DONE", cut, r"DONE cannot be read \(.+\)\. Move it away\."),
        ("env.2.json", lambda path: path.write_text("{"), r"env\.2\.json cannot be read \(.+\)\. Move it away\."),
        ("sessions.json", cut, r"sessions\.json cannot be read"),
        ("mlflow.json", lambda path: path.write_text("[]"), "does not have the content that a run writes"),
        ("samples.jsonl", lambda path: path.write_text("[]\n"), "line 1, is not a sample"),
        ("metrics.jsonl", Path.unlink, "metrics.jsonl lacks 4 of 4 steps"),
        ("metrics.jsonl", with_half_a_line, r"metrics\.jsonl ends within a line\. Move DONE away and resume the run"),
        ("metrics.jsonl", without_step_2, "metrics.jsonl lacks 1 of 4 steps, the first of them 2"),
        ("eval.parquet", Path.unlink, r"eval.parquet is missing\. Move DONE away and resume"),
        ("eval.parquet", cut, r"eval.parquet is damaged \(.+\)\. Move it away"),
    ],
)
def test_damage_is_named(name: str, harm: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    """`checked_metrics` names any damaged file; `check` names those that a resume needs."""
    run = RunDirectory(make_run(tmp_path / "run", "bf16", 0))
    run.checked_metrics(), run.check()
    harm(run.path / name)
    with pytest.raises(ConfigError, match=said):
        run.checked_metrics()
    if name in ("mlflow.json", "sessions.json") or "is damaged" in said:
        with pytest.raises(ConfigError, match=said):
            run.check()


def test_a_run_without_evaluation_has_no_answers(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "run", "bf16", 0, eval__questions=0))
    (run.path / "eval.parquet").unlink()
    run.checked_metrics()
    assert run.status == "done"
    assert run.evaluations() == {}


def test_a_run_that_goes_on_may_be_in_the_middle_of_a_line(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "run", "bf16", 0))
    (run.path / "DONE").unlink()
    lines = run.metrics()
    with_half_a_line(run.path / "metrics.jsonl")
    assert run.checked_metrics() == lines != []
    (run.checkpoints / "step-000006").mkdir(parents=True)
    with pytest.raises(ConfigError, match="lacks 2 of 6 steps, the first of them 5"):
        run.checked_metrics()


def edit(run: RunDirectory, **changes: Any) -> None:
    """Replace values in resolved.yaml; `optim__learning_rate` stands for the key optim.learning_rate."""
    cfg = run.config()
    for key, value in changes.items():
        cfg = changed(cfg, key.replace("__", "."), value)
    write_config(run.path, cfg)


def changed(node: Any, key: str, value: Any) -> Any:
    """Copy a configuration with another value of a dotted key."""
    first, _, rest = key.partition(".")
    return replace(node, **{first: changed(getattr(node, first), rest, value) if rest else value})


def save_checkpoint(run: RunDirectory, step: int, **more: Any) -> Path:
    state = {"step": step, "prompts_seen": 4, "config": settings_of_run(run.config()) | more}
    return checkpoint.save(run.checkpoints, state, lambda folder: None, keep=2)


def test_an_edited_configuration_is_refused_and_the_changed_keys_are_named(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "run", "bf16", 0))
    was = run.config()
    save_checkpoint(run, 2)
    newest = save_checkpoint(run, 4, **{REMOVED[0]: 8})
    # Where it ran makes no other run.
    edit(run, jobs_per_gpu=2, cpu_threads=7, device="cpu", checkpoint__every=1, tracking__mlflow=False)
    run.checked_metrics()
    edit(run, optim__learning_rate=0.5, aqn__norms=["input_layernorm"], seed=3, gpus=2)
    norms = r"aqn\.norms=\[input_layernorm\] \(was .*\)"
    rate = rf"optim\.learning_rate=0\.5 \(was {was.optim.learning_rate}\)"
    said = rf"step-000004 was trained with: .*{norms}.*, {rate}, seed=3 \(was 0\), gpus=2 \(was 1\)\. Put it back as"
    with pytest.raises(ConfigError, match=rf"resolved\.yaml is not the .* {said} it was"):
        run.checked_metrics()
    assert was.optim.learning_rate != 0.5
    shutil.rmtree(newest)
    with pytest.raises(ConfigError, match=r"step-000002 was trained with"):
        run.checked_metrics()
    (run.path / "resolved.yaml").write_text("seed: 0\n")  # cut off: over a hundred keys differ
    with pytest.raises(ConfigError, match=r"model\.path=nothing \(was .*\),.* and \d+ more\. Put it back as"):
        run.checked_metrics()


def test_answers_come_in_the_order_in_which_they_were_given(tmp_path: Path) -> None:
    run = RunDirectory(make_run(tmp_path / "run", "bf16", 0))
    phases = run.evaluations()
    assert list(phases) == ["before", "after"]
    run.write_evaluations({"before": phases["before"], "step 20": phases["after"], "step 100": phases["after"]})
    assert list(run.evaluations()) == ["before", "step 20", "step 100"]
