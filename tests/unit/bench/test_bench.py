"""The benchmarks, as far as a CPU can run them: what is computed, what the tables say of it, what is refused."""

import json
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from bench_jobs import job
from qerl_lab import formats
from qerl_lab.bench import __main__ as command
from qerl_lab.bench import arm_processes, bench_options, one_arm, train_step
from qerl_lab.report import bench, bench_figures, palette
from qerl_lab.system import exits

OPTIONS = bench_options.TrainStepOptions(sequences=4, length=10, steps=2, rank=4)


def test_micro_batches_give_the_gradient_of_the_whole_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *_: nullcontext())  # to float32
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
    assert rows[0]["base_gb"] * 1e9 == pytest.approx((packed * bits + rest * other) / 8, rel=0.08)


def products() -> dict[str, Any]:
    """bf16 takes 1, ours 1.5, bitsandbytes 2 in a layer of two kinds of Linears, the first of which is there twice."""
    rows = [
        {"model": "m", "layer": layer, "N": 1, "K": 1, "count": count, "tokens": 512, "arm": arm, "ms": ms * times,
         "eager_ms": 9.0}
        for layer, count, times in (("a", 2, 1.0), ("b", 1, 10.0))
        for arm, ms in (("bf16", 1.0), ("nvfp4", 1.5 if layer == "a" else 1.2), ("bitsandbytes", 2.0))
    ]  # fmt: skip
    unpacking = [{"model": "m", "layer": "a", "format": "nvfp4", "of_copy": 0.91}]
    return {"benchmark": "linear", "products": rows, "dequantization": unpacking, "environment": {"gpus": []}}


def test_ratios_of_products() -> None:
    ratios = bench.product_ratios(products()).set_index(["layer", "arm"])
    assert ratios.loc[("a", "nvfp4"), "of_bf16"] == 1.5
    assert ratios.loc[("a", "nvfp4"), "of_bitsandbytes"] == 0.75
    assert ratios.loc[(bench.LAYER, "nvfp4"), "of_bf16"] == pytest.approx((2 * 1.5 + 12) / (2 + 10))
    text = bench.text(products())
    assert "0.91" in text
    assert "1.50 (0.75)" in text


def training_steps() -> list[dict[str, Any]]:
    about = {"model": "m", "step_tokens": 8, "rank": 4, "ms": 1.0, "peak_gb": 2.0, "base_gb": 1.0}
    return [
        {**about, "arm": arm, "loss": loss, "micro_batch_tokens": size, "tokens_per_second": speed}
        for arm, loss, size, speed in (
            ("bf16", "chunked", 8, 100.0), ("nvfp4", "chunked", 8, 90.0), ("qlora", "chunked", 8, 60.0),
            ("bf16", "chunked", 2, 50.0), ("nvfp4", "chunked", 2, 40.0), ("bf16", "full logits", 8, 80.0),
        )
    ]  # fmt: skip


def test_ratios_of_steps_compare_equal_micro_batches(tmp_path: Path) -> None:
    result = {"benchmark": "train_step", "steps": training_steps(), "environment": {"gpus": []}}
    result["options"] = {"model": "m", "rank": 4}
    ratios = bench.measured(result)
    assert ratios["of_bf16"].tolist() == [1.0, 0.9, 0.6, 1.0, 0.8, 0.8]
    assert ratios["of_qlora"].tolist()[:3] == [100 / 60, 1.5, 1.0]
    assert " - " in bench.text(result)  # no QLoRA arm at 2 tokens
    bench_figures.draw(result, tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 10_000


def test_decode_adds_up_the_layers_and_leaves_out_what_was_not_timed(tmp_path: Path) -> None:
    rows = [
        {"layer": layer, "rows": number, "arm": arm, "us": us * number}
        for layer, us in (("qkv_proj", 1.0), ("o_proj", 2.0)) for number in (8, 64)
        for arm in ("marlin", "fp4_tiles") if (arm, number) != ("fp4_tiles", 64)
    ]  # fmt: skip
    result = {"benchmark": "decode", "options": {"model": "m"}, "environment": {"gpus": []}, "decode": rows}
    times = bench.decode_times(result)
    assert times.loc[(bench.LAYER, 8)].to_dict() == {"marlin": 24.0, "fp4_tiles": 24.0}
    assert times.loc[(bench.LAYER, 64), "marlin"] == 192.0
    assert bench.text(result).splitlines()[-1].split()[-1] == "-"
    bench_figures.draw(result, tmp_path / "decode.png")
    assert (tmp_path / "decode.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "bench train_step"),
        (["rolout"], "rolout is not a command. Did you mean rollout? Allowed: train_step, rollout, step."),
        (["train_step", "model=qwen2.5-7c"], "model=qwen2.5-7c is not allowed; allowed: qwen2.5-0.5b"),
        (["train_step", "arms=[]"], "arms=[] leaves nothing to measure."),
        (["train_step", "arms=[bf61]"], "allowed: bf16, bf16_peft, fp8, mxfp4, nf4, nvfp4, qlora. Did you mean bf16?"),
        (["train_step", "length=1"], "length=1"),
        (["train_step", "out="], "error: out= has no file name. Type for example out=results/bench/mine."),
        (["train_step"], "error: The benchmarks need an NVIDIA GPU"),
    ],
)
def test_what_the_command_says(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if words == ["train_step"] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert command.main(words) == (2 if words else 0)
    assert message in "".join(capsys.readouterr())


def test_a_benchmark_is_printed_row_by_row_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "require_gpu", lambda: None)
    monkeypatch.setattr(arm_processes, "check", lambda options: None)
    monkeypatch.setattr(arm_processes, "run", lambda options: iter(training_steps()))
    heard = {name: signal.getsignal(name) for name in exits.SIGNALS}
    try:
        assert command.main(["train_step", "arms=[bf16,nvfp4]", f"out={tmp_path}/new/result"]) == 0
    finally:
        for name, handler in heard.items():
            signal.signal(name, handler)
    out, err = capsys.readouterr()
    kept = json.loads((tmp_path / "new" / "result.json").read_text())
    assert (kept["benchmark"], kept["rows"]) == ("train_step", training_steps())
    assert kept["environment"]["python"]
    assert kept["options"]["arms"] == ["bf16", "nvfp4"]
    assert "model m  " in err
    assert err.count("\n") == len(training_steps())
    assert out.endswith(f"{tmp_path}/new/result.json  {tmp_path}/new/result.png\n")
    assert (tmp_path / "new" / "result.png").stat().st_size > 10_000


def test_every_format_is_an_arm_and_has_a_colour() -> None:
    assert set(bench_options.FORMATS) == set(formats.FORMATS)
    assert set(bench_options.ARMS) - {"bf16_peft", "qlora"} == set(formats.FORMATS)
    assert len({palette.color(name) for name in formats.FORMATS}) == len(formats.FORMATS)


def test_the_table_names_the_longest_kernels_of_older_files_and_adds_up_the_others() -> None:
    about = {
        "arm": "nvfp4", "format": "nvfp4", "baseline": False, "rank": 4, "batch": 8, "tokens_per_second": 1.0,
        "tokens_per_second_min": 1.0, "tokens_per_second_max": 1.0, "decode_ms": 0.05, "sync_ms": 1.0,
        "start_seconds": 1.0, "weights_gib": 1.0, "kv_gib": 1.0, "used_gib": None, "model": "m", "busy_us": 40.0,
    }  # fmt: skip
    kernels = [{"name": f"k{number}", "calls": 2.0, "us": 20.0 - number} for number in range(14)]
    result = {"benchmark": "rollout", "rows": [about | {"kernels": kernels}], "options": {}}
    lines = bench.text(result).splitlines()
    assert lines[-14] == "nvfp4, rank 4, batch 8: kernels run for 40 microseconds of a token's 50"
    assert lines[-13].split() == ["20", "in", "2", "launches", "k0"]
    assert lines[-1].split() == ["15", "in", "4", "launches", "2", "others"]
