"""Weights in few bits: one module per format, and the Linear that computes with them.

The bits are those of the checkpoint: compressed-tensors' layout for NVFP4 and MXFP4, bitsandbytes' for NF4, so that
trainer and engine read the same file.
"""

from qerl_lab.formats.codecs import Codec, codec, names
from qerl_lab.formats.linear import PackedLinear, WeightBytes, pack_model, register_lora, weight_bytes

__all__ = [
    "Codec",
    "PackedLinear",
    "WeightBytes",
    "codec",
    "names",
    "pack_model",
    "register_lora",
    "weight_bytes",
]
