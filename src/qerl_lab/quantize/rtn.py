"""Pack a dense checkpoint by rounding to nearest. Holds one output file and one fused layer in memory."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qerl_lab.formats.format import STORED_DTYPES, Format, check_values, pack_fused
from qerl_lab.model.linear import fused_groups
from qerl_lab.model.on_disk import INDEX
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.system import terminal
from qerl_lab.system.disk import replace_file


def write(
    source: WeightFiles, linears: Sequence[str], weight_format: Format, device: torch.device, folder: Path,
    shard_bytes: float,
) -> None:  # fmt: skip
    """Pack the Linears named in `linears`, copy all other tensors, and write weight files and their index to `folder`.

    Tensors keep the order of `source`, with fused layers together. Each file has at most `shard_bytes` of tensors
    unless a single fused layer or copied tensor is larger. Raises ValueError, naming file and tensor, for a weight that
    the format cannot store, or NaN or Inf in a copied tensor. Raises OSError, naming the file, if writing fails.
    """
    fused: dict[str, list[str]] = {}  # each weight to pack -> all weights of its fused layer
    for group in fused_groups(list(linears)):
        weights = [f"{name}.weight" for name in group]
        fused |= dict.fromkeys(weights, weights)
    # The tensors that are read together, by the first of them: the weights of a fused layer, or one to copy.
    units: dict[str, list[str]] = {}
    for name in source.names:
        names = fused.get(name, [name])
        units[names[0]] = names

    def output_bytes(names: list[str]) -> int:
        if names[0] not in fused:
            return source.bytes(names[0])
        return sum(weight_format.packed_bytes(*source.shape(name)) for name in names)

    split = split_state_dict_into_shards_factory(
        units, get_storage_size=output_bytes, filename_pattern="model{suffix}.safetensors",
        max_shard_size=int(shard_bytes),
    )  # fmt: skip
    files: dict[str, str] = {}  # by tensor, for the index
    with terminal.ProgressBar(f"{weight_format.NAME}, round to nearest", sum(map(source.bytes, source.names))) as bar:
        for file, first_names in split.filename_to_tensors.items():
            packed: dict[str, Tensor] = {}
            for names in (units[name] for name in first_names):
                made = output_tensors(names, source, weight_format if names[0] in fused else None, device)
                packed |= {name: part.cpu().clone(memory_format=torch.contiguous_format) for name, part in made.items()}
                bar.advance(sum(map(source.bytes, names)))
            files |= dict.fromkeys(packed, file)
            try:
                save_file(packed, folder / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{folder / file} cannot be written: {error}") from error
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(files.items()))}
        replace_file(folder / INDEX, json.dumps(index, indent=2).encode() + b"\n")


def output_tensors(
    names: list[str], source: WeightFiles, weight_format: Format | None, device: torch.device
) -> dict[str, Tensor]:
    """Read the tensors `names` of `source`; return the tensors to write, by name.

    The tensors, parts of one fused layer, are packed in `weight_format`; None copies the only tensor unchanged. Raises
    ValueError, naming file and tensor, for values that the format cannot store, or NaN or Inf in a copy.
    """
    if weight_format is None:
        (name,) = names
        copied = source.tensor(name, "cpu")
        if copied.dtype in STORED_DTYPES:
            check_values(copied, name=f"{source.where(name)}: {name}")
        return {name: copied}
    weights = {name.removesuffix(".weight"): source.tensor(name, device) for name in names}
    try:
        packed = dict(pack_fused(weight_format, weights))
    except ValueError as error:
        raise ValueError(f"{source.where(names[0])}: {error}") from error
    return {f"{module}.{part}": tensor for module, parts in packed.items() for part, tensor in parts.items()}
