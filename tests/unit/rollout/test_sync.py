"""vLLM's engine looks its weights up once, not at each sync, and drops them when it closes."""

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
from torch import nn

pytest.importorskip("vllm")

from qerl_lab import rollout
from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.vllm.vllm_engine import VllmEngine


@pytest.fixture
def build(tiny: Callable[..., RunConfig], build_policy) -> Iterator[Callable[[str], tuple[VllmEngine, Policy]]]:
    """An engine and its policy, by how the adapter is computed."""
    engines = []

    def make(lora: str) -> tuple[VllmEngine, Policy]:
        cfg = tiny(rollout__engine="vllm", format__name="bf16", rollout__vllm__enforce_eager=True,
                   rollout__vllm__lora=lora)  # fmt: skip
        policy = build_policy(cfg)
        engines.append(rollout.build(cfg, policy))
        return engines[-1], policy

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("lora", ["dense", "request"])
def test_a_closed_engine_holds_no_weight_of_vllm(build: Callable, lora: str) -> None:
    engine, policy = build(lora)
    engine.sync(Noise(0.3, seed=0, step=1))
    names = [f"{name}.weight" for name in policy.norms]
    held = engine.llm.apply_model(lambda model: [weakref.ref(model.get_parameter(name)) for name in names])[0]
    assert all(weight() is not None for weight in held)
    engine.close()
    gc.collect()
    assert not any(weight() is not None for weight in held)


def test_another_tensor_in_place_of_the_adapters_is_refused(build: Callable) -> None:
    engine, policy = build("dense")
    layer = next(module for name, module in policy.model.named_modules() if name.endswith("lora_B.default"))
    own, layer.weight = layer.weight, nn.Parameter(layer.weight.detach().clone())
    with pytest.raises(AssertionError, match="has other tensors than when the engine began"):
        engine.sync(CLEAN)
    layer.weight = own
    engine.sync(CLEAN)
