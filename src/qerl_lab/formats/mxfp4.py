"""MXFP4 (OCP Microscaling Formats v1.0): E2M1 values, one power of two (E8M0) per 32 of a row.

    weight ~ value * 2 ** (weight_scale - 127)

Exponent rule, bit for bit that of compressed-tensors 0.17 (preset MXFP4A16; `round_to_power_2` and
`generate_mx_scales` in quantization/utils/mxfp_utils.py): round max|block| to the one mantissa bit of E2M1, half up,
and take its exponent less 2, the exponent of E2M1's largest value. So the maximum lands in [3.5, 7) of the scaled block
(above 5 it becomes 6), where the specification's floor rule would let it reach 8. Exponents below -127 become -127, so
blocks below 2**-129 become zeros; a block of zeros has scale byte 0.

A later `floor` or `ceil` rule is a new option of `quantize`; the layout would not change.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl_lab.formats import e2m1
from qerl_lab.formats.codecs import Decoder, Layout, check_layout, check_weight

NAME: str = "mxfp4"
BLOCK = 32
QUANT_METHOD: str | None = "compressed-tensors"

_BIAS = 127  # of E8M0
_E2M1_EMAX = 2  # 6 = 1.5 * 2**2


def bits_per_weight() -> float:
    """4 bits and a byte per 32: 4.25."""
    return 4 + 8 / 32


def shared_options(weights: Sequence[Tensor]) -> dict[str, Any]:
    """Nothing: every block stands alone."""
    return {}


def quantize(weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
    """Pack `weight[N, K]`, K divisible by 32.

    Returns `weight_packed` uint8 `[N, K/2]` (low nibble = even column) and `weight_scale` uint8 `[N, K/32]`, E8M0.
    Raises ValueError, naming `name`, for another shape or dtype and for NaN or Inf.
    """
    weight = check_weight(weight, name=name, format_name=NAME, block=BLOCK)
    blocks = weight.unflatten(1, (-1, BLOCK))
    scale = _scale_bytes(blocks.abs().amax(-1).float())
    codes = e2m1.encode(blocks / _powers(scale, weight.dtype).unsqueeze(-1)).flatten(1)
    return {"weight_packed": e2m1.pack(codes), "weight_scale": scale}


def dequantize(packed: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight `[N, K]`: exact in bfloat16 and float32."""
    return _unpacked(packed["weight_packed"], packed["weight_scale"], shape, dtype)


def decoder(packed: dict[str, Tensor], shape: tuple[int, int]) -> Decoder:
    """`dequantize` for a Linear; there is no tensor scale to hold back."""
    return Decoder(partial(_unpacked, packed["weight_packed"], packed["weight_scale"], shape))


def layout(shape: tuple[int, int]) -> Layout:
    """Codes and scales as in `quantize`."""
    rows, columns = shape
    return {
        "weight_packed": ((rows, columns // 2), torch.uint8),
        "weight_scale": ((rows, columns // BLOCK), torch.uint8),
    }


def accept(packed: dict[str, Tensor], shape: tuple[int, int], *, name: str) -> dict[str, Tensor]:
    """`packed` if it is of this layout; raises ValueError, naming the tensor, if not."""
    return check_layout(packed, layout(shape), name=name, format_name=NAME)


def _unpacked(codes: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    if codes.is_cuda:
        from qerl_lab.formats.kernels import dequantize_e2m1

        return dequantize_e2m1(codes, scale, shape, dtype)
    values = e2m1.decode(codes, dtype).unflatten(1, (-1, BLOCK))
    return (values * _powers(scale, dtype).unsqueeze(-1)).reshape(shape)


def _scale_bytes(largest: Tensor) -> Tensor:
    """E8M0 bytes for the block maxima (float32)."""
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2**exponent, mantissa in [0.5, 1)
    exponent = exponent - 1 + (mantissa >= 0.875).int()  # 1.75 and more rounds up to the next power of two
    scale = (exponent - _E2M1_EMAX + _BIAS).clamp(min=0)
    return torch.where(largest == 0, 0, scale).to(torch.uint8)


def _powers(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """2 ** (byte - 127): a byte is an E8M0 number."""
    return scale.view(torch.float8_e8m0fnu).to(dtype)
