"""All weights are copied into a fake of vLLM's model with its fused layers.

tests/gpu/test_vllm_engine.py has vLLM's own model.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from played_vllm import PlayedLlm, played_engine
from qerl_lab.aqn import Noise
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import all_weights
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import EngineFailed
from qerl_lab.rollout.vllm.all_weights import send

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
         "up_proj": "gate_up_proj"}  # fmt: skip


class FusedModel(nn.Module):
    """vLLM's names of parameters, in bfloat16 with float32 norms as in `NormWorker`, and its `load_weights`."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        parts: dict[str, dict[str, Tensor]] = {}
        for name, weight in weights.items():
            parts.setdefault(fused(name), {})[name] = weight
        self.rows, self.held = {}, {}
        for name, own in parts.items():
            dtype = torch.float32 if "layernorm" in name else torch.bfloat16
            self.held[name] = nn.Parameter(torch.zeros_like(torch.cat([*own.values()]), dtype=dtype), False)
            starts = torch.tensor([0, *(len(part) for part in own.values())]).cumsum(0).tolist()
            self.rows |= {part: slice(*at) for part, at in zip(own, pairwise(starts), strict=True)}
            self.register_parameter(name.replace(".", "_"), self.held[name])

    def named_parameters(self, *_: Any, **__: Any) -> Iterable[tuple[str, nn.Parameter]]:
        return iter(self.held.items())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, weight in weights:
            if fused(name) not in self.held:
                raise ValueError(f"There is no module or parameter named {name!r}")
            assert not weight.requires_grad
            weight.shard_id = name  # vLLM does so, and the policy's parameter must not get it
            self.held[fused(name)].data[self.rows[name]].copy_(weight)
            loaded.add(fused(name))
        return loaded


def fused(name: str) -> str:
    return next((name.replace(part, whole) for part, whole in FUSED.items() if f".{part}." in name), name)


@pytest.fixture
def cfg(tiny: Callable[..., RunConfig]) -> RunConfig:
    return tiny(lora__rank=0, format__name="bf16")


@pytest.fixture
def policy(cfg: RunConfig, build_policy: Callable[[RunConfig], Policy]) -> Policy:
    return build_policy(cfg)


def test_every_sync_copies_all_weights_rounded_into_the_same_tensors(policy: Policy) -> None:
    weights = all_weights.weights(policy.base)
    theirs = FusedModel(weights)
    addresses = {name: weight.data_ptr() for name, weight in theirs.held.items()}
    for _ in range(2):
        send(theirs, policy.base, "pocket")
        for name, weight in weights.items():
            held = theirs.held[fused(name)]
            assert torch.equal(held[theirs.rows[name]], weight.to(held.dtype)), name
        for parameter in policy.model.parameters():
            assert not hasattr(parameter, "shard_id")
            parameter.data += 0.01 * torch.randn_like(parameter)
    assert addresses == {name: weight.data_ptr() for name, weight in theirs.held.items()}


def test_a_model_with_other_weights_is_refused(policy: Policy) -> None:
    weights = all_weights.weights(policy.base)
    more, less = FusedModel(weights | {"model.visual.weight": torch.zeros(2)}), FusedModel(weights)
    del less.held["model.norm.weight"]
    for model, said in ((more, "model.visual.weight"), (less, "model.norm.weight")):
        with pytest.raises(ConfigError, match=f"has others .*{said}.* Type rollout=transformers, or lora=rank32"):
            send(model, policy.base, "pocket")


def test_a_tensor_that_moves_is_an_error_since_cuda_graphs_read_its_old_address(policy: Policy) -> None:
    class Moving(FusedModel):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            loaded = super().load_weights(weights)
            self.held["model.norm.weight"] = nn.Parameter(self.held["model.norm.weight"].data.clone(), False)
            return loaded

    with pytest.raises(AssertionError, match="other tensors"):
        send(Moving(all_weights.weights(policy.base)), policy.base, "pocket")


def test_with_lora_full_the_engine_sends_the_weights_and_then_the_noisy_norms(cfg, policy, monkeypatch) -> None:
    """vLLM began with the files of the model. Noise is added to the trained norms."""
    weights = all_weights.weights(policy.base)
    began, given = FusedModel(weights), dict[str, Any]()
    began.load_weights((name, weight.clone()) for name, weight in weights.items())

    def start(**arguments: Any) -> PlayedLlm:
        given.update(arguments)
        return PlayedLlm(began)

    with played_engine(monkeypatch, start) as module:
        engine = module.VllmEngine(policy, cfg)
        assert given.keys().isdisjoint({"quantization", "hf_overrides", "enable_lora"})
        for parameter in policy.model.parameters():
            parameter.data += 0.01 * torch.randn_like(parameter)
        engine.sync(noise := Noise(0.1, seed=0, step=1))
        monkeypatch.setattr(PlayedLlm, "reset_prefix_cache", lambda _: False)
        with pytest.raises(EngineFailed, match="kept its prefix cache"):  # which has results of the old weights
            engine.sync(noise)
    for name, weight in weights.items():
        noisy = noise.onto_norms({key: norm.data for key, norm in policy.norms.items()}).get(name[: -len(".weight")])
        held = began.held[fused(name)]
        assert torch.equal(held[began.rows[name]], (weight if noisy is None else noisy).to(held.dtype)), name
