"""Pack an NVFP4 layer for Marlin as vLLM 0.26 does, on the CPU: its Python steps, in their order.

`prepare_fp4_layer_for_marlin` and `nvfp4_marlin_process_scales` are vLLM's (Apache-2.0,
model_executor/layers/quantization/utils/marlin_utils_fp4.py). So are the permutations: `get_weight_perm` and
`marlin_permute_weights` (marlin_utils_test.py, with which vLLM's tests check gptq_marlin_repack) and `get_scale_perms`
(marlin_utils.py). This file only uses index tables and shares nothing with formats/marlin.py. tests/gpu packs with vLLM
itself.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def layer(parts: Sequence[dict[str, Tensor]]) -> nn.Module:
    """Build vLLM's layer, weight and scales, from the parts of a fused weight as `Nvfp4.quantize` packs them."""
    codes, scale, global_scale = (torch.cat([part[key] for part in parts]) for key in parts[0])
    made = nn.Module()
    made.weight = nn.Parameter(repacked(codes), requires_grad=False)
    scales, factor = processed(permuted(scale.T.to(torch.bfloat16)))
    made.weight_scale = nn.Parameter(scales, requires_grad=False)
    one = (1.0 / global_scale.max()) * 2.0 ** (126 - 7) / factor
    made.weight_global_scale = nn.Parameter(one, requires_grad=False)
    return made


def repacked(codes: Tensor) -> Tensor:
    """Repack codes [N, K/2] (bytes) as int32 [K/16, 2 N]."""
    weight = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1).T.long()  # [K, N]
    rows, columns = weight.shape
    tiles = weight.reshape(rows // 16, 16, columns // 16, 16).permute(0, 2, 1, 3).reshape(rows // 16, columns * 16)
    table = weight_table()
    ordered = tiles.reshape(-1, len(table))[:, table].reshape(tiles.shape)
    words = sum(ordered[:, i::8] << 4 * i for i in range(8))
    return words.to(torch.int32)  # wraps, as numpy's cast of uint32 does


def weight_table() -> Tensor:
    """Return the source index of each of the 1024 codes of a 16 x 64 tile."""
    found: list[int] = []
    for lane in range(32):
        rows = [2 * (lane % 4), 2 * (lane % 4) + 1, 2 * (lane % 4 + 4), 2 * (lane % 4 + 4) + 1]
        one = [16 * row + lane // 4 + 8 * block for block in (0, 1) for row in rows]
        found += [place + 256 * warp for warp in range(4) for place in one]
    return torch.tensor(found).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()


def permuted(scale: Tensor) -> Tensor:
    """Reorder scales [K/16, N] for the kernel's threads."""
    table = [i + 8 * j for i in range(8) for j in range(8)]
    return scale.reshape(-1, 64)[:, table].reshape(scale.shape).contiguous()


def processed(scale: Tensor) -> tuple[Tensor, float]:
    """Convert permuted scales to bytes typed as E4M3; return them and the power of two they were multiplied by."""
    scale = scale.to(torch.half)
    scale = scale.view(-1, 4)[:, [0, 2, 1, 3]].view(scale.size(0), -1)
    factor, most = 1.0, scale.float().max() * 2**7
    if 0 < most < 448 * 2**7:
        factor = (448 * 2**7 / most).log2().floor().exp2().item()
    if factor > 1:
        scale = (scale.float() * factor).to(torch.half)
    scale = scale * 2**7
    scale[scale < 2] = 0
    return (scale.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous(), factor
