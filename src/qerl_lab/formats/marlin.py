"""Read NVFP4 weights in Marlin's layout, in which vLLM holds them on a Hopper GPU.

Marlin reorders the same codes and scales into tiles of 64 rows x 16 columns. Row S of its tensors, called line S, holds
columns 16 S to 16 S + 15 of the weight. For a weight `[N, K]`, let row n = 64 T + 16 w + 8 h + c and column k = 16 S +
8 b + 2 r + a (w, r to 3; c to 7; h, b, a to 1):

- codes, int32 `[K/16, 2 N]`: word 128 T + 16 c + 4 r + w of line S holds code [n, k] in nibble 4 a + 2 h + b;
- scales, a byte each, `[K/16, N]`: byte 64 T + 8 c + 4 (w div 2) + 2 h + (w mod 2) of line S is the scale of block S of
  row n, as E5M3 without a sign: the upper byte of a float16 2^7 * boost * scale, its sign shifted out.

`boost` is a power of two, one per engine layer, by which vLLM multiplies the block scales and divides the layer's
global scale. Scales with 2^7 * boost * scale < 2 are lost: Marlin stores zero for them, and so computes with zeros
where the checkpoint has numbers. `boost` is 1 where a tensor's largest scale exceeds 224; the lost scales are then the
subnormal E4M3 numbers, below 2^-6.

Sources, vLLM 0.26: `prepare_fp4_layer_for_marlin` and `nvfp4_marlin_process_scales` (marlin_utils_fp4.py),
`marlin_permute_scales` (marlin_utils.py), `get_weight_perm` (marlin_utils_test.py), gptq_marlin_repack.cu.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import Tensor

from qerl_lab.formats.format import Decoder
from qerl_lab.formats.nvfp4 import GLOBAL_SCALE, Nvfp4

ROWS = 64  # of a tile
CODES, SCALE = "marlin_codes", "marlin_scale"


@dataclass(frozen=True)
class Marlin:
    """Reads an NVFP4 weight in Marlin's layout.

    The methods take the weight as `held`: `CODES` and `SCALE` in Marlin's layout, and `GLOBAL_SCALE` as in a
    checkpoint. `boost` is the power of two by which vLLM multiplied the block scales.
    """

    boost: float

    def stored(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert `held` (CODES, SCALE, GLOBAL_SCALE) to the tensors of an NVFP4 checkpoint.

        They are bit-equal to the checkpoint's tensors, except for scales that Marlin stores as zero (see the module).
        """
        lines, tiles = len(held[SCALE]), held[SCALE].shape[1] // ROWS
        words = held[CODES].unflatten(1, (tiles, 8, 4, 4))  # S T c r w
        codes = torch.empty(tiles, 4, 2, 8, lines, 2, 4, dtype=torch.uint8, device=words.device)  # T w h c S b r
        for h, b in product(range(2), range(2)):
            low = 4 * (2 * h + b)
            pairs = (words >> low & 15) | (words >> (low + 16) & 15) << 4
            codes[:, :, h, :, :, b] = pairs.permute(1, 4, 2, 0, 3)
        upper = held[SCALE].view(torch.uint8).unflatten(1, (tiles, 8, 2, 2, 2)).permute(1, 3, 5, 4, 2, 0)  # T w w h c S
        halves = (upper.reshape(tiles * ROWS, lines).to(torch.int16) << 7).view(torch.float16)
        return {
            "weight_packed": codes.reshape(tiles * ROWS, lines * 8),
            "weight_scale": (halves.float() * (2.0**-7 / self.boost)).to(torch.float8_e4m3fn),
            GLOBAL_SCALE: held[GLOBAL_SCALE],
        }

    def decoder(self, held: Mapping[str, Tensor], shape: tuple[int, int]) -> Decoder:
        """Return the decoder of a weight of `shape` [N, K]; it gives the bits of `Nvfp4.decoder` on `stored(held)`."""
        return Decoder(partial(self._unpack_weight, held, shape), held[GLOBAL_SCALE].reciprocal().item())

    def _unpack_weight(self, held: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """Unpack a weight to `[N, K]` in `dtype`, without the global scale; on a GPU by a Triton kernel."""
        if held[CODES].is_cuda:
            from qerl_lab.formats.unpack_kernels import dequantize_marlin

            return dequantize_marlin(held[CODES], held[SCALE], self.boost, dtype)
        return Nvfp4(None).decoder(self.stored(held), shape).unpack(dtype)


def part(held: Mapping[str, Tensor], first: int, rows: int) -> dict[str, Tensor]:
    """Return views of the rows `first` to `first + rows - 1` of a fused weight in Marlin's layout, e.g. q in q/k/v.

    `held` has CODES, SCALE and GLOBAL_SCALE; `first` and `rows` are multiples of 64.
    """
    return {
        CODES: held[CODES].narrow(1, 2 * first, 2 * rows),
        SCALE: held[SCALE].narrow(1, first, rows),
        GLOBAL_SCALE: held[GLOBAL_SCALE],
    }
