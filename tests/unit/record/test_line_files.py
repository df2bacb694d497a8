"""Write, read, cut and show samples.jsonl."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from qerl_lab.config.option import ConfigError
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.line_files import CHARACTERS, Sample
from qerl_lab.tools.samples import format_step, main

ONE = Sample(
    1, "7+5", "Ann has 7 pens.\nHow many?", "<think>7+5</think>é", {"format": 0.2, "answer": 1.0}, finished=True
)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Three steps of two samples."""
    for step in (1, 2, 3):
        two = [replace(ONE, step=step), replace(ONE, step=step, question_id="8-3", finished=False)]
        RunDirectory(tmp_path).append_samples(two)
    return tmp_path


LIST = json.dumps(asdict(ONE) | {"rewards": [1.0]}).encode()


@pytest.mark.parametrize("bad", [b'{"step": "1"}', b"garbage", LIST, None])
def test_a_line_that_is_no_sample_is_named(run_dir: Path, bad: bytes | None) -> None:
    """LIST has a list in place of rewards; None stands for a text in place of a reward."""
    path = run_dir / "samples.jsonl"
    assert RunDirectory(run_dir).samples()[0] == ONE
    whole = path.read_bytes()
    path.write_bytes((bad or whole.splitlines()[0].replace(b"1.0", b'"1"')) + b"\n" + whole)
    for read in (RunDirectory.samples, lambda run: run.cut_records(2)):
        with pytest.raises(ConfigError, match=r"samples\.jsonl, line 1, is not a sample: .*Delete the line"):
            read(RunDirectory(run_dir))


def test_a_long_completion_keeps_its_ends(tmp_path: Path) -> None:
    RunDirectory(tmp_path).append_samples([replace(ONE, completion="a" * CHARACTERS + "b" * CHARACTERS)])
    (sample,) = RunDirectory(tmp_path).samples()
    half = CHARACTERS // 2
    assert sample.completion == "a" * half + f"\n[... {CHARACTERS:,} characters ...]\n" + "b" * half


def test_the_command_shows_the_last_step_or_the_one_asked_for(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run_dir)]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    assert first == (
        "step 3, 7+5: reward 1.2 (format 0.2, answer 1)\n  Ann has 7 pens.\n  How many?\n  <think>7+5</think>é"
    )
    assert second.startswith("step 3, 8-3: reward 1.2 (format 0.2, answer 1), cut at the token limit\n")
    assert main([str(run_dir), "step=1"]) == 0
    assert capsys.readouterr().out.count("step 1, ") == 2
    assert main([str(run_dir), "step=9"]) == 2
    assert "step=9 is not in" in capsys.readouterr().err


def test_a_completion_cannot_steer_the_terminal(tmp_path: Path) -> None:
    RunDirectory(tmp_path).append_samples([replace(ONE, completion="\x1b[2J\x07\r\u202eok")])
    assert format_step(tmp_path, None).endswith(r"\x1b[2J\x07\r\u202eok")


def test_a_directory_without_samples_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "resolved.yaml").write_text("steps: 1\n")
    assert main([str(tmp_path)]) == 2
    assert "has no sample in samples.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(("place", "said"), [("", "has no resolved.yaml, so it is no run"), ("no", "is no directory")])
def test_a_directory_of_no_run_is_said(
    place: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / place)]) == 2
    assert said in capsys.readouterr().err
