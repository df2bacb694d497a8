"""MXFP4 (OCP Microscaling Formats v1.0): E2M1 values, one power of two (E8M0) per 32 elements of a row.

    weight ~ value * 2 ** (weight_scale - 127)

The specification leaves the exponent to the writer. The option `exponent_rule` sets it. The interval behind each rule
contains the block's maximum divided by the scale:
- `round`, [3.5, 7): round max|block| to E2M1's one mantissa bit, half up, and take its exponent less 2, the exponent
  of E2M1's largest value. Clips up to 1. Bit-equal to compressed-tensors 0.17 (preset MXFP4A16; `round_to_power_2` and
  `generate_mx_scales` in quantization/utils/mxfp_utils.py); torchao calls it EVEN.
- `floor`, [4, 8): floor(log2(max|block|)) - 2. The finest step, but clips up to 2. The conversion described in the
  specification (section 6.3); torchao's FLOOR.
- `ceil`, (3, 6]: ceil(log2(max|block| / 6)). Clips nothing. cuBLAS ("Block quantization", UE8M0 scales); torchao's
  RCEIL. (torchao's CEIL is another rule: ceil(log2(max|block|)) - 2.)
Exponents below -127 become -127, so blocks below 2**-129 become zeros; a block of zeros has scale byte 0. torchao's
names are in `ScaleCalculationMode` (torchao/prototype/mx_formats/config.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_lab.formats import e2m1
from qerl_lab.formats.compressed_tensors import CompressedTensors
from qerl_lab.formats.format import checked

_BIAS = 127  # of E8M0
_E2M1_EMAX = 2  # 6 = 1.5 * 2**2
_LARGEST_SCALE = 224  # 6 * 2**(224 - 127) is below 2**100, as every weight that is packed; 255 is NaN
# Mantissa of max|block|, in [0.5, 1), from which on the exponent is raised by one.
_NEXT_EXPONENT_FROM = {"round": 0.875, "floor": 1.0, "ceil": 0.75 + 2**-24}  # the next float32 above 0.75
EXPONENT_RULES = tuple(_NEXT_EXPONENT_FROM)


@dataclass(frozen=True)
class Mxfp4(CompressedTensors):
    """MXFP4; `exponent_rule`, one of `EXPONENT_RULES`, says how the exponents are chosen (see the module)."""

    NAME = "mxfp4"
    BLOCK = 32
    LAYOUT = "mxfp4-pack-quantized"
    STRATEGY = "group"
    SCALE_DTYPE = torch.uint8

    exponent_rule: str | None

    def quantize(self, weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
        """Pack `weight[N, K]`, K divisible by 32.

        Returns `weight_packed` uint8 `[N, K/2]` (low nibble = even column) and `weight_scale` uint8 `[N, K/32]`, E8M0.
        Raises ValueError for an unknown `exponent_rule`, and, naming `name`, unless `weight` is a matrix of finite
        floats below 2**100 with such a K.
        """
        if self.exponent_rule not in EXPONENT_RULES:
            raise ValueError(f"unknown exponent_rule {self.exponent_rule!r}; allowed: {', '.join(EXPONENT_RULES)}")
        weight = checked(weight, self, name=name)
        blocks = weight.unflatten(1, (-1, self.BLOCK))
        largest = blocks.abs().amax(-1).float()
        mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2**exponent, mantissa in [0.5, 1)
        exponent = exponent - 1 + (mantissa >= _NEXT_EXPONENT_FROM[self.exponent_rule]).int()
        scale = (exponent - _E2M1_EMAX + _BIAS).clamp(min=0)
        scale = torch.where(largest == 0, 0, scale).to(torch.uint8)
        codes = e2m1.encode(blocks / scale.view(torch.float8_e8m0fnu).to(weight.dtype).unsqueeze(-1)).flatten(1)
        return {"weight_packed": e2m1.pack(codes), "weight_scale": scale}

    def dequantize(self, packed: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Unpack packed tensors to a weight `[N, K]`; exact in bfloat16 and float32."""
        return e2m1.dequantize(packed["weight_packed"], packed["weight_scale"], dtype)

    def accept(self, packed: Mapping[str, Tensor], shape: tuple[int, int], *, name: str) -> dict[str, Tensor]:
        """Check tensors that another program packed; return those that `layout` lists.

        Raises ValueError, naming the tensor, for a shape or dtype other than in `layout(shape)`, and for scales that
        are NaN or allow weights of 2**100 and more.
        """
        accepted = super().accept(packed, shape, name=name)
        if (accepted["weight_scale"] > _LARGEST_SCALE).any():
            raise ValueError(f"{name}.weight_scale has NaN or huge numbers; allowed: bytes of 0 to {_LARGEST_SCALE}")
        return accepted
