"""The weights of a policy as a dense checkpoint has them: the frozen base alone, or with the adapter added."""

import torch
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor

from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.loading import tied
from qerl_lab.model.policy import Policy


def base_tensors(policy: Policy) -> dict[str, Tensor]:
    """The frozen tensors by their names in a checkpoint: without PEFT's layer around them, without the adapter."""
    base = policy.model.get_base_model()
    tensors, again = base.state_dict(), tied(base)
    for name, module in base.named_modules():
        if isinstance(module, PackedLinear) and module.form is not None:  # an engine's tensors, in its form
            for key in module.held():
                del tensors[f"{name}.{key}"]
            tensors |= {f"{name}.{key}": tensor for key, tensor in module.packed().items()}
    return {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in tensors.items()
        if ".lora_" not in name and name not in again
    }


def dense_tensors(policy: Policy, dtype: torch.dtype, *, merged: bool = False) -> dict[str, Tensor]:
    """`base_tensors` with every packed Linear dequantized to `dtype`; what the format leaves dense is as it was loaded.

    With `merged` a layer with an adapter is W + scaling * B A instead, added in float32 and rounded once.
    """
    tensors = base_tensors(policy)
    for name, module in policy.model.get_base_model().named_modules():
        plain = name.removesuffix(".base_layer")
        if isinstance(module, PackedLinear):
            for key in module.packed():
                del tensors[f"{plain}.{key}"]
            tensors[f"{plain}.weight"] = dequantized(module, dtype)
    for name, module in policy.model.get_base_model().named_modules() if merged else ():
        if isinstance(module, LoraLayer):
            tensors[f"{name}.weight"] = _merged(module).to(dtype)
    return tensors


def dequantized(layer: PackedLinear, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] that a packed layer stands for."""
    return layer.weight_format.dequantize(layer.packed(), (layer.out_features, layer.in_features), dtype)


def _merged(layer: LoraLayer) -> Tensor:
    base = layer.get_base_layer()
    weight = dequantized(base, torch.float32) if isinstance(base, PackedLinear) else base.weight.detach().float()
    A, B = layer.lora_A["default"].weight.detach().float(), layer.lora_B["default"].weight.detach().float()
    return torch.addmm(weight, B, A, alpha=layer.scaling["default"])
