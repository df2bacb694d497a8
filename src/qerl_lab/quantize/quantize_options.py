"""Options of `python -m qerl_lab.quantize`, and rules between them. Imports no torch."""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.keys import spell_value
from qerl_lab.config.option import ConfigError, did_you_mean, option
from qerl_lab.config.records import METHODS, QUALITY
from qerl_lab.config.rules import check_patterns
from qerl_lab.config.schema import DENSE_FORMAT, DEVICES, FormatConfig, ModelConfig
from qerl_lab.model import on_disk
from qerl_lab.record.out import OutputOptions, check_apart, check_free

CALIBRATION = ("dataset", "samples", "tokens", "seed")  # options for awq and gptq only
# Weight-only presets of compressed-tensors that llmcompressor writes.
SCHEMES = {"nvfp4": "NVFP4A16", "mxfp4": "MXFP4A16"}


def packed_formats() -> list[str]:
    """List the weight formats that a checkpoint can be quantized to: all but the dense one."""
    return [name for name in choices_of("format") if name != DENSE_FORMAT]


def same_as(schema: type, name: str) -> Any:
    """Return a dataclass field with the default, help text and bounds of the field `name` of `schema`."""
    known = next(f for f in fields(schema) if f.name == name)
    if known.default_factory is not MISSING:
        return field(default_factory=known.default_factory, metadata=known.metadata)
    return field(default=known.default, metadata=known.metadata)


@dataclass
class QuantizeOptions(OutputOptions):
    model: str = option(
        "", "dense model to quantize: Hugging Face id, local directory, FILE.gguf, or `pocket`; required"
    )
    revision: str | None = same_as(ModelConfig, "revision")
    format: str = option(FormatConfig().name, f"weight format of the checkpoint: {', '.join(packed_formats())}")
    method: str = option(
        "rtn",
        "rtn rounds each weight to the nearest; awq and gptq calibrate on data (nvfp4 and mxfp4; make quantize-env)",
        choices=METHODS,
    )
    out: str = option("", "directory to write; required")
    ignore: list[str] = same_as(FormatConfig, "ignore")
    double_quant: bool = same_as(FormatConfig, "double_quant")
    scale_rule: str = same_as(FormatConfig, "scale_rule")
    exponent_rule: str = same_as(FormatConfig, "exponent_rule")
    activations: str = same_as(FormatConfig, "activations")
    device: str = option("auto", "device that quantizes: auto takes a GPU if there is one", choices=DEVICES)
    shard_gb: float = option(2.0, "largest file of weights in GB; rtn holds one file in memory", above=0)
    dataset: str = option(
        "open-thoughts/OpenThoughts-114k",
        "awq, gptq: calibration texts, a hub id (the paper's is the default) or a local .txt or .jsonl file",
    )
    samples: int = option(256, "awq, gptq: calibration sequences (paper: 256)", at_least=1)
    tokens: int = option(2048, "awq, gptq: tokens of each sequence (paper: 2048)", at_least=1)
    seed: int = option(0, "awq, gptq: seeds the choice of calibration texts", at_least=0)
    overwrite: bool = option(False, "replace the checkpoint at `out`")

    def format_config(self) -> FormatConfig:
        """Return the config group `format` of a run that trains on the checkpoint that these options write."""
        shared = {f.name: getattr(self, f.name) for f in fields(FormatConfig) if hasattr(self, f.name)}
        return FormatConfig(name=self.format, **shared)


def check(options: QuantizeOptions) -> None:
    """Raise ConfigError at the first invalid combination of options. Checks local paths, loads nothing."""
    if folder := on_disk.local_path(options.model, "model"):
        on_disk.check_files(folder, f"model={options.model}")
    allowed = packed_formats()
    if options.format not in allowed:
        hint = did_you_mean(options.format, allowed) or " Type for example format=nvfp4."
        raise ConfigError(f"format={options.format} is not allowed; allowed: {', '.join(allowed)}.{hint}")
    if options.method != "rtn" and options.format not in SCHEMES:
        raise ConfigError(
            f"method={options.method} with format={options.format} is not possible: llmcompressor writes "
            f"{' and '.join(SCHEMES)}. Type method=rtn, or format={next(iter(SCHEMES))}."
        )
    is_rounded, defaults = options.method == "rtn", QuantizeOptions()
    unread = dict.fromkeys(CALIBRATION, "method=awq and method=gptq") if is_rounded else {}
    for f in fields(FormatConfig):
        owner = f.metadata["only"]
        if owner and (owner != options.format or not is_rounded):
            unread[f.name] = f"format={owner} with method=rtn"
    for key, reader in unread.items():
        if (value := getattr(options, key)) != getattr(defaults, key):
            raise ConfigError(
                f"{key}={spell_value(value)} is an option of {reader}, and format={options.format} "
                f"method={options.method} was given. Leave {key} out."
            )
    check_apart(options, options.model)
    check_free(options.folder, options.out, QUALITY, overwrite=options.overwrite)
    check_patterns("ignore", options.ignore)
