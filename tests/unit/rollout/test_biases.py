"""Every route of the one adapter, and a layer's bias in it. vLLM's kernels keep a bias in an order of their own.

Where vLLM is not installed a few names play it.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packed_layers import NVFP4
from played_modules import play
from qerl_lab.config.option import ConfigError
from qerl_lab.model.linear import PackedLinear
from qerl_lab.rollout.vllm.product import UNPACK_ROWS

N, K, RANK = 64, 32, 4
NAMES: dict[str, dict[str, Any]] = {
    "vllm": {}, "vllm.model_executor": {}, "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.linear": {
        "WEIGHT_LOADER_V2_SUPPORTED": ["Kernel"], "LinearBase": nn.Module, "LinearMethodBase": object,
        "UnquantizedLinearMethod": object, "register_weight_loader_v2_supported_method": lambda method: method,
    },
    "vllm.model_executor.layers.quantization": {
        "get_quantization_config": None, "register_quantization_config": lambda name: lambda config: config,
    },
    "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": object},
}  # fmt: skip


class Kernel:
    """The weights' method of a layer: reverses the bias when it is loaded, and knows so when it computes."""

    def __init__(self, dense: Tensor) -> None:
        self.dense = dense

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.bias = nn.Parameter(layer.bias.data.flip(0), requires_grad=False)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ self.dense.t() + (0 if bias is None else layer.bias.flip(0))


@pytest.fixture
def one_adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    installed = importlib.util.find_spec("vllm") is not None
    if not installed:
        play(monkeypatch, NAMES)
    module = importlib.import_module("qerl_lab.rollout.vllm.one_adapter")
    yield module
    if not installed:
        del sys.modules[module.__name__]


@pytest.mark.parametrize("rows", [3, UNPACK_ROWS])
@pytest.mark.parametrize("biased", [True, False])
def test_few_rows_and_many_have_the_bias_that_was_loaded(one_adapter: Any, rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    packed = NVFP4.quantize(torch.randn(N, K))
    own = PackedLinear(NVFP4, packed, (N, K), compute_dtype=torch.float32)
    dense, bias = NVFP4.dequantize(packed, (N, K), torch.float32), torch.randn(N)
    layer = nn.Module()
    layer.bias = nn.Parameter(bias.clone(), requires_grad=False)
    layer.adapter_A, layer.adapter_B = torch.randn(RANK, K), torch.randn(N, RANK)
    method = layer.quant_method = one_adapter.OneAdapterMethod(Kernel(dense), RANK, ["a.up_proj"], [True])
    method.sizes = [N]
    method.process_weights_after_loading(layer)
    model = nn.ModuleList([layer])
    one_adapter.lend(model, {"a.up_proj": own})
    x = torch.randn(rows, K)
    y = method.routed(layer, x, layer.bias if biased else None)
    expected = x @ dense.t() + x @ layer.adapter_A.t() @ layer.adapter_B.t() + (bias if biased else 0)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("biased", [True, False])
def test_from_dense_rows_on_the_base_s_kernel_is_not_asked(one_adapter: Any, biased: bool) -> None:
    """The product is the trainer's to the bit: the same weights, and their global scale after the product."""
    torch.manual_seed(0)
    packed = NVFP4.quantize(torch.randn(N, K))
    own = PackedLinear(NVFP4, packed, (N, K), compute_dtype=torch.float32)
    layer = nn.Module()
    layer.bias = nn.Parameter(torch.randn(N), requires_grad=False)
    own.bias = nn.Parameter(layer.bias.data.clone()) if biased else None
    layer.adapter_A, layer.adapter_B = torch.randn(RANK, K), torch.zeros(N, RANK)
    for name, tensor in packed.items():  # the parts of a fused layer have a global scale each, which are one
        layer.register_buffer(name, tensor.repeat(2) if name == "weight_global_scale" else tensor)
    routes = one_adapter.Routes(dense_rows=4)
    method = one_adapter.OneAdapterMethod(Kernel(torch.full((N, K), 7.0)), RANK, ["a.up_proj"], [True], routes)
    method.sizes = [N]
    method.process_weights_after_loading(layer)
    one_adapter.lend(nn.ModuleList([layer]), {})
    layer.adapter_A.fill_(3.0)  # as a sync does: what lies below the weight is the adapter's
    assert (layer.stacked[N:] == 3).all()
    bias = layer.bias if biased else None
    for rows in (4, 5, UNPACK_ROWS):
        x = torch.randn(rows, K)
        assert torch.equal(method.routed(layer, x, bias), own(x))
    x = torch.randn(3, K)
    assert torch.equal(method.routed(layer, x, None), x @ torch.full((N, K), 7.0).t())


@pytest.mark.parametrize("packed", [True, False])
def test_humming_is_asked_with_the_schedules_of_the_layer_s_shape(
    one_adapter: Any, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """And a layer that is not packed goes by its own kernel."""
    asked = []

    class HummingMethod:
        @staticmethod
        def forward_layer(layer: nn.Module, x: Tensor, compute_config: str, tuning_config: str) -> Tensor:
            asked.append((len(x), compute_config, json.loads(tuning_config)))
            return torch.ones(len(x), N)

    play(monkeypatch, {"vllm.utils": {}, "vllm.utils.humming": {"HummingMethod": HummingMethod}})
    layer = nn.Module()
    layer.bias = nn.Parameter(torch.zeros(N), requires_grad=False)
    layer.adapter_A, layer.adapter_B = torch.randn(RANK, K), torch.randn(N, RANK)
    if packed:
        layer.humming_metas, layer.compute_config = {"": None}, "{}"
    routes = one_adapter.Routes(schedules={f"{N}x{K}": [[0, 8, {"num_stages": 4}]], "1x1": [[0, 8, {}]]})
    method = one_adapter.OneAdapterMethod(Kernel(torch.zeros(N, K)), RANK, ["a.up_proj"], [True], routes)
    method.sizes = [N]
    method.process_weights_after_loading(layer)
    x = torch.randn(5, K)
    y = method.routed(layer, x, None)
    torch.testing.assert_close(y, x @ layer.adapter_A.t() @ layer.adapter_B.t() + packed, rtol=1e-4, atol=1e-4)
    assert asked == ([(5, "{}", [[0, 8, {"num_stages": 4}]])] if packed else [])


def test_a_layer_whose_few_rows_are_faster_apart_has_no_fp4_linear(
    one_adapter: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps no second copy of its weights either; a layer of another shape does, where the GPU has the kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    layer = nn.Module()
    layer.bias = nn.Parameter(torch.zeros(N), requires_grad=False)
    layer.adapter_A, layer.adapter_B = torch.randn(RANK, K), torch.randn(N, RANK)

    def load(apart: str) -> Any:
        routes = one_adapter.Routes(fp4_linear=True, apart=[apart])
        method = one_adapter.OneAdapterMethod(Kernel(torch.ones(N, K)), RANK, ["a.up_proj"], [True], routes)
        method.sizes = [N]
        method.process_weights_after_loading(layer)
        return method

    method, x = load(f"{N}x{K}"), torch.randn(3, K)
    assert not [name for name, _ in layer.named_buffers() if name.startswith("fp4")]
    expected = x @ torch.ones(N, K).t() + x @ layer.adapter_A.t() @ layer.adapter_B.t()
    torch.testing.assert_close(method.routed(layer, x, None), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="needs a GPU of compute capability"):
        load("1x1")


def test_a_layer_of_several_global_scales_has_no_dense_copy(one_adapter: Any) -> None:
    layer = nn.Module()
    layer.weight_global_scale, layer.adapter_A = torch.tensor([1.0, 2.0]), torch.zeros(RANK, K)
    layer.bias = nn.Parameter(torch.zeros(N), requires_grad=False)
    routes = one_adapter.Routes(dense_rows=4)
    method = one_adapter.OneAdapterMethod(Kernel(torch.zeros(N, K)), RANK, ["a.up_proj"], [True], routes)
    method.sizes = [N]
    with pytest.raises(ConfigError, match=r"one global scale for a.up_proj .* Type rollout.vllm.dense_rows=null"):
        method.process_weights_after_loading(layer)
