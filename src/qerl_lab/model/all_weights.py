"""Train all weights of a model (lora=full): float32 master weights, computed in another dtype under autocast.

In bfloat16 a weight has 8 significant bits, and an update below a 512th of it, such as Adam's at a learning rate of
1e-6, would be rounded away.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl_lab.model.loading import tied_names
from qerl_lab.model.on_disk import SINGLE
from qerl_lab.system.disk import make_readable


def make_trainable(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert all weights of `model` to float32 and let them be trained.

    `dtype` is the dtype that the weights had: under autocast to `dtype` the model computes as before. Autocast rounds
    the weights of matrix products only, so hooks round the outputs of embeddings and norms.
    """
    model.float().requires_grad_(True)
    for module in model.modules():
        if dtype != torch.float32 and module._parameters and not isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _, __, output: output.to(dtype))


def weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of `model` by checkpoint name, as detached tensors that share its memory; tied ones once."""
    copies = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in copies}


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write the float32 weights to `folder`, in one file."""
    folder.mkdir(exist_ok=True)
    save_file(weights(model), folder / SINGLE)
    make_readable([folder / SINGLE])


def load(model: PreTrainedModel, folder: Path) -> None:
    """Copy the weights that `save` wrote to `folder` into `model`, in place. Raises KeyError if a weight is missing."""
    held = load_file(folder / SINGLE)
    for name, tensor in weights(model).items():
        tensor.copy_(held[name])
