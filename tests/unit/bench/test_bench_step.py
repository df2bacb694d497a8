"""Whole steps of the lab's trainer and of TRL's, at test size on the CPU."""

import os
from pathlib import Path
from typing import Any

import bitsandbytes
import pytest
import torch

from bench_jobs import ARCHITECTURE, job
from qerl_lab.bench import arm_processes, gpu, lab, one_arm, step
from qerl_lab.bench.bench_options import StepOptions
from qerl_lab.record.metrics import PHASES
from vllm_engines import NEEDS_VLLM

LAB = "nvfp4 rollout.engine=transformers"
ON_CPU = "use_vllm=false use_cpu=true bf16=false"  # on a CPU vLLM drops the tensors that TRL would write to
ON_VLLM = "bf16 rollout.vllm.enforce_eager=true model.dtype=bfloat16"
TRL, QLORA = f"bf16_trl {ON_CPU}", f"qlora_trl {ON_CPU}"


def options(**changes: Any) -> StepOptions:
    small = {"groups": 2, "group_size": 4, "prompt": 12, "new": 8, "micro_batch": 4, "steps": 2, "rank": 4}
    return StepOptions(**small | changes)


@pytest.mark.parametrize("arm", [LAB, TRL, QLORA])
def test_a_row_is_a_whole_step(tmp_path: Path, arm: str) -> None:
    (row,) = one_arm.rows_of(job(tmp_path, arm, options()))
    assert row["tokens"] == pytest.approx(8 * 8)
    assert row["step_seconds"] > 0
    assert row["grad_norm"] > 0
    assert 5 < row["nats"] < 6
    assert (row["completions"], row["micro_batch"], row["steps"]) == (8, 4, 2)
    assert row["policy_gib"] > 0
    if arm == LAB:
        phases = sum(row[f"{phase}_seconds"] for phase in PHASES)
        assert 0.5 * row["step_seconds"] < phases < 1.5 * row["step_seconds"]
        assert min(row[f"{phase}_seconds"] for phase in ("rollout", "train")) > 0
        owners = row["gib_by_owner"]
        assert owners["frozen base"] > 0
        assert owners["adapter, its gradients and moments"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["rank4", "nvfp4" if arm == LAB else "bf16" if arm == TRL else "nf4"]
    )


def test_an_arm_may_have_its_own_micro_batch_and_adapters_on_fewer_layers(tmp_path: Path) -> None:
    own = "optim.micro_batch_size=2 lora.target_modules=[q_proj,v_proj]"
    (row,) = one_arm.rows_of(job(tmp_path, f"{LAB} {own}", options(steps=1)))
    assert row["micro_batch"] == 2
    assert row["grad_norm"] > 0


def test_an_arm_of_trl_samples_all_completions_with_any_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled, alternate = list[int](), step.alternate
    monkeypatch.setattr(step, "alternate", lambda texts, asked: sampled.append(len(texts)) or alternate(texts, asked))
    (row,) = one_arm.rows_of(job(tmp_path, f"{TRL} per_device_train_batch_size=2", options(steps=1)))
    assert (row["micro_batch"], row["completions"], sampled) == (2, 8, [8, 8])
    fewer = job(tmp_path / "other", f"{TRL} gradient_accumulation_steps=1 steps_per_generation=1", options(steps=1))
    with pytest.raises(RuntimeError, match="a step samples 4 completions and trains 4, not 8"):
        list(one_arm.rows_of(fewer))


def test_the_memory_of_the_policy_does_not_depend_on_the_rank(tmp_path: Path) -> None:
    found = set()
    for rank in (4, 8):
        one = job(tmp_path / str(rank), LAB, options(rank=rank))
        found.add(lab.build(one)[2]["policy_gib"])
    assert len(found) == 1


@pytest.mark.parametrize("arm", [LAB, TRL])
def test_completions_have_mean_tokens_in_the_mean(tmp_path: Path, arm: str) -> None:
    ragged = options(new=64, mean_tokens=6, groups=8, steps=1)
    (row,) = one_arm.rows_of(job(tmp_path, arm, ragged))
    assert 32 * 3 < row["tokens"] < 32 * 12  # 6 in the mean, over 32 completions


def test_the_overrides_of_an_arm_reach_the_run(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a step sampled 32 tokens, not 8 x 8"):
        list(one_arm.rows_of(job(tmp_path, f"{LAB} rollout.max_completion_tokens=4", options())))


@pytest.mark.parametrize(("mean_tokens", "count"), [(0, 0), (10, 30)])
def test_all_end_tokens_can_be_sampled(tmp_path: Path, mean_tokens: float, count: int) -> None:
    """vLLM refuses a token outside of the vocabulary."""
    asked = job(tmp_path, LAB, options(mean_tokens=mean_tokens))
    policy, _, _ = lab.build(asked)
    ends = policy.end_ids()
    assert len(ends) == count
    assert all(0 < index < 300 for index in ends)


def test_the_base_of_qlora_is_counted_with_its_scales(tmp_path: Path) -> None:
    """NF4 with double quantization: 4 bits per weight, 8 per 64 weights, 32 per 256 of these, and a table."""
    weight = torch.randn(128, 512)
    packed = bitsandbytes.nn.Params4bit(weight, quant_type="nf4", blocksize=64, compress_statistics=True).to("cpu")
    scales = weight.numel() // 64
    layer = torch.nn.Linear(512, 128, bias=False)
    layer.weight = packed
    counted = gpu.base_gib(layer) * 2**30
    assert counted == pytest.approx(weight.numel() / 2 + scales + 4 * scales / 256, abs=2048)
    assert counted > weight.numel() / 2 + scales
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    assert gpu.base_gib(layer) * 2**30 == 4 * weight.numel()


@NEEDS_VLLM
def test_a_step_on_vllm_runs_in_its_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(arm_processes.ARCHITECTURES, "small", ARCHITECTURE)
    monkeypatch.setitem(os.environ, "VLLM_CPU_KVCACHE_SPACE", "1")
    ragged = options(model="small", arms=[ON_VLLM], new=64, mean_tokens=6, groups=8, steps=1, scratch=str(tmp_path))
    (row,) = arm_processes.run(ragged)
    assert "died" not in row, row["log"]
    assert 32 * 3 < row["tokens"] < 32 * 12
    assert row["max_num_seqs"] == 32
    assert row["weights_gib"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("arm", [LAB, pytest.param(ON_VLLM, marks=NEEDS_VLLM)])
def test_two_ranks_share_a_step_and_the_first_writes_its_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arm: str
) -> None:
    monkeypatch.setitem(arm_processes.ARCHITECTURES, "small", ARCHITECTURE)
    monkeypatch.setitem(os.environ, "VLLM_CPU_KVCACHE_SPACE", "1")
    both = [f"{arm} device=cpu", f"{arm} device=cpu gpus=2"]
    one, two = arm_processes.run(options(model="small", arms=both, steps=1, scratch=str(tmp_path)))
    assert "died" not in two, two["log"]
    assert two["tokens"] == pytest.approx(one["tokens"]) == 64
    assert (two["completions"], two["arm"], two["gpus"]) == (8, both[1], 2)


def found(grad_norm: float = 0.1) -> list[dict[str, float]]:
    """Return three steps, a slow one first."""
    return [
        {"step_seconds": seconds, "tokens": 64.0, "nats": 5.5, "grad_norm": grad_norm} for seconds in (100.0, 2.0, 3.0)
    ]


def test_the_first_step_does_not_count(tmp_path: Path) -> None:
    row = step.summarize(job(tmp_path, LAB, options()), found(), micro_batch_size=8)
    assert row["step_seconds"] == 2.5
    assert row["tokens_per_second"] == 128 / 5
    slow = found()[-1] | {"step_seconds": 10.0}
    row = step.summarize(job(tmp_path / "three", LAB, options(steps=3)), [*found(), slow], micro_batch_size=8)
    assert row["step_seconds"] == 3, "the median"
    assert row["tokens_per_second"] == 192 / 15


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (found()[:2], "asked for 2 steps after the first, and got 1"),
        (found(grad_norm=0.0), "the gradient is 0.0"),
        (found(grad_norm=float("nan")), "the gradient is nan"),
    ],
)
def test_wrong_steps_end_the_arm(tmp_path: Path, steps: list[dict[str, float]], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        step.summarize(job(tmp_path, LAB, options()), steps, micro_batch_size=8)


def test_every_second_answer_is_rewarded_so_that_a_group_of_two_has_a_gradient(tmp_path: Path) -> None:
    answers = step.alternate(["18", "no number", "18"], [step.Question("", "", "0")] * 3)["answer"]
    assert answers.tolist() == [0, 1, 0]
    (row,) = one_arm.rows_of(job(tmp_path, LAB, options(groups=1, group_size=2, micro_batch=2)))
    assert row["grad_norm"] > 0
