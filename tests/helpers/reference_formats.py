"""Reference implementation of the formats in numpy float64, written from their definitions.

Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0), OCP 8-bit floats (E4M3), QLoRA (arXiv 2305.14314, section 3 and
appendix E), Four Over Six (arXiv 2512.02010). Rules that the definitions leave open, for NVFP4's scales and MXFP4's
exponent, are stated where used.
"""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

# QLoRA, arXiv 2305.14314, appendix E.
QLORA_TABLE = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> Tensor:
    return 0.02 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def nibbles(packed: Tensor) -> NDArray[np.uint8]:
    """Turn [N, K/2] bytes into [N, K] codes, low nibble first."""
    array = packed.numpy()
    return np.stack([array & 15, array >> 4], -1).reshape(len(array), -1)


class Quantized(NamedTuple):
    """Quantized weights. `stable` marks elements whose rounding cannot differ in float32 arithmetic."""

    codes: NDArray[np.int64]
    scale: Array  # per block
    values: Array  # dequantized, [N, K]
    stable: NDArray[np.bool_]


def floor_log2(x: Array) -> NDArray[np.int64]:
    """Return the exponent of the leading bit; a very small number for 0."""
    return np.where(x == 0, -2000, np.frexp(x)[1] - 1)


def round_float(x: Array, *, mantissa_bits: int, min_exponent: int, largest: float) -> Array:
    """Round to the nearest value of a small float (ties to even, subnormals, saturating)."""
    quantum = np.exp2(np.maximum(floor_log2(np.abs(x)), min_exponent).astype(float) - mantissa_bits)
    return np.clip(np.rint(x / quantum) * quantum, -largest, largest)


def round_e2m1(x: Array) -> Array:
    return round_float(x, mantissa_bits=1, min_exponent=0, largest=6.0)


def round_e4m3(x: Array) -> Array:
    return round_float(x, mantissa_bits=3, min_exponent=-6, largest=448.0)


def e2m1_codes(x: Array) -> NDArray[np.int64]:
    """Encode as sign bit, two exponent bits (bias 1) and one mantissa bit."""
    magnitude = np.abs(round_e2m1(x))
    exponent = np.maximum(floor_log2(magnitude), 0)
    mantissa = np.where(magnitude < 1, magnitude * 2, (magnitude / np.exp2(exponent) - 1) * 2)
    field = np.where(magnitude < 1, 0, exponent + 1)
    return (8 * (x < 0) + 2 * field + mantissa).astype(np.int64)


def same_when_nudged(round_: object, x: Array, relative: float = 1e-6) -> NDArray[np.bool_]:
    return round_(x * (1 - relative)) == round_(x * (1 + relative))


class BlockCodes(NamedTuple):
    """Blocks `[N, B, 16]` with one choice of scales; `certain` marks scales that do not depend on rounding errors."""

    scale: Array
    values: Array
    codes: NDArray[np.int64]
    error: Array  # squared, per block
    ratio: Array  # of weights to steps
    certain: NDArray[np.bool_]


def mapped_to(top: float, blocks: Array, divisor: float) -> BlockCodes:
    """Quantize blocks with the largest magnitude of each mapped to `top`."""
    exact = divisor * np.abs(blocks).max(-1) / top
    scale = round_e4m3(exact)
    step = np.where(scale == 0, 1.0, scale / divisor)[..., None]
    ratio = np.where(scale[..., None] == 0, 0.0, blocks / step)
    values = round_e2m1(ratio) * step
    error = ((values - blocks) ** 2).sum(-1)
    return BlockCodes(scale, values, e2m1_codes(ratio), error, ratio, same_when_nudged(round_e4m3, exact))


def nvfp4(weight: Array, global_scale: float | None = None) -> Quantized:
    """Quantize with a global scale that maps the largest magnitude to 448 * 6, and block scales that map it to 6."""
    divisor = 448.0 * 6.0 / np.abs(weight).max() if global_scale is None else global_scale
    found = mapped_to(6.0, weight.reshape(len(weight), -1, 16), divisor)
    stable = found.certain[..., None] & same_when_nudged(round_e2m1, found.ratio)
    shape = weight.shape
    return Quantized(found.codes.reshape(shape), found.scale, found.values.reshape(shape), stable.reshape(shape))


def four_over_six(weight: Array) -> Quantized:
    """Quantize with global scale 256 * 6 / largest magnitude; map each block to 6, or to 4 if that error is less.

    `stable` excludes whole blocks if a scale, a code or the choice depends on float32 rounding.
    """
    divisor = 256.0 * 6.0 / np.abs(weight).max()
    blocks = weight.reshape(len(weight), -1, 16)
    six, four = mapped_to(6.0, blocks, divisor), mapped_to(4.0, blocks, divisor)
    choose = four.error < six.error
    clear = np.abs(four.error - six.error) > 1e-4 * six.error
    scale, codes, values = (
        np.where(choose[..., None] if a.ndim == 3 else choose, a, b)
        for a, b in zip((four.scale, four.codes, four.values), (six.scale, six.codes, six.values), strict=True)
    )
    ratio = blocks * divisor / np.where(scale == 0, 1.0, scale)[..., None]
    stable = clear & six.certain & four.certain & same_when_nudged(round_e2m1, ratio).all(-1)
    shape = weight.shape
    return Quantized(codes.reshape(shape), scale, values.reshape(shape), np.repeat(stable, 16, -1).reshape(shape))


def mxfp4_exponent(largest: Array, rule: str) -> NDArray[np.int64]:
    """Return the exponent of the scale for block maxima; unbounded below."""
    exponent = floor_log2(largest)
    if rule == "floor":  # OCP MX v1.0, section 6.3
        return exponent - 2
    if rule == "ceil":  # the smallest e with max <= 6 * 2**e
        return exponent - 2 + (largest > 6 * np.exp2(exponent.astype(float) - 2))
    # `round`: the exponent of the maximum rounded to one mantissa bit, half up.
    half_units = np.floor(np.ldexp(largest, 1 - exponent) + 0.5)  # 2, 3 or 4 units of half a binade
    return exponent + (half_units == 4) - 2


def mxfp4(weight: Array, rule: str = "round") -> Quantized:
    """Quantize with block scale 2 ** e, e from `mxfp4_exponent`."""
    blocks = weight.reshape(len(weight), -1, 32)
    exponent = np.maximum(mxfp4_exponent(np.abs(blocks).max(-1), rule), -127)
    step = np.exp2(exponent.astype(float))[..., None]
    values = round_e2m1(blocks / step) * step
    codes = e2m1_codes(blocks / step).reshape(weight.shape)
    return Quantized(codes, exponent + 127.0, values.reshape(weight.shape), np.ones(weight.shape, bool))


def e4m3_values() -> Array:
    """List the value of each of the 256 codes: sign, four exponent bits of bias 7, three of mantissa (OCP, section 5).

    All exponent and mantissa bits set is NaN; there are no infinities.
    """
    code = np.arange(256)
    field, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(field == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * np.exp2(field - 7.0))
    magnitude[code & 0x7F == 0x7F] = np.nan
    return np.where(code < 128, magnitude, -magnitude)


def e4m3_codes(x: Array) -> NDArray[np.int64]:
    """Take the nearest of the 127 magnitudes, of two equally near ones the even code, and x's sign."""
    magnitudes = e4m3_values()[:127]
    above = np.minimum(np.searchsorted(magnitudes, np.abs(x)), 126)
    below = np.maximum(above - 1, 0)
    to_above, to_below = np.abs(magnitudes[above] - np.abs(x)), np.abs(np.abs(x) - magnitudes[below])
    code = np.where((to_below < to_above) | ((to_below == to_above) & (below % 2 == 0)), below, above)
    return code + 128 * np.signbit(x)


def bfloat16(x: Array) -> Array:
    """Round to bfloat16: seven mantissa bits, ties to even."""
    return round_float(x, mantissa_bits=7, min_exponent=-126, largest=np.inf)


def fp8(weight: Array) -> Quantized:
    """Quantize with scale bfloat16(max|row| / 448), 2**-7 for a row of zeros."""
    scale = bfloat16(np.abs(weight).max(-1, keepdims=True) / 448)
    scale = np.where(scale == 0, 2.0**-7, scale)
    codes = e4m3_codes(weight / scale)
    return Quantized(codes, scale, e4m3_values()[codes] * scale, np.ones(weight.shape, bool))


def nf4_codebook() -> Array:
    """Return appendix E's codebook: 8 positive and 7 negative quantiles of N(0, 1) and 0, scaled to [-1, 1]."""
    offset = 0.9677083
    quantile = np.vectorize(NormalDist().inv_cdf)
    positive = quantile(np.linspace(offset, 0.5, 9)[:-1])
    negative = -quantile(np.linspace(offset, 0.5, 8)[:-1])
    return np.sort(np.concatenate([positive, [0.0], negative])) / positive.max()


def nearest(x: Array, codebook: Array) -> NDArray[np.int64]:
    return np.abs(x[..., None] - codebook).argmin(-1)


def off_midpoints(x: Array, codebook: Array, margin: float) -> NDArray[np.bool_]:
    return np.abs(x[..., None] - (codebook[1:] + codebook[:-1]) / 2).min(-1) > margin


def nf4(weight: Array, codebook: Array) -> Quantized:
    """Divide by the largest magnitude of each 64 consecutive elements; take the nearest codebook entry."""
    blocks = weight.reshape(-1, 64)
    largest = np.abs(blocks).max(-1)
    ratio = blocks / np.where(largest == 0, 1.0, largest)[:, None]
    codes = nearest(ratio, codebook)
    shape = weight.shape
    values = codebook[codes] * largest[:, None]
    return Quantized(
        codes.reshape(shape), largest, values.reshape(shape), off_midpoints(ratio, codebook, 1e-6).reshape(shape)
    )


def double_quantized(largest: Array, codebook: Array) -> tuple[Array, NDArray[np.bool_]]:
    """Quantize block maxima as in QLoRA section 3: minus their mean, in blocks of 256, to 8 bits; with `stable`."""
    offset = largest.mean()
    centred = np.pad(largest - offset, (0, -len(largest) % 256)).reshape(-1, 256)
    scale = np.abs(centred).max(-1, keepdims=True)
    ratio = centred / np.where(scale == 0, 1.0, scale)
    values = codebook[nearest(ratio, codebook)] * scale + offset
    stable = off_midpoints(ratio, codebook, 1e-5)
    return values.reshape(-1)[: len(largest)], stable.reshape(-1)[: len(largest)]
