"""Base class of formats stored as compressed-tensors checkpoints: write and parse their part of config.json.

The written entry equals what presets NVFP4A16, MXFP4A16 and FP8_DYNAMIC of compressed-tensors 0.17 write. The library
is not needed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from qerl_lab.formats.format import Format, Layout, PackedAs, layer_names, unsupported_entry

# The output layer of a causal LM. It has no parent module, and other tools look for the plain name.
_HEAD = "lm_head"
E4M3_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
_EMPTY_SECTIONS = ("kv_cache_scheme", "sparsity_config", "transform_config")
_ANY_PARENT = r"re:(.*\.)?"


@dataclass(frozen=True)
class CompressedTensors(Format):
    """A format with blocks within rows, of 4-bit E2M1 values unless a subclass overrides BITS and `layout` (FP8)."""

    QUANT_METHOD = "compressed-tensors"
    BY_ROWS = True
    BITS: ClassVar[int] = 4
    LAYOUT: ClassVar[str]  # config.json's name of the checkpoint layout
    STRATEGY: ClassVar[str]  # scales: `group` per block; `tensor_group` per block and per tensor; `channel` per row
    SCALE_DTYPE: ClassVar[torch.dtype]

    @property
    def bits_per_weight(self) -> float:
        """Return the bits per weight: BITS for the value, and the weight's share of the block scale, one byte.

        Scales per tensor (NVFP4, 4 bytes) and per row (FP8, 2 bytes) are not counted.
        """
        return self.BITS + (8 / self.BLOCK if self.BLOCK else 0.0)

    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return shape and dtype of the tensors of codes and of block scales, by name."""
        assert self.BLOCK is not None
        rows, columns = shape
        return {
            "weight_packed": ((rows, columns // 2), torch.uint8),
            "weight_scale": ((rows, columns // self.BLOCK), self.SCALE_DTYPE),
        }

    def quantization_config(self, ignore: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        """Build the `quantization_config` that compressed-tensors would write; `dtype` is not recorded.

        An entry of `ignore` is the full name of a layer, the last parts of its name, a module that contains layers, or
        `re:` and a pattern. Entries other than patterns and `lm_head` are written as patterns (see `_ignore_pattern`).
        """
        weights = self._weights_section() | {
            "block_structure": None, "actorder": None, "scale_dtype": str(self.SCALE_DTYPE), "zp_dtype": None,
            "observer": "memoryless_minmax", "observer_kwargs": {},
        }  # fmt: skip
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "config_groups": {"group_0": group | {"format": self.LAYOUT}}, "quant_method": self.QUANT_METHOD,
            "kv_cache_scheme": None, "format": self.LAYOUT, "quantization_status": "compressed",
            "global_compression_ratio": None, "ignore": [_ignore_pattern(entry) for entry in ignore],
        }  # fmt: skip

    @classmethod
    def recognize(cls, config: Mapping[str, Any]) -> PackedAs | None:
        """Parse a `quantization_config` of compressed-tensors or llmcompressor; None if it describes another layout.

        The options of the returned format are None, because the rounding rule is not recorded. Raises ValueError for an
        entry that this package cannot load.
        """
        if layout_of(config) != cls.LAYOUT:
            return None
        group = only_group(config)
        weights = group.get("weights") or {}
        entries = [
            ("quantization_status", config.get("quantization_status"), ("compressed",)),
            *((key, config.get(key) or None, (None,)) for key in _EMPTY_SECTIONS),
            ("targets", group["targets"], (["Linear"],)),  # with exceptions in ignore
            *((key, group.get(key) or None, (None,)) for key in ("input_activations", "output_activations")),
            *((f"weights.{key}", weights.get(key), (value,)) for key, value in cls._weights_section().items()),
            ("weights.scale_dtype", weights.get("scale_dtype"), (None, str(cls.SCALE_DTYPE))),
            # With "group" the columns are stored in another order; "weight" reorders while calibrating only.
            ("weights.actorder", weights.get("actorder"), (None, "weight", "static")),
        ]
        for key, given, allowed in entries:
            if given not in allowed:
                raise unsupported_entry(key, given, f"{' or '.join(map(str, allowed))} in {cls.NAME}")
        unknown_rule = cls(*(None for _ in fields(cls)))
        ignore = layer_names("ignore", config.get("ignore"))
        return PackedAs(unknown_rule, tuple(map(_ignore_entry, ignore)))

    @classmethod
    def _weights_section(cls) -> dict[str, Any]:
        """Return the `weights` section of the `quantization_config` that this format requires."""
        return {
            "num_bits": cls.BITS, "type": "float", "symmetric": True, "group_size": cls.BLOCK or None,
            "strategy": cls.STRATEGY, "dynamic": False,
        }  # fmt: skip


def layout_of(config: Mapping[str, Any]) -> str | None:
    """Return the name of the checkpoint layout in a `quantization_config`, e.g. `nvfp4-pack-quantized`, or None.

    Raises ValueError unless `config` has exactly one entry in `config_groups`.
    """
    return only_group(config).get("format") or config.get("format")


def only_group(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the only entry of `config_groups` in a `quantization_config`. Raises ValueError for none or several."""
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise unsupported_entry("config_groups", sorted(groups), "one group, in which all layers have the same format")
    return next(iter(groups.values()))


def _ignore_pattern(entry: str) -> str:
    """Turn an entry of `ignore` into a compressed-tensors pattern that matches the same layers.

    compressed-tensors reads an entry that is no pattern as the full name of a layer. `ignore` also allows the last
    parts of a name, and a module that contains layers. `lm_head` and `re:` patterns are returned unchanged.
    """
    if entry == _HEAD or entry.startswith("re:"):
        return entry
    name = re.escape(entry)
    return rf"{_ANY_PARENT}{name}$|{name}\..*"


def _ignore_entry(pattern: str) -> str:
    """Turn a pattern of `_ignore_pattern` back into the entry of `ignore`. Returns any other pattern unchanged."""
    name = pattern.removeprefix(_ANY_PARENT).partition("$")[0].replace("\\", "")
    return name if pattern == _ignore_pattern(name) else pattern
