"""Weight formats: NVFP4, MXFP4, NF4, FP8, BF16. The dataclass fields of a format are its options."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from qerl_lab.formats.bf16 import Bf16
from qerl_lab.formats.compressed_tensors import CompressedTensors, layout_of
from qerl_lab.formats.format import Format, PackedAs, unsupported_entry
from qerl_lab.formats.fp8 import Fp8
from qerl_lab.formats.mxfp4 import Mxfp4
from qerl_lab.formats.nf4 import Nf4
from qerl_lab.formats.nvfp4 import Nvfp4

FORMATS: dict[str, type[Format]] = {kind.NAME: kind for kind in (Bf16, Fp8, Mxfp4, Nf4, Nvfp4)}


def build(format_config: Any) -> Format:
    """Build a weight format from `format_config`, a FormatConfig: its `name` is a key of `FORMATS`.

    Only the options that this format has are read from `format_config`. Raises ValueError for an unknown name.
    """
    if format_config.name not in FORMATS:
        raise ValueError(f"unknown weight format {format_config.name!r}; allowed: {', '.join(FORMATS)}")
    kind: Any = FORMATS[format_config.name]
    return kind(**{option.name: getattr(format_config, option.name) for option in fields(kind)})


def changed_options(format_config: Any) -> dict[str, Any]:
    """Return the options of the format in `format_config`, a FormatConfig, that differ from the defaults, by name."""
    usual = type(format_config)()
    return {name: value for name, value in asdict(build(format_config)).items() if value != getattr(usual, name)}


def recognize(config: Mapping[str, Any]) -> PackedAs:
    """Parse `config`, the `quantization_config` of a config.json; return the format and the modules left dense.

    Reads what this lab, llmcompressor and transformers write. Raises ValueError for settings that no format supports.
    """
    method = config.get("quant_method")
    kinds = [kind for kind in FORMATS.values() if kind.QUANT_METHOD is not None]
    for kind in kinds:
        if method == kind.QUANT_METHOD and (found := kind.recognize(config)) is not None:
            return found
    if method == CompressedTensors.QUANT_METHOD:
        layouts = (kind.LAYOUT for kind in kinds if issubclass(kind, CompressedTensors))
        raise unsupported_entry("format", layout_of(config), ", ".join(layouts))
    methods = dict.fromkeys(str(kind.QUANT_METHOD) for kind in kinds)
    raise unsupported_entry("quant_method", method, ", ".join(methods))
