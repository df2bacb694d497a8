"""Records of run directories: what is damage, and what is none."""

import os
from pathlib import Path

import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.record import checkpoint
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.line_files import Sample
from qerl_lab.report import comparison
from qerl_lab.tools.samples import format_step
from qerl_lab.tracking.mlflow import resync
from run_directories import make_run


@pytest.mark.parametrize("is_done", [True, False])
@pytest.mark.parametrize(
    ("kept", "says"),
    [
        ([0, 2, 3], "lacks 1 of 4 steps"),
        ([0, 1, 1, 2, 3], "has 1 steps more than once"),
        ([0, 1], "lacks 2 of 4 steps"),
    ],
)
def test_report_resync_and_samples_agree_on_what_is_damaged(
    tmp_path: Path, kept: list[int], says: str, is_done: bool
) -> None:
    """resync would put what is left in the place of a whole mirror."""
    run = make_run(tmp_path / "run", "bf16", 0)
    RunDirectory(run).append_samples([Sample(4, "7+5", "?", "12", {"answer": 1.0}, finished=True)])
    if not is_done:
        (run / "DONE").unlink()
        state = {"step": 4, "prompts_seen": 4, "config": {}}
        checkpoint.save(run / "checkpoints", state, lambda folder: (folder / "a").touch(), keep=1)
    assert "step 4" in format_step(run, None)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[at] for at in kept))
    with pytest.raises(ConfigError, match=rf"damaged \(metrics.jsonl {says}"):
        comparison.read([run])
    with pytest.raises(ConfigError, match=f"is damaged, and its mirror stays as it is. metrics.jsonl {says}"):
        resync(RunDirectory(run), f"sqlite:///{tmp_path}/none.db")
    with pytest.raises(ConfigError, match=f"metrics.jsonl {says}"):
        format_step(run, None)


def test_a_run_below_a_name_that_is_no_utf_8_is_not_damaged(tmp_path: Path) -> None:
    (make_run(tmp_path / "runs" / "moved", "bf16", 0)).rename(tmp_path / "runs" / os.fsdecode(b"\xff"))
    assert comparison.read([tmp_path / "runs"]).left_out == []
