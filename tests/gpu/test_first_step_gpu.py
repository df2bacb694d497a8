"""Sampler and trainer agree at every token in the first step of a run with SmolLM2's widths, in every format.

Seen on an H200 with SmolLM2-135M: a training step in NVFP4 had a gap of 0.12 nats in the mean and 31 at one token, in
BF16 0.02 and 0.6. The NVFP4 engine agreed with the policy's modules to 0.03 nats. The cause is not known yet.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from qerl_lab import rollout
from qerl_lab.aqn import CLEAN
from qerl_lab.rollout.engine import Sampling
from qerl_lab.rollout.vllm.backends import humming_races
from small_checkpoints import write_dense
from trained import train
from vllm_engines import NEEDS_VLLM

pytestmark = pytest.mark.gpu

FORMATS = ["nvfp4", "mxfp4", "nf4", "fp8", "bf16"]
# Nats per token of a step. The adapters are larger here than in the first step of a run.
BAND_MEAN, BAND_MAX = 0.06, 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model with SmolLM2-135M's widths (576 is no multiple of 128), its tied head, a fifth of its layers."""
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=9,
        num_key_value_heads=3, initializer_range=0.06, tie_word_embeddings=True, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    return write_dense(tmp_path_factory.mktemp("dense"), LlamaForCausalLM(config).to(torch.bfloat16))


@pytest.mark.parametrize(("engine", "name", "backend"), [
    *(("transformers", name, "vllm") for name in FORMATS),
    *(pytest.param("vllm", name, "vllm", marks=NEEDS_VLLM) for name in FORMATS),  # FP8: Humming
    *(pytest.param("vllm", name, "humming", marks=NEEDS_VLLM) for name in ("nvfp4", "mxfp4")),
    *(pytest.param("vllm", name, "auto", marks=NEEDS_VLLM) for name in ("nvfp4", "fp8")),
    ("transformers", "bf16", "full"), pytest.param("vllm", "bf16", "full", marks=NEEDS_VLLM),
])  # fmt: skip
def test_sampler_and_trainer_agree_at_every_token_of_a_step(
    engine: str, name: str, backend: str, folder: Path, tiny: Callable[..., Any], build_policy: Callable[..., Any],
    tmp_path: Path,
) -> None:  # fmt: skip
    """All weights (`full`) are trained for two steps, at a rate at which the second step shows a missed sync.

    Humming with a data race is skipped: beside other runs on the GPU its gap is above the band (docs/running.md).
    """
    is_humming = backend == "humming" or (engine, name, backend) == ("vllm", "fp8", "vllm")
    if is_humming and humming_races():
        pytest.skip("the installed Humming has a data race on this GPU")
    full = backend == "full"
    cfg = tiny(
        steps=2 if full else 1, device="cuda", model__path=str(folder), format__name=name, rollout__engine=engine,
        lora__rank=0 if full else 32, optim__learning_rate=1e-3 if full else 1e-5,
        rollout__prompts_per_step=16, rollout__group_size=16, rollout__max_completion_tokens=192,
        rollout__batch_size=512, rollout__vllm__linear_backend="vllm" if full else backend, optim__micro_batch_size=32,
        aqn__probe_prompts=16,
    )  # fmt: skip
    policy = build_policy(cfg)
    sampler = rollout.build(cfg, policy)
    try:
        sampler.sync(CLEAN)  # as an evaluation before training: more rows, and longer prompts, than a step has
        sampler.generate([[3 + (row + at) % 1000 for at in range(200)] for row in range(512)], 1, Sampling(64, seed=1))
        *_, metrics = train(cfg, policy, sampler, tmp_path).steps
    finally:
        sampler.close()
    said = {key: value for key, value in metrics.items() if key.startswith("sampler/")}
    for kind in ("kernel", "logprob"):  # by the probe on a few completions, and by the training's forward pass
        assert metrics[f"sampler/{kind}_gap_mean"] < BAND_MEAN, said
        assert metrics[f"sampler/{kind}_gap_max"] < BAND_MAX, said
