"""The Triton kernel against the pure torch code, bit for bit: on a GPU, and in Triton's interpreter on a CPU.

conftest.py sets TRITON_INTERPRET where there is no GPU.
"""

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from packed_layers import BITS, BY_NAME

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),  # numpy, where a product is infinite
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
each_format = pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
each_dtype = pytest.mark.parametrize("dtype", list(BITS))


def by_kernel(packed: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    from qerl_lab.formats.unpack_kernels import dequantize_e2m1

    codes, scale = (packed[key].to(DEVICE) for key in ("weight_packed", "weight_scale"))
    return dequantize_e2m1(codes, scale, shape, dtype).cpu()


def check(name: str, packed: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Compare the kernel with the torch code; return the result of the kernel."""
    expected = BY_NAME[name].decoder(packed, shape).unpack(dtype)
    got = by_kernel(packed, shape, dtype)
    assert (got.shape, got.dtype) == (shape, dtype)
    assert torch.equal(got.isnan(), expected.isnan())
    wrong = (got.view(BITS[dtype]) != expected.view(BITS[dtype])) & ~expected.isnan()
    if INTERPRETED and dtype is torch.bfloat16:
        wrong &= expected.abs() >= 2.0**-126  # the interpreter's cast to bfloat16 drops subnormals, a GPU's does not
    assert not wrong.any(), (wrong.nonzero()[0], got[wrong][0], expected[wrong][0])
    return got


def arbitrary(name: str, rows: int, columns: int) -> dict[str, Tensor]:
    """Draw any bytes: every code and every scale, also scales that no quantizer writes (negative, NaN, overflowing)."""
    generator = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(0, 256, (rows, columns // BY_NAME[name].BLOCK), dtype=torch.uint8, generator=generator)
    if name == "mxfp4":
        return {"weight_packed": codes, "weight_scale": scale}
    e4m3 = scale.view(torch.float8_e4m3fn)
    return {"weight_packed": codes, "weight_scale": e4m3, "weight_global_scale": torch.tensor([3.0])}


@each_format
@each_dtype
@pytest.mark.parametrize("shape", [(1, 32), (3, 96), (127, 160), (64, 4096), (513, 32), (0, 64)])
def test_any_bytes_unpack_to_the_bits_of_the_torch_code(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check(name, arbitrary(name, *shape), shape, dtype)


@each_format
@each_dtype
def test_every_value_with_every_scale_unpacks_to_the_bits_of_the_torch_code(name: str, dtype: torch.dtype) -> None:
    width = BY_NAME[name].BLOCK
    packed = arbitrary(name, 256, width)
    pairs = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE], dtype=torch.uint8)
    packed["weight_packed"] = pairs.repeat(256, width // 16)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    packed["weight_scale"] = scale.view(packed["weight_scale"].dtype)
    got = check(name, packed, (256, width), dtype)
    assert got.isnan().any()  # E8M0 255, E4M3 127 and 255
    assert len(got[~got.isnan()].unique()) > 400


@each_format
def test_strided_tensors_unpack_like_contiguous_ones(name: str) -> None:
    packed = arbitrary(name, 8, 128)
    strided: dict[str, Any] = {key: value.clone() for key, value in packed.items()}
    for key in ("weight_packed", "weight_scale"):
        strided[key] = packed[key].view(torch.uint8).t().contiguous().t().view(packed[key].dtype)
        assert not strided[key].is_contiguous()
    assert torch.equal(by_kernel(strided, (8, 128), torch.float32).nan_to_num(),
                       by_kernel(packed, (8, 128), torch.float32).nan_to_num())  # fmt: skip
