"""One quantization, from its options to its directory: read -> pack -> describe -> measure -> rename.

Everything is written in OUT.partial, which is renamed to OUT when it is whole. config.json is written after the
weights, so that no loader takes an unfinished directory for a model.
"""

import errno
import json
import shlex
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig

from qerl_lab import compress, policy, progress, quality
from qerl_lab.checks import typed
from qerl_lab.config import ConfigError, FormatConfig, did_you_mean
from qerl_lab.formats import hf_config, loading, writing
from qerl_lab.formats.files import INDEX, WeightFiles, local_folder, read_json
from qerl_lab.formats.linear import packable
from qerl_lab.quantize_config import QuantizeConfig
from qerl_lab.record import replace_file
from qerl_lab.report import tables
from qerl_lab.unfinished import Unfinished

COPIED = (".json", ".jinja", ".txt", ".model")  # tokenizer, chat template, generation_config; licences by their name
NOT_IDENTITY = ("model", "revision", "out", "quality", "text", "overwrite", "device")
CALIBRATION = ("dataset", "samples", "tokens", "seed")


class Source(NamedTuple):
    """The dense model: its folder, config.json, tensors, the Linears to pack and those left dense."""

    folder: Path
    config: dict[str, Any]
    weights: WeightFiles
    packed: list[str]
    dense: list[str]


def run(cfg: QuantizeConfig) -> None:
    """Write the checkpoint that `cfg` asks for and print its quality.

    Raises:
        ConfigError: the model cannot be loaded, or OUT.partial is of another command.
        ValueError: a file is damaged, or a weight cannot be held by the format; names file and tensor.
        OSError: the disk is full, or a file cannot be read or written.
    """
    progress.quiet_third_parties()
    device = policy.device_of(cfg.device)
    if cfg.method != "rtn":
        compress.check(cfg)
    source = read_source(cfg)
    with Unfinished(cfg.folder, identity(cfg, source, device), cfg.overwrite) as unfinished:
        if cfg.method == "rtn":
            pack(cfg, source, device, unfinished)
        else:
            calibrate(cfg, source, unfinished)
        result = quality.measure(cfg, source.folder, source.packed, unfinished.folder, device)
        unfinished.finish()
    print(quality.table(cfg, result))
    print(f"checkpoint:  {tables.near(cfg.folder)}  (quality.json, sqnr.png)")
    print(f"train on it: {tables.python()} -m qerl_lab {shlex.join(training_words(cfg))}")


def training_words(cfg: QuantizeConfig) -> list[str]:
    """What to type after `python -m qerl_lab` to train on the checkpoint."""
    words = [f"+experiment={cfg.format}_aqn", *([] if cfg.model == "pocket" else ["scale=custom"])]
    words.append(f"model.path={tables.near(cfg.folder)}")
    chosen, defaults = quality.format_config(cfg), FormatConfig()
    if chosen.ignore != defaults.ignore:
        words.append(f"format.ignore={typed(chosen.ignore)}")
    changed = [(key, value) for key, value in quality.codec_options(cfg).items() if value != getattr(defaults, key)]
    return words + [f"format.{key}={typed(value)}" for key, value in changed]


def read_source(cfg: QuantizeConfig) -> Source:
    """Headers of the model's files, and which of its layers are Linears; no weight is read."""
    folder = local_folder(cfg.model, cfg.revision, key="model")
    config = read_json(folder / "config.json")
    if "quantization_config" in config:
        raise ConfigError(f"model={cfg.model} is quantized already (config.json). Type model= of the dense model.")
    weights = WeightFiles(folder)
    model = loading.empty_model(AutoConfig.from_pretrained(folder, trust_remote_code=False), torch.float32)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    _check_ignore(cfg, linears)
    packed = packable(model, cfg.ignore)
    if not packed:
        raise ConfigError(f"model={cfg.model} has no Linear layer outside of ignore={typed(cfg.ignore)}.")
    for name in packed:
        _check_tensor(folder, weights, f"{name}.weight", tuple(model.get_parameter(f"{name}.weight").shape))
    return Source(folder, config, weights, packed, [name for name in linears if name not in set(packed)])


def _check_ignore(cfg: QuantizeConfig, linears: list[str]) -> None:
    """An entry that names nothing is a slip, and would quantize what it was to protect."""
    for entry in cfg.ignore:
        if not any(hf_config.is_ignored(name, [entry]) for name in linears):
            ends = sorted({name.rpartition(".")[2] for name in linears})
            raise ConfigError(
                f"ignore={typed(cfg.ignore)}: no Linear layer is called {entry}.{did_you_mean(entry, ends)} "
                f"Allowed: full names, their last parts ({', '.join(ends)}), re:PATTERN."
            )


def _check_tensor(folder: Path, weights: WeightFiles, name: str, shape: tuple[int, ...]) -> None:
    if name not in weights.names:
        raise ValueError(f"{folder} holds no {name}, which its config.json asks for")
    if weights.shape(name) != shape:
        raise ValueError(
            f"{weights.where(name)}: {name} has shape {list(weights.shape(name))}, config.json asks for {list(shape)}"
        )


def identity(cfg: QuantizeConfig, source: Source, device: torch.device) -> dict[str, Any]:
    """What decides the bytes to be written."""
    left_out = NOT_IDENTITY + (CALIBRATION if cfg.method == "rtn" else ())
    chosen = {key: value for key, value in asdict(cfg).items() if key not in left_out}
    files = {file: file.stat() for file in (*source.weights.files, source.folder / "config.json")}
    stamps = {file.name: [stat.st_size, stat.st_mtime_ns] for file, stat in files.items()}
    return chosen | {"device": device.type, "model": stamps}


def pack(cfg: QuantizeConfig, source: Source, device: torch.device, unfinished: Unfinished) -> None:
    """Round to nearest, file by file; files that are complete are left as they are."""
    options = quality.codec_options(cfg)
    shards = writing.plan(source.weights, source.packed, cfg.format, options, cfg.shard_gb * 1e9)
    left = [shard for shard in shards if not unfinished.has(shard.file)]
    _refuse_full_disk(unfinished.folder, sum(shard.bytes for shard in left))
    total, ahead = (sum(writing.source_bytes(source.weights, shard) for shard in some) for some in (shards, left))
    with progress.Bytes(f"{cfg.format}, round to nearest", total, total - ahead) as bar:
        for shard in left:
            writing.write(shard, unfinished.folder, source.weights, cfg.format, options, device, bar.advance)
            unfinished.note(shard.file)
    if len(shards) > 1:
        _write_json(unfinished.folder / INDEX, writing.index(shards))
    copy_companions(source.folder, unfinished.folder)
    about = hf_config.describe(
        cfg.format, [*cfg.ignore, *_beyond(source.dense, cfg.ignore)],
        dtype=source.weights.dtype(f"{source.packed[0]}.weight"), double_quant=cfg.double_quant,
    )  # fmt: skip
    _write_json(unfinished.folder / "config.json", source.config | {"quantization_config": about})


def _write_json(file: Path, content: dict[str, Any]) -> None:
    replace_file(file, json.dumps(content, indent=2).encode() + b"\n")


def _beyond(dense: list[str], ignore: list[str]) -> list[str]:
    """Linears left dense though `ignore` does not name them: those that share their weight with an embedding."""
    return [name for name in dense if not hf_config.is_ignored(name, ignore)]


def _refuse_full_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            errno.ENOSPC, f"{needed / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free. Type an out elsewhere",
            str(folder),
        )  # fmt: skip


def copy_companions(source: Path, target: Path) -> None:
    """Copy what belongs to a model beside its weights and config.json."""
    for file in sorted(source.iterdir()):
        is_companion = file.suffix in COPIED and not file.name.endswith(".index.json") and file.name != "config.json"
        if file.is_file() and (is_companion or file.name.startswith(("LICENSE", "NOTICE"))):
            shutil.copyfile(file, target / file.name)


def calibrate(cfg: QuantizeConfig, source: Source, unfinished: Unfinished) -> None:
    """AWQ or GPTQ. It cannot go on in the middle: what an interrupted process left is made again."""
    if unfinished.has("config.json"):
        return
    unfinished.clear()
    compress.run(cfg, source.folder, source.dense, unfinished.folder)
    copy_companions(source.folder, unfinished.folder)
    unfinished.note(*(file.name for file in unfinished.folder.iterdir() if file.suffix in (".safetensors", ".json")))
