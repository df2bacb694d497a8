"""Small models on disk, dense and packed, for tests of loading."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from packed_layers import pack_model
from qerl_lab.formats.format import Format, PackedAs
from qerl_lab.model.loading import empty_model, fill, stored_as
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.model.weight_files import WeightFiles


def write_dense(folder: Path, model: PreTrainedModel, **save_options: Any) -> Path:
    """Save the model with `save_pretrained`, and the embedded policy's tokenizer."""
    model.save_pretrained(folder, **save_options)
    AutoTokenizer.from_pretrained(ASSETS).save_pretrained(folder)
    return folder


def write_random(folder: Path, **sizes: float) -> Path:
    """Write random bfloat16 weights; `sizes` override arguments of Qwen2Config.

    By default logits vary by about 1.5, so that four bits change them and texts have entropy.
    """
    own = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 8,
           "num_key_value_heads": 2, "initializer_range": 0.06}  # fmt: skip
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=1024, eos_token_id=2, **own | sizes))
    return write_dense(folder, with_biases(model).to(torch.bfloat16))


def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    """Set random biases. transformers starts with zeros, with which a wrong order in a kernel would go unnoticed."""
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    return model


def write_packed(
    folder: Path, model: PreTrainedModel, weight_format: Format, ignore: Sequence[str] = ("lm_head",)
) -> Path:
    """Pack `model` in place and write it as `python -m qerl_lab.quantize` does."""
    write_dense(folder, model)
    pack_model(model, weight_format, ignore=ignore)
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    edit_config(folder, quantization_config=weight_format.quantization_config(ignore, model.dtype))
    return folder


def load(folder: Path, packed_as: PackedAs | None = None, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a folder on the CPU as it is stored; a dense one is packed as given."""
    stored = stored_as(folder)
    wanted, is_packed = stored or packed_as, stored is not None
    assert wanted is not None
    config, cpu = AutoConfig.from_pretrained(folder), torch.device("cpu")
    return fill(empty_model(config, dtype), WeightFiles(folder), wanted, is_packed=is_packed, device=cpu)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; None removes one."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of model.safetensors by name, where "__" may stand for "."; None removes one."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def equal(a: Tensor, b: Tensor) -> bool:
    """Return whether dtype and bits are equal."""
    return a.dtype is b.dtype and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )
