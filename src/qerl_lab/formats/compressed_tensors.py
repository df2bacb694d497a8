"""Formats in the checkpoint layout of compressed-tensors: what config.json says about them, both ways.

It is what the presets NVFP4A16 and MXFP4A16 of version 0.17 dump; the library is not needed here.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qerl_lab.formats import e2m1
from qerl_lab.formats.format import Format, PackedAs, layers, refusal

# The one output layer of a causal LM: its name is its full name, and tools look for the plain word.
_HEAD = "lm_head"
_ANY_PARENT, _END, _BELOW = r"re:(.*\.)?", "$", r"\..*"


@dataclass(frozen=True)
class CompressedTensors(Format):
    """A format of 4 bits whose blocks lie within rows, and whose rule of rounding no checkpoint records."""

    QUANT_METHOD = "compressed-tensors"
    BY_ROWS = True
    STRATEGY: ClassVar[str]  # what shares a scale: `group`; `tensor_group`, where the tensor has one too
    SCALE_DTYPE: ClassVar[torch.dtype]

    @property
    def bits_per_weight(self) -> float:
        """Return 4 bits and a byte per block, by every rule. (NVFP4's global scale adds 4 bytes a tensor.)"""
        assert self.BLOCK is not None
        return 4 + 8 / self.BLOCK

    def ideal(self, weight: Tensor) -> Tensor:
        """Return the nearest E2M1 values under the scale that maps a block's maximum to 6, unrounded."""
        assert self.BLOCK is not None
        blocks = weight.float().unflatten(1, (-1, self.BLOCK))
        scale = blocks.abs().amax(-1, keepdim=True) / e2m1.MAX
        exact = torch.where(scale > 0, blocks / scale, 0.0)
        rounded = e2m1.decode(e2m1.pack(e2m1.encode(exact).flatten(1)), torch.float32)
        return (rounded.view_as(blocks) * scale).flatten(1)

    @classmethod
    def layout_name(cls) -> str:
        """Return what config.json calls the layout."""
        return f"{cls.NAME}-pack-quantized"

    def quantization_config(self, ignore: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        """Return what the library dumps; it does not record `dtype`. An entry of `ignore` may be `re:` and a pattern,
        and one that is the end of a name becomes such a pattern."""
        weights = self._weights() | {
            "block_structure": None, "actorder": None, "scale_dtype": str(self.SCALE_DTYPE), "zp_dtype": None,
            "observer": "memoryless_minmax", "observer_kwargs": {},
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "config_groups": {"group_0": group | {"format": self.layout_name()}}, "quant_method": self.QUANT_METHOD,
            "kv_cache_scheme": None, "format": self.layout_name(), "quantization_status": "compressed",
            "global_compression_ratio": None, "ignore": [_pattern(entry) for entry in ignore],
        }  # fmt: skip

    @classmethod
    def recognize(cls, config: Mapping[str, Any]) -> PackedAs | None:
        """Read what the library or llmcompressor dumped; None if it speaks of another layout."""
        if layout_of(config) != cls.layout_name():
            return None
        if (status := config.get("quantization_status")) != "compressed":
            raise refusal("quantization_status", status, "compressed")
        for key in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            if config.get(key):
                raise refusal(key, config[key], "none")
        group = _only_group(config)
        if group["targets"] != ["Linear"]:
            raise refusal("targets", group["targets"], "['Linear'], with exceptions in ignore")
        for key in ("input_activations", "output_activations"):
            if group.get(key):
                raise refusal(key, group[key], "none: only the weights may be quantized")
        cls._check_weights(group.get("weights") or {})
        (unknown_rule,) = cls.variants()
        return PackedAs(unknown_rule, tuple(map(_name, layers("ignore", config.get("ignore")))))

    @classmethod
    def _weights(cls) -> dict[str, Any]:
        """Return what must be said of the weights."""
        return {
            "num_bits": 4, "type": "float", "symmetric": True, "group_size": cls.BLOCK, "strategy": cls.STRATEGY,
            "dynamic": False,
        }  # fmt: skip

    @classmethod
    def _check_weights(cls, weights: Mapping[str, Any]) -> None:
        for key, value in cls._weights().items():
            if weights.get(key) != value:
                raise refusal(f"weights.{key}", weights.get(key), f"{value} in {cls.NAME}")
        if (dtype := weights.get("scale_dtype")) not in (None, str(cls.SCALE_DTYPE)):
            raise refusal("weights.scale_dtype", dtype, f"{cls.SCALE_DTYPE} in {cls.NAME}")
        if weights.get("actorder") == "group":  # "weight" reorders while calibrating only
            raise refusal("weights.actorder", "group", "null, weight: the columns must be stored in order")


def layout_of(config: Mapping[str, Any]) -> str | None:
    """Return what `config` calls the layout of the weights. Raises ValueError unless all layers have the same one."""
    return _only_group(config).get("format") or config.get("format")


def _only_group(config: Mapping[str, Any]) -> Mapping[str, Any]:
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise refusal("config_groups", sorted(groups), "one group, in which all layers have the same format")
    return next(iter(groups.values()))


def _pattern(entry: str) -> str:
    """Write an entry as compressed-tensors reads it, which takes a plain one for a full name, and not for a module that
    layers are part of."""
    if entry == _HEAD or entry.startswith("re:"):
        return entry
    name = re.escape(entry)
    return f"{_ANY_PARENT}{name}{_END}|{name}{_BELOW}"


def _name(pattern: str) -> str:
    """Invert `_pattern`, also as it was when it ended after the name."""
    name = pattern.removeprefix(_ANY_PARENT).partition(_END)[0].replace("\\", "")
    return name if pattern in (_pattern(name), _ANY_PARENT + re.escape(name) + _END) else pattern
