"""Packed layers, equivalent dense layers, and small models for tests of the formats."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from qerl_lab.config.schema import FormatConfig
from qerl_lab.formats import FORMATS, build
from qerl_lab.formats.format import Format, pack_fused
from qerl_lab.formats.nf4 import Nf4
from qerl_lab.model.linear import PackedLinear, fused_groups, pack_group, packable_linears

N, K = 96, 128
BY_NAME = {name: build(FormatConfig(name=name)) for name in FORMATS}  # with the schema's defaults
NVFP4, MXFP4, NF4, FP8, BF16 = (BY_NAME[name] for name in ("nvfp4", "mxfp4", "nf4", "fp8", "bf16"))
ALL = [*BY_NAME.values(), Nf4(double_quant=False)]
PACKED = [each for each in ALL if each.BLOCK is not None]
LAYER_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
E4M3 = torch.arange(0x7F, dtype=torch.uint8)  # no sign, no NaN
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}  # to compare by
each_packed = pytest.mark.parametrize("weight_format", PACKED, ids=repr)
each_format = pytest.mark.parametrize("weight_format", ALL, ids=repr)


def linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N, bias=bias, dtype=dtype)


def packed_linear(weight_format: Format, **like: Any) -> PackedLinear:
    return packed_from(linear(**like), weight_format)


def packed_from(dense: nn.Linear, weight_format: Format) -> PackedLinear:
    """Pack one Linear; the result computes in the dtype of its weight."""
    ((_, packed),) = pack_fused(weight_format, {"weight": dense.weight})
    return PackedLinear(dense, weight_format, packed)


def dense_twin(packed: PackedLinear) -> nn.Linear:
    """Return an ordinary Linear with the dequantized weight of `packed`."""
    dtype = packed.compute_dtype
    twin = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, dtype=dtype)
    shape = (packed.out_features, packed.in_features)
    twin.weight.data = packed.weight_format.dequantize(packed.packed(), shape, dtype)
    if packed.bias is not None:
        twin.bias.data = packed.bias.data.clone()
    return twin


def tiny_model(
    *, tied: bool = False, seed: int = 0, hidden: int = 64, dtype: torch.dtype = torch.float32
) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=32, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=tied, initializer_range=0.2,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).to(dtype)


def tokens() -> Tensor:
    return torch.randint(0, 32, (4, 12), generator=torch.Generator().manual_seed(2))


def pack_model(model: nn.Module, weight_format: Format, *, ignore: Sequence[str] = ("lm_head",)) -> None:
    """Pack the Linears of a transformers causal LM in place, as reference for packing while loading.

    Each layer keeps the dtype of its weight; with BF16 it stays an `nn.Linear`, rounded. Skips layers that `ignore`
    matches (see `on_disk.is_ignored`) and layers that share their weight with an embedding. Parts of a fused layer are
    packed together (NVFP4: one global scale). Raises ValueError, naming the module, for a weight that the format cannot
    store; layers before it are packed by then.
    """
    for group in fused_groups(packable_linears(model, ignore)):
        weights: dict[str, Tensor] = {name: model.get_parameter(f"{name}.weight") for name in group}
        pack_group(model, weights, weight_format)


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for key, tensor in expected.items():
        assert (found[key].dtype, found[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[key].view(torch.uint8), tensor.contiguous().view(torch.uint8)), key
