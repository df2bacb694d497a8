"""Tables of a weight format's values and errors on single blocks and one Linear, for notebooks/."""

import math
from collections.abc import Iterable

import pandas as pd
import torch
from torch import Tensor, nn

from qerl_lab.evaluate import kl, weight_error
from qerl_lab.evaluate.entropy import Texts
from qerl_lab.formats.format import Format
from qerl_lab.model.dense import base_tensors

_RAMP = 4096  # weights from -largest to largest that are rounded to list a block's values


def values_of_a_block(weight_format: Format, largest: float = 1.0) -> list[float]:
    """Return, in order, every value that a weight can take in a block with largest magnitude `largest`.

    Raises ValueError for a format without blocks.
    """
    if weight_format.BLOCK is None:
        raise ValueError(f"{weight_format.NAME} has no blocks; allowed: packed formats")
    others = weight_format.BLOCK - 1
    ramp = torch.linspace(-largest, largest, others * math.ceil(_RAMP / others)).view(-1, others)
    blocks = torch.cat([torch.full((len(ramp), 1), largest), ramp], 1)
    return rounded(weight_format, blocks).unique().tolist()


def largest_of_blocks(weight_format: Format, weight: Tensor) -> Tensor:
    """Return stored / exact value of the largest weight in each block of `weight[N, K]`: float32 [N * K / block]."""
    assert weight_format.BLOCK is not None
    exact = weight.float().reshape(-1, weight_format.BLOCK)
    stored = rounded(weight_format, weight).reshape(-1, weight_format.BLOCK)
    at = exact.abs().argmax(1, keepdim=True)
    return (stored.gather(1, at) / exact.gather(1, at)).flatten()


def rounded(weight_format: Format, weight: Tensor) -> Tensor:
    """Quantize and dequantize `weight[N, K]`; returns float32."""
    return weight_format.dequantize(weight_format.quantize(weight), (weight.shape[0], weight.shape[1]), torch.float32)


def errors(weight_formats: Iterable[Format], weight: Tensor, inputs: Tensor) -> pd.DataFrame:
    """Tabulate errors of y = x W^T by format, with `weight[N, K]` and `inputs[T, K]`.

    Columns: bits per weight; weight error |W' - W| / |W|; output error |y' - y| / |y|; and `grid`, `dead` and `scale`,
    the shares of the squared weight error (evaluate/weight_error.py), NaN for a format without an ideal.
    """
    weight, rows = weight.float(), []
    exact = inputs @ weight.t()
    for weight_format in weight_formats:
        nearest = rounded(weight_format, weight)
        whole = weight_error.LayerError("", weight, weight_format.ideal(weight), nearest, nearest)
        total = weight_error.total([whole])
        rows.append(
            {
                "format": weight_format.NAME, "bits": weight_format.bits_per_weight,
                "weight error": math.sqrt(total["relative"]),
                "output error": ((inputs @ nearest.t() - exact).norm() / exact.norm()).item(),
                **{part: (total["parts"] or {}).get(part, math.nan) for part in ("grid", "dead", "scale")},
            }
        )  # fmt: skip
    return pd.DataFrame(rows).set_index("format")


def linear_of(texts: Texts, layer: str) -> tuple[Tensor, Tensor]:
    """Return weight [N, K] and inputs [T, K], both float32, of a Linear of the dense policy.

    Args:
        layer: full name of the Linear.
    """
    seen: list[Tensor] = []

    def keep(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0].flatten(0, 1).float())

    with texts.model.get_submodule(layer).register_forward_pre_hook(keep):
        for pair in texts.pairs:  # one at a time, without padding
            kl.hidden_states(texts.model, [pair])
    return base_tensors(texts.policy)[f"{layer}.weight"].float(), torch.cat(seen)
