"""The contract of a weight format, and the one way from dense weights to packed ones."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

# Far above any weight, and low enough that nothing overflows float32: not rounding up to the nearest code, not the sum
# of 2**27 block maxima that NF4's double quantization takes.
LIMIT = 2.0**100

# A checkpoint may hold a dense weight in these.
STORED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

# `quantize` takes so many elements at a time: its intermediate results are about 14 bytes each. On a GPU a slice costs
# forty launches, however small it is.
_SLICE_ELEMENTS, _SLICE_ELEMENTS_ON_GPU = 2**19, 2**24

# Shape and dtype of the packed tensors, by name.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
Quantize = Callable[..., dict[str, Tensor]]


class Decoder(NamedTuple):
    """The weight of a Linear as W = alpha * W'.

    `unpack(dtype)` makes W' `[N, K]` in float32 or bfloat16; alpha is to be applied after the product. Made once per
    layer, so that a call reads nothing back from a GPU.
    """

    unpack: Callable[[torch.dtype], Tensor]
    alpha: float = 1.0


class PackedAs(NamedTuple):
    """How a model is packed. `ignore` names the modules left dense, for `model.on_disk.is_ignored`."""

    weight_format: "Format"
    ignore: tuple[str, ...]


@dataclass(frozen=True)
class Format(ABC):
    """A way to hold a weight `[N, K]` in few bits: a value, whose fields are the format's options.

    A field is named as its key in the configuration's group `format`, where its default is. None stands for a rule of
    rounding that a checkpoint of other programs does not tell. Packed tensors have their names of a checkpoint.
    """

    NAME: ClassVar[str]
    BLOCK: ClassVar[int | None]  # elements that share one scale; None: a dense format, nothing is packed
    QUANT_METHOD: ClassVar[str | None] = None  # `quant_method` of a Hugging Face `quantization_config`
    SHARED: ClassVar[str | None] = None  # the packed tensor that all parts of a fused layer (q/k/v, gate/up) share
    BY_ROWS: ClassVar[bool] = False  # no block crosses from one row to the next, so rows can be quantized apart

    @property
    @abstractmethod
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales included, per-tensor constants (at most 2 KiB) left out."""

    @abstractmethod
    def quantize(self, weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
        """Pack `weight[N, K]`. Raises ValueError, naming `name`, for what the format cannot hold."""

    @abstractmethod
    def dequantize(self, packed: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Return the weight `[N, K]` that `packed` stands for, rounded once to `dtype`."""

    def ideal(self, weight: Tensor) -> Tensor | None:
        """Return `weight[N, K]` rounded as this format rounds, were the scale of a block any number: float32 `[N, K]`.

        None from a format that does not say; its error is then not split into parts (evaluate/weight_error.py).
        """
        return None

    @abstractmethod
    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return what `quantize` makes of a weight `[N, K]`."""

    def together(self, weights: Sequence[Tensor]) -> Quantize:
        """Return the `quantize` for the parts of one fused layer (q/k/v, gate/up), with what they must have in common.

        Where every block stands alone, that is nothing.
        """
        return self.quantize

    def decoder(self, packed: Mapping[str, Tensor], shape: tuple[int, int]) -> Decoder:
        """Return what a Linear computes with. On a GPU the bits are those of the CPU."""
        return Decoder(partial(self.dequantize, packed, shape))

    def accept(self, packed: Mapping[str, Tensor], shape: tuple[int, int], *, name: str) -> dict[str, Tensor]:
        """Return `packed`, as some program wrote it, as `quantize` does.

        Raises ValueError, naming the tensor of the module `name`, where it is not of the layout of a weight `[N, K]`.
        """
        layout = self.layout(shape)
        for key, (expected, dtype) in layout.items():
            found = packed[key]
            if (tuple(found.shape), found.dtype) != (expected, dtype):
                raise ValueError(
                    f"{name}.{key} is {found.dtype} {list(found.shape)}, "
                    f"and {self.NAME} has {dtype} {list(expected)} there"
                )
        return {key: packed[key] for key in layout}

    def quantization_config(self, ignore: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        """Return the `quantization_config` of a packed checkpoint's config.json.

        `ignore` names the Linears left dense, in full or by the end after a dot; compressed-tensors also takes `re:`
        ones. `dtype` is what the model computes in. Raises ValueError for what config.json cannot say.
        """
        raise ValueError(f"{self.NAME} has no quantization_config")

    @classmethod
    def recognize(cls, config: Mapping[str, Any]) -> PackedAs | None:
        """Read a `quantization_config` of this format's QUANT_METHOD; None if it speaks of another format.

        Raises ValueError for what this package cannot compute with: another block size or scale type, quantized
        activations or cache, rotated weights, weights that are not compressed.
        """
        return None

    @classmethod
    def variants(cls) -> tuple[Self, ...]:
        """Return a value for each set of tensors that the format may have, the usual one first."""
        return (cls(*(None for _ in fields(cls))),)


def checked(weight: Tensor, weight_format: Format, *, name: str) -> Tensor:
    """Return `weight[N, K]` contiguous, in float32 or bfloat16 (float16 exactly, float64 rounded to float32).

    Raises ValueError, naming the tensor, for what `check` refuses. Where blocks lie within rows, K must be a multiple
    of the block.
    """
    check(weight, weight_format, name=name)
    if weight_format.BY_ROWS:
        check_divides(weight.shape[1], "K", weight_format, name=name)
    weight = weight.detach()
    return (weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()).contiguous()


def check(weight: Tensor, weight_format: Format, *, name: str) -> None:
    """Raise ValueError, naming the tensor, unless it is a matrix of finite floats below 2**100 in magnitude."""
    if weight.ndim != 2 or weight.dtype not in STORED_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED_DTYPES)
        raise ValueError(
            f"{name}: {weight_format.NAME} packs a matrix [N, K] in {allowed}, got shape {list(weight.shape)} in "
            f"{weight.dtype}"
        )
    check_values(weight, weight_format.NAME, name=name)


def check_values(tensor: Tensor, holder: str, *, name: str) -> None:
    """Raise ValueError, which names the tensor and its `holder`, for NaN, Inf and magnitudes from 2**100 on."""
    tensor = tensor.detach()
    low, high = torch.aminmax(tensor) if tensor.numel() else (tensor.new_zeros(()),) * 2  # no copy of the tensor
    if not (low > -LIMIT and high < LIMIT):  # NaN compares false
        bad = ~(tensor.abs() < LIMIT)
        first = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{name}: {int(bad.sum())} values that {holder} cannot hold, the first "
            f"{tensor[tuple(first)].item()} at {first}; allowed: finite values below 2**100"
        )


def check_divides(count: int, what: str, weight_format: Format, *, name: str) -> None:
    """Raise ValueError, naming the tensor, unless `count` elements, called `what`, make whole blocks."""
    if count % (block := weight_format.BLOCK or 1):
        raise ValueError(
            f"{name}: {what}={count} is not divisible by {block}, the block of {weight_format.NAME}; "
            f"allowed: multiples of {block}. Leave this layer out (ignore) or choose a format with another block"
        )


def pack_fused(weight_format: Format, weights: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yield name and packed tensors of each part of one fused layer (q/k/v, gate/up).

    `weights[N, K]` come by name in the dtype in which they are stored, whatever the model computes in: the one way from
    a dense weight to packed bytes, which therefore depend on the checkpoint alone. Each weight is taken out of
    `weights` when its turn comes. Raises ValueError, naming the weight, for what the format cannot hold.
    """
    for name, weight in weights.items():  # before what they have in common, which one bad part would spoil for all
        check(weight, weight_format, name=name)
    quantize = weight_format.together(list(weights.values()))
    for name in list(weights):
        elements = _SLICE_ELEMENTS_ON_GPU if weights[name].is_cuda else _SLICE_ELEMENTS
        rows = max(1, elements // max(1, weights[name].shape[-1])) if weight_format.BY_ROWS else None
        yield name, quantized_by_rows(quantize, weights.pop(name), rows, name=name)


def quantized_by_rows(quantize: Quantize, weight: Tensor, rows: int | None, *, name: str) -> dict[str, Tensor]:
    """Return `quantize(weight)` made of `rows` rows at a time: the same tensors, in a fraction of the memory.

    None stands for all rows. `quantize` must know what the rows have in common, as that of `Format.together` does.
    """
    if rows is None or len(weight) <= rows:
        return quantize(weight, name=name)
    parts = [
        quantize(part, name=f"{name}, row {i * rows} and following")
        for i, part in enumerate(weight.detach().split(rows))
    ]
    return {key: torch.cat([part[key] for part in parts]) if one.ndim == 2 else one for key, one in parts[0].items()}


def layers(key: str, listed: Any) -> tuple[str, ...]:
    """Return the layers that a `quantization_config` leaves dense, under `key`; null stands for none.

    Raises ValueError for what is no list of names and patterns.
    """
    entries = [] if listed is None else listed
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise refusal(key, listed, "a list of names")
    for entry in entries:
        try:
            re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
        except re.error as error:
            raise refusal(key, entry, f"re: and a regular expression ({error})") from None
    return tuple(entries)


def refusal(key: str, given: Any, allowed: str) -> ValueError:
    """Return the error for an entry of a `quantization_config` that cannot be loaded."""
    return ValueError(f"quantization_config: {key}={given!r} cannot be loaded; allowed: {allowed}")
