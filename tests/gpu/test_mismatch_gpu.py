"""Correction and mismatch on a GPU in bfloat16: one forward pass against TRL's two, and the gap of the kernels."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qerl_lab import rollout
from qerl_lab.config.schema import RunConfig
from trained import Jittered, train
from vllm_engines import NEEDS_VLLM

pytestmark = pytest.mark.gpu

FORMATS = ["nvfp4", "mxfp4", "nf4", "fp8", "bf16"]
SMALL = {"steps": 1, "device": "cuda", "rollout__max_completion_tokens": 64, "optim__micro_batch_size": 4}
NOISE = {"aqn__schedule": "linear", "aqn__reading": "equation", "aqn__stages": 2, "aqn__sigma_start": 0.3}


@pytest.mark.parametrize(("packing", "rows"), [("off", 16), ("on", 4)])
@pytest.mark.parametrize("name", FORMATS)
def test_gradients_equal_those_with_trls_correction(
    name: str, packing: str, rows: int, tiny, build_policy, tmp_path: Path
) -> None:
    """Log-probs of two forward passes differ by the order of bfloat16 sums, and so do the importance weights."""
    cfg: RunConfig = tiny(**SMALL, format__name=name, optim__packing=packing)
    found, expected = [], []
    for is_old, gradients in ((False, found), (True, expected)):
        policy = build_policy(cfg)
        run = train(cfg, policy, Jittered(policy, 64), tmp_path, is_old=is_old)
        assert run.scored == (1 + is_old) * rows
        gradients += run.gradients
    of_new, of_old = (torch.cat([grad.flatten() for grad in grads[0].values()]) for grads in (found, expected))
    assert (of_new - of_old).norm() < 0.05 * of_old.norm()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=NEEDS_VLLM)])
def test_noise_raises_the_logprob_gap_and_leaves_the_kernel_gap(
    engine: str, name: str, tiny, build_policy: Callable[..., Any], tmp_path: Path
) -> None:
    cfg: RunConfig = tiny(**SMALL, **NOISE, format__name=name, rollout__engine=engine, aqn__probe_prompts=16)
    policy = build_policy(cfg)
    sampler = rollout.build(cfg, policy)
    try:
        (metrics,) = train(cfg, policy, sampler, tmp_path).steps
        clean = replace(cfg, aqn=replace(cfg.aqn, schedule="off"))
        (quiet,) = train(clean, policy, sampler, tmp_path).steps
    finally:
        sampler.close()
    assert metrics["sampler/logprob_gap_mean"] > 3 * metrics["sampler/kernel_gap_mean"]
    assert metrics["sampler/kl_k3_nats"] > 3 * quiet["sampler/kl_k3_nats"]
    assert metrics["sampler/kernel_gap_mean"] < 3 * quiet["sampler/kernel_gap_mean"] + 1e-4
    assert quiet["sampler/effective_sample_size"] > 0.99
