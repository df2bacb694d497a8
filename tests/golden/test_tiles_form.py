"""Weights in the order of `fp4_tiles` are unpacked again, by torch code and by a Triton kernel.

test_fp4_tiles.py tests that the kernel in CUDA C++ reads this order.
"""

import os

import pytest
import torch
from torch import Tensor, nn

from packed_layers import BITS, E4M3, NVFP4, check_same
from qerl_lab.formats.nvfp4 import GLOBAL_SCALE
from qerl_lab.formats.tiles import TILES, Tiles, pack
from qerl_lab.model.linear import PackedLinear

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Rows of the parts, columns, blocks of a tile. There are parts that begin and end within tiles, layers of several
# parts, K that is an odd multiple of 64, and tiles that are partly filled.
LAYERS = [([64], 64, 2), ([128, 64, 64], 192, 3), ([320, 64, 64], 128, 4), ([192, 576], 320, 5), ([640], 192, 6),
          ([448, 64, 64], 128, 7), ([64, 960], 256, 8), ([4224], 64, 2)]  # fmt: skip


def anything(rows: int, columns: int, scales: Tensor = E4M3[1:]) -> dict[str, Tensor]:
    """Draw any codes, and take `scales` in turn, shifted in each row. Blocks with a scale of 0 have codes of 0."""
    generator = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(0, 256, (rows, columns // 16, 8), dtype=torch.uint8, generator=generator)
    scale = scales[(torch.arange(rows)[:, None] * 5 + torch.arange(columns // 16)) % len(scales)]
    codes *= (scale != 0)[..., None]
    scale = scale.view(torch.float8_e4m3fn)
    return {"weight_packed": codes.flatten(1), "weight_scale": scale, GLOBAL_SCALE: torch.tensor([3.0])}


def held_in_tiles(parts: list[dict[str, Tensor]], tile: int) -> tuple[dict[str, Tensor], list[Tiles]]:
    """Return the tensors that an engine holds of a fused layer, and the form of each part."""
    codes, scale = (torch.cat([part[key] for part in parts]) for key in ("weight_packed", "weight_scale"))
    forms, first = list[Tiles](), 0
    for part in parts:
        rows, half = part["weight_packed"].shape
        forms.append(Tiles(first, rows, 2 * half))
        first += rows
    return {TILES: pack(codes, scale, tile), GLOBAL_SCALE: parts[0][GLOBAL_SCALE]}, forms


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(BITS[a.dtype]), b.view(BITS[b.dtype]))


def test_packing_follows_the_formula_of_the_order() -> None:
    """Look up each code and each scale by the formula."""
    tile, N, K = 3, 256, 320
    packed = anything(N, K)
    (held, _), codes = held_in_tiles([packed], tile), packed["weight_packed"]
    assert held[TILES].shape == (2, 3, 2, tile, 2304)
    bits = {(0, 0): (15, 8, 7, 6), (1, 0): (12, 5, 4, 3), (0, 1): (9, 2, 1, 0), (1, 1): (14, 13, 11, 10)}  # by h, b
    for n in range(0, N, 3):
        T, j, w, h, g = n // 64 // tile, n // 64 % tile, n // 16 % 4, n // 8 % 2, n % 8
        for k in range(K):
            d, i, s, b, t, a = k // 128, k // 64 % 2, k // 16 % 4, k // 8 % 2, k // 2 % 4, k % 2
            of_warp = held[TILES][T, d, i, j, 576 * w : 576 * (w + 1)]
            half = int(of_warp[:512].view(torch.int16)[2 * (16 * g + 4 * t + s) + a])
            code = sum((half >> place & 1) << 3 - index for index, place in enumerate(bits[h, b]))
            assert code == int(codes[n, k // 2]) >> 4 * a & 15, (n, k)
            byte = int(of_warp[512 + 8 * g + 4 * h + s])
            assert (1 + byte % 8 / 8) * 2.0 ** ((byte >> 3) - 9) == packed["weight_scale"][n, k // 16].item()


@pytest.mark.parametrize(("sizes", "columns", "tile"), LAYERS)
def test_unpacking_returns_every_bit_of_each_part(sizes: list[int], columns: int, tile: int) -> None:
    """The parts have every code and every scale: 0, the subnormal ones, and 2^-6 to 448."""
    parts = [anything(rows, columns, E4M3) for rows in sizes]
    held, forms = held_in_tiles(parts, tile)
    for packed, form in zip(parts, forms, strict=True):
        check_same(form.stored(held), packed)


@pytest.mark.parametrize(
    ("scale", "code", "back"),
    [
        (0x00, 0x5, (0x00, 0)),  # codes with a scale of 0 are lost
        (0x01, 0x0, (0x00, 0)),  # the scale 2^-9 of codes of 0 is lost
        (0x01, 0x8, (0x01, 0x8)),  # with a code of -0 it is kept
        (0x20, 0x0, (0x20, 0)),  # a block of zeros has 0.125
    ],
)
def test_codes_or_the_scale_of_zero_weights_may_be_lost(scale: int, code: int, back: tuple[int, int]) -> None:
    packed = anything(64, 64)
    packed["weight_scale"].view(torch.uint8)[5, 2] = scale
    packed["weight_packed"][5, 16:24] = code * 0x11
    held, (form,) = held_in_tiles([packed], 2)
    packed["weight_scale"].view(torch.uint8)[5, 2] = back[0]
    packed["weight_packed"][5, 16:24] = back[1] * 0x11
    check_same(form.stored(held), packed)


@pytest.mark.parametrize(
    ("sizes", "columns", "tile", "dtype"),
    [*((*layer, torch.bfloat16) for layer in LAYERS), (*LAYERS[1], torch.float32)],
)
def test_the_kernel_has_the_bits_of_the_torch_code(
    sizes: list[int], columns: int, tile: int, dtype: torch.dtype
) -> None:
    """Check each part of a layer."""
    pytest.importorskip("triton")
    from qerl_lab.formats.unpack_kernels import dequantize_tiles

    parts = [anything(rows, columns, E4M3) for rows in sizes]
    held, forms = held_in_tiles(parts, tile)
    for packed, form in zip(parts, forms, strict=True):
        got = dequantize_tiles(held[TILES].to(DEVICE), form.first, form.rows, columns, dtype).cpu()
        assert same_bits(got, NVFP4.decoder(packed, (form.rows, columns)).unpack(dtype))


if not INTERPRETED:
    test_the_kernel_has_the_bits_of_the_torch_code = pytest.mark.gpu(test_the_kernel_has_the_bits_of_the_torch_code)


def outcome(layer: PackedLinear, x: Tensor) -> list[Tensor]:
    """Return the output, and the gradient of the input."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize("dtype", list(BITS))
def test_a_linear_layer_gives_the_same_bits_from_tiles(dtype: torch.dtype) -> None:
    parts = [anything(rows, 192, E4M3) for rows in (192, 64)]
    held, forms = held_in_tiles(parts, 4)
    for packed, form in zip(parts, forms, strict=True):
        layer = PackedLinear(nn.Linear(192, form.rows, dtype=dtype), NVFP4, packed)
        x = torch.randn(5, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
        before = outcome(layer, x)
        layer.hold(held, form)
        assert all(same_bits(a, b) for a, b in zip(before, outcome(layer, x), strict=True))
        check_same(layer.packed(), packed)


@pytest.mark.parametrize(("form", "shape"), [
    (Tiles(32, 64, 192), (64, 192)),  # begins within a block
    (Tiles(64, 256, 192), (256, 192)),  # ends beyond the tiles
    (Tiles(0, 64, 128), (64, 128)),  # a narrower weight
    (Tiles(0, 64, 192), (128, 192)),  # another layer
], ids=str)  # fmt: skip
def test_rows_and_columns_outside_of_the_tiles_are_refused(form: Tiles, shape: tuple[int, int]) -> None:
    held, _ = held_in_tiles([anything(256, 192)], 2)
    with pytest.raises(AssertionError, match=r"Tiles\("):
        form.decoder(held, shape)
