"""A session of a run: its record, its checks before the model loads, and its first lines."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import AqnConfig
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.model.policy import Policy
from qerl_lab.record import checkpoint, environment
from qerl_lab.record.directory import RunDirectory
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.system.exits import FAILURE, USAGE
from qerl_lab.train import run as run_module
from qerl_lab.train.__main__ import main
from qerl_lab.train.stop import Stop
from run_directories import claimed
from small_checkpoints import edit_config


@pytest.mark.parametrize("taken", ["fp4_tiles", None])
def test_the_kernels_that_the_engine_took_are_recorded(tiny, tmp_path: Path, monkeypatch, taken: str | None) -> None:
    """Another kernel gives other numbers. An engine without a choice of kernels records none."""
    monkeypatch.setattr(run_module, "train", lambda *_: None)
    monkeypatch.setattr(run_module, "conclude", lambda *_: None)
    if taken:
        monkeypatch.setattr(TransformersEngine, "linear_backend", taken, raising=False)
    run_module.run(tiny(eval__questions=0), directory := RunDirectory(tmp_path), Stop())
    assert directory.environment()["linear_backend"] == taken
    assert directory.environment()["micro_batch_size"] == 4


def test_the_recorded_code_hash_is_from_before_the_model_loads(tiny, tmp_path: Path, monkeypatch) -> None:
    """Otherwise the same command would take these numbers for numbers of the edited code."""
    shutil.copytree(environment.PACKAGE, package := tmp_path / "qerl_lab")
    monkeypatch.setattr(environment, "PACKAGE", package)
    began, build_policy = environment.code_hash(), run_module.build_policy

    def edit_and_build(*args: Any) -> Policy:
        (package / "aqn" / "new.py").write_text("x = 1\n")
        return build_policy(*args)

    monkeypatch.setattr(run_module, "build_policy", edit_and_build)
    monkeypatch.setattr(run_module, "train", lambda *_: None)
    monkeypatch.setattr(run_module, "conclude", lambda *_: None)
    run_module.run(tiny(eval__questions=0), directory := RunDirectory(tmp_path), Stop())
    assert environment.code_hash() != began
    assert directory.environment()["code_hash"] == began


def test_a_killed_session_lasts_until_its_last_line_also_if_this_step_is_trained_again(
    tiny, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(run_module, "train", lambda *_: None)
    monkeypatch.setattr(run_module, "conclude", lambda *_: None)
    directory = claimed(tmp_path / "run", tiny(eval__questions=0))
    directory.begin_session(1.0)
    directory.append_metrics(1, {"reward/mean": 0.0})
    (line,) = directory.metrics()
    run_module.run(directory.config(), directory, Stop())
    assert directory.metrics() == []
    assert directory.sessions()[0] == [1.0, line["time"]]


@pytest.mark.parametrize("is_renamed", [True, False])
def test_a_run_whose_directory_was_renamed_says_that_and_prints_no_traceback(
    tiny, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str], is_renamed: bool
) -> None:
    directory = claimed(tmp_path / "run", tiny())

    def rename_and_write(*_: Any) -> int:
        if is_renamed:
            directory.path.rename(tmp_path / "renamed")
        raise FileNotFoundError("checkpoints/step-000004")

    monkeypatch.setattr(run_module, "run", rename_and_write)
    monkeypatch.setattr(Stop, "on_signals", lambda parent: Stop())
    said = f"ConfigError: {directory.path} was removed or renamed while its run" if is_renamed else "FileNotFoundError:"
    assert main(directory, os.getppid()) == (USAGE if is_renamed else FAILURE)
    assert directory.reason.startswith(said)
    assert ("Traceback" in capsys.readouterr().err) is not is_renamed


@pytest.mark.parametrize(
    ("began", "said"),
    [
        (
            {"gpus": [], "data": {"heldout_questions": 2, "heldout_sha256": "b" * 64}},
            "the heldout questions have changed since the run began",
        ),
        ({"gpus": [{"name": "a GPU"}]}, "began on cuda, and here it would continue on cpu: one record would hold two"),
    ],
)
def test_a_run_without_a_checkpoint_refuses_other_questions_and_another_device(
    tiny, tmp_path: Path, monkeypatch, began: dict, said: str
) -> None:
    """A run killed before its first checkpoint has recorded answers, which are not asked for again."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cfg = tiny(device="auto")
    directory = claimed(tmp_path / "run", cfg)
    (directory.path / "env.json").write_text(json.dumps(began))
    with pytest.raises(ConfigError, match=said):
        run_module.build_session(cfg, directory, Stop())


@pytest.mark.parametrize(("returned", "wrong"), [
    ("{'answer': [1.0 for _ in texts]}", "must return a dict of scores"),
    ("{'answer': [len(text) / max(map(len, texts)) for text in texts]}", "raised ZeroDivisionError: division by zero"),
])  # fmt: skip
def test_a_mistake_in_a_grader_is_said_before_the_model_loads(
    tiny, tmp_path: Path, monkeypatch, returned: str, wrong: str
) -> None:
    monkeypatch.setattr(run_module, "build_policy", lambda *_: pytest.fail("loaded the model"))
    module = tmp_path / "grader.py"
    module.write_text(f"def grade(texts, questions): return {returned}")
    cfg = tiny(task__module=str(module))
    directory = claimed(tmp_path / "run", cfg)
    said = rf"grader.py: grade\(texts, questions\) {wrong}.* a trial with one empty text"
    with pytest.raises(ConfigError, match=said):
        run_module.build_session(cfg, directory, Stop())


def test_a_run_with_a_checkpoint_skips_the_trial_of_its_grader(tiny, tmp_path: Path, monkeypatch) -> None:
    """The grader's file must not change any more, and may never have met an empty text."""
    module = tmp_path / "grader.py"
    module.write_text("def grade(texts, questions): return {'answer': [1 / len(text) for text in texts]}")
    cfg = tiny(task__module=str(module))
    directory = claimed(tmp_path / "run", cfg)
    saved = checkpoint.Saved(directory.checkpoints / "checkpoint-1", step=1, prompts_seen=4, config={})
    monkeypatch.setattr(directory, "starting_point", lambda: saved)
    monkeypatch.setattr(run_module, "build_policy", lambda *_: (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        run_module.build_session(cfg, directory, Stop())


@pytest.mark.parametrize(
    ("name", "weights"),
    [("nvfp4", "nvfp4 (4.50 bits a weight, 0.45 MiB)"), ("bf16", "bf16 (16.00 bits a weight, 3.16 MiB in float32)")],
)
def test_the_opening_lines_say_what_is_trained_on_what(tiny, tmp_path: Path, name: str, weights: str) -> None:
    sizes = {"optim__micro_batch_size": 8, "rollout__max_prompt_tokens": 48}
    cfg = tiny(format__name=name, aqn__schedule="off", **sizes)
    session = run_module.build_session(cfg, claimed(tmp_path / "run", cfg), Stop())
    assert run_module.opening_lines(session).splitlines() == [
        f"adhoc at scale pocket: pocket in {weights}, no AQN, on cpu",
        "grpo, LoRA rank 4 (34,176 parameters), learning rate 1e-05, arithmetic with 14 questions",
        "3 steps of 4 x 4 completions of at most 16 tokens, micro-batches of 8, seed 0",
        "note: 50 more questions are longer than rollout.max_prompt_tokens=48, and left out",
        "note: 949 held-out questions are longer than rollout.max_prompt_tokens=48, and left out",
    ]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"schedule": "off"}, "no AQN"),
        ({}, "AQN exponential 0, then 0.05 -> 0.0005"),
        ({"relative": True}, "AQN exponential 0, then 0.05 -> 0.0005 of each norm's size"),
        ({"stages": 2}, "AQN exponential 0, then 0.05 -> 0.05"),
        ({"reading": "algorithm"}, "AQN exponential 0, then 0.05 -> 0.00083405"),  # 0.05 * 0.01 ** (8 / 9)
        ({"reading": "equation"}, "AQN exponential 0.05 -> 0.0005"),
        ({"unit": "kl", "schedule": "linear"}, "AQN linear, KL 0, then 0.003 -> 0.0001 nats"),
        ({"unit": "kl", "schedule": "adaptive"}, "AQN adaptive, KL 0.003 nats, from sigma 0.05"),
    ],
)
def test_the_noise_of_a_run_in_words(changes: dict, said: str) -> None:
    sizes = {"schedule": "exponential", "sigma_start": 0.05, "sigma_end": 5e-4, "kl_start": 3e-3, "kl_end": 1e-4}
    assert run_module.noise_line(AqnConfig(**sizes | changes)) == said


def test_a_chat_template_with_a_date_gets_the_day_on_which_the_run_began(tiny, tmp_path: Path) -> None:
    model = Path(shutil.copytree(ASSETS, tmp_path / "model"))
    template = model / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}" + template.read_text())
    cfg = tiny(model__path=str(model))
    directory = claimed(tmp_path / "run", cfg)
    directory.begin_session(1721995200.0)  # 2024-07-26, noon
    session = run_module.build_session(cfg, directory, Stop())
    prompt = session.policy.chat.prompt_ids(session.data.task.messages(session.data.questions[0]))
    assert session.policy.decode_prompt(prompt).startswith("26 Jul 2024")
    assert any("2024-07-26" in note for note in session.notes)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_a_model_with_dropout_of_its_own_is_noted(tiny, tmp_path: Path, rate: float) -> None:
    """Nobody asked for it, and each update would be of a policy other than the sampler's."""
    model = Path(shutil.copytree(ASSETS, tmp_path / "model"))
    edit_config(model, attention_dropout=rate)
    cfg = tiny(model__path=str(model))
    session = run_module.build_session(cfg, claimed(tmp_path / "run", cfg), Stop())
    assert any("has dropout (attention_dropout=0.1)" in note for note in session.notes) is (rate > 0)
