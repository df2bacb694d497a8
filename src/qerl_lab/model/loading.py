"""Build a frozen packed model from named tensors, one fused layer at a time, so that memory holds few dense weights.

The model is created on torch's meta device and filled from `Weights`: a packed checkpoint, or a dense one that is
packed while it is read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from qerl_lab.config.message import some_of
from qerl_lab.config.option import ConfigError
from qerl_lab.formats import recognize
from qerl_lab.formats.format import STORED_DTYPES, Format, PackedAs, check_values
from qerl_lab.model import on_disk
from qerl_lab.model.linear import PackedLinear, fused_groups, pack_group, packable_linears
from qerl_lab.model.weight_files import Weights

# Tensors in old checkpoints that models compute anew.
_COMPUTED = r"rotary_emb\.inv_freq$"


def stored_as(folder: Path) -> PackedAs | None:
    """Return format and ignored modules of the packed weights in `folder`, from config.json; None if they are dense.

    The rounding rule (scale_rule, exponent_rule) comes from quality.json, which only the lab's checkpoints have. Raises
    ValueError, naming the file, if config.json is missing or describes an unsupported layout.
    """
    file = folder / "config.json"
    config = on_disk.read_model_json(file).get("quantization_config")
    if config is None:
        return None
    try:
        packed_as = recognize(config)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    _, noted = on_disk.noted_format(folder)
    weight_format = packed_as.weight_format
    unknown = {name: noted[name] for name, value in asdict(weight_format).items() if value is None and name in noted}
    return packed_as._replace(weight_format=replace(weight_format, **unknown))


def require_dense(folder: Path, setting: str, why: str) -> None:
    """Raise ConfigError unless `folder` holds a dense model with a tokenizer and a chat template.

    `setting` (`key=value`) is how the user named the model; `why` ends the message about a packed model.
    """
    on_disk.check_chat_model(folder, setting)
    if stored_as(folder) is not None:
        raise ConfigError(f"{setting} is packed; allowed: the dense model, {why}")


def fitting_attention(config: PretrainedConfig) -> str:
    """Choose the attention for a model: "sdpa", or "eager" if it caps its attention logits (Gemma 2).

    sdpa cannot compute the cap, and transformers before 5.21 leaves it out without a word.
    """
    return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else "sdpa"


def empty_model(config: PretrainedConfig, dtype: torch.dtype, attention: str = "sdpa") -> PreTrainedModel:
    """Create a causal LM of transformers on the meta device, in eval mode: it has shapes and `dtype`, but no memory.

    Removes quantization_config from `config`, because libraries would otherwise treat the model as quantized by them.
    `attention` is model.attention; for "sdpa" `fitting_attention` chooses.
    """
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    attention = fitting_attention(config) if attention == "sdpa" else attention
    with init_empty_weights(include_buffers=False):  # buffers that no checkpoint holds (rotary frequencies) are real
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    model.tie_weights()
    return model.eval()


def load_by_transformers(folder: Path, dtype: torch.dtype | str, **options: Any) -> PreTrainedModel:
    """Load the dense causal LM in `folder` with transformers' own loader, in `dtype`; "auto" is the stored dtype.

    `options` are further arguments of `from_pretrained`. Raises ValueError if the files lack a weight of the model,
    which transformers would fill with random numbers; if they have a weight that the model lacks; or if a weight has
    NaN or Inf.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True, **options
    )
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{folder / options.get('gguf_file', '')}: {some_of(missing, 1)} missing, of the weights of "
            f"{type(model).__name__}"
        )
    if extra := sorted(name for name in info["unexpected_keys"] if not re.search(_COMPUTED, name)):
        raise ValueError(f"{folder}: {some_of(extra, 1)} in no module of {type(model).__name__}")
    for name, parameter in model.named_parameters():
        check_values(parameter, name=f"{folder}: {name}")
    if (fitting := fitting_attention(model.config)) != "sdpa":
        model.set_attn_implementation(fitting)
    return model


def fill(
    model: PreTrainedModel, source: Weights, packed_as: PackedAs, *, is_packed: bool, device: torch.device
) -> PreTrainedModel:
    """Load the weights of `source` into a model made by `empty_model`; return it frozen and on `device`.

    Linears are packed as `packed_as` says. With `is_packed` the source holds packed weights. Otherwise it holds dense
    weights: each fused layer (q/k/v, gate/up) is packed in its stored dtype, and its dense weights are freed before the
    next layer is read. Layers left dense get the model's dtype. Raises ValueError, naming tensor and file, for a tensor
    that is missing, superfluous, of wrong shape or dtype, or has NaN or Inf, for a copy of a tied tensor with other
    values, and for parts of a fused layer that differ in their shared tensor scale.
    """
    weight_format, shapes = packed_as.weight_format, shapes_of(model)
    linears = packable_linears(model, packed_as.ignore)
    dense = sorted(shapes.keys() - {f"{name}.weight" for name in linears})
    expected = {name: shapes[name] for name in dense} if is_packed else shapes
    check_tensors(model, source, expected, weight_format, linears if is_packed else ())
    for group in fused_groups(linears):
        if is_packed:
            _fill_packed(model, source, group, weight_format, device)
        else:
            pack_group(model, {name: source.tensor(f"{name}.weight", device) for name in group}, weight_format)
    for name in dense:
        parent_name, _, leaf = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        empty = getattr(parent, leaf)
        # If the dtype must change, cast on the CPU, so that the device never holds both tensors.
        read_on = device if source.dtype(name) is empty.dtype else "cpu"
        tensor = source.tensor(name, read_on).to(empty.dtype).to(device)
        check_values(tensor, name=f"{source.where(name)}: {name}")
        setattr(parent, leaf, nn.Parameter(tensor, requires_grad=False) if isinstance(empty, nn.Parameter) else tensor)
    model.tie_weights()
    for name in sorted({*tied_names(model)}.intersection(source.names)):
        kept = model.get_parameter(name)
        if not torch.equal(source.tensor(name).to(kept.dtype), kept.cpu()):  # transformers would take both
            raise ValueError(
                f"{source.where(name)}: {name} has other values than the tensor that config.json ties it to. Set "
                "tie_word_embeddings to false in config.json"
            )
    return model.to(device).requires_grad_(False)


def shapes_of(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a dense model by checkpoint name; tied parameters appear once."""
    copies = tied_names(model)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name not in copies}


def check_tensors(
    model: PreTrainedModel, source: Weights, dense: Mapping[str, tuple[int, ...]], weight_format: Format,
    packed: Sequence[str] = (),
) -> None:  # fmt: skip
    """Raise ValueError unless `source` has exactly the tensors that the model needs, in valid shapes and dtypes.

    `dense` maps names of dense tensors to shapes; `packed` names the Linears stored in `weight_format`; their shapes
    are not checked here. Copies of tied tensors and tensors that the model ignores may be in `source` too.
    """
    keys = weight_format.layout((64, 64)).keys() if packed else ()  # the same for every shape
    expected = dense.keys() | {f"{name}.{key}" for name in packed for key in keys}
    stored, patterns = set(source.names), [*(model._keys_to_ignore_on_load_unexpected or ()), _COMPUTED]
    ignored = {name for name in stored if any(re.search(pattern, name) for pattern in patterns)}
    extra = sorted(stored - expected - ignored - set(tied_names(model)))
    missing = sorted(expected - stored)
    if missing or extra:
        kind = f"packed in {weight_format.NAME}" if packed else "dense"
        found = [f"{some_of(missing, 1)} missing"] if missing else []
        if extra:
            found.append(f"{some_of(extra, 1)} in no module")
        file = source.where((extra or sorted(stored))[0])
        if any(".experts." in name for name in missing):
            found.append("the lab does not merge the tensors of experts, as transformers does; type another model")
        raise ValueError(
            f"{file}: the tensors are not those of {type(model).__name__}, {kind} according to config.json: "
            f"{', '.join(found)}"
        )
    for name, shape in dense.items():
        if source.shape(name) != shape:
            raise ValueError(f"{source.where(name)}: {name} is {list(source.shape(name))}, the model has {list(shape)}")
        dtype = source.dtype(name)
        if dtype not in STORED_DTYPES:  # codes without their scales would be cast as they are
            allowed = ", ".join(str(stored).removeprefix("torch.") for stored in STORED_DTYPES)
            raise ValueError(f"{source.where(name)}: {name} is {dtype}; allowed: {allowed}")


def tied_names(model: PreTrainedModel) -> list[str]:
    """List the names of parameters that are the same tensor as a parameter with an earlier name.

    An example is `lm_head.weight` of a model that ties it to the embedding. A checkpoint may omit these names.
    """
    once = dict(model.named_parameters())
    return [name for name, _ in model.named_parameters(remove_duplicate=False) if name not in once]


def _fill_packed(
    model: PreTrainedModel, source: Weights, group: Sequence[str], weight_format: Format, device: torch.device
) -> None:
    """Replace the Linears named in `group`, the parts of a fused layer, by `PackedLinear`s with weights of `source`.

    The Linears are on the meta device; their biases stay there. Raises ValueError if a tensor is invalid, or if the
    parts differ in a tensor scale that they must share (`Format.SHARED`): vLLM keeps the largest for all parts, and
    would sample from weights other than the trained ones. Rescaling the parts would round their block scales again.
    """
    packed = {}
    for name in group:
        linear = cast(nn.Linear, model.get_submodule(name))
        shape = (linear.out_features, linear.in_features)
        tensors = {key: source.tensor(f"{name}.{key}", device) for key in weight_format.layout(shape)}
        file = source.where(f"{name}.{next(iter(tensors))}")
        packed[name] = linear, weight_format.accept(tensors, shape, name=f"{file}: {name}")
    if (key := weight_format.SHARED) is not None:
        numbers = {name: tensors[key].item() for name, (_, tensors) in packed.items()}
        if len(set(numbers.values())) > 1:
            parts = ", ".join(f"{name} has {number:g}" for name, number in numbers.items())
            raise ValueError(
                f"the parts of a fused layer differ in {key}: {parts}; allowed: one number for all, since vLLM keeps "
                "one. Quantize the dense model with python -m qerl_lab.quantize, which gives them one"
            )
    for name, (linear, tensors) in packed.items():
        model.set_submodule(name, PackedLinear(linear, weight_format, tensors))
