"""The contract of a weight format, and how one is found by name.

A format is one module of this package; the module itself is the codec. To add one, write the module: nothing else
changes, `names()` finds it by the line `NAME: str = "..."` that every codec has.
"""

import importlib
import re
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

# Far above any weight, and low enough that nothing overflows float32: not rounding up to the nearest code, not the sum
# of 2**27 block maxima that NF4's double quantization takes.
LIMIT = 2.0**100

# What `quantize` makes of one weight at a time: its intermediate results take about 14 bytes an element.
_SLICE_ELEMENTS = 2**19

# Shape and dtype of the packed tensors, by name.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Decoder(NamedTuple):
    """The weight of a Linear as W = alpha * W'.

    `unpack(dtype)` makes W' `[N, K]` in float32 or bfloat16; alpha is to be applied after the product. Made once per
    layer, so that a call reads nothing back from a GPU.
    """

    unpack: Callable[[torch.dtype], Tensor]
    alpha: float = 1.0


class Codec(Protocol):
    """What a module `qerl_lab.formats.<name>` exposes. Packed tensors are keyed by their names in a checkpoint."""

    NAME: str
    BLOCK: int | None  # elements that share one scale; None: a dense format, nothing is packed
    QUANT_METHOD: str | None  # `quant_method` of a Hugging Face `quantization_config`
    OPTIONS: tuple[str, ...]  # options of `quantize` that a configuration sets, by the same names

    def bits_per_weight(self, **options: Any) -> float:
        """Stored bits per weight, scales included, per-tensor constants (at most 2 KiB) left out."""

    def shared_options(self, weights: Sequence[Tensor], **options: Any) -> dict[str, Any]:
        """What completes the `options` of `quantize` alike for all parts of a fused layer (q/k/v, gate/up)."""

    def quantize(self, weight: Tensor, *, name: str = "weight", **options: Any) -> dict[str, Tensor]:
        """Pack `weight[N, K]`. Raises ValueError, naming `name`, for what the format cannot hold."""

    def dequantize(self, packed: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The weight `[N, K]` that `packed` stands for, rounded once to `dtype`."""

    def decoder(self, packed: dict[str, Tensor], shape: tuple[int, int]) -> Decoder:
        """What a Linear computes with. On a GPU the bits are those of the CPU."""

    def layout(self, shape: tuple[int, int], **options: Any) -> Layout:
        """What `quantize` makes of a weight `[N, K]`."""

    def accept(
        self, packed: dict[str, Tensor], shape: tuple[int, int], *, name: str, **options: Any
    ) -> dict[str, Tensor]:
        """`packed`, as some program wrote it, as `quantize` returns it. Raises ValueError, naming the tensor of the
        module `name`, where it is not what `quantize` with `options` makes of a weight `[N, K]`."""


@cache
def names() -> tuple[str, ...]:
    """The formats there are, sorted; found by reading the files, so that none is imported."""
    files = Path(__file__).parent.glob("*.py")
    return tuple(sorted(f.stem for f in files if re.search(r"^NAME: str = ", f.read_text("utf-8"), re.MULTILINE)))


@cache
def codec(name: str) -> Codec:
    """The codec called `name`. Raises ValueError for an unknown name."""
    if name not in names():
        raise ValueError(f"unknown weight format {name!r}; allowed: {', '.join(names())}")
    return cast(Codec, importlib.import_module(f"qerl_lab.formats.{name}"))


def check_weight(weight: Tensor, *, name: str, format_name: str, block: int = 1) -> Tensor:
    """`weight[N, K]` detached, contiguous, in float32 or bfloat16 (float16 is widened, which is exact).

    Raises ValueError, naming the tensor, if it is not a matrix of floats, if K is not a multiple of `block`, or if a
    value is NaN, infinite or at least 2**100 in magnitude.
    """
    if weight.ndim != 2 or weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name}: {format_name} packs a matrix [N, K] in float32, bfloat16 or float16, "
            f"got shape {list(weight.shape)} in {weight.dtype}"
        )
    columns = weight.shape[1]
    if columns % block:
        raise ValueError(
            f"{name}: K={columns} is not divisible by {block}, the block of {format_name}; "
            f"allowed: multiples of {block}. Leave this layer out (ignore) or choose a format with another block"
        )
    weight = weight.detach()
    low, high = torch.aminmax(weight) if weight.numel() else (weight.new_zeros(()),) * 2  # no copy of the weight
    if not (low > -LIMIT and high < LIMIT):  # NaN compares false
        bad = ~(weight.abs() < LIMIT)
        row, column = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: {int(bad.sum())} values that {format_name} cannot hold, the first {weight[row, column].item()} "
            f"at [{row}, {column}]; allowed: finite values below 2**100"
        )
    return (weight.float() if weight.dtype is torch.float16 else weight).contiguous()


def quantize_by_rows(module_codec: Codec, weight: Tensor, *, name: str, **options: Any) -> dict[str, Tensor]:
    """`module_codec.quantize`, some rows at a time where the blocks lie within rows: the same tensors, in a fraction of
    the memory. `options` hold what the rows have in common (`shared_options`)."""
    rows = max(1, _SLICE_ELEMENTS // max(1, weight.shape[-1]))
    # In the layout of compressed-tensors a block lies within a row; bitsandbytes' blocks run over the flattened weight.
    if module_codec.QUANT_METHOD != "compressed-tensors" or weight.ndim != 2 or len(weight) <= rows:
        return module_codec.quantize(weight, name=name, **options)
    parts = [
        module_codec.quantize(part, name=f"{name}, row {i * rows} and following", **options)
        for i, part in enumerate(weight.detach().split(rows))
    ]
    return {key: torch.cat([part[key] for part in parts]) if one.ndim == 2 else one for key, one in parts[0].items()}


def check_layout(packed: dict[str, Tensor], layout: Layout, *, name: str, format_name: str) -> dict[str, Tensor]:
    """`packed`, in the order of `layout`. Raises ValueError, naming the tensor, for another shape or dtype."""
    for key, (shape, dtype) in layout.items():
        found = packed[key]
        if (tuple(found.shape), found.dtype) != (shape, dtype):
            raise ValueError(
                f"{name}.{key} is {found.dtype} {list(found.shape)}, and {format_name} has {dtype} {list(shape)} there"
            )
    return {key: packed[key] for key in layout}
