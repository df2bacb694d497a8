"""LoRA as one operation against PEFT's modules: values, gradients, saved tensors, and when it is not used."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora.layer import Linear as PeftLinear
from torch import Tensor, nn

from packed_layers import (
    LAYER_NAMES,
    NVFP4,
    K,
    N,
    dense_twin,
    each_packed,
    linear,
    pack_model,
    packed_linear,
    tiny_model,
    tokens,
)
from qerl_lab.config.schema import RunConfig
from qerl_lab.formats.format import Format
from qerl_lab.model import policy
from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.lora import LoraLinear, _LoraProduct, register_lora

RANK = 4


def with_adapter(base: nn.Module, **config: Any) -> LoraLinear:
    lora = LoraConfig(r=RANK, lora_alpha=10, target_modules=["0"], **config)
    register_lora(lora)
    layer = inject_adapter_in_model(lora, nn.Sequential(base, nn.LayerNorm(N)))[0]  # PEFT needs a parameter
    assert isinstance(layer, LoraLinear)
    nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    return layer


def by_peft(layer: LoraLinear, x: Tensor) -> Tensor:
    return PeftLinear.forward(layer, x)


def gradients(y: Tensor, layer: LoraLinear, x: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(3)
    own = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    return torch.autograd.grad(y, (x, *own), torch.randn_like(y))


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    apply = _LoraProduct.apply
    monkeypatch.setattr(_LoraProduct, "apply", lambda *args: calls.append(1) or apply(*args))
    return calls


def test_gradients_equal_the_formula() -> None:
    layer = with_adapter(linear().double())
    assert layer.lora_A["default"].weight.dtype is torch.float64
    x = torch.randn(3, 2, K, dtype=torch.float64, requires_grad=True)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    expected = x @ layer.base_layer.weight.T + layer.base_layer.bias + 2.5 * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(gradients(layer(x), layer, x), gradients(expected, layer, x))


@each_packed
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_on_packed_bases_equal_peft(
    weight_format: Format, bias: bool, fused_calls: list[int]
) -> None:
    layer = with_adapter(packed_linear(weight_format, bias=bias))
    strided = torch.randn(3, K, 5).transpose(1, 2)
    for x in (torch.randn(K), torch.randn(7, K), strided, torch.randn(0, K)):
        x = x.requires_grad_()
        y, expected = layer(x), by_peft(layer, x)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients(y, layer, x), gradients(expected, layer, x), rtol=1e-4, atol=1e-5)
    assert len(fused_calls) == 4


@each_packed
def test_values_and_gradients_under_autocast_equal_peft(weight_format: Format) -> None:
    layer = with_adapter(packed_linear(weight_format))
    x = torch.randn(7, K, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = layer(x), by_peft(layer, x)
    assert y.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=4e-2)
    own, theirs = gradients(y, layer, x), gradients(expected, layer, x)
    assert [g.dtype for g in own] == [torch.float32] * 3
    torch.testing.assert_close(own, theirs, rtol=5e-2, atol=0.1)


def test_no_dense_weight_is_saved_for_the_backward_pass() -> None:
    layer, shapes = with_adapter(packed_linear(NVFP4)), []
    x = torch.randn(7, K, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        layer(x)
    assert sorted(shapes) == sorted([(7, K), (7, RANK), (RANK, K), (N, RANK)])


def test_the_operation_is_not_used_with_dropout_or_a_disabled_adapter(fused_calls: list[int]) -> None:
    x = torch.randn(7, K)
    with_adapter(packed_linear(NVFP4), lora_dropout=0.5)(x)
    layer = with_adapter(packed_linear(NVFP4))
    layer.enable_adapters(False)
    assert torch.equal(layer(x), layer.base_layer(x))
    assert fused_calls == []
    layer.enable_adapters(True)
    assert not torch.equal(layer(x), layer.base_layer(x))
    assert fused_calls == [1]


# A small Qwen2


def with_lora(model: nn.Module) -> PeftModel:
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYER_NAMES), init_lora_weights=False)
    register_lora(config)
    return get_peft_model(model, config)


def lora_gradients(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
def test_lora_gradients_equal_those_on_a_dense_base(checkpointing: bool | None) -> None:
    packed = tiny_model()
    pack_model(packed, NVFP4)
    dense = copy.deepcopy(packed)
    for path, module in list(dense.named_modules()):
        if isinstance(module, PackedLinear):
            dense.set_submodule(path, dense_twin(module))
    packed, dense = with_lora(packed), with_lora(dense)
    if checkpointing is not None:
        packed.enable_input_require_grads()
        packed.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        assert packed.training
        assert packed.is_gradient_checkpointing
    (loss, grads), (dense_loss, dense_grads) = lora_gradients(packed), lora_gradients(dense)
    torch.testing.assert_close(loss, dense_loss, rtol=1e-5, atol=1e-6)
    assert len(grads) == 2 * 2 * len(LAYER_NAMES)
    torch.testing.assert_close(grads, dense_grads, rtol=1e-3, atol=1e-6)


def test_a_new_adapter_is_drawn_from_the_seed_of_the_run_alone(tiny: Callable[..., RunConfig]) -> None:
    """Otherwise all seeds of an arm would begin alike, and the interval over seeds would be too narrow."""

    def draw(seed: int) -> dict[str, Tensor]:
        torch.rand(1 + seed)  # earlier draws of the process do not matter
        model = policy.build(tiny(seed=seed, format__name="bf16"), torch.device("cpu")).model
        return {name: matrix for name, matrix in get_peft_model_state_dict(model).items() if "lora_A" in name}

    first, again, other = draw(0), draw(0), draw(1)
    assert all(torch.equal(matrix, again[name]) for name, matrix in first.items())
    assert not any(torch.equal(matrix, other[name]) for name, matrix in first.items())
