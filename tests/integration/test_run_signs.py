"""The messages about questions left out, a collapse and a failing grader, and their traces in the record."""

import json
import re
from pathlib import Path

import pytest

from processes import run_module
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.line_files import PER_STEP

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def test_questions_left_out_and_a_collapse_are_reported_and_completions_are_kept(tmp_path: Path) -> None:
    words = [
        "+experiment=nvfp4", "steps=7", "rollout.prompts_per_step=8", "rollout.max_prompt_tokens=55",
        "optim.learning_rate=1", "eval.questions=0", "tracking=none", "device=cpu", "run_dir=run",
    ]  # fmt: skip
    ran = run_module("qerl_lab", *words, cwd=tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    done = json.loads((tmp_path / "run" / "DONE").read_text())
    (said,) = re.findall(r"note: ([\d,]+) more questions are longer than rollout\.max_prompt_tokens=55", ran.stdout)
    assert int(said.replace(",", "")) == done["training_questions_left_out"] > 0
    assert done["training_questions"] + done["training_questions_left_out"] == 4096
    (warning,) = re.findall(r"^warning, step .*", ran.stderr, re.MULTILINE)
    assert "the policy has collapsed" in warning
    assert warning.endswith("Type a lower optim.learning_rate (it is 1).")
    kept = RunDirectory(tmp_path / "run").samples()
    assert [sample.step for sample in kept] == [step for step in range(1, 8) for _ in range(PER_STEP)]
    assert sum(kept[0].rewards.values()) > 0
    assert sum(kept[-1].rewards.values()) == 0


def test_a_grader_that_fails_in_training_fails_the_run_and_its_traceback_is_shown(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "calls = []\n"
        "def grade(texts, questions):\n"
        "    calls.append(1)\n"
        "    return {'format': [1.0] * len(texts), 'answer': {1: [1.0], 2: [0.5] * len(texts)}[len(calls)]}\n"
    )
    words = [
        "task.module=mine.py", "steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.questions=0",
        "algorithm.dynamic_sampling=false", "tracking=none", "device=cpu", "run_dir=run",
    ]  # fmt: skip
    ran = run_module("qerl_lab", *words, cwd=tmp_path)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert 'mine.py", line 4, in grade' in ran.stderr
    said = (
        "failed: GraderFailed: task.module=.*mine.py: grade.* raised KeyError: 3 .line 4.\\.\nrun/FAILED has the trace"
    )
    assert re.search(said, ran.stderr)
    assert "+def grade(texts, questions):" in (tmp_path / "run" / "code.diff").read_text()
