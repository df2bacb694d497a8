"""Packed layers as vLLM's engine holds them, for one kernel or another, built without vLLM."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn

import marlin_packer
from qerl_lab.formats.nvfp4 import DIVISOR
from qerl_lab.formats.tiles import TILES, pack
from qerl_lab.model.linear import packed_layers
from qerl_lab.model.policy import Policy

PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
MarlinNvFp4LinearKernel = type("MarlinNvFp4LinearKernel", (), {})


def in_marlin(packed: list[dict[str, Tensor]]) -> nn.Module:
    """Build a vLLM layer for Marlin."""
    made = marlin_packer.layer(packed)
    made.scheme = SimpleNamespace(kernel=MarlinNvFp4LinearKernel())
    return made


def in_tiles(packed: list[dict[str, Tensor]]) -> nn.Module:
    """Build a layer for `fp4_tiles`; its tile borders differ from the borders of fused parts."""
    made = nn.Module()
    codes, scale = (torch.cat([part[key] for part in packed]) for key in ("weight_packed", "weight_scale"))
    made.register_buffer(TILES, pack(codes, scale, 3))
    made.register_buffer(DIVISOR, packed[0][DIVISOR])
    return made


Form = Callable[[list[dict[str, Tensor]]], nn.Module]


def engine_of(policy: Policy, wrapped: bool = False, form: Form = in_marlin) -> nn.Module:
    """Build the policy's base as vLLM holds it; `wrapped` as its LoRA for many adapters wraps layers."""
    return model_of({name: layer.packed() for name, layer in packed_layers(policy.base).items()}, wrapped, form)


def model_of(layers: dict[str, dict[str, Tensor]], wrapped: bool = False, form: Form = in_marlin) -> nn.Module:
    """Build vLLM's model from packed layers, given by checkpoint name."""
    model = nn.Module()
    model.packed_modules_mapping = PARTS
    whole = {part: name for name, parts in PARTS.items() for part in parts}
    for name in dict.fromkeys(f"{parent}.{whole.get(leaf, leaf)}" for parent, _, leaf in map(split, layers)):
        parent, _, leaf = split(name)
        made = form([layers[f"{parent}.{part}"] for part in PARTS.get(leaf, [leaf])])
        put(model, f"{name}.base_layer" if wrapped else name, made)
    return model


def split(name: str) -> tuple[str, str, str]:
    return name.rpartition(".")


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    *parents, leaf = name.split(".")
    for one in parents:
        if not hasattr(model, one):
            model.add_module(one, nn.Module())
        model = model.get_submodule(one)
    model.add_module(leaf, layer)
