"""NF4 (QLoRA, arXiv 2305.14314, section 3 and appendix E), quantized and dequantized by bitsandbytes.

A code selects one of sixteen quantiles of a normal distribution. The quantile is multiplied by absmax, the largest
magnitude in the code's block; a block is 64 consecutive elements of the flattened weight. Double quantization (QLoRA's
default) subtracts the mean of all absmax and stores the differences in 8 bits, in blocks of 256. One huge outlier then
spoils the whole tensor, because it shifts the mean.

Uses bitsandbytes' functional API only, because `Linear4bit` repacks its weight on a CPU in eval mode. bitsandbytes is
imported on first use.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl_lab.formats.format import (
    Decoder,
    Format,
    Layout,
    PackedAs,
    ceil_div,
    check_values,
    checked,
    layer_names,
    unsupported_entry,
)

_NESTED_BLOCK = 256
_HEADER = "weight.quant_state.bitsandbytes__nf4"
_HEADER_BYTES = 256


@dataclass(frozen=True)
class Nf4(Format):
    """NF4; `double_quant` stores the block scales in 8 bits instead of float32."""

    NAME = "nf4"
    BLOCK = 64
    QUANT_METHOD = "bitsandbytes"

    double_quant: bool

    @property
    def bits_per_weight(self) -> float:
        """Return the stored bits per weight: 4.5 (a float32 per block of 64), or 4.127 with double quantization."""
        block_bits = 8 + 32 / _NESTED_BLOCK if self.double_quant else 32
        return 4 + block_bits / self.BLOCK

    def quantize(self, weight: Tensor, *, name: str = "weight") -> dict[str, Tensor]:
        """Pack `weight[N, K]`, N*K divisible by 64 (blocks run over the flattened weight and may cross rows).

        Returns the tensors of a bitsandbytes checkpoint: `weight` uint8 `[N*K/2, 1]` (HIGH nibble = even element),
        `weight.absmax` `[N*K/64]` (uint8 if `double_quant`, else float32), `weight.quant_map` float32 `[16]`, a JSON
        header uint8 `[256]`, and with `double_quant` `weight.nested_absmax` and `weight.nested_quant_map`. Raises
        ValueError as `checked` does.
        """
        from bitsandbytes.functional import quantize_4bit, quantize_blockwise

        weight = checked(weight, self, name=name)
        codes, state = quantize_4bit(weight, blocksize=self.BLOCK, compress_statistics=False, quant_type="nf4")
        if self.double_quant:
            # As `compress_statistics` of bitsandbytes, but on the CPU, and with the mean summed in float64: the last
            # bits of a float32 sum depend on the device and on the number of threads.
            absmax = state.absmax.cpu()
            state.offset = absmax.mean(dtype=torch.float64).float()
            state.absmax, state.state2 = quantize_blockwise(absmax - state.offset, blocksize=_NESTED_BLOCK)
            state.nested = True
        kept = state.as_dict(packed=True)
        tensors = {f"weight.{key}": tensor.to(weight.device, copy=True) for key, tensor in kept.items()}
        tensors[_HEADER] = _pad_header(tensors[_HEADER])
        return {"weight": codes, **tensors}

    def dequantize(self, packed: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Unpack to a weight `[N, K]`: quantile * absmax in float32, rounded once to `dtype`.

        Each call reads the JSON header back from the device; a `decoder` reads it once.
        """
        return self.decoder(packed, shape).unpack(dtype)

    def decoder(self, packed: Mapping[str, Tensor], shape: tuple[int, int]) -> Decoder:
        """Return the decoder of a packed weight of `shape` [N, K]. Reads the JSON header now, not at each unpacking."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        codes = packed["weight"]
        state = QuantState.from_dict({key: tensor for key, tensor in packed.items() if key != "weight"}, codes.device)
        # Give each block its own row. bitsandbytes 0.50's AVX-512 kernel takes a wrong scale where a block crosses
        # rows, i.e. where K is no multiple of 64 (seen at K=160: accuracy 0.49 became 0.11).
        state.shape = torch.Size((codes.numel() * 2 // self.BLOCK, self.BLOCK))
        states = {dtype: copy.copy(state) for dtype in (torch.float32, torch.bfloat16)}
        for dtype, state_of_dtype in states.items():
            state_of_dtype.dtype = dtype
        return Decoder(lambda dtype: dequantize_4bit(codes, states[dtype]).reshape(shape))

    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return shape and dtype of each tensor of a packed weight, by name: codes, block scales, tables, header."""
        blocks = shape[0] * shape[1] // self.BLOCK
        single: Layout = {
            "weight": ((blocks * self.BLOCK // 2, 1), torch.uint8),
            "weight.absmax": ((blocks,), torch.uint8 if self.double_quant else torch.float32),
            "weight.quant_map": ((16,), torch.float32),
        }
        nested: Layout = {
            "weight.nested_absmax": ((ceil_div(blocks, _NESTED_BLOCK),), torch.float32),
            "weight.nested_quant_map": ((256,), torch.float32),
        }
        return single | (nested if self.double_quant else {}) | {_HEADER: ((_HEADER_BYTES,), torch.uint8)}

    def accept(self, packed: Mapping[str, Tensor], shape: tuple[int, int], *, name: str) -> dict[str, Tensor]:
        """Check tensors that bitsandbytes packed; return those that `layout(shape)` names.

        The JSON header is padded to 256 bytes. Raises ValueError, naming the module `name` and the tensor, for a shape
        or dtype that differs from `layout(shape)`, and for NaN or Inf.
        """
        header = packed[_HEADER]
        if header.dtype is torch.uint8 and header.numel() < _HEADER_BYTES:
            header = _pad_header(header)
        accepted = super().accept({**packed, _HEADER: header}, shape, name=name)
        for key, tensor in accepted.items():
            if tensor.is_floating_point():
                check_values(tensor, name=f"{name}.{key}")
        return accepted

    def quantization_config(self, ignore: Sequence[str], dtype: torch.dtype) -> dict[str, Any]:
        """Build the `quantization_config` that `transformers.BitsAndBytesConfig` would write.

        `ignore` names the layers left dense: full names, last parts of names, or modules that contain layers.
        transformers takes an entry for the beginning or the end of a name (`layers.1` for `layers.10` too), so the
        quantize command lists full names. Raises ValueError for a `re:` pattern, because bitsandbytes would read it as
        a name.
        """
        if any(entry.startswith("re:") for entry in ignore):
            raise ValueError(
                f"{self.NAME} has the layout of bitsandbytes, which knows no re: patterns; allowed: full names of "
                "layers, their last parts, modules they are in"
            )
        return {
            "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": self.double_quant,
            "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."), "bnb_4bit_quant_storage": "uint8",
            "llm_int8_skip_modules": list(ignore), "llm_int8_threshold": 6.0,
            "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False,
        }  # fmt: skip

    @classmethod
    def recognize(cls, config: Mapping[str, Any]) -> PackedAs:
        """Parse a `quantization_config` that this class or transformers wrote.

        The config lists the layers that are not quantized (`llm_int8_skip_modules`). If this list is null or missing,
        only `lm_head` is not quantized, as in transformers. Raises ValueError for all but 4-bit NF4.
        """
        for key, value in {"load_in_4bit": True, "bnb_4bit_quant_type": cls.NAME}.items():
            if config.get(key) != value:
                raise unsupported_entry(key, config.get(key), str(value))
        skipped = config.get("llm_int8_skip_modules")  # null: transformers leaves lm_head dense
        ignore = ("lm_head",) if skipped is None else layer_names("llm_int8_skip_modules", skipped)
        return PackedAs(cls(double_quant=bool(config.get("bnb_4bit_use_double_quant", False))), ignore)


def _pad_header(header: Tensor) -> Tensor:
    """Pad bitsandbytes' JSON header with spaces to 256 bytes. Its unpadded length varies from weight to weight."""
    padded = torch.full((_HEADER_BYTES,), ord(" "), dtype=torch.uint8, device=header.device)
    padded[: header.numel()] = header
    return padded
