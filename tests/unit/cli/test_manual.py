"""The overview, --help, and the table of a dry run."""

from pathlib import Path

import pytest

import qerl_lab
from qerl_lab import preflight
from qerl_lab.cli.compose import make_plan
from qerl_lab.cli.manual import describe_option, help_text
from qerl_lab.cli.overrides import COMMANDS
from qerl_lab.cli.train import main
from qerl_lab.config.arm import leaves
from qerl_lab.config.conf_folder import choices_of, package_data
from qerl_lab.config.schema import RunConfig


@pytest.fixture(autouse=True)
def _empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def printed(line: str, capsys) -> str:
    assert main(line.split()) == 0
    return capsys.readouterr().out


def test_without_a_word_it_lists_the_experiments_and_what_to_type(capsys):
    text = printed("", capsys)
    for name in choices_of("experiment"):
        meaning = describe_option(package_data("conf") / "experiment" / f"{name}.yaml")
        assert f"{name} " in text
        assert meaning in text
    assert "python -m qerl_lab +experiment=nvfp4_aqn" in text
    assert "--help" in text


def test_flags_alone_start_nothing_and_list_the_experiments(capsys, tmp_path):
    (tmp_path / "own").mkdir()
    assert len({printed(line, capsys) for line in ("", "-m", "hydra.verbose=true", "-cd=own -m")}) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_the_manual_names_every_option_file_with_its_meaning_and_every_key_with_its_help():
    text, words = help_text(), " ".join(help_text().split())
    for path in [*package_data("conf").glob("*/*.yaml"), *package_data("sweeps").glob("*.yaml")]:
        assert f"  {path.stem}" in text
        assert describe_option(path) in words
    for name, field, _ in leaves(RunConfig()):
        assert f"  {name}=" in text
        assert " ".join(field.metadata["help"].split()) in words
    assert "  pocket* " in text, "a default is marked"
    assert max(map(len, text.splitlines())) <= 100
    (usual,) = make_plan([], multirun=False).jobs
    assert usual.config.steps != RunConfig().steps
    assert f"  steps={usual.config.steps} " in text


def test_the_manual_names_every_command():
    root = Path(qerl_lab.__file__).parent
    packages = {path.parent.name for path in root.glob("*/__main__.py")} - {"train"}  # the command starts it
    scripts = {f"tools.{path.stem}" for path in root.glob("tools/*.py") if '"__main__"' in path.read_text()}
    assert set(COMMANDS) == packages | scripts
    text, words = help_text(), " ".join(help_text().split())
    for name, meaning in COMMANDS.items():
        assert f"  python -m qerl_lab.{name} " in text
        assert meaning in words


def test_a_dry_run_shows_the_job_and_makes_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.machine, "GPU_NODES", ("/dev/null",))
    monkeypatch.setattr(preflight.machine, "gpu_memory_bytes", lambda: None)
    monkeypatch.setattr(preflight, "refuse_full_disk", lambda *_: None)  # the model takes 6 GB
    text = printed("+experiment=nvfp4_aqn +scale=paper_gsm8k_3b seed=3 lora.rank=8 dry_run=true", capsys)
    header, row, last = text.splitlines()
    assert dict(zip(header.split(), row.split(), strict=False)) | {"run": ""} == {
        "job": "0", "experiment": "nvfp4_aqn", "scale": "paper_gsm8k_3b", "model": "qwen2_5_3b", "format": "nvfp4",
        "aqn": "exponential", "algorithm": "grpo", "rank": "8", "seed": "3", "steps": "600", "batch": "128", "run": "",
    }  # fmt: skip
    assert row.split()[11].startswith("runs/nvfp4_aqn/seed3/2")
    assert "1 job" in last
    assert not list(tmp_path.iterdir())


def test_a_dry_run_says_what_was_fitted_and_in_which_jobs(capsys):
    text = printed("-m rollout.prompts_per_step=8,2 seed=0,1 dry_run=true", capsys)
    assert text.count("note: ") == 1
    assert "note: optim.micro_batch_size=16 instead of 64" in text
    assert "completions of an update (job 2, 3)" in text


def test_a_dry_run_of_a_sweep_shows_every_job_and_makes_nothing(capsys, tmp_path):
    text = printed("experiment=nf4,bf16 -m seed=range(0,2) dry_run=true", capsys)
    rows = [line.split() for line in text.splitlines()]
    assert [(row[0], row[1], row[8], row[11]) for row in rows[1:5]] == [
        ("0", "nf4", "0", "0-nf4-seed0"), ("1", "nf4", "1", "1-nf4-seed1"),
        ("2", "bf16", "0", "2-bf16-seed0"), ("3", "bf16", "1", "3-bf16-seed1"),
    ]  # fmt: skip
    assert "would run 4 jobs in runs/sweeps/adhoc/" in text
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_a_sweep_shows_the_words_that_no_column_tells(capsys):
    text = printed("-m +experiment=nvfp4 format.scale_rule=max,four_over_six lora.rank=8 dry_run=true", capsys)
    header, *rows = text.splitlines()[:3]
    begin, end = header.index("overrides"), header.index("run directory")
    assert [row[begin:end].strip() for row in rows] == ["format.scale_rule=max", "format.scale_rule=four_over_six"]
