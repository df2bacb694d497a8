"""Pack a dense checkpoint by rounding to nearest. Holds one output file and one fused layer in memory."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qerl_lab.formats.format import STORED_DTYPES, Format, Layout, pack_fused
from qerl_lab.model.linear import fused_groups
from qerl_lab.model.loading import check_dense_values
from qerl_lab.model.on_disk import INDEX
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.system import terminal
from qerl_lab.system.disk import replace_file


class Unit(NamedTuple):
    """Source tensors that are read together: the weights of one fused layer, or one copied tensor."""

    names: tuple[str, ...]
    modules: tuple[str, ...]  # the fused layer's Linears; none for a copied tensor
    layout: Layout  # of the tensors written
    bytes: int  # of the tensors written


def write(
    source: WeightFiles, linears: Sequence[str], weight_format: Format, device: torch.device, folder: Path,
    shard_bytes: float,
) -> None:  # fmt: skip
    """Pack the Linears named in `linears`, copy all other tensors, and write weight files and their index to `folder`.

    Tensors keep the order of `source`, with fused layers together. Each file has at most `shard_bytes` of tensors
    unless a single fused layer or copied tensor is larger. Raises ValueError, naming file and tensor, for a weight that
    the format cannot store, or NaN or Inf in a copied tensor. Raises OSError, naming the file, if writing fails.
    """
    units = list_units(source, linears, weight_format)
    split = split_state_dict_into_shards_factory(
        units, get_storage_size=lambda unit: unit.bytes, filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(shard_bytes),
    )  # fmt: skip
    total = sum(source.bytes(name) for name in source.names)
    with terminal.ProgressBar(f"{weight_format.NAME}, round to nearest", total) as bar:
        for file, first_names in split.filename_to_tensors.items():
            packed: dict[str, Tensor] = {}
            for unit in (units[name] for name in first_names):
                made = output_tensors(unit, source, weight_format, device)
                packed |= {name: part.cpu().clone(memory_format=torch.contiguous_format) for name, part in made.items()}
                bar.advance(sum(source.bytes(name) for name in unit.names))
            try:
                save_file(packed, folder / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{folder / file} cannot be written: {error}") from error
    if split.is_sharded:
        files = {name: split.tensor_to_filename[first] for first, unit in units.items() for name in unit.layout}
        index = {"metadata": split.metadata, "weight_map": dict(sorted(files.items()))}
        replace_file(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")


def list_units(source: WeightFiles, linears: Sequence[str], weight_format: Format) -> dict[str, Unit]:
    """Return the fused layers to pack and the tensors to copy, each by the name of its first tensor in `source`.

    They are in the order of `source`; `linears` names the Linears to pack.
    """
    groups = {f"{name}.weight": tuple(group) for group in fused_groups(list(linears)) for name in group}
    units: dict[str, Unit] = {}
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
        size = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout.values())
        units[name] = Unit(tuple(f"{module}.weight" for module in modules) or (name,), modules, layout, size)
        done.update(units[name].names)
    return units


def output_tensors(unit: Unit, source: WeightFiles, weight_format: Format, device: torch.device) -> dict[str, Tensor]:
    """Read the source tensors of one unit; return the tensors to write, by name: packed, or unchanged for a copy.

    Raises ValueError, naming file and tensor, for values that the format cannot store, or NaN or Inf in a copy.
    """
    if not unit.modules:
        (name,) = unit.names
        copied = source.tensor(name, "cpu")
        if copied.dtype in STORED_DTYPES:
            check_dense_values(copied, name=f"{source.where(name)}: {name}")
        return {name: copied}
    weights = {module: source.tensor(name, device) for module, name in zip(unit.modules, unit.names, strict=True)}
    try:
        packed = dict(pack_fused(weight_format, weights))
    except ValueError as error:
        raise ValueError(f"{source.where(unit.names[0])}: {error}") from error
    return {f"{module}.{part}": tensor for module, parts in packed.items() for part, tensor in parts.items()}
