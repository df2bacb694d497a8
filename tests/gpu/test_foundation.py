"""On a GPU the norms of a bf16 model hold the requested noise, and the command trains."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from qerl_lab.aqn import Noise, observed_std
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import policy
from qerl_lab.rollout.transformers import TransformersEngine
from small_checkpoints import write_dense

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def real_shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write random weights in the architecture of Qwen2.5-0.5B, with the embedded policy's tokenizer."""
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
        num_key_value_heads=2, tie_word_embeddings=True, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    return write_dense(tmp_path_factory.mktemp("qwen"), Qwen2ForCausalLM(config).to(torch.bfloat16))


@pytest.mark.parametrize("sigma", [1e-2, 1e-3, 1e-4])
def test_the_norms_of_a_bf16_model_hold_the_requested_noise(real_shape: Path, sigma: float) -> None:
    cfg = RunConfig()
    cfg.model.path = str(real_shape)
    built = policy.build(cfg, torch.device("cuda"))
    engine = TransformersEngine(built, 8)
    engine.sync(Noise(sigma, seed=0, step=1))
    assert all(norm.dtype == torch.float32 and norm.is_cuda for norm in engine.norms().values())
    assert observed_std(engine.norms(), built.clean_norms) == pytest.approx(sigma, rel=0.05)
    with built.as_sampler(engine.norms()):
        logits = built.model(input_ids=torch.zeros((1, 4), dtype=torch.long, device="cuda")).logits
    assert logits.dtype == torch.bfloat16


@pytest.mark.parametrize("arm", ["nvfp4_aqn", "nf4"])
def test_the_command_trains_on_the_gpu(real_shape: Path, tmp_path: Path, arm: str) -> None:
    command = [
        sys.executable, "-m", "qerl_lab", f"+experiment={arm}", f"model.path={real_shape}", "scale=pocket",
        "device=cuda", "steps=3",
        "rollout.prompts_per_step=2", "optim.micro_batch_size=8", "rollout.max_completion_tokens=32",
        "eval.questions=4",
        "optim=adamw_8bit", "model.gradient_checkpointing=true", "tracking=none", "run_dir=run",
    ]  # fmt: skip
    ran = subprocess.run(command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    done = json.loads((tmp_path / "run" / "DONE").read_text())
    assert done["memory_gpu_peak_gib"] > 0.3
    steps = [json.loads(line)["metrics"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < row["policy/entropy_nats"] < 13 for row in steps if "policy/entropy_nats" in row)
    gaps = [row["sampler/logprob_gap_mean"] for row in steps if "sampler/logprob_gap_mean" in row]
    assert max(gaps) < 0.2
