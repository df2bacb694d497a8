"""Routes of a product with one adapter, and the bias of a layer on each. vLLM's kernels reorder a bias.

Without vLLM a few fake names stand for it.
"""

import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from packed_layers import FP8, NVFP4
from played_modules import imported_over
from qerl_lab.config.option import ConfigError
from qerl_lab.formats import tiles
from qerl_lab.model.linear import PackedLinear
from qerl_lab.rollout.vllm import fp4_tiles
from qerl_lab.rollout.vllm.product import UNPACK_ROWS

N, K, RANK = 64, 32, 8
NAMES: dict[str, dict[str, Any]] = {
    "vllm": {}, "vllm.model_executor": {}, "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.linear": {
        "WEIGHT_LOADER_V2_SUPPORTED": ["Kernel"], "LinearBase": nn.Module, "LinearMethodBase": object,
        "UnquantizedLinearMethod": type("Unquantized", (), {}),
        "register_weight_loader_v2_supported_method": lambda method: method,
    },
    "vllm.model_executor.layers.quantization": {
        "get_quantization_config": None, "register_quantization_config": lambda name: lambda config: config,
    },
    "vllm.model_executor.layers.quantization.base_config": {"QuantizationConfig": object},
}  # fmt: skip


class Kernel:
    """A layer's method for its weights. It reverses the bias when loading, and reverses it back when computing."""

    def __init__(self, dense: Tensor) -> None:
        self.dense = dense

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.bias = nn.Parameter(layer.bias.data.flip(0), requires_grad=False)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return x @ self.dense.t() + (0 if bias is None else layer.bias.flip(0))


@pytest.fixture
def one_adapter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    with imported_over(monkeypatch, "qerl_lab.rollout.vllm.one_adapter", NAMES) as module:
        yield module


@pytest.mark.parametrize("rows", [3, UNPACK_ROWS])
@pytest.mark.parametrize("biased", [True, False])
def test_few_and_many_rows_get_the_loaded_bias(one_adapter: Any, rows: int, biased: bool) -> None:
    torch.manual_seed(0)
    packed = NVFP4.quantize(torch.randn(N, K))
    own = PackedLinear(torch.nn.Linear(K, N, bias=False), NVFP4, packed)
    dense, bias = NVFP4.dequantize(packed, (N, K), torch.float32), torch.randn(N)
    layer = nn.Module()
    layer.bias = nn.Parameter(bias.clone(), requires_grad=False)
    layer.adapter_A, layer.adapter_B = torch.randn(RANK, K), torch.randn(N, RANK)
    method = layer.quant_method = one_adapter.OneAdapterMethod(Kernel(dense), RANK, ["a.up_proj"], [True])
    method.sizes = [N]
    method.process_weights_after_loading(layer)
    model = nn.ModuleList([layer])
    one_adapter.use_packed_layers(model, {"a.up_proj": own})
    x = torch.randn(rows, K)
    y = method.routed(layer, x, layer.bias if biased else None)
    expected = x @ dense.t() + x @ layer.adapter_A.t() @ layer.adapter_B.t() + (bias if biased else 0)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("biased", [True, False])
def test_from_dense_rows_on_the_kernel_of_the_base_is_not_used(one_adapter: Any, biased: bool) -> None:
    """The product equals the trainer's bit for bit, with the same weights and their global scale after the product."""
    torch.manual_seed(0)
    packed = NVFP4.quantize(torch.randn(N, K))
    own = PackedLinear(torch.nn.Linear(K, N, bias=False), NVFP4, packed)
    layer = nn.Module()
    layer.bias = nn.Parameter(torch.randn(N), requires_grad=False)
    own.bias = nn.Parameter(layer.bias.data.clone()) if biased else None
    layer.adapter_A, layer.adapter_B = torch.randn(RANK, K), torch.zeros(N, RANK)
    for name, tensor in packed.items():  # each part of a fused layer has a global scale, and all are equal
        layer.register_buffer(name, tensor.repeat(2) if name == "weight_global_scale" else tensor)
    routes = one_adapter.Routes(dense_rows=4)
    method = one_adapter.OneAdapterMethod(Kernel(torch.full((N, K), 7.0)), RANK, ["a.up_proj"], [True], routes)
    method.sizes = [N]
    method.process_weights_after_loading(layer)
    one_adapter.use_packed_layers(nn.ModuleList([layer]), {})
    layer.adapter_A.fill_(3.0)  # as a sync does: the rows below the weight are the adapter's
    assert (layer.stacked[N:] == 3).all()
    bias = layer.bias if biased else None
    for rows in (4, 5, UNPACK_ROWS):
        x = torch.randn(rows, K)
        assert torch.equal(method.routed(layer, x, bias), own(x))
    x = torch.randn(3, K)
    assert torch.equal(method.routed(layer, x, None), x @ torch.full((N, K), 7.0).t())


def test_the_fp8_copy_multiplies_rows_rounded_to_fp8(one_adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with both roundings in float64. Fakes stand for vLLM's two kernels."""
    kernels = SimpleNamespace(
        scaled_fp8_quant=lambda x, use_per_token_if_dynamic: FP8.quantize(x).values(),
        cutlass_scaled_mm=lambda x, W, of_rows, of_columns, dtype, bias: (
            (x.double() * of_rows.double()) @ (W.double() * of_columns.double().t()) + bias.double()
        ).to(dtype),
    )
    monkeypatch.setattr(sys.modules["vllm"], "_custom_ops", kernels, raising=False)
    torch.manual_seed(0)
    packed, bias = NVFP4.quantize(torch.randn(N, K)), torch.randn(N, dtype=torch.bfloat16)
    layer = nn.Module()
    layer.bias = nn.Parameter(bias.clone(), requires_grad=False)
    layer.adapter_A = torch.randn(RANK, K, dtype=torch.bfloat16)
    layer.adapter_B = torch.randn(N, RANK, dtype=torch.bfloat16)
    for name, tensor in packed.items():
        layer.register_buffer(name, tensor)
    routes = one_adapter.Routes(dense_rows=4, dense_dtype="fp8")
    kernel = Kernel(torch.full((N, K), 7.0, dtype=torch.bfloat16))
    method = one_adapter.OneAdapterMethod(kernel, RANK, ["a.up_proj"], [True], routes)
    method.sizes = [N]
    method.process_weights_after_loading(layer)
    assert layer.fp8_copy.nbytes == N * K, "half of 16 bits"
    weight = NVFP4.dequantize(packed, (N, K), torch.float32)
    x = torch.randn(4, K, dtype=torch.bfloat16)
    y = method.routed(layer, x, layer.bias).double()
    adapter = x.double() @ layer.adapter_A.double().t() @ layer.adapter_B.double().t()
    exact = x.double() @ weight.double().t()
    rounded = [FP8.dequantize(FP8.quantize(of), of.shape, torch.float32).double() for of in (x.float(), weight)]
    torch.testing.assert_close(y, rounded[0] @ rounded[1].t() + adapter + bias.double(), rtol=0.01, atol=0.1)
    assert 0.01 < (y - adapter - bias.double() - exact).norm() / exact.norm() < 0.06
    few = method.routed(layer, x[:3], None)
    assert torch.equal(few, (x[:3] @ kernel.dense.t()).addmm(x[:3] @ layer.adapter_A.t(), layer.adapter_B.t()))


@pytest.fixture
def asked(one_adapter: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Return the list of products on a fake H200: the way, and the number of rows. Each product gives zeros."""
    ways: list[tuple[str, int]] = []

    def playing(way: str) -> Any:
        def play(x: Tensor, *_: Any, **__: Any) -> Tensor:
            ways.append((way, len(x)))
            return torch.zeros(len(x), 64)

        return play

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(fp4_tiles, "device_properties", lambda device: fp4_tiles.DeviceProperties(132, 227 * 2**10))
    monkeypatch.setattr(fp4_tiles, "shared_by_mps", lambda: False)
    monkeypatch.setattr(fp4_tiles, "linear", playing("tiles"))
    monkeypatch.setattr(one_adapter, "stacked_product", playing("dense"))
    monkeypatch.setattr(one_adapter, "unpacked_product", playing("unpacked"))
    monkeypatch.setattr(Kernel, "apply", lambda method, layer, x, bias: playing("base")(x))
    return ways


def loaded(
    one_adapter: Any, several: bool = False, parts: Sequence[str] = ("a.up_proj",), **routes: Any
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Load an NVFP4 layer [64, 256] for `fp4_tiles`, with one or `several` global scales; return it and the tensors."""
    torch.manual_seed(0)
    layer, packed = nn.Module(), NVFP4.quantize(torch.randn(64, 256))
    layer.bias = nn.Parameter(torch.zeros(64), requires_grad=False)
    layer.register_buffer("adapter_A", torch.zeros(RANK, 256))
    layer.register_buffer("adapter_B", torch.zeros(64, RANK))
    for name, tensor in packed.items():
        held = torch.cat([tensor, tensor + 1]) if "global" in name and several else tensor
        layer.register_parameter(name, nn.Parameter(held, requires_grad=False))
    given = one_adapter.Routes(**{"fp4_tiles": True} | routes)
    own = [True for _ in parts]
    layer.quant_method = one_adapter.OneAdapterMethod(Kernel(torch.empty(0)), RANK, list(parts), own, given)
    layer.quant_method.sizes = [64 // len(parts) for _ in parts]
    layer.quant_method.process_weights_after_loading(layer)
    return layer, packed


@pytest.mark.parametrize(("dense_rows", "rows", "ways"), [
    (None, [1, 64, 65, 320, 321], ["tiles", "tiles", "tiles", "tiles", "unpacked"]),
    (32, [8, 31, 32, 321], ["tiles", "tiles", "dense", "dense"]),
    (400, [320, 321, 400], ["tiles", "unpacked", "dense"]),
])  # fmt: skip
def test_the_number_of_rows_decides_the_way(
    one_adapter: Any, asked: list, dense_rows: int | None, rows: list[int], ways: list[str]
) -> None:
    layer, _ = loaded(one_adapter, dense_rows=dense_rows)
    for number in rows:
        layer.quant_method.routed(layer, torch.zeros(number, 256), None)
    assert asked == list(zip(ways, rows, strict=True))


def test_tensors_in_the_form_of_the_kernel_replace_the_loaded_ones(one_adapter: Any, asked: list) -> None:
    layer, packed = loaded(one_adapter)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    in_order = tiles.pack(packed["weight_packed"], packed["weight_scale"], fp4_tiles.tile_of(64, 256, 132))
    assert torch.equal(layer.fp4_tiles, in_order)
    assert torch.equal(layer.weight_global_scale, packed["weight_global_scale"])
    (decoder,) = layer.quant_method.decoders
    expected = NVFP4.decoder(packed, (64, 256))
    assert torch.equal(decoder.unpack(torch.bfloat16), expected.unpack(torch.bfloat16))
    assert decoder.alpha == expected.alpha


@pytest.mark.parametrize(("owner", "name", "told", "said"), [
    (torch.cuda, "get_device_capability", (10, 0), r"needs a GPU of .* Type rollout.vllm.linear_backend=vllm"),
    (fp4_tiles, "shared_by_mps", True, "cannot be where MPS shares the GPU.*linear_backend=vllm"),
    (fp4_tiles, "supports", False, r"does not take a.up_proj, \[64\] x 256 at rank"),
])  # fmt: skip
def test_a_gpu_or_layer_without_the_kernel_is_refused(
    one_adapter: Any, asked: list, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, told: Any, said: str
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: told)
    with pytest.raises(ConfigError, match=f"fp4_tiles {said}"):
        loaded(one_adapter)


def test_a_layer_that_is_stored_fused_has_its_stored_global_scale(one_adapter: Any, asked: list) -> None:
    """vLLM has room for a scale of each partition, and loads only the first."""
    layer, packed = loaded(one_adapter, several=True, parts=["a.gate_up_proj"])
    assert torch.equal(layer.weight_global_scale, packed["weight_global_scale"])


@pytest.mark.parametrize("routes", [{"fp4_tiles": True}, {"dense_rows": 2}], ids=str)
def test_a_layer_in_format_ignore_uses_its_own_product(
    one_adapter: Any, monkeypatch: pytest.MonkeyPatch, routes: dict[str, Any]
) -> None:
    """The packed layers beside it have the routes of the run."""
    torch.manual_seed(0)
    layer, dense = nn.Module(), torch.randn(N, K)
    layer.weight_loader = None
    layer.bias = nn.Parameter(torch.zeros(N), requires_grad=False)
    monkeypatch.setattr(Kernel, "create_weights", lambda *_, **__: None, raising=False)
    base = type("Dense", (Kernel, one_adapter.UnquantizedLinearMethod), {})(dense)
    method = one_adapter.OneAdapterMethod(base, RANK, ["a.o_proj"], [True], one_adapter.Routes(**routes))
    method.create_weights(layer, K, [N], K, N, torch.float32)
    method.process_weights_after_loading(layer)
    x = torch.randn(5, K)
    assert torch.equal(method.routed(layer, x, None), x @ dense.t())
