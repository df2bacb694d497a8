"""Quantize a model: read -> pack -> describe -> measure -> rename.

All files are written to OUT.partial, which is renamed to OUT when complete. After an interruption the same command
starts again.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoConfig

from qerl_lab import formats
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.keys import spell_value
from qerl_lab.config.message import first_line
from qerl_lab.config.option import ConfigError, did_you_mean
from qerl_lab.config.records import QUALITY
from qerl_lab.config.schema import POCKET, FormatConfig
from qerl_lab.config.spelling import hydra_override, shell_line, spell_list
from qerl_lab.formats.nf4 import Nf4
from qerl_lab.model import loading, policy
from qerl_lab.model.linear import packable_linears, packed_head
from qerl_lab.model.on_disk import is_ignored, read_model_json
from qerl_lab.model.weight_files import WeightFiles, copy_companions, local_folder
from qerl_lab.quantize import llmcompressor, quality, rtn
from qerl_lab.quantize.quantize_options import QuantizeOptions
from qerl_lab.record.out import Unfinished
from qerl_lab.system import terminal
from qerl_lab.system.disk import replace_file


class Source(NamedTuple):
    """A dense model: folder and weights, and names of the Linears that become `packed` or stay `dense`.

    `config` is the config.json of the checkpoint.
    """

    folder: Path
    weights: WeightFiles
    packed: list[str]
    dense: list[str]
    config: dict[str, Any]


def run(options: QuantizeOptions) -> None:
    """Quantize a model: write the checkpoint and print its quality.

    Raises ConfigError if the model cannot be loaded. Raises ValueError, naming file and tensor, if a file is damaged or
    the format cannot store a weight.
    """
    device = policy.device_of(options.device)
    if options.method != "rtn":
        llmcompressor.check(options)
    source = read_source(options)
    with Unfinished(options.folder, {}, options.overwrite) as unfinished:
        if options.method == "rtn":
            weight_format, shard = formats.build(options.format_config()), options.shard_gb * 1e9
            rtn.write(source.weights, source.packed, weight_format, device, unfinished.folder, shard)
            replace_file(unfinished.folder / "config.json", json.dumps(source.config, indent=2).encode() + b"\n")
        else:
            llmcompressor.run(options, source.folder, source.dense, unfinished.folder)
        copy_companions(source.folder, unfinished.folder)
        result = quality.measure(options, source.folder, source.packed, unfinished.folder, device)
        unfinished.finish()
    print(quality.table(options, result))
    command, folder = f"{terminal.python_command()} -m qerl_lab", terminal.format_path(options.folder)
    print(f"checkpoint:  {folder}  ({QUALITY})")
    # No other model is measured, because each one is as much work as the checkpoint.
    given = {"model": options.model, "revision": options.revision, "checkpoints": folder}
    words = [hydra_override(key, value) for key, value in given.items() if value is not None] + ["formats=[]"]
    print(f"measure it:  {command}.evaluate entropy {shell_line(words)}")
    print(f"train on it: {command} {shell_line(training_overrides(options))}")


def training_overrides(options: QuantizeOptions) -> list[str]:
    """Return the command-line overrides (`key=value`) with which the main command trains on the written checkpoint."""
    arm = f"{options.format}_aqn"
    chosen, usual = options.format_config(), FormatConfig()
    words = [
        f"+experiment={arm}" if arm in choices_of("experiment") else f"format={options.format}",
        f"scale={'pocket' if options.model == POCKET else 'custom'}",
        hydra_override("model.path", terminal.format_path(options.folder)),
    ]
    if options.model != POCKET:
        words.append("task=gsm8k")  # the default, arithmetic, is for the embedded policy
    if chosen.activations != usual.activations:
        words.append("rollout=vllm")  # which quantizes activations
    if chosen.ignore != usual.ignore:
        words.append(f"format.ignore={spell_list(chosen.ignore)}")
    return words + [f"format.{key}={spell_value(value)}" for key, value in formats.changed_options(chosen).items()]


def read_source(options: QuantizeOptions) -> Source:
    """Read the file headers of the model and list its Linears, without reading weights.

    Raises ConfigError for a model or an `ignore` that cannot be used, and ValueError for a missing or misshapen weight.
    """
    folder = local_folder(options.model, options.revision, key="model")
    config = read_model_json(folder / "config.json")
    if "quantization_config" in config:
        raise ConfigError(f"model={options.model} is quantized already (config.json). Type model= of the dense model.")
    weights = WeightFiles(folder)
    try:
        model = loading.empty_model(AutoConfig.from_pretrained(folder, trust_remote_code=False), torch.float32)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model={options.model}: transformers makes no causal language model of {folder / 'config.json'} "
            f"({first_line(error)}). Type another model, or install a transformers that knows it."
        ) from error
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    weight_format, ignore = formats.build(options.format_config()), options.ignore
    typed = f"ignore={spell_value(ignore)}"
    _check_ignore(ignore, linears)
    if head := packed_head(model, weight_format, ignore):
        raise ConfigError(
            f"{typed} would pack {head}, the output layer, and training reads its dense weight; "
            f"allowed: lists that name it. Type {shell_line([f'ignore={spell_list([*ignore, head])}'])}."
        )
    packed = packable_linears(model, ignore)
    if not packed:
        raise ConfigError(
            f"model={options.model} has no Linear layer outside of {typed}. Type another model, or a shorter ignore."
        )
    loading.check_tensors(model, weights, loading.shapes_of(model), weight_format)
    dense = [name for name in linears if name not in packed]
    tied = [name for name in dense if not is_ignored(name, ignore)]  # to an embedding
    # With NF4 full names, because transformers takes an entry for the beginning or the end of a name.
    listed = dense if isinstance(weight_format, Nf4) else [*ignore, *tied]
    config["quantization_config"] = weight_format.quantization_config(listed, weights.dtype(f"{packed[0]}.weight"))
    return Source(folder, weights, packed, dense, config)


def _check_ignore(ignore: list[str], linears: list[str]) -> None:
    """Raise ConfigError if an entry of `ignore` matches no layer of `linears`, the full names of a model's Linears.

    Without this check a typo would quantize a layer that was to stay dense.
    """
    for entry in ignore:
        if not any(is_ignored(name, [entry]) for name in linears):
            ends = sorted({name.rpartition(".")[2] for name in linears})
            raise ConfigError(
                f"ignore={spell_value(ignore)}: no Linear layer is called {entry}.{did_you_mean(entry, ends)} Allowed: "
                f"full names, their last parts ({', '.join(ends)}), modules they are in, re:PATTERN."
            )
