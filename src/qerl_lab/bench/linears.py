"""Time single Linears of a real model: unpacking the weight, and forward with input gradient."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from qerl_lab import formats
from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import Work, graphed, side_by_side
from qerl_lab.bench.shapes import linears
from qerl_lab.config.schema import FormatConfig
from qerl_lab.model.linear import PackedLinear


def dequantization(models: list[str]) -> Iterator[Row]:
    """Yield for each shape and format the milliseconds to unpack it to bfloat16, and to copy the same number of bytes.

    Bytes are those read plus those written.
    """
    for model in models:
        for layer, (rows, columns, _) in linears(model).items():
            dense = random_linear(rows, columns)
            for name, packed in packed_in_every_format(dense).items():
                moved = packed.packed_bytes() + 2 * rows * columns
                source = torch.randint(0, 255, (moved // 64, 32), dtype=torch.uint8, device="cuda")  # whole sectors
                target = torch.empty_like(source)
                arms: dict[str, Work] = {
                    "unpack": partial(packed.unpack, torch.bfloat16),
                    "copy": partial(target.copy_, source),
                }
                ms = side_by_side({arm: graphed(work) for arm, work in arms.items()})
                yield {
                    "model": model, "layer": layer, "N": rows, "K": columns, "format": name, "bytes": moved,
                    "ms": ms["unpack"], "copy_ms": ms["copy"], "tb_per_s": moved / ms["unpack"] / 1e9,
                    "of_copy": ms["copy"] / ms["unpack"],
                }  # fmt: skip


def products(models: list[str], tokens: list[int]) -> Iterator[Row]:
    """Yield for each shape, token count and arm the milliseconds of forward and input gradient.

    `ms` is kernel time (CUDA graph); `eager_ms` includes the launches from Python.
    """
    for model in models:
        for layer, (rows, columns, count) in linears(model).items():
            layers = arms(random_linear(rows, columns))
            for number in tokens:
                x = torch.randn(number, columns, dtype=torch.bfloat16, device="cuda", requires_grad=True)
                grad = torch.randn(number, rows, dtype=torch.bfloat16, device="cuda")
                calls = {name: partial(forward_and_gradient, module, x, grad) for name, module in layers.items()}
                eager = side_by_side(calls)
                kernels = side_by_side({name: graphed(call) for name, call in calls.items()})
                for name in layers:
                    yield {
                        "model": model, "layer": layer, "N": rows, "K": columns, "count": count, "tokens": number,
                        "arm": name, "ms": kernels[name], "eager_ms": eager[name],
                    }  # fmt: skip


def random_linear(rows: int, columns: int) -> nn.Linear:
    """Make a Linear on the GPU with a bfloat16 weight[rows, columns] from normal(0, 0.02)."""
    linear = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    nn.init.normal_(linear.weight, std=0.02)
    return linear


def packed_in_every_format(dense: nn.Linear) -> dict[str, PackedLinear]:
    """Pack `dense` in each packed format, with the schema's options; return them by name."""
    every = (formats.build(FormatConfig(name=name)) for name, kind in formats.FORMATS.items() if kind.BLOCK is not None)
    return {each.NAME: PackedLinear.from_linear(dense, each) for each in every}


def arms(dense: nn.Linear) -> dict[str, nn.Module]:
    """Build one arm per implementation of the same weight: `nn.Linear`, our formats, bitsandbytes' `Linear4bit`."""
    return {"bf16": dense, **packed_in_every_format(dense), "bitsandbytes": linear4bit(dense)}


def linear4bit(dense: nn.Linear) -> nn.Module:
    """Make NF4 with double quantization on the GPU, as QLoRA's `BitsAndBytesConfig(load_in_4bit=True, ...)` does."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = Linear4bit(
        dense.in_features, dense.out_features, bias=dense.bias is not None, compute_dtype=torch.bfloat16,
        compress_statistics=True, quant_type="nf4", device="meta",
    )  # fmt: skip
    layer.weight = Params4bit(dense.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4").cuda()
    layer.bias = dense.bias
    return layer


def forward_and_gradient(module: nn.Module, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Run one forward pass, and compute the gradient of its input."""
    return torch.autograd.grad(module(x), x, grad)
