"""What the formats mean, written once more in numpy float64 from their definitions.

Sources: OCP Microscaling Formats v1.0 (E2M1, E8M0), OCP 8-bit floats (E4M3), QLoRA (arXiv 2305.14314, section 3 and
appendix E). The two rules that the definitions leave open, NVFP4's scales and MXFP4's exponent, are stated where used.
"""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


class Quantized(NamedTuple):
    """`stable` marks the elements that float32 arithmetic cannot have put on another side of a rounding boundary."""

    codes: NDArray[np.int64]
    scale: Array  # per block
    values: Array  # dequantized, [N, K]
    stable: NDArray[np.bool_]


def floor_log2(x: Array) -> NDArray[np.int64]:
    """Exponent of the leading bit; a very small number for 0."""
    return np.where(x == 0, -2000, np.frexp(x)[1] - 1)


def round_float(x: Array, *, mantissa_bits: int, min_exponent: int, largest: float) -> Array:
    """Nearest value of a small float (ties to even, subnormals, saturating)."""
    quantum = np.exp2(np.maximum(floor_log2(np.abs(x)), min_exponent).astype(float) - mantissa_bits)
    return np.clip(np.rint(x / quantum) * quantum, -largest, largest)


def round_e2m1(x: Array) -> Array:
    return round_float(x, mantissa_bits=1, min_exponent=0, largest=6.0)


def round_e4m3(x: Array) -> Array:
    return round_float(x, mantissa_bits=3, min_exponent=-6, largest=448.0)


def e2m1_codes(x: Array) -> NDArray[np.int64]:
    """Sign bit, two exponent bits (bias 1), one mantissa bit."""
    magnitude = np.abs(round_e2m1(x))
    exponent = np.maximum(floor_log2(magnitude), 0)
    mantissa = np.where(magnitude < 1, magnitude * 2, (magnitude / np.exp2(exponent) - 1) * 2)
    field = np.where(magnitude < 1, 0, exponent + 1)
    return (8 * (x < 0) + 2 * field + mantissa).astype(np.int64)


def same_when_nudged(round_: object, x: Array, relative: float = 1e-6) -> NDArray[np.bool_]:
    return round_(x * (1 - relative)) == round_(x * (1 + relative))


def nvfp4(weight: Array, global_scale: float | None = None) -> Quantized:
    """Global scale so that the largest magnitude becomes 448 * 6; block scale so that the block's becomes 6."""
    divisor = 448.0 * 6.0 / np.abs(weight).max() if global_scale is None else global_scale
    blocks = weight.reshape(len(weight), -1, 16)
    exact_scale = divisor * np.abs(blocks).max(-1) / 6.0
    scale = round_e4m3(exact_scale)
    step = np.where(scale == 0, 1.0, scale / divisor)[..., None]
    ratio = np.where(scale[..., None] == 0, 0.0, blocks / step)
    values = round_e2m1(ratio) * step
    stable = same_when_nudged(round_e4m3, exact_scale)[..., None] & same_when_nudged(round_e2m1, ratio)
    shape = weight.shape
    return Quantized(e2m1_codes(ratio).reshape(shape), scale, values.reshape(shape), stable.reshape(shape))


def mxfp4(weight: Array) -> Quantized:
    """Scale 2 ** (e - 2), e the exponent of the block's maximum once rounded to one mantissa bit, half up."""
    blocks = weight.reshape(len(weight), -1, 32)
    largest = np.abs(blocks).max(-1)
    exponent = floor_log2(largest)
    half_units = np.floor(largest / np.exp2(exponent.astype(float) - 1) + 0.5)  # 2, 3 or 4 units of half a binade
    exponent = np.maximum(exponent + (half_units == 4) - 2, -127)
    step = np.exp2(exponent.astype(float))[..., None]
    values = round_e2m1(blocks / step) * step
    codes = e2m1_codes(blocks / step).reshape(weight.shape)
    return Quantized(codes, exponent + 127.0, values.reshape(weight.shape), np.ones(weight.shape, bool))


def nf4_codebook() -> Array:
    """Appendix E: 8 positive and 7 negative quantiles of N(0, 1) from `offset` to 1/2, and 0, scaled to [-1, 1]."""
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
    """Nearest entry of the codebook after division by the largest magnitude of 64 consecutive elements."""
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
    """QLoRA section 3: block maxima less their mean, in blocks of 256, in an 8-bit codebook; and `stable`."""
    offset = largest.mean()
    centred = np.pad(largest - offset, (0, -len(largest) % 256)).reshape(-1, 256)
    scale = np.abs(centred).max(-1, keepdims=True)
    ratio = centred / np.where(scale == 0, 1.0, scale)
    values = codebook[nearest(ratio, codebook)] * scale + offset
    stable = off_midpoints(ratio, codebook, 1e-5)
    return values.reshape(-1)[: len(largest)], stable.reshape(-1)[: len(largest)]


def sqnr_db(weight: Array, approximation: Array) -> float:
    return float(10 * np.log10((weight**2).sum() / ((weight - approximation) ** 2).sum()))
