"""The benchmarks on a CPU: numbers, tables, refusals."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_jobs import job
from qerl_lab.bench import __main__ as command
from qerl_lab.bench import arm_processes, bench_options, one_arm, train_step
from qerl_lab.report import bench

OPTIONS = bench_options.TrainStepOptions(sequences=4, length=10, steps=2, rank=4)


def test_micro_batches_give_the_gradient_of_the_whole_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_: nullcontext())  # so that all stays float32
    model = train_step.build(job(tmp_path, "nvfp4", OPTIONS), torch.device("cpu")).float()
    for parameter in model.parameters():  # B of a new adapter is zero, and so would be the gradient of A
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    ids = torch.randint(300, (4, 10), generator=torch.Generator().manual_seed(1))
    grads: list[list[torch.Tensor]] = []

    class Optimizer:
        def step(self) -> None:
            grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])

        def zero_grad(self) -> None:
            model.zero_grad()

    for micro in (4, 1):
        train_step.train_step(model, Optimizer(), ids, micro)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    (-torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).mean()).backward()
    Optimizer().step()
    assert len(grads[0]) == 28
    assert min(grad.abs().max() for grad in grads[0]) > 0
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grads[0], grads[2], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("arm", ["bf16", "bf16_peft", "nvfp4", "qlora"])
def test_a_row_is_a_training_step_of_a_micro_batch_size(tmp_path: Path, arm: str) -> None:
    rows = list(one_arm.rows_of(job(tmp_path, arm, OPTIONS)))
    assert [row["micro_batch_tokens"] for row in rows] == [40, 10]
    assert all(row["tokens_per_second"] == 40 / (row["ms"] / 1e3) for row in rows)
    packed, rest = 2 * (3 * 128 * 192 + 128 * 2 * (128 + 64)), 2 * 300 * 128  # weights of two layers; embeddings, head
    bits = {"bf16": 32, "bf16_peft": 16, "nvfp4": 4.5, "qlora": 4.127}[arm]
    other = 32 if arm in ("bf16", "nvfp4") else 16
    tables = 14 * (16 + 256) * 4 if arm == "qlora" else 0  # of bitsandbytes, in float32, for each packed weight
    assert rows[0]["base_gb"] * 1e9 == pytest.approx((packed * bits + rest * other) / 8 + tables, rel=0.02)


def training_steps() -> list[dict[str, Any]]:
    about = {"model": "m", "rank": 4, "ms": 1.0, "peak_gb": 2.0, "base_gb": 1.0}
    return [
        {**about, "arm": arm, "loss": loss, "micro_batch_tokens": size, "tokens_per_second": speed}
        for arm, loss, size, speed in (
            ("bf16", "chunked", 8, 100.0), ("nvfp4", "chunked", 8, 90.0), ("qlora", "chunked", 8, 60.0),
            ("bf16", "chunked", 2, 50.0), ("nvfp4", "chunked", 2, 40.0), ("bf16", "full logits", 8, 80.0),
        )
    ]  # fmt: skip


def test_ratios_of_steps_compare_equal_micro_batches() -> None:
    result = {"benchmark": "train_step", "steps": training_steps(), "environment": {"gpus": []}}
    result["options"] = {"model": "m", "rank": 4}
    ratios = bench.measured(result)
    assert ratios["of_bf16"].tolist() == [1.0, 0.9, 0.6, 1.0, 0.8]
    assert ratios["of_qlora"].tolist()[:3] == [100 / 60, 1.5, 1.0]
    assert " - " in bench.text(result)  # no QLoRA arm at 2 tokens


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "bench train_step"),
        (["rolout"], "rolout is not a command. Did you mean rollout? Allowed: train_step, rollout, step."),
        (["train_step", "model=qwen2.5-7c"], "model=qwen2.5-7c is not allowed; allowed: qwen2.5-0.5b"),
        (["train_step", "arms=[bf61]"], "allowed: bf16, bf16_peft, fp8, mxfp4, nf4, nvfp4, qlora. Did you mean bf16?"),
        (["train_step", "length=1"], "length=1"),
        (["step", "arms=['nvfp4 optim.micro_batch_size=null']"], "in a run only. Type optim.micro_batch_size=8."),
        (["train_step", "BENCHMARK=x"], "BENCHMARK is not a known key. Allowed: length, sequences, arms"),
        (["train_step"], "error: The benchmarks need an NVIDIA GPU"),
    ],
)
def test_the_command_prints_its_usage_or_what_is_wrong(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if words == ["train_step"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main(words) == (2 if words else 0)
    assert message in "".join(capsys.readouterr())


def test_a_benchmark_is_printed_row_by_row_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "require_gpu", lambda: None)
    monkeypatch.setattr(arm_processes, "prepare", lambda options: None)
    monkeypatch.setattr(arm_processes, "run", lambda options: iter(training_steps()))
    assert command.main(["train_step", "arms=[bf16,nvfp4]", f"out={tmp_path}/new/result"]) == 0
    out, err = capsys.readouterr()
    kept = json.loads((tmp_path / "new" / "result.json").read_text())
    assert (kept["benchmark"], kept["rows"]) == ("train_step", training_steps())
    assert kept["environment"]["python"]
    assert kept["options"]["arms"] == ["bf16", "nvfp4"]
    assert "model m  " in err
    assert err.count("\n") == len(training_steps())
    assert out.endswith(f"{tmp_path}/new/result.json  {tmp_path}/new/result.png\n")
    assert (tmp_path / "new" / "result.png").stat().st_size > 10_000
