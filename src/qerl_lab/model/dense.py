"""Collect a policy's weights by checkpoint name (packed, dequantized, or merged with its adapter); write a model."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from torch import Tensor

from qerl_lab.model import all_weights
from qerl_lab.model.linear import PackedLinear, packed_layers
from qerl_lab.model.loading import tied_names
from qerl_lab.model.lora import lora_layers
from qerl_lab.model.on_disk import read_model_json
from qerl_lab.model.policy import Policy
from qerl_lab.model.weight_files import copy_companions


def base_tensors(policy: Policy) -> dict[str, Tensor]:
    """Return the tensors of a policy's base by checkpoint name, without the adapter.

    Names are without PEFT's `.base_layer`. Packed Linears give their packed tensors; tied parameters appear once. Norms
    are converted back from float32 to the policy's dtype, in which they were loaded. With lora=full every tensor is
    converted to that dtype and moved to the CPU.
    """
    if policy.trains_all:
        return {name: tensor.to("cpu", policy.dtype) for name, tensor in all_weights.weights(policy.base).items()}
    base = policy.base
    norms = {f"{name}.weight": norm.detach().to(policy.dtype) for name, norm in policy.norms.items()}
    tensors, copies = base.state_dict() | norms, tied_names(base)
    for name, module in base.named_modules():
        if isinstance(module, PackedLinear) and module.engine_layout is not None:  # tensors in an engine's layout
            for key in module.held():
                del tensors[f"{name}.{key}"]
            tensors |= {f"{name}.{key}": tensor for key, tensor in module.packed().items()}
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if ".lora_" not in name and name not in copies
    }


def dense_tensors(policy: Policy, dtype: torch.dtype, *, merged: bool = False) -> tuple[dict[str, Tensor], float]:
    """Return `base_tensors` with each packed Linear dequantized to `dtype`, and how much of the adapter is lost.

    Dense layers keep the dtype in which they were loaded. With `merged` the weight of a layer with an adapter becomes
    W + scaling * B A, added in float32 and rounded once to `dtype`.

    The second result compares two changes of these weights: the change by that rounding, divided by the change by the
    adapter (root mean squares over all layers with an adapter). At 1 the adapter is lost. The result is 0 without
    `merged`, and for an adapter that changes nothing.
    """
    base, tensors = policy.base, base_tensors(policy)
    packed, rounded, moved = packed_layers(base), 0.0, 0.0
    adapted = lora_layers(base) if merged else {}
    for name in packed | adapted:
        layer = packed.get(name)
        if layer is not None:
            weight_format, shape = layer.weight_format, (layer.out_features, layer.in_features)
            stored = {key: tensors.pop(f"{name}.{key}") for key in weight_format.layout(shape)}
            weight = weight_format.dequantize(stored, shape, torch.float32 if name in adapted else dtype)
        else:
            weight = tensors[f"{name}.weight"].float()
        if name not in adapted:
            tensors[f"{name}.weight"] = weight.to(dtype)
            continue
        change = adapted[name].get_delta_weight("default").detach().float()
        tensors[f"{name}.weight"] = (weight + change).to(dtype)
        rounded += (tensors[f"{name}.weight"] - weight).double().sub(change).square().sum().item()
        moved += change.double().square().sum().item()
    return tensors, math.sqrt(rounded / moved) if moved else 0.0


def write_model(tensors: Mapping[str, Tensor], dtype: torch.dtype | None, base: Path, folder: Path) -> None:
    """Write a dense model to `folder`, for transformers and vLLM.

    `tensors` are written in `dtype`; None keeps the dtype of each. config.json, tokenizer and chat template come from
    the model in `base`. config.json is written last, so that a folder with a config.json is complete.
    """
    folder.mkdir(exist_ok=True)
    save_torch_state_dict({name: tensor.to(dtype=dtype).contiguous() for name, tensor in tensors.items()}, folder)
    copy_companions(base, folder)
    config = read_model_json(base / "config.json")
    config.pop("quantization_config", None)
    if dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
