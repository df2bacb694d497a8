"""Share one NVFP4 base between engine and trainer: the policy's packed layers read the engine's tensors.

An engine reorders every weight for its kernel, so the trainer reads that layout: `formats.tiles` for the lab's kernel,
`formats.marlin` for vLLM's kernel. Both unpack to the same bits. A part of a fused layer (q/k/v, gate/up) is a range of
rows.

`share` compares the engine's tensors with the policy's, bit for bit, before it drops the policy's tensors. If bits
differ, a layer keeps its own tensors: Marlin drops block scales below 2^-6, and `formats.tiles` has one way to write a
block of zeros. While vLLM starts, the policy's packed tensors lie in host memory, so that the GPU never holds two
copies.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from qerl_lab.config.option import ConfigError
from qerl_lab.formats.marlin import CODES, ROWS, SCALE, Marlin, part
from qerl_lab.formats.nvfp4 import GLOBAL_SCALE
from qerl_lab.formats.tiles import TILES, Tiles
from qerl_lab.model.linear import PackedLinear, packed_layers
from qerl_lab.model.policy import Policy

# Class name of `layer.scheme.kernel`. vLLM documents no way to ask for a layer's kernel; tests/gpu/test_one_copy_gpu.py
# fails if this one disappears.
KERNEL = "MarlinNvFp4LinearKernel"
Layers = dict[str, PackedLinear]


@contextmanager
def packed_on_host(policy: Policy) -> Iterator[None]:
    """Context manager: move the policy's packed weights to host memory, to free the GPU while vLLM loads.

    At the end layers return to the GPU, except those that `share` has switched to vLLM's tensors.
    """
    layers, device = packed_layers(policy.base).values(), policy.device
    for layer in layers:
        layer.hold({name: tensor.cpu() for name, tensor in layer.packed().items()})
    try:
        yield
    finally:
        for layer in layers:
            if layer.engine_layout is None:
                layer.hold({name: tensor.to(device) for name, tensor in layer.packed().items()})


def share(policy: Policy, model: nn.Module) -> list[str]:
    """Replace the packed weights of `policy` by the tensors of vLLM's `model`.

    Returns the names of the policy's layers that keep their own tensors, because vLLM's tensors differ in some bits.
    Raises ConfigError, before any layer is changed, if vLLM's model lacks a layer, or if the trainer cannot read the
    layout of a layer.
    """
    layers = packed_layers(policy.base)
    fused = list(_fused_layers(layers, model))
    held = {name for _, parts in fused for name in parts}
    if missing := [name for name in layers if name not in held]:
        raise cannot_share(f"finds no layer in vLLM's model that holds {missing[0]}")
    for vllm_layer, parts in fused:
        if TILES not in vllm_layer._buffers:  # the lab's own layout was checked when it was made
            _check_marlin(vllm_layer, parts)
    return [name for vllm_layer, parts in fused for name in _share_layer(vllm_layer, parts)]


def bytes_shared_with_vllm(policy: Policy) -> int:
    """Return the bytes of the tensors that the policy shares with vLLM."""
    return sum(layer.packed_bytes() for layer in packed_layers(policy.base).values() if layer.engine_layout is not None)


def cannot_share(why: str) -> ConfigError:
    """Return a ConfigError that begins with rollout.vllm.share_base=true and goes on with `why`, a verb phrase."""
    return ConfigError(f"rollout.vllm.share_base=true {why}. Type rollout.vllm.share_base=false.")


def _fused_layers(layers: Layers, model: nn.Module) -> Iterator[tuple[nn.Module, Layers]]:
    """Yield each fused layer of vLLM's `model`, such as qkv_proj, with the policy's layers that are its parts.

    The parts are in the order of their rows, by name. `layers` are the policy's packed layers. A layer of vLLM is
    skipped unless all of its parts are among them.
    """
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    # A `.base_layer` comes after its wrapper in named_modules, and so replaces it.
    vllm_layers = {name.removesuffix(".base_layer"): layer for name, layer in model.named_modules()}
    for name, layer in vllm_layers.items():
        parent, _, leaf = name.rpartition(".")
        parts = [f"{parent}.{part_leaf}" for part_leaf in fused.get(leaf, [leaf])]
        if all(part_name in layers for part_name in parts):
            yield layer, {part_name: layers[part_name] for part_name in parts}


def _check_marlin(vllm_layer: nn.Module, parts: Layers) -> None:
    """Raise ConfigError unless vLLM computes `vllm_layer` with Marlin, in tensors shaped like `parts` stacked."""
    name, first = next(iter(parts.items()))
    kernel = type(getattr(getattr(vllm_layer, "scheme", None), "kernel", None)).__name__
    if kernel != KERNEL:
        raise cannot_share(f"needs weights that vLLM computes with {KERNEL}, and {name} has {kernel}")
    sizes, columns = [layer.out_features for layer in parts.values()], first.in_features
    expected = [(columns // 16, 2 * sum(sizes)), (columns // 16, sum(sizes))]
    shapes = [tuple(vllm_layer.get_parameter(held).shape) for held in ("weight", "weight_scale")]
    if any(size % ROWS for size in sizes) or shapes != expected:
        raise cannot_share(f"takes parts in multiples of {ROWS} rows that Marlin does not pad, and {name} is {sizes} "
                      f"x {columns}")  # fmt: skip


def _share_layer(vllm_layer: nn.Module, parts: Layers) -> list[str]:
    """Let the policy's layers `parts` hold the tensors of vLLM's layer `vllm_layer`, which fuses them.

    Returns the names of parts that keep their own tensors, because vLLM's tensors differ in some bits.
    """
    keep = list[str]()
    first = 0  # row of the fused layer at which a part begins
    for name, layer in parts.items():
        held, layout = _engine_tensors(vllm_layer, layer, first)
        packed = {key: tensor.to(held[GLOBAL_SCALE].device) for key, tensor in layer.packed().items()}
        stored = layout.stored(held)
        if all(torch.equal(stored[key].view(torch.uint8), tensor.view(torch.uint8)) for key, tensor in packed.items()):
            layer.hold(held, layout)
        else:
            keep.append(name)
        first += layer.out_features
    return keep


def _engine_tensors(vllm_layer: nn.Module, layer: PackedLinear, first: int) -> tuple[dict[str, Tensor], Tiles | Marlin]:
    """Return the tensors in which vLLM holds the weight of the policy's `layer`, and the layout to read them with.

    `vllm_layer` fuses several layers; `layer` begins at its row `first`. The global scale is the policy's own.
    """
    global_scale = layer.packed()[GLOBAL_SCALE]
    if TILES in vllm_layer._buffers:
        tiles = vllm_layer.get_buffer(TILES)
        held = {TILES: tiles, GLOBAL_SCALE: global_scale.to(tiles.device)}
        return held, Tiles(first, layer.out_features, layer.in_features)
    codes, scale = (vllm_layer.get_parameter(name).data for name in ("weight", "weight_scale"))
    global_scale = global_scale.to(codes.device)
    layout = Marlin(boost(global_scale, vllm_layer.get_parameter("weight_global_scale")))
    return part({CODES: codes, SCALE: scale, GLOBAL_SCALE: global_scale}, first, layer.out_features), layout


def boost(global_scale: Tensor, vllm_scale: Tensor) -> float:
    """Return the power of two by which vLLM multiplied a layer's block scales for Marlin.

    `global_scale` is as in the checkpoint, `vllm_scale` as in vLLM: 2^119 / global_scale / boost.
    """
    ratio = 2.0**119 / global_scale.double() / vllm_scale.double()
    return float(ratio.log2().round().exp2().item())
