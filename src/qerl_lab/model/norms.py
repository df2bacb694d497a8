"""Find the norms that get noise, and hold them in float32.

In bfloat16 a weight between 1 and 2 has steps of 0.0078, too coarse for a small sigma.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl_lab.config.option import ConfigError
from qerl_lab.config.spelling import listed


def noisy_norms(model: PreTrainedModel, names: Sequence[str], path: str) -> dict[str, nn.Module]:
    """Return the norms of `model` named in `names` (last part of the layer name), by full name.

    The paper adds noise to norms that feed linear layers: q, k, v, and gate, up. Their names differ between models: in
    Gemma 2 `post_attention_layernorm` follows the attention, and `pre_feedforward_layernorm` feeds gate and up.

    Args:
        path: model.path, for the message.

    Raises:
        ConfigError: the model lacks a module of a name, or it feeds no linear layer.
    """
    found = {name: module for name, module in model.named_modules() if _last(name) in names}
    if missing := set(names) - {_last(name) for name in found}:
        raise ConfigError(f"aqn.norms={listed(names)}: {path} has no module named {sorted(missing)}.")
    feeding = _norms_before_linears(model)
    if wrong := [name for name in found if name not in feeding]:
        allowed = sorted({_last(name) for name in feeding})
        remedy = f" Type aqn.norms={listed(allowed)}." if allowed else ""
        raise ConfigError(
            f"aqn.norms={listed(names)}: in {path} {wrong[0]} feeds no linear layer, and noise belongs on the norms "
            f"before q, k, v and gate, up; allowed: {', '.join(allowed) or 'none of this model'}.{remedy}"
        )
    return found


def _last(name: str) -> str:
    return name.rpartition(".")[2]


@torch.no_grad()
def _norms_before_linears(model: PreTrainedModel) -> set[str]:
    """Run one token through `model`; return the full names of the norms whose output a Linear reads."""
    written: dict[str, Tensor] = {}  # keep the tensors alive, so that no address is reused
    read: list[Tensor] = []
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            hooks.append(module.register_forward_pre_hook(lambda _, args: read.append(args[0])))
        elif _is_norm(module):

            def keep(_: nn.Module, __: Any, output: Tensor, name: str = name) -> None:
                written[name] = output

            hooks.append(module.register_forward_hook(keep))
    training = model.training
    try:
        model.eval()
        model.base_model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=False)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    addresses = {tensor.data_ptr() for tensor in read}
    return {name for name, output in written.items() if output.data_ptr() in addresses}


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module has a one-dimensional weight."""
    own = dict(module.named_parameters(recurse=False))
    return "weight" in own and own["weight"].dim() == 1


def hold_in_float32(norm: nn.Module) -> nn.Parameter:
    """Convert the weight of `norm` to float32 in place, with output in the input's dtype. Returns the weight.

    Unchanged weights give unchanged bits: the float32 product of two bfloat16 numbers is exact and so rounded once,
    like the bfloat16 product.
    """
    weight = norm.get_parameter("weight")
    if weight.dtype != torch.float32:
        weight.data = weight.data.float()
        norm.register_forward_hook(lambda _, args, output: output.to(args[0].dtype))
    return weight
