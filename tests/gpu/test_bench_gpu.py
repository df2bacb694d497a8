"""The benchmark commands on a GPU, at the smallest size."""

import json
from pathlib import Path

import pytest

from processes import run_module
from vllm_engines import NEEDS_VLLM

pytestmark = pytest.mark.gpu


def bench(tmp_path: Path, *words: str) -> tuple[dict, str]:
    done = run_module("qerl_lab.bench", *words, f"out={tmp_path}/result", cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "result.png").stat().st_size > 10_000
    return json.loads((tmp_path / "result.json").read_text()), done.stdout


def test_bench_train_step_measures_memory_of_every_arm(tmp_path: Path) -> None:
    result, out = bench(
        tmp_path, "train_step", "model=qwen2.5-0.5b", "sequences=2", "length=128", "steps=1", "arms=[bf16,nvfp4,qlora]"
    )
    rows = {(row["arm"], row["micro_batch_tokens"]): row for row in result["rows"]}
    assert len(rows) == 6
    assert rows["nvfp4", 256]["base_gb"] < 0.7 * rows["bf16", 256]["base_gb"]
    assert all(row["peak_gb"] > row["base_gb"] for row in result["rows"])
    assert "of QLoRA" in out


@NEEDS_VLLM
def test_bench_rollout_measures_every_arm_and_batch(tmp_path: Path) -> None:
    arms = ["bf16_stock", "qlora_stock", "nvfp4_stock", "bf16", "nvfp4", "mxfp4", "nf4"]
    result, out = bench(
        tmp_path, "rollout", "model=qwen2.5-0.5b", f"arms=[{','.join(arms)}]", "batches=[1,4]", "prompt=64", "new=32",
        "repeats=2", "ranks=[16]",
    )  # fmt: skip
    rows = {(row["arm"], row["batch"]): row for row in result["rows"]}
    assert set(rows) == {(arm, batch) for arm in arms for batch in (1, 4)}
    assert all(row["nats"] > 5 for row in result["rows"])
    assert rows["nvfp4", 4]["weights_gib"] < 0.8 * rows["bf16", 4]["weights_gib"]
    assert all(row["sm_mhz"] > 300 for row in result["rows"])
    assert all(row["policy_gib"] < row["used_gib"] for row in result["rows"] if not row["baseline"])
    for setting in ("max_num_seqs", "max_num_batched_tokens", "chunked_prefill", "prefix_caching", "cuda_graphs"):
        assert len({row[setting] for row in result["rows"]}) == 1, setting
    assert "of QLoRA" in out


@NEEDS_VLLM
def test_bench_step_measures_memory_of_every_arm(tmp_path: Path) -> None:
    result, out = bench(
        tmp_path, "step", "model=qwen2.5-0.5b", "arms=[bf16_trl,qlora_trl,bf16,nvfp4]", "groups=2", "group_size=4",
        "prompt=64", "new=32", "micro_batch=4", "steps=1",
    )  # fmt: skip
    rows = {row["arm"]: row for row in result["rows"]}
    assert all(row["tokens"] == 8 * 32 for row in rows.values())
    assert all(row["peak_gib"] > row["policy_gib"] for row in rows.values())
    assert rows["nvfp4"]["policy_gib"] < 0.8 * rows["bf16"]["policy_gib"]
    owners = rows["nvfp4"]["gib_by_owner"]
    assert owners["frozen base"] == pytest.approx(rows["nvfp4"]["policy_gib"], rel=0.1)
    assert owners["activations and the rest"] > 0
    assert "memory of nvfp4, GiB: frozen base" in out
    assert "train" in out
