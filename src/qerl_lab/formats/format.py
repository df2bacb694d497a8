"""The interface of a weight format, and `pack_fused`, which packs dense weights."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

# Far above any weight. Low enough that neither rounding up nor the sum of 2**27 block maxima (NF4's double
# quantization) overflows float32.
LIMIT = 2.0**100

# Allowed dtypes of a dense weight in a checkpoint.
STORED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_SLICE_ELEMENTS = 2**20  # weights quantized at a time, because rounding takes about 14 bytes per weight

# Shape and dtype of the packed tensors, by name.
Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]
Quantize = Callable[..., dict[str, Tensor]]  # called like `Format.quantize`


class Decoder(NamedTuple):
    """Unpacks the weight W of a Linear as W = alpha * W'.

    `unpack(dtype)` returns W' `[N, K]` in float32 or bfloat16. The caller multiplies its matrix product by `alpha`. A
    decoder is made once per layer, so that `unpack` reads no numbers back from a GPU.
    """

    unpack: Callable[[torch.dtype], Tensor]
    alpha: float = 1.0


class PackedAs(NamedTuple):
    """How a model is packed: its format, and in `ignore` what stays dense (see `model.on_disk.is_ignored`)."""

    weight_format: "Format"
    ignore: tuple[str, ...]


@dataclass(frozen=True)
class Format(ABC):
    """A way to store a weight `[N, K]` in few bits. The dataclass fields are the format's options.

    Each field has the name of its key in the config group `format`, which holds its default. A rounding rule is None if
    the format comes from a checkpoint, because checkpoints do not record the rule. Packed tensors are named as in a
    checkpoint, without the module's name.
    """

    NAME: ClassVar[str]
    BLOCK: ClassVar[int | None]  # elements that share one scale; 0: all of a row; None: a dense format
    QUANT_METHOD: ClassVar[str | None] = None  # `quant_method` of a Hugging Face `quantization_config`
    SHARED: ClassVar[str | None] = None  # packed tensor shared by all parts of a fused layer (q/k/v, gate/up)
    BY_ROWS: ClassVar[bool] = False  # no block crosses rows, so that rows can be quantized separately

    @property
    @abstractmethod
    def bits_per_weight(self) -> float:
        """Return the bits stored per weight: its value and its part of a block scale.

        Row scales and constants of a whole tensor (at most 2 KiB) do not count.
        """

    @abstractmethod
    def quantize(self, weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
        """Pack a dense `weight[N, K]`; return the packed tensors by name, e.g. `weight_packed`.

        Raises ValueError, naming the layer `name`, for values or shapes that the format cannot store.
        """

    @abstractmethod
    def dequantize(self, packed: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Unpack the tensors that `quantize` returned to a weight of `shape` [N, K], rounded once to `dtype`."""

    @abstractmethod
    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return shape and dtype, by name, of each tensor that `quantize` makes of a weight of `shape` [N, K]."""

    def packed_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of all packed tensors of a weight [`rows`, `columns`]."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.layout((rows, columns)).values())

    def fused_quantize(self, weights: Sequence[Tensor]) -> Quantize:
        """Return the function that packs each part of one fused layer (q/k/v or gate/up); call it like `quantize`.

        `weights` are the dense parts. A constant that they share, such as a tensor scale, is computed here from all of
        them. By default nothing is shared, and the function is `quantize`.
        """
        return self.quantize

    def decoder(self, packed: Mapping[str, Tensor], shape: tuple[int, int]) -> Decoder:
        """Return the decoder of a packed weight of `shape` [N, K]. It gives the same bits on a GPU as on a CPU."""
        return Decoder(partial(self.dequantize, packed, shape))

    def accept(self, packed: Mapping[str, Tensor], shape: tuple[int, int], *, name: str) -> dict[str, Tensor]:
        """Check tensors that another program packed from a weight of `shape` [N, K]; return those that `layout` lists.

        Raises ValueError, naming module `name` and tensor, if shape or dtype of a tensor differ from `layout(shape)`.
        """
        layout = self.layout(shape)
        for key, (expected, dtype) in layout.items():
            tensor = packed[key]
            if (tuple(tensor.shape), tensor.dtype) != (expected, dtype):
                raise ValueError(
                    f"{name}.{key} is {tensor.dtype} {list(tensor.shape)}, "
                    f"and {self.NAME} has {dtype} {list(expected)} there"
                )
        return {key: packed[key] for key in layout}

    def quantization_config(self, ignore: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        """Build the `quantization_config` of a packed checkpoint's config.json.

        `ignore` names the Linears left dense (see `model.on_disk.is_ignored`). `dtype` is the model's compute dtype.
        Raises ValueError for an entry of `ignore` that config.json cannot express, and if the format has no
        `quantization_config`.
        """
        raise ValueError(f"{self.NAME} has no quantization_config")

    @classmethod
    def recognize(cls, config: Mapping[str, Any]) -> PackedAs | None:
        """Parse `config`, a `quantization_config` with this format's QUANT_METHOD; None if it is of another format.

        Raises ValueError for settings that this package cannot compute with: another block size or scale type,
        quantized activations or cache, rotated weights, uncompressed weights.
        """
        return None


def checked(weight: Tensor, weight_format: Format, *, name: str) -> Tensor:
    """Validate `weight[N, K]` for packing; return it contiguous in float32 or bfloat16.

    float16 converts exactly to float32; float64 is rounded to float32. Raises ValueError, naming the tensor `name`,
    unless `weight` is a matrix of finite floats below 2**100, and each row divides into blocks. Where blocks cross rows
    (BY_ROWS is false), the whole matrix must divide into blocks instead.
    """
    check_weight(weight, weight_format, name=name)
    what, count = ("K", weight.shape[1]) if weight_format.BY_ROWS else ("N*K", weight.numel())
    block = weight_format.BLOCK or 1
    if count % block:
        raise ValueError(
            f"{name}: {what}={count} is not divisible by {block}, the block of {weight_format.NAME}; "
            f"allowed: multiples of {block}. "
            "Leave this layer out (ignore, in a run format.ignore), or take another format"
        )
    weight = weight.detach()
    return (weight if weight.dtype in (torch.float32, torch.bfloat16) else weight.float()).contiguous()


def check_weight(weight: Tensor, weight_format: Format, *, name: str) -> None:
    """Raise ValueError unless `weight` is a matrix [N, K] in one of `STORED_DTYPES`, finite and below 2**100.

    The limit holds for magnitudes. The message names the tensor, by `name`, and the format.
    """
    if weight.ndim != 2 or weight.dtype not in STORED_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in STORED_DTYPES)
        raise ValueError(
            f"{name}: {weight_format.NAME} packs a matrix [N, K] in {allowed}, got shape {list(weight.shape)} in "
            f"{weight.dtype}"
        )
    check_values(weight, weight_format.NAME, name=name)


def check_values(tensor: Tensor, holder: str = "", *, name: str) -> None:
    """Raise ValueError if `tensor` has NaN, Inf, or magnitudes of 2**100 or more: a model would answer nonsense.

    The message names the tensor `name`, and what cannot hold the values: `holder`, a format's name, or by default the
    tensor's dtype.
    """
    tensor = tensor.detach()
    if not tensor.numel():
        return
    low, high = torch.aminmax(tensor)  # makes no copy of the tensor
    if not (low > -LIMIT and high < LIMIT):  # NaN compares false
        bad = ~(tensor.abs() < LIMIT)
        first, dtype = bad.nonzero()[0].tolist(), str(tensor.dtype).removeprefix("torch.")
        raise ValueError(
            f"{name}: {int(bad.sum())} values that {holder or dtype} cannot hold, the first "
            f"{tensor[tuple(first)].item()} at {first}; allowed: finite values below 2**100"
        )


def pack_fused(weight_format: Format, weights: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Pack the parts of one fused layer (q/k/v, gate/up); yield each part's name and packed tensors.

    `weights` holds the dense parts `[N, K]` by name, in the dtype of the checkpoint and not in the compute dtype, so
    that the bytes depend on the checkpoint alone. Each part is removed from `weights` when it is packed. Raises
    ValueError, naming the part, for values or shapes that the format cannot store.
    """
    for name, weight in weights.items():  # before the shared constants, which one bad part would spoil
        check_weight(weight, weight_format, name=name)
    quantize = weight_format.fused_quantize(list(weights.values()))
    for name in list(weights):
        rows = max(1, _SLICE_ELEMENTS // max(1, weights[name].shape[-1])) if weight_format.BY_ROWS else None
        yield name, quantized_by_rows(quantize, weights.pop(name), rows, name=name)


def quantized_by_rows(quantize: Quantize, weight: Tensor, rows: int | None, *, name: str) -> dict[str, Tensor]:
    """Quantize `weight[N, K]` in slices of `rows` rows, to save memory; None quantizes all rows at once.

    The packed tensors are the same either way. `quantize` must come from `Format.fused_quantize`, so that all slices
    use the same constants, such as the tensor scale.
    """
    if rows is None or len(weight) <= rows:
        return quantize(weight, name=name)
    parts = [quantize(part, name=name) for part in weight.detach().split(rows)]
    return {key: _join_rows([part[key] for part in parts]) for key in parts[0]}


def _join_rows(slices: list[Tensor]) -> Tensor:
    """Concatenate the slices of a packed matrix by rows. Slices of another tensor are all equal: return the first.

    Concatenates bytes, because autocast refuses torch.cat of float8.
    """
    first = slices[0]
    return torch.cat([part.view(torch.uint8) for part in slices]).view(first.dtype) if first.ndim == 2 else first


def ceil_div(count: int, size: int) -> int:
    """Return count / size, rounded up."""
    return -(-count // size)


def layer_names(key: str, listed: Any) -> tuple[str, ...]:
    """Return `listed`, the layers that a `quantization_config` does not quantize, as a tuple; empty for None.

    `key` is the name of the entry that lists them. Raises ValueError, naming `key`, unless `listed` is None or a list
    of strings.
    """
    entries = [] if listed is None else listed
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise unsupported_entry(key, listed, "a list of names")
    return tuple(entries)


def unsupported_entry(key: str, given: Any, allowed: str) -> ValueError:
    """Return a ValueError: a `quantization_config` has the value `given` at `key`, and only `allowed` can be loaded."""
    return ValueError(f"quantization_config: {key}={given!r} cannot be loaded; allowed: {allowed}")
