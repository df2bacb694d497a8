"""Pack a dense checkpoint by rounding to nearest. Holds one output file and one fused layer in memory."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qerl_lab.formats.format import STORED_DTYPES, Format, Layout, pack_fused
from qerl_lab.model.linear import fused_groups
from qerl_lab.model.loading import TensorSource, check_dense_values


class Unit(NamedTuple):
    """Source tensors that are read together: the weights of one fused layer, or one copied tensor.

    `modules` are the fused layer's Linears; empty for a copied tensor. `layout` describes the tensors written.
    """

    names: tuple[str, ...]
    modules: tuple[str, ...]
    layout: Layout


class Shard(NamedTuple):
    """One output file."""

    file: str
    units: list[Unit]

    @property
    def layout(self) -> Layout:
        """Layout (shape and dtype by name) of all tensors in this output file."""
        return {name: about for unit in self.units for name, about in unit.layout.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all tensors in this output file, which has a header too."""
        return layout_bytes(self.layout)


def plan_shards(source: TensorSource, linears: Sequence[str], weight_format: Format, shard_bytes: float) -> list[Shard]:
    """Assign all tensors to output files in source order, keeping fused layers together.

    Each file has at most `shard_bytes` of tensors unless a single unit is larger. Depends on names, shapes and dtypes
    only.
    """
    units = {unit.names[0]: unit for unit in _list_units(source, linears, weight_format)}
    split = split_state_dict_into_shards_factory(
        units, get_storage_size=lambda unit: layout_bytes(unit.layout), filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(shard_bytes),
    )  # fmt: skip
    return [Shard(file, [units[name] for name in names]) for file, names in split.filename_to_tensors.items()]


def _list_units(source: TensorSource, linears: Sequence[str], weight_format: Format) -> Iterator[Unit]:
    """Yield the units of the source, in its order: each fused layer, and each tensor to copy."""
    groups = {f"{name}.weight": tuple(group) for group in fused_groups(list(linears)) for name in group}
    done: set[str] = set()
    for name in source.names:
        if name in done:
            continue
        modules = groups.get(name, ())
        layout: Layout = {} if modules else {name: (source.shape(name), source.dtype(name))}
        for module in modules:
            rows, columns = source.shape(f"{module}.weight")
            made = weight_format.layout((rows, columns))
            layout |= {f"{module}.{part}": about for part, about in made.items()}
        unit = Unit(tuple(f"{module}.weight" for module in modules) or (name,), modules, layout)
        done.update(unit.names)
        yield unit


def layout_bytes(layout: Layout) -> int:
    """Return the number of bytes of the tensors in a layout."""
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout.values())


def write_shard(
    shard: Shard,
    folder: Path,
    source: TensorSource,
    weight_format: Format,
    device: torch.device,
    advance: Callable[[int], None],
) -> None:
    """Pack and write one output file. Copied tensors keep their dtype. Calls `advance` with the source bytes done.

    Raises ValueError for a weight that the format cannot store, or NaN in a copied one, naming file and tensor; and
    OSError, naming the file, if writing fails.
    """
    packed: dict[str, Tensor] = {}
    for unit in shard.units:
        made = _output_tensors(unit, source, weight_format, device)
        packed |= {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in made.items()}
        advance(layout_bytes({name: (source.shape(name), source.dtype(name)) for name in unit.names}))
    try:
        save_file(packed, folder / shard.file, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"{folder / shard.file} cannot be written: {error}") from error


def _output_tensors(unit: Unit, source: TensorSource, weight_format: Format, device: torch.device) -> dict[str, Tensor]:
    """Return the output tensors of one unit by name: packed, or copied."""
    if not unit.modules:
        (name,) = unit.names
        copied = source.tensor(name, "cpu")
        if copied.dtype in STORED_DTYPES:
            check_dense_values(copied, name=f"{source.where(name)}: {name}")
        return {name: copied}
    weights = {module: source.tensor(name, device) for module, name in zip(unit.modules, unit.names, strict=True)}
    try:
        return {
            f"{module}.{part}": tensor
            for module, parts in pack_fused(weight_format, weights)
            for part, tensor in parts.items()
        }
    except ValueError as error:
        raise ValueError(f"{source.where(unit.names[0])}: {error}") from error


def weight_index(shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the content of model.safetensors.index.json, which maps tensors to files."""
    listed = {name: shard.file for shard in shards for name in shard.layout}
    return {
        "metadata": {"total_size": sum(shard.bytes for shard in shards)},
        "weight_map": dict(sorted(listed.items())),
    }
