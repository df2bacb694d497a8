"""NVFP4 in the layout of the kernel `fp4_tiles` (rollout/vllm/fp4_tiles.cu): convert to it and back.

The layout reorders the same codes and scales into blocks of 64 rows x 64 columns, 2304 bytes each. `tile` blocks below
each other form a tile. A weight `[N, K]` is uint8 `[tiles, D, 2, tile, 2304]` with N / (64 tile) tiles and D = K/128,
both rounded up; zeros fill the space beyond N and K. For row n = 64 (tile T + j) + 16 w + 8 h + g and column k = 128 d
+ 64 i + 16 s + 8 b + 2 t + a (w, s, t to 3; g to 7; i, h, b, a to 1), the 576 bytes from 576 w on of block [T, d, i, j]
are:

- codes, 512 bytes or int32 `[128]`: half a of word 16 g + 4 t + s (lower half first) holds code [n, k]. Its sign and
  magnitude are the bits 15 and 8, 7, 6 for h, b = 0, 0; 12 and 5, 4, 3 for 1, 0; 9 and 2, 1, 0 for 0, 1; 14 and 13, 11,
  10 for 1, 1;
- scales, a byte each: byte 8 g + 4 h + s is the scale of [n, k], a 5-bit exponent e above a 3-bit mantissa m: (1 + m/8)
  2^(e - 9). This covers all E4M3 numbers above 0, subnormals included, but not 0.

Where a scale is 0, the 16 codes become 0 and the scale 2^-9: the same weights up to signs of zeros. On the way back 16
zero codes with scale 2^-9 get scale 0. So two things are lost: codes under a scale of 0, and a scale of 2^-9 over 16
zero codes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qerl_lab.formats.format import Decoder, ceil_div
from qerl_lab.formats.nvfp4 import GLOBAL_SCALE, Nvfp4

BLOCK, DEPTH, BLOCK_BYTES = 64, 64, 2304  # rows, columns and bytes of a block, as in fp4_tiles.cu
AT_A_TIME = 2  # blocks along K that the kernel fetches together, as in fp4_tiles.cu
TILES = "fp4_tiles"
_CODE_WORDS = 128  # per quarter block
_SIGNS = -0x7FFF8000  # 0x80008000 as int32
# The scale byte with the value of each E4M3 byte: the exponent is 2 more, and subnormal numbers (1 to 7) become normal.
# Byte 0 means 2^-9 and not 0, so that `_to_blocks` sets codes with scale 0 to 0. Bytes from 127 on (NaN, negative) do
# not occur.
_SCALE_BYTES = torch.tensor([0, 0, 8, 12, 16, 18, 20, 22, *range(24, 143), *[0] * 129], dtype=torch.uint8)
_ROWS_AT_ONCE = 4096  # int32 takes eight times the memory of codes


@dataclass(frozen=True)
class Tiles:
    """Reads one part (q, k or v) of a fused NVFP4 layer in the layout of `fp4_tiles`: `rows` rows from `first` on.

    The methods take the layer as `held`: `TILES`, the tensor of the whole layer, and `GLOBAL_SCALE` as in a
    checkpoint. No part has a tensor of its own, because a part may begin and end within a tile. `first`, `rows` and
    `columns` are multiples of 64.
    """

    first: int
    rows: int
    columns: int

    def stored(self, held: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert this part of `held` (TILES, GLOBAL_SCALE) to the tensors of an NVFP4 checkpoint.

        They are bit-equal to the tensors that were packed, except where 16 weights with one scale are all 0 (see the
        module).
        """
        tile, first, end = held[TILES].shape[3], self.first // BLOCK, (self.first + self.rows) // BLOCK
        before = first // tile  # copy only the tiles that overlap the part
        blocks = held[TILES][before : ceil_div(end, tile)].permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
        blocks = blocks[first - before * tile : end - before * tile, : self.columns // DEPTH]
        blocks = blocks.unflatten(-1, (4, -1))  # N/64 K/64 w
        words = blocks.view(torch.int32)[..., :_CODE_WORDS]
        codes = _packed_codes(words)
        scale_bytes = blocks[..., 4 * _CODE_WORDS :].unflatten(3, (8, 2, 4))  # N/64 K/64 w g h s
        scale_bytes = scale_bytes.permute(0, 2, 4, 3, 1, 5).reshape(self.rows, self.columns // 16)
        scale = ((scale_bytes.int() << 20) + (118 << 23)).view(torch.float32)  # (1 + m/8) 2^(e - 9)
        empty = (scale_bytes == 0) & (codes.view(torch.int64) == 0)  # eight bytes hold the codes of one scale
        return {
            "weight_packed": codes,
            "weight_scale": scale.masked_fill_(empty, 0).to(torch.float8_e4m3fn),
            GLOBAL_SCALE: held[GLOBAL_SCALE],
        }

    def decoder(self, held: Mapping[str, Tensor], shape: tuple[int, int]) -> Decoder:
        """Return the decoder of this part of `held`; it gives the same bits as `Nvfp4.decoder` on `stored(held)`."""
        tiles, depth, _, tile, _ = held[TILES].shape
        are_whole = self.first % BLOCK == self.rows % BLOCK == self.columns % DEPTH == 0
        are_held = self.first + self.rows <= tiles * tile * BLOCK and depth == depth_of(self.columns)
        fits = are_whole and are_held and shape == (self.rows, self.columns)
        assert fits, f"{self} of a layer {shape}"
        return Decoder(partial(self._unpack_part, held), held[GLOBAL_SCALE].reciprocal().item())

    def _unpack_part(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Unpack this part to `[rows, columns]` in `dtype`, without the global scale. A GPU runs a Triton kernel."""
        if held[TILES].is_cuda:
            from qerl_lab.formats.unpack_kernels import dequantize_tiles

            return dequantize_tiles(held[TILES], self.first, self.rows, self.columns, dtype)
        return Nvfp4(None).decoder(self.stored(held), (self.rows, self.columns)).unpack(dtype)


def decoders(held: Mapping[str, Tensor], sizes: Sequence[int], columns: int) -> list[Decoder]:
    """Return a decoder for each part (q, k, v or gate, up) of the fused layer in `held` (TILES, GLOBAL_SCALE).

    `sizes` gives the rows of each part, in order; every part has `columns` columns.
    """
    firsts = [sum(sizes[:part]) for part in range(len(sizes))]
    return [Tiles(first, size, columns).decoder(held, (size, columns))
            for first, size in zip(firsts, sizes, strict=True)]  # fmt: skip


def depth_of(columns: int) -> int:
    """Return how many pairs of 64-column blocks cover `columns`."""
    return ceil_div(columns, DEPTH * AT_A_TIME)


def pack(codes: Tensor, scale: Tensor, tile: int) -> Tensor:
    """Convert an NVFP4 weight to the layout of `fp4_tiles`, uint8 `[N / (64 tile), K / 128, 2, tile, 2304]`.

    Both quotients are rounded up, and the space beyond N and K is filled with zeros.

    Args:
        codes: uint8 `[N, K/2]`, low nibble = even column; N and K are multiples of 64.
        scale: float8_e4m3fn `[N, K/16]`, none negative.
        tile: number of blocks of 64 rows in a tile.
    """
    tiles, depth = ceil_div(len(codes), BLOCK * tile), depth_of(2 * codes.shape[1])
    shape = (tiles * tile, depth * AT_A_TIME, BLOCK_BYTES)
    blocks = torch.zeros(shape, dtype=torch.uint8, device=codes.device)
    first = 0  # row of blocks that the next slice is written to
    for code_rows, scale_rows in zip(codes.split(_ROWS_AT_ONCE), scale.split(_ROWS_AT_ONCE), strict=True):
        converted = _to_blocks(code_rows, scale_rows)
        blocks[first : first + len(converted), : converted.shape[1]] = converted
        first += len(converted)
    return blocks.view(tiles, tile, depth, AT_A_TIME, BLOCK_BYTES).permute(0, 2, 3, 1, 4).contiguous()


def _to_blocks(codes: Tensor, scale: Tensor) -> Tensor:
    """Convert NVFP4 codes, uint8 `[N, K/2]`, and scales, E4M3 `[N, K/16]`, to blocks, uint8 `[N/64, K/64, 2304]`."""
    N, K = len(codes), 2 * codes.shape[1]
    code = torch.stack([codes & 15, codes >> 4], dim=-1).view(N, K // 16, 16).int()
    code *= (scale.float() != 0)[..., None]
    code = code.view(N // 64, 4, 2, 8, K // 64, 4, 2, 4, 2).permute(0, 4, 1, 3, 7, 5, 8, 6, 2)  # w g t s a b h
    sign, size = code >> 3, code & 7
    half = sign[..., 0, 0] << 15 | size[..., 0, 0] << 6
    half |= sign[..., 0, 1] << 12 | size[..., 0, 1] << 3
    half |= sign[..., 1, 0] << 9 | size[..., 1, 0]
    half |= sign[..., 1, 1] << 14 | size[..., 1, 1] >> 2 << 13 | (size[..., 1, 1] & 3) << 10
    words = half.to(torch.int16).view(torch.uint8).reshape(N // 64, K // 64, 4, 4 * _CODE_WORDS)
    scales = _SCALE_BYTES.to(scale.device)[scale.view(torch.uint8).long()]
    scales = scales.view(N // 64, 4, 2, 8, K // 64, 4).permute(0, 4, 1, 3, 2, 5).reshape(N // 64, K // 64, 4, 64)
    return torch.cat([words, scales], dim=-1).view(N // 64, K // 64, BLOCK_BYTES)


def _packed_codes(words: Tensor) -> Tensor:
    """Convert code words of `fp4_tiles`, int32 `[N/64, K/64, 4, 128]`, to NVFP4 codes, uint8 `[N, K/2]`.

    The low nibble of a byte is the even column.
    """
    words = words.unflatten(3, (8, 4, 4)).permute(0, 2, 3, 1, 5, 4)  # N/64 w g K/64 s t
    rows, _, _, columns, _, _ = words.shape
    out = torch.empty(rows, 4, 2, 8, columns, 4, 2, 4, dtype=torch.uint8, device=words.device)  # w h g K/64 s b t
    # Shift the sign of each of the four codes in a 16-bit half to bit 15, its magnitude to bits 8, 7, 6 of both halves.
    last = words << 1 & _SIGNS | words >> 4 & 0x00C000C0 | words >> 5 & 0x01000100
    for h, b, placed in ((0, 0, words), (1, 0, words << 3), (0, 1, words << 6), (1, 1, last)):
        pairs = placed >> 12 & 0x00080008 | placed >> 6 & 0x00070007
        out[:, :, h, :, :, :, b] = (pairs | pairs >> 12) & 0xFF
    return out.view(rows * BLOCK, columns * DEPTH // 2)
