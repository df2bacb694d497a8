"""The packed Linear against a dense one with the dequantized weight: values, gradients, memory, moves, state dicts."""

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from packed_layers import NVFP4, K, N, dense_twin, each_packed, packed_from, packed_linear
from qerl_lab.formats.format import Format
from qerl_lab.formats.nvfp4 import GLOBAL_SCALE
from qerl_lab.formats.tiles import BLOCK, TILES, Tiles, pack
from qerl_lab.model.linear import linear_bytes, total_bytes


def gradients(module: nn.Module, x: Tensor, *parameters: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    y = module(x)
    return list(torch.autograd.grad(y, [x, *parameters], torch.randn_like(y)))


# The product


@each_packed
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradient_equal_a_dense_linear(weight_format: Format, bias: bool) -> None:
    packed = packed_linear(weight_format, bias=bias)
    twin = dense_twin(packed)
    strided = torch.randn(3, K, 5).transpose(1, 2)
    for x in (torch.randn(K), torch.randn(7, K), strided, torch.randn(2, 3, 4, K)[:, ::2], torch.randn(0, K)):
        x = x.requires_grad_()
        torch.testing.assert_close(packed(x), twin(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(gradients(packed, x), gradients(twin, x), rtol=1e-5, atol=1e-5)


def test_nvfp4_applies_alpha_after_the_product() -> None:
    """Engines do the same. Rounding value * scale / global scale to bfloat16 first gives another result."""
    packed = packed_linear(NVFP4, bias=False, dtype=torch.bfloat16)
    x = torch.randn(64, K, dtype=torch.bfloat16)
    unpack, alpha = packed.decoder
    exact = (x.double() @ unpack(torch.bfloat16).double().T) * alpha
    assert ((packed(x) - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()  # rounded once
    assert not ((dense_twin(packed)(x) - exact).abs() <= 2**-8 * exact.abs() + 1e-6).all()


@each_packed
def test_the_output_has_the_dtype_of_the_input_or_of_autocast(weight_format: Format) -> None:
    packed = packed_linear(weight_format)
    twin = dense_twin(packed)
    x = torch.randn(7, K, requires_grad=True)
    short = x.bfloat16()  # without autocast it is computed in float32, and returned in its dtype
    assert torch.equal(packed(short), packed(short.float()).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = packed(x), twin(x)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    (grad,) = torch.autograd.grad(y.float().sum(), x)
    assert grad.dtype is torch.float32
    torch.testing.assert_close(grad, torch.autograd.grad(expected.float().sum(), x)[0], rtol=2e-2, atol=5e-2)
    with torch.autocast("cpu", torch.bfloat16):  # backward inside the context
        y = packed(x)
        torch.testing.assert_close(torch.autograd.grad(y.float().sum(), x)[0], grad, rtol=0, atol=0)


def saved_shapes(module: nn.Module, x: Tensor) -> list[tuple[int, ...]]:
    shapes = []

    def note(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(x)
    return shapes


@each_packed
def test_no_dense_weight_outlives_the_forward(weight_format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_linear(weight_format)
    x = torch.randn(7, K, requires_grad=True)
    assert (N, K) in [tuple(sorted(shape)) for shape in saved_shapes(dense_twin(packed), x)]  # the test would see one
    assert saved_shapes(packed, x) == []
    made = []
    decoder = packed.decoder

    def watched(dtype: torch.dtype) -> Tensor:
        result = decoder.unpack(dtype)
        made.append(weakref.ref(result))
        return result

    monkeypatch.setattr(packed, "decoder", decoder._replace(unpack=watched))
    y = packed(x)
    y.sum().backward()
    assert len(made) == 2  # forward, and backward again
    assert [ref() for ref in made] == [None, None]


# The dense cache


@each_packed
def test_dense_cache_gives_the_same_bits(weight_format: Format) -> None:
    packed, cached = packed_linear(weight_format), packed_linear(weight_format)
    cached.dense_cache = True
    x = torch.randn(7, K, requires_grad=True)
    with torch.inference_mode():
        cached(x.detach())  # generation fills the cache, and training uses it
    for module_dtype in (torch.float32, torch.bfloat16):
        packed.to(module_dtype), cached.to(module_dtype)
        assert cached._dense == {}
        for autocast in (False, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                torch.testing.assert_close(gradients(cached, x), gradients(packed, x), rtol=0, atol=0)
                assert torch.equal(cached(x), packed(x))
        assert torch.bfloat16 in cached._dense
        first = cached._dense[torch.bfloat16]
        cached(x)
        assert cached._dense[torch.bfloat16] is first
    assert packed._dense == {}
    assert cached.state_dict().keys() == packed.state_dict().keys()
    assert (linear_bytes(cached), total_bytes(cached)) == (linear_bytes(packed), total_bytes(packed))


# Moves and files


@each_packed
@pytest.mark.parametrize("change", [lambda m: m.to("cpu", torch.bfloat16), lambda m: m.bfloat16().float()])
def test_a_change_of_dtype_leaves_the_packed_bits(
    weight_format: Format, change: Callable[[nn.Module], nn.Module]
) -> None:
    packed = packed_linear(weight_format)
    before = {key: tensor.clone() for key, tensor in packed.packed().items()}
    outer = change(nn.Sequential(packed, nn.LayerNorm(N)))
    for key, tensor in packed.packed().items():
        assert tensor.dtype is before[key].dtype
        assert torch.equal(tensor.view(torch.uint8), before[key].view(torch.uint8))
    assert packed.compute_dtype is packed.bias.dtype is outer[1].weight.dtype
    x = torch.randn(7, K, dtype=packed.compute_dtype)
    assert packed(x).dtype is packed.compute_dtype


@each_packed
def test_moves_between_devices_keep_dtypes(weight_format: Format) -> None:
    packed = packed_linear(weight_format)
    dtypes = {key: tensor.dtype for key, tensor in packed.packed().items()}
    packed.to("meta")
    assert {tensor.device.type for tensor in [*packed.packed().values(), packed.bias, packed.weight]} == {"meta"}
    assert {key: tensor.dtype for key, tensor in packed.packed().items()} == dtypes


# Several layers on one tensor of an engine


@pytest.fixture
def q_and_k() -> nn.ModuleList:
    """Return two layers on one tensor in tiles. Each layer has half of every tile."""
    layers = nn.ModuleList(packed_from(nn.Linear(K, BLOCK, bias=False), NVFP4) for _ in range(2))
    packed = [layer.packed() for layer in layers]
    whole = pack(*(torch.cat([own[key] for own in packed]) for key in ("weight_packed", "weight_scale")), tile=2)
    for first, layer, own in zip((0, BLOCK), layers, packed, strict=True):
        layer.hold({TILES: whole, GLOBAL_SCALE: own[GLOBAL_SCALE]}, Tiles(first, BLOCK, K))
    return layers


def test_layers_on_one_tensor_count_their_own_bytes_and_together_the_tensor_once(q_and_k: nn.ModuleList) -> None:
    own = BLOCK * K * 9 // 16 + 4
    assert [layer.packed_bytes() for layer in q_and_k] == [own, own]
    assert linear_bytes(q_and_k) == total_bytes(q_and_k) == 2 * own
    q_and_k.bfloat16()
    assert linear_bytes(q_and_k) == total_bytes(q_and_k) == 2 * own


def test_a_change_of_dtype_leaves_layers_on_one_tensor(q_and_k: nn.ModuleList) -> None:
    whole, x = q_and_k[0].weight, torch.randn(7, K)
    before = [layer(x) for layer in q_and_k]
    q_and_k.to("cpu", torch.bfloat16).float()
    assert all(layer.weight is whole for layer in q_and_k)
    assert all(torch.equal(layer(x), y) for layer, y in zip(q_and_k, before, strict=True))
