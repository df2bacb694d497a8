"""Shared parts of GPU tests of vLLM's engine: configuration, prompts, and the trainer's log-probs of a rollout."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Rollout
from rollouts import rows

NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
# Nats a token between sampler and trainer, which order their bfloat16 sums differently: mean and largest of 4,096.
# Measured on an H200 with this model and its large adapter: 0.026 and 0.14 in BF16; NVFP4 with noise 0.043 and 0.24.
# Norms without their noise are 0.22 away in the mean (on a CPU).
BAND_MEAN, BAND_MAX = 0.06, 0.35
DENSE_ROWS = 16  # below the initial batch and above the last rows of a rollout

BACKENDS = "fp4_tiles", "humming"
IGNORED = ["lm_head", "down_proj"]  # down_proj stays dense, the others are packed


def config(tiny: Callable[..., RunConfig], folder: Path, weight_format: str, way: str, **changes: Any) -> RunConfig:
    """Return the configuration of a run with the model in `folder`.

    `way` names what computes, joined by "+": one of `WAYS` in tests/gpu. `changes` override it.
    """
    ways, usual = way.split("+"), "auto" if weight_format == "fp8" else "vllm"  # vLLM's choice is Humming for FP8
    settings = dict(
        device="auto", model__path=str(folder), format__name=weight_format,
        lora__rank=0 if way == "full" else 16, rollout__engine="vllm",
        rollout__max_completion_tokens=128, rollout__batch_size=64,
        format__activations="fp8" if "activations" in ways else "auto",
        rollout__vllm__dense_rows=DENSE_ROWS if "dense_rows" in ways else None,
        rollout__vllm__dense_dtype="fp8" if "dense_fp8" in ways else "auto",
        rollout__vllm__linear_backend=next((name for name in BACKENDS if name in ways), usual),
        rollout__vllm__share_base="share_base" in ways,
        rollout__vllm__lora="request" if way == "request" else "dense",
        **({"format__ignore": IGNORED} if "ignore" in ways else {}),
    )  # fmt: skip
    return tiny(**settings | changes)


def prompts() -> list[list[int]]:
    """Return 16 prompts of 5 to 185 tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 1024, (length,), generator=generator).tolist() for length in range(5, 197, 12)]


def trainer_logprobs(policy: Policy, out: Rollout, norms: dict[str, Tensor]) -> Tensor:
    """Return log-probs [tokens] of the sampled tokens under the policy with these norms, in its training dtype."""
    found = []
    with policy.as_sampler({name: weight.to(policy.norms[name]) for name, weight in norms.items()}):
        for prompt, completion, _ in rows(out):
            logits = policy.model(input_ids=torch.tensor([prompt + completion], device=policy.device)).logits[0]
            logps = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
            found.append(logps[torch.arange(len(completion)), completion].cpu())
    return torch.cat(found)


def told(out: Rollout) -> Tensor:
    """Return the sampler's own log-probs: [tokens]."""
    return torch.tensor([logprob for _, _, logprobs in rows(out) for logprob in logprobs])


def trainer_gap(policy: Policy, out: Rollout, norms: dict[str, Tensor]) -> Tensor:
    """Return the nats between the sampler and the policy's own modules with these norms: [tokens]."""
    return (told(out) - trainer_logprobs(policy, out, norms)).abs()
