"""Refusals of the evaluate commands, each in one line."""

import shutil
from pathlib import Path

import pytest

from hub_rows import gsm8k, write_jsonl
from qerl_lab.config.option import ConfigError
from qerl_lab.config.task import TaskConfig
from qerl_lab.evaluate import __main__ as evaluate
from qerl_lab.evaluate.subject import load_questions
from qerl_lab.model.on_disk import ASSETS
from refusals import refusal_of


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("accuracy", "neither run= nor model= is given; allowed: one of them."),
        ("accuracy run=a model=b", "run=a and model=b are given; allowed: one of them."),
        ("accuracy model=pocket", "benchmarks= is missing, and model=pocket has no task."),
        ("accuracy model=pocket benchmarks=gsm8", "gsm8 in benchmarks=[gsm8] is no task; allowed: "),
        ("accuracy model=pocket benchmarks=gsm8k,gsm8k:x", "gsm8k is in benchmarks 2 times."),
        ("accuracy model=pocket benchmarks=gsm8k adapter=false", "adapter=false is of a run"),
        ("accuracy run=a format=nf4", "format=nf4 is of a model, and run=a has its own."),
        ("accuracy model=nowhere/at/all benchmarks=gsm8k", "model=nowhere/at/all is no directory"),
        ("accuracy model=pocket benchmarks=gsm8k:/nowhere", "Type benchmarks=gsm8k:DIRECTORY, or put"),
        ("accuracy model=pocket benchmarks=gsm8k:/no.jsonl", "gsm8k:/no.jsonl is not there; allowed: a directory"),
        ("accuracy model=pocket benchmarks=gsm8k:", "it names no path after the colon. Type gsm8k alone"),
        ("accuracy model=pocket benchmarks=arithmetic:x", "arithmetic makes its own questions. Type arithmetic alone"),
        (
            "accuracy model=pocket benchmarks=arithmetic max_completion_tokens=2048",
            "are 3072 tokens, and model=pocket was made for 2048 (its config.json: "
            "max_position_embeddings). Type max_prompt_tokens=1024 max_completion_tokens=",
        ),
        (
            "accuracy model=pocket benchmarks=arithmetic max_prompt_tokens=500 max_completion_tokens=1600",
            "are 2100 tokens, and model=pocket was made for 2048 (its config.json: "
            "max_position_embeddings). Type max_prompt_tokens=500 max_completion_tokens=",
        ),
        ("entropy formats=nvfp4 checkpoints=pocket", "error: pocket in checkpoints is dense; allowed: packed ones."),
        (
            "accuracy model=pocket benchmarks=arithmetic rollout=vllm_server common=true",
            "common=true with rollout=vllm_server",
        ),
        ("compare a", "given: a; allowed: two directories, A and B."),
        ("entropy formats=fp5", "fp5 in formats=[fp5] is not allowed; allowed: all, bf16, fp8, mxfp4, nf4, nvfp4."),
        ("entropy prompts=gsm8", "prompts=gsm8 is no task; allowed: "),
        ("entropy questions=1", "questions=1 is not allowed; allowed: at least 2."),
        ("entropy formats=bf16", "formats=[bf16] leaves nothing to compare with the dense model"),
        ("entropy formats=bf16 checkpoints=/no/where", "checkpoints=/no/where is no directory"),
        ("sigma sigmas=[abc]", "sigmas=[abc] is not allowed; allowed: a list of numbers. Type for example"),
        ("sigma sigmas=[0.1,inf]", "inf in sigmas=[0.1,inf] is not allowed; allowed: a finite number. Type for"),
    ],
)
def test_impossible_options_are_refused_in_one_line(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refusal_of(evaluate.main, words.split(), capsys)


def test_refusals_name_the_options_of_the_command_and_not_the_keys_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ASSETS, "broken")
    Path("broken/model.safetensors").write_bytes(b"cut off")
    for words in (["accuracy", "benchmarks=arithmetic"], ["entropy"], ["sigma"]):
        assert evaluate.main([*words, "model=broken"]) == 2
        assert capsys.readouterr().err.startswith("error: model=broken could not be loaded (")
    short = TaskConfig(
        name="gsm8k", path=str(write_jsonl(tmp_path / "test.jsonl", [gsm8k(1) | {"answer": "a\nb\n#### 2"}]))
    )
    short.gsm8k.max_steps = 1
    with pytest.raises(ConfigError, match=r"steps\. Type benchmarks=gsm8k:PATH of other questions\.$"):
        load_questions(short, "benchmarks=gsm8k:")


def test_one_question_gives_no_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = '{"question": "What is 1 + 1?", "answer": "1 + 1 = 2\\n#### 2"}\n'
    for rows, said in ((one, "has 1 question; allowed: two or more"), ("", "has 0 questions; allowed: two or more")):
        (tmp_path / "test.jsonl").write_text(rows)
        assert evaluate.main(["entropy", f"prompts=gsm8k:{tmp_path}", "device=cpu"]) == 2
        assert f"prompts=gsm8k:{tmp_path} {said}" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["test.jsonl"]
