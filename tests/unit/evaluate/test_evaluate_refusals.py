"""What the evaluate commands refuse, each in one line."""

from pathlib import Path

import pytest

from qerl_lab.evaluate import __main__ as evaluate


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
        ("accuracy model=pocket benchmarks=arithmetic max_completion_tokens=2048", "Type max_completion_tokens=1024."),
        (
            "accuracy model=pocket benchmarks=arithmetic max_prompt_tokens=1024 max_completion_tokens=1500",
            "are 2524 tokens, and model.path=pocket was made for 2048. Type max_prompt_tokens=548.",
        ),
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
def test_what_cannot_be_is_refused_in_one_line(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert evaluate.main(words.split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert said in err
    assert err.count("\n") == 1
    assert not [*tmp_path.iterdir()], "a refused command makes no folder"


def test_one_question_gives_no_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "test.jsonl"):
        (tmp_path / name).write_text('{"question": "What is 1 + 1?", "answer": "1 + 1 = 2\\n#### 2"}\n')
    assert evaluate.main(["entropy", f"prompts=gsm8k:{tmp_path}", "device=cpu"]) == 2
    assert f"prompts=gsm8k:{tmp_path} has one question; allowed: two or more" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"train.jsonl", "test.jsonl"}
