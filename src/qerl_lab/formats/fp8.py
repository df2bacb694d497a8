"""FP8: E4M3 values (OCP 8-bit Floating Point Specification, revision 1.0, section 5), a bfloat16 scale per row.

    weight ~ value * weight_scale

- scale = bfloat16(max|row| / 448), computed in float32 whatever the dtype of the weight; 2**-7 where that is zero;
- value = E4M3(weight / scale), rounded once, to nearest and ties to even; it saturates at 448.
For a bfloat16 weight the scales equal the scales of compressed-tensors 0.17 (preset FP8_DYNAMIC: `calculate_qparams`,
round to nearest, min-max observer). For other dtypes they equal its scales after rounding to bfloat16. The values equal
its `quantize` of the weight in float32. Given a bfloat16 weight, compressed-tensors rounds weight / scale twice, first
to bfloat16, and so takes the farther of two neighbours for about 3% of the values.

The scale is bfloat16, because vLLM's Marlin rounds it to the compute dtype: with a float32 scale engine and trainer
would compute with different weights. value * scale is exact in float32; bfloat16 rounds it once.

With `activations=fp8` vLLM also quantizes a layer's input, each token by its own maximum (W8A8). Packed weights are the
same, and the trainer does not quantize its activations.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl_lab.formats.compressed_tensors import E4M3_MAX, CompressedTensors, layout_of, only_group
from qerl_lab.formats.format import Layout, PackedAs, checked, unsupported_entry

_SCALE_OF_ZERO_ROW = torch.finfo(torch.bfloat16).eps  # any positive value would do; compressed-tensors writes this one
_NAN = 0x7F  # bits of NaN, without the sign
_PER_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
_UNUSED = dict.fromkeys(("group_size", "block_structure", "actorder", "scale_dtype", "zp_dtype", "observer"))
INPUT_ACTIVATIONS = {"auto": None, "fp8": _PER_TOKEN | _UNUSED | {"observer_kwargs": {}}}  # of a quantization_config


@dataclass(frozen=True)
class Fp8(CompressedTensors):
    """FP8 with activations in the compute dtype (`auto`) or, in vLLM, in FP8 (`fp8`)."""

    NAME = "fp8"
    BLOCK = 0
    BITS = 8
    LAYOUT = "float-quantized"
    STRATEGY = "channel"
    SCALE_DTYPE = torch.bfloat16

    activations: str

    def quantize(self, weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
        """Pack `weight[N, K]` of any K into `weight` float8_e4m3fn `[N, K]` and `weight_scale` bfloat16 `[N, 1]`.

        Raises ValueError, naming `name`, unless `weight` is a matrix of finite floats below 2**100.
        """
        weight = checked(weight, self, name=name)
        low, high = torch.aminmax(weight, dim=1, keepdim=True)
        scale = (torch.maximum(-low, high).float() / E4M3_MAX).to(torch.bfloat16)
        scale = torch.where(scale == 0, _SCALE_OF_ZERO_ROW, scale)
        values = (weight / scale.float()).clamp_(-E4M3_MAX, E4M3_MAX)  # torch's cast of larger ones is NaN
        return {"weight": values.to(torch.float8_e4m3fn), "weight_scale": scale}

    def dequantize(self, packed: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Unpack the weight `[N, K]`: each value times the scale of its row, exact in float32, else rounded once."""
        return packed["weight"].to(dtype).mul_(packed["weight_scale"])

    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return shape and dtype of `weight` (values) and `weight_scale` (a scale per row), by name."""
        return {"weight": (shape, torch.float8_e4m3fn), "weight_scale": ((shape[0], 1), self.SCALE_DTYPE)}

    def accept(self, packed: Mapping[str, Tensor], shape: tuple[int, int], *, name: str) -> dict[str, Tensor]:
        """Check tensors that another program packed; return those that `layout` lists.

        Raises ValueError, naming the tensor, for a shape or dtype other than in `layout(shape)`, for values that are
        NaN, and for scales that are not positive and finite.
        """
        accepted = super().accept(packed, shape, name=name)
        if (accepted["weight"].view(torch.uint8) & _NAN == _NAN).any():
            raise ValueError(f"{name}.weight has NaN; allowed: -{E4M3_MAX:g} to {E4M3_MAX:g}")
        scale = accepted["weight_scale"]
        if not ((scale > 0) & scale.isfinite()).all():
            raise ValueError(
                f"{name}.weight_scale has zero, negative or infinite numbers, or NaN; allowed: positive finite numbers"
            )
        return accepted

    def quantization_config(self, ignore: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        """Build the `quantization_config` that compressed-tensors would write; `dtype` is not recorded.

        `ignore` names the layers left dense (see `model.on_disk.is_ignored`). The option `activations` of the format
        sets the entry `input_activations`.
        """
        config = super().quantization_config(ignore, dtype)
        group = config["config_groups"]["group_0"]
        group["weights"]["scale_dtype"] = None  # as in the preset: the dtype of the weight
        group["input_activations"] = INPUT_ACTIVATIONS[self.activations]
        return config

    @classmethod
    def recognize(cls, config: Mapping[str, Any]) -> PackedAs | None:
        """Parse a `quantization_config` of compressed-tensors; None if it describes another layout.

        Activations may be unquantized, or FP8 with a dynamic scale per token. Raises ValueError for other entries that
        this package cannot load.
        """
        if layout_of(config) != cls.LAYOUT:
            return None
        group = only_group(config)
        given = group.get("input_activations") or {}
        if given and any(given.get(key) != value for key, value in _PER_TOKEN.items()):
            raise unsupported_entry("input_activations", given, f"null or {_PER_TOKEN} in {cls.NAME}")
        found = super().recognize({**config, "config_groups": {"group_0": {**group, "input_activations": None}}})
        return found and found._replace(weight_format=W8A8 if given else W8A16)


W8A16, W8A8 = Fp8("auto"), Fp8("fp8")
