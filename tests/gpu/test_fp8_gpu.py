"""FP8 in vLLM: the scheme and kernel for each kind of activations, and the gap to the trainer."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from qerl_lab import rollout
from qerl_lab.config.schema import RunConfig
from qerl_lab.rollout.engine import Sampling
from vllm_engines import BAND_MEAN, NEEDS_VLLM, config, prompts, trainer_gap

pytestmark = [pytest.mark.gpu, NEEDS_VLLM]


def computed_by(model: nn.Module) -> set[tuple[str, str, bool]]:
    """Return scheme and kernel of the layers that vLLM packed, and whether many rows use the policy's layers."""
    found = set()
    for layer in model.modules():
        if (scheme := getattr(layer, "scheme", None)) is not None:
            kernel = getattr(scheme, "fp8_linear", None) or scheme.linear_kernel
            found.add((type(scheme).__name__, type(kernel).__name__, bool(layer.quant_method.packed_layers)))
    return found


@pytest.mark.parametrize(("activations", "scheme", "kernels", "unpacks", "band"), [
    ("auto", "CompressedTensorsW8A16Fp8", ["MarlinFP8ScaledMMLinearKernel"], True, BAND_MEAN),
    ("fp8", "CompressedTensorsW8A8Fp8", ["CutlassFP8ScaledMMLinearKernel", "FlashInferFP8ScaledMMLinearKernel"], False,
     5 * BAND_MEAN),
])  # fmt: skip
def test_each_kind_of_activations_gets_its_scheme_and_kernel(
    folder: Path, tiny: Callable[..., RunConfig], build_policy, activations: str, scheme: str, kernels: list[str],
    unpacks: bool, band: float,
) -> None:  # fmt: skip
    if activations == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU cannot multiply FP8")
    cfg = config(tiny, folder, "fp8", "dense", format__activations=activations, rollout__vllm__kv_cache_gib=1.0)
    policy = build_policy(cfg)
    engine = rollout.build(cfg, policy)
    try:
        ((own, kernel, unpacked),) = engine.llm.apply_model(computed_by)[0]
        assert (own, unpacked) == (scheme, unpacks)
        assert kernel in kernels
        gap = trainer_gap(policy, engine.generate(prompts(), 4, Sampling(64, seed=1)), engine.norms())
    finally:
        engine.close()
    print(f"fp8, activations={activations}: gap {gap.mean():.4f} nats in the mean, {gap.max():.4f} at most")
    assert gap.mean() < band
