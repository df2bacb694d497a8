"""The operation that adds the adapter's product, against float64, and the scaling of the adapter for vLLM."""

from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.nn import Linear

from packed_layers import BY_NAME
from played_modules import imported_over
from qerl_lab.model.linear import PackedLinear
from qerl_lab.rollout.vllm.product import add_adapter, unpacked_product


def operands(sizes: list[int], rank: int, rows: int = 5, columns: int = 24) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [(rows, sum(sizes)), (rows, columns), (len(sizes) * rank, columns), (sum(sizes), rank)]
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def expected(y: Tensor, x: Tensor, A: Tensor, B: Tensor, sizes: list[int]) -> Tensor:
    """Compute the result part by part in float64."""
    y, x, A, B = (tensor.double() for tensor in (y, x, A, B))
    blocks = zip(A.split(len(A) // len(sizes)), B.split(sizes), strict=True)
    return y + torch.cat([x @ a.t() @ b.t() for a, b in blocks], dim=1)


@pytest.mark.parametrize(("sizes", "rank"), [([48], 8), ([40, 8, 8], 1), ([33, 7], 3)])
def test_each_part_gets_its_own_product_and_memory_between_rows_stays(sizes: list[int], rank: int) -> None:
    y, x, A, B = operands(sizes, rank)
    wide = torch.full((5, 100), 7.0)
    wide[:, : y.shape[1]] = y
    add_adapter(wide[:, : y.shape[1]], x, A, B, sizes)
    torch.testing.assert_close(wide[:, : y.shape[1]], expected(y, x, A, B, sizes).float(), rtol=1e-5, atol=1e-5)
    assert (wide[:, y.shape[1] :] == 7).all()


def test_the_operation_is_registered_correctly_in_torch() -> None:
    """Check its schema, the tensors that it changes, and its tracing for torch.compile."""
    found = torch.library.opcheck(add_adapter, (*operands([40, 8, 8], 4), [40, 8, 8]))
    assert len(found) > 3
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("name", "biased"), [("nvfp4", True), ("mxfp4", False), ("nf4", True), ("fp8", False)])
def test_the_product_with_unpacked_weights_has_weight_bias_and_adapter(name: str, biased: bool) -> None:
    """The parts have different sizes, and in NVFP4 different global scales."""
    sizes, columns, rank = [64, 32], 64, 4
    _, x, A, B = operands(sizes, rank, rows=7, columns=columns)
    bias = torch.randn(sum(sizes)) if biased else None
    weights = [torch.randn(size, columns) * 10**part for part, size in enumerate(sizes)]
    packed = [(BY_NAME[name].quantize(weight), tuple(weight.shape)) for weight in weights]
    parts = [PackedLinear(Linear(columns, size, bias=False), BY_NAME[name], held)
             for size, (held, _) in zip(sizes, packed, strict=True)]  # fmt: skip
    dense = torch.cat([BY_NAME[name].dequantize(held, shape, torch.float32) for held, shape in packed]).double()
    start = x.double() @ dense.t() + (0 if bias is None else bias.double())
    y = unpacked_product(x, [part.decoder for part in parts], A, B, sizes, bias)
    torch.testing.assert_close(y, expected(start, x, A, B, sizes).float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("alpha", "scaling"), [(None, 1.0), (8.0, 2.0)])
def test_vllm_layers_get_the_adapter_scaled_by_alpha_over_rank(
    monkeypatch: pytest.MonkeyPatch, tiny, alpha: float | None, scaling: float
) -> None:
    played = {
        "vllm": {"LLM": object}, "vllm.lora": {}, "vllm.lora.request": {"LoRARequest": object},
        "qerl_lab.rollout.vllm.one_adapter": {"AdapterBuffers": object},
    }  # fmt: skip
    with imported_over(monkeypatch, "qerl_lab.rollout.vllm.adapter", played) as module:
        adapter = module.DenseAdapter(None, tiny(lora__rank=4, lora__alpha=alpha))
    adapter.buffers = Mock()
    adapter.sync(Mock())
    adapter.buffers.write.assert_called_once_with(scaling)
