"""`quantization_config` of a Hugging Face config.json: what a packed checkpoint says about itself, both ways.

NVFP4 and MXFP4 are compressed-tensors' (as its presets NVFP4A16 and MXFP4A16, version 0.17, dump themselves), NF4 is
bitsandbytes'. Neither library is needed here.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

_STRATEGY = {"nvfp4": "tensor_group", "mxfp4": "group"}
_GROUP_SIZE = {"nvfp4": 16, "mxfp4": 32}
_SCALE_DTYPE = {"nvfp4": "torch.float8_e4m3fn", "mxfp4": "torch.uint8"}
_FORMAT = {f"{name}-pack-quantized": name for name in _STRATEGY}

# The one output layer of a causal LM: its name is its full name, and tools look for the plain word.
_HEAD = "lm_head"
_ANY_PARENT, _END = r"re:(.*\.)?", "$"


class PackedAs(NamedTuple):
    """`ignore`: modules left dense, for `is_ignored`. `options`: of the codec (NF4: double_quant)."""

    format_name: str
    ignore: tuple[str, ...]
    options: dict[str, Any]


def is_ignored(name: str, ignore: Sequence[str]) -> bool:
    """Whether the module `name` is left dense: an entry is its full name, the end of it after a dot, a module that it
    is part of, or `re:` and a pattern that matches from its beginning (as in compressed-tensors)."""
    return any(
        re.match(entry[3:], name) is not None
        if entry.startswith("re:")
        else name == entry or name.endswith(f".{entry}") or name.startswith(f"{entry}.")
        for entry in ignore
    )


def describe(
    format_name: str, ignore: Sequence[str], *, dtype: torch.dtype, double_quant: bool = True
) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint packed in `format_name`.

    `ignore` names the Linears left dense, in full or by the end after a dot; compressed-tensors also takes `re:` ones.
    (Of bitsandbytes' list vLLM reads full names and last parts only.)
    `dtype` is what the model computes in and `double_quant` the choice of NF4; compressed-tensors records neither.
    Raises ValueError for a format that is not packed, and for a pattern where bitsandbytes takes names.
    """
    if format_name == "nf4":
        return _bitsandbytes(ignore, dtype, double_quant)
    if format_name not in _STRATEGY:
        raise ValueError(f"{format_name} has no quantization_config; allowed: {', '.join([*_STRATEGY, 'nf4'])}")
    weights = {
        "num_bits": 4, "type": "float", "symmetric": True, "group_size": _GROUP_SIZE[format_name],
        "strategy": _STRATEGY[format_name], "block_structure": None, "dynamic": False, "actorder": None,
        "scale_dtype": _SCALE_DTYPE[format_name], "zp_dtype": None, "observer": "memoryless_minmax",
        "observer_kwargs": {},
    }  # fmt: skip
    layout = f"{format_name}-pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "config_groups": {"group_0": group | {"format": layout}}, "quant_method": "compressed-tensors",
        "kv_cache_scheme": None, "format": layout, "quantization_status": "compressed",
        "global_compression_ratio": None, "ignore": [_pattern(entry) for entry in ignore],
    }  # fmt: skip


def recognize(config: Mapping[str, Any]) -> PackedAs:
    """What a `quantization_config` says, the inverse of `describe`; also for those of llmcompressor and transformers.

    Raises ValueError for what this package cannot compute with: another method, layout, block size or scale type,
    quantized activations or cache, rotated weights, weights that are not compressed.
    """
    match config.get("quant_method"):
        case "compressed-tensors":
            return _recognize_compressed_tensors(config)
        case "bitsandbytes":
            return _recognize_bitsandbytes(config)
        case other:
            raise _refusal("quant_method", other, "compressed-tensors, bitsandbytes")


def _bitsandbytes(ignore: Sequence[str], dtype: torch.dtype, double_quant: bool) -> dict[str, Any]:
    """As `transformers.BitsAndBytesConfig` dumps itself."""
    if patterns := [entry for entry in ignore if entry.startswith("re:")]:
        raise ValueError(f"ignore={patterns}: bitsandbytes knows no re: patterns; allowed: names of modules")
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": double_quant, "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": list(ignore), "llm_int8_threshold": 6.0,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
    }  # fmt: skip


def _recognize_bitsandbytes(config: Mapping[str, Any]) -> PackedAs:
    expected = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    for key, value in expected.items():
        if config.get(key) != value:
            raise _refusal(key, config.get(key), str(value))
    if (storage := config.get("bnb_4bit_quant_storage", "uint8")) not in ("uint8", None):
        raise _refusal("bnb_4bit_quant_storage", storage, "uint8")
    skipped = config.get("llm_int8_skip_modules")  # null: transformers leaves the head alone
    double_quant = bool(config.get("bnb_4bit_use_double_quant", False))
    return PackedAs("nf4", (_HEAD,) if skipped is None else tuple(skipped), {"double_quant": double_quant})


def _recognize_compressed_tensors(config: Mapping[str, Any]) -> PackedAs:
    group = _only_group(config)
    layout = group.get("format") or config.get("format")
    if layout not in _FORMAT:
        raise _refusal("format", layout, ", ".join(_FORMAT))
    name = _FORMAT[layout]
    if (status := config.get("quantization_status")) != "compressed":
        raise _refusal("quantization_status", status, "compressed")
    for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        if config.get(key):
            raise _refusal(key, config[key], "none")
    if group["targets"] != ["Linear"]:
        raise _refusal("targets", group["targets"], "['Linear'], with exceptions in ignore")
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise _refusal(key, group[key], "none: only the weights may be quantized")
    _check_weights(name, group.get("weights") or {})
    return PackedAs(name, tuple(_name(entry) for entry in config.get("ignore") or ()), {})


def _only_group(config: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise _refusal("config_groups", sorted(groups), "one group, in which all layers have the same format")
    return next(iter(groups.values()))


def _check_weights(name: str, weights: Mapping[str, Any]) -> None:
    expected = {
        "num_bits": 4, "type": "float", "symmetric": True, "group_size": _GROUP_SIZE[name],
        "strategy": _STRATEGY[name], "dynamic": False,
    }  # fmt: skip
    for key, value in expected.items():
        if weights.get(key) != value:
            raise _refusal(f"weights.{key}", weights.get(key), f"{value} in {name}")
    if (dtype := weights.get("scale_dtype")) not in (None, _SCALE_DTYPE[name]):
        raise _refusal("weights.scale_dtype", dtype, f"{_SCALE_DTYPE[name]} in {name}")
    if weights.get("actorder") == "group":  # "weight" reorders while calibrating only
        raise _refusal("weights.actorder", "group", "null, weight: the columns must be stored in order")


def _pattern(entry: str) -> str:
    """An entry as compressed-tensors reads it, which takes a plain one for a full name."""
    if entry == _HEAD or entry.startswith("re:"):
        return entry
    return _ANY_PARENT + re.escape(entry) + _END


def _name(pattern: str) -> str:
    """The inverse of `_pattern`."""
    name = pattern.removeprefix(_ANY_PARENT).removesuffix(_END).replace("\\", "")
    return name if _pattern(name) == pattern else pattern


def _refusal(key: str, given: Any, allowed: str) -> ValueError:
    return ValueError(f"quantization_config: {key}={given!r} cannot be loaded; allowed: {allowed}")
