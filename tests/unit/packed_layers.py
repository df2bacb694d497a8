"""Packed layers, their dense twins and small models for the tests of the formats."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from qerl_lab.formats import PackedLinear, codec

N, K = 96, 128
PACKED = [("nvfp4", {}), ("mxfp4", {}), ("nf4", {"double_quant": False}), ("nf4", {"double_quant": True})]
ALL = [*PACKED, ("bf16", {})]
LAYER_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
each_packed = pytest.mark.parametrize(("name", "options"), PACKED)
each_format = pytest.mark.parametrize(("name", "options"), ALL)


def linear(bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(K, N, bias=bias, dtype=dtype)


def packed_linear(name: str, options: dict[str, Any], *, dense_cache: bool = False, **like: Any) -> PackedLinear:
    return PackedLinear.from_linear(linear(**like), name, dense_cache=dense_cache, **options)


def dense_twin(packed: PackedLinear) -> nn.Linear:
    """An ordinary Linear with the weight that `packed` stands for."""
    dtype = packed.compute_dtype
    twin = nn.Linear(packed.in_features, packed.out_features, bias=packed.bias is not None, dtype=dtype)
    shape = (packed.out_features, packed.in_features)
    twin.weight.data = codec(packed.weight_format).dequantize(packed.packed(), shape, dtype)
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
