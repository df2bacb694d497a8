"""Pack a dense checkpoint by rounding to nearest. Holds one fused layer in memory, never the model or a whole file."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl_lab.formats.format import STORED_DTYPES, Format, Layout, pack_fused
from qerl_lab.model.files import DTYPES, SINGLE
from qerl_lab.model.linear import fused_groups
from qerl_lab.model.loading import TensorSource, check_dense_values

# Names of dtypes in a safetensors header.
_CODES = {dtype: code for code, dtype in DTYPES.items()}


class Unit(NamedTuple):
    """Source tensors that are read together: the weights of one fused layer's `modules`, or one copied tensor.

    `modules` is empty for a copied tensor. `layout` describes the tensors written.
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
        """Layout of all its tensors in stored order: wide dtypes first, so that every tensor is aligned."""
        tensors = {name: about for unit in self.units for name, about in unit.layout.items()}
        return dict(sorted(tensors.items(), key=lambda item: (-item[1][1].itemsize, item[0])))

    @property
    def bytes(self) -> int:
        """Size of the file in bytes."""
        return len(_header(self.layout)) + _layout_bytes(self.layout)


def plan(source: TensorSource, linears: Sequence[str], weight_format: Format, shard_bytes: float) -> list[Shard]:
    """Assign tensors to output files in source order, keeping fused layers together.

    Each file has at most `shard_bytes` of tensors unless a single unit is larger. Depends on names, shapes and dtypes
    only.
    """
    shards: list[list[Unit]] = []
    size = 0
    for unit in _units(source, linears, weight_format):
        more = _layout_bytes(unit.layout)
        if not shards or size + more > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(unit)
        size += more
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    return [Shard(name, units) for name, units in zip(names, shards, strict=True)]


def _units(source: TensorSource, linears: Sequence[str], weight_format: Format) -> Iterator[Unit]:
    """Yield the units of the source, in its order."""
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


def _layout_bytes(layout: Layout) -> int:
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout.values())


def source_bytes(source: TensorSource, shard: Shard) -> int:
    """Return the bytes of the source tensors in `shard`."""
    return _layout_bytes({n: (source.shape(n), source.dtype(n)) for unit in shard.units for n in unit.names})


def write(
    shard: Shard,
    folder: Path,
    source: TensorSource,
    weight_format: Format,
    device: torch.device,
    advance: Callable[[int], None],
) -> None:
    """Write one output file and sync it to disk. Copied tensors keep their dtype.

    The safetensors library is not used, because it needs all tensors of a file at once. Calls `advance` with the source
    bytes done. Raises ValueError for a weight that the format cannot store, or NaN in a copied one, and OSError if
    writing fails; both name file and tensor.
    """
    header = _header(shard.layout)
    begins = {name: len(header) + begin for name, begin in _begins(shard.layout).items()}
    with (folder / shard.file).open("wb", buffering=0) as out:  # a buffer would fail again on close
        _write_whole(out, memoryview(header))
        for unit in shard.units:
            for name, tensor in _tensors(unit, source, weight_format, device).items():
                content = _bytes(name, tensor, unit.layout[name])
                try:
                    out.seek(begins[name])
                    _write_whole(out, content)
                except OSError as error:
                    raise OSError(error.errno, f"{error.strerror}, at {name}", str(folder / shard.file)) from error
            del tensor, content  # before the next unit is read
            advance(source_bytes(source, Shard(shard.file, [unit])))
        os.fsync(out.fileno())


def _write_whole(out: FileIO, content: memoryview) -> None:
    while content:
        content = content[out.write(content) :]


def _tensors(unit: Unit, source: TensorSource, weight_format: Format, device: torch.device) -> dict[str, Tensor]:
    """Return the output tensors of one unit."""
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


def _begins(layout: Layout) -> dict[str, int]:
    """Return each tensor's offset after the header."""
    begins, end = {}, 0
    for name, about in layout.items():
        begins[name] = end
        end += _layout_bytes({name: about})
    return begins


def _header(layout: Layout) -> bytes:
    """Return header length (8 bytes, little endian) and JSON, padded with spaces to a multiple of 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, begin in _begins(layout).items():
        shape, dtype = layout[name]
        end = begin + _layout_bytes({name: layout[name]})
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes(name: str, tensor: Tensor, about: tuple[tuple[int, ...], torch.dtype]) -> memoryview:
    """Return a tensor's bytes, after checking its shape and dtype."""
    if (tuple(tensor.shape), tensor.dtype) != about:
        raise AssertionError(f"{name} is {list(tensor.shape)} in {tensor.dtype}, its format's layout says {about}")
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def index(shards: Sequence[Shard]) -> dict[str, Any]:
    """Return the content of model.safetensors.index.json, which maps tensors to files."""
    size = sum(_layout_bytes(shard.layout) for shard in shards)
    listed = {name: shard.file for shard in shards for name in shard.layout}
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(listed.items()))}
