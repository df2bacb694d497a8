"""The packed Linear, with and without LoRA, gives the numbers of the CPU on a GPU, and keeps no dense weight."""

import copy
from collections.abc import Callable

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from packed_layers import FP8, MXFP4, NVFP4, packed_from
from qerl_lab.formats.format import Format
from qerl_lab.formats.nf4 import Nf4
from qerl_lab.model.lora import register_lora

pytestmark = pytest.mark.gpu
N, K = 192, 320
PACKED = [NVFP4, MXFP4, Nf4(True), Nf4(False), FP8]
each_packed = pytest.mark.parametrize("weight_format", PACKED, ids=repr)


def layer(weight_format: Format, dtype: torch.dtype, lora: bool, dense: nn.Linear | None = None) -> nn.Module:
    torch.manual_seed(0)
    packed = packed_from(dense or nn.Linear(K, N).to(dtype), weight_format)
    model = nn.Sequential(packed, nn.LayerNorm(packed.out_features, dtype=dtype))
    if lora:
        config = LoraConfig(r=8, target_modules=["0"])
        register_lora(config)
        inject_adapter_in_model(config, model)
        nn.init.normal_(model[0].lora_B["default"].weight, std=0.1)
    return model[0]


def gradients(module: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, ...]:
    y = module(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    parameters = [p for p in getattr(module, "parameters", list)() if p.requires_grad]
    return (y, *torch.autograd.grad(y, [x, *parameters], grad))


def inputs() -> list[Tensor]:
    return [torch.randn(K), torch.randn(7, K), torch.randn(3, K, 5).transpose(1, 2), torch.randn(0, K)]


@each_packed
@pytest.mark.parametrize("lora", [False, True], ids=["linear", "lora"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_output_and_gradients_equal_the_cpu(weight_format: Format, lora: bool, dtype: torch.dtype) -> None:
    on_cpu = layer(weight_format, dtype, lora)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    exact = dtype is torch.float32
    torch.backends.cuda.matmul.allow_tf32 = False
    for x in inputs():
        expected = gradients(on_cpu, x.to(dtype).requires_grad_())
        got = [t.cpu() for t in gradients(on_gpu, x.to(dtype).cuda().requires_grad_())]
        for own, other in zip(got, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-4 if exact else 3e-2, atol=1e-4 if exact else 0.1)


@each_packed
def test_unpacked_bits_equal_the_cpu(weight_format: Format) -> None:
    on_cpu = layer(weight_format, torch.float32, False)
    on_gpu = copy.deepcopy(on_cpu).cuda()
    for dtype in (torch.float32, torch.bfloat16):
        own, other = on_gpu.unpack(dtype).cpu(), on_cpu.unpack(dtype)
        if weight_format.NAME == "nf4":  # kernels of bitsandbytes: some values differ by one rounding of bfloat16
            torch.testing.assert_close(own, other, rtol=2**-8, atol=1e-6)
        else:
            assert torch.equal(own, other)


@each_packed
@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
def test_a_linear_compiled_by_inductor_gives_the_same_numbers(weight_format: Format, autocast: bool) -> None:
    """The layer has no adapter, because torch 2.11 compiles the product that adds in place to wrong gradients."""
    torch._dynamo.reset()  # all cases compile the same code objects; Dynamo keeps eight versions of each
    module = layer(weight_format, torch.bfloat16, lora=False).cuda()
    compiled = torch.compile(module, fullgraph=True)
    x = torch.randn(64, K, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for own, eager in zip(gradients(compiled, x), gradients(module, x), strict=True):
            torch.testing.assert_close(own, eager, rtol=3e-2, atol=0.1)


@each_packed
@pytest.mark.parametrize("lora", [False, True], ids=["linear", "lora"])
def test_nothing_dense_is_kept_and_checkpointing_changes_nothing(weight_format: Format, lora: bool) -> None:
    big = nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16, device="cuda")
    module = layer(weight_format, torch.bfloat16, lora, big).cuda()
    x = torch.randn(16, 4096, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    expected = gradients(module, x)  # the libraries allocate workspaces, which they keep
    del expected
    before = torch.cuda.memory_allocated()
    y = module(x)
    assert torch.cuda.memory_allocated() - before < 2**20  # a dense weight has 2**25 bytes
    y.sum().backward()
    del y
    module.zero_grad()
    plain = gradients(module, x)
    again = gradients(lambda x: checkpoint(module, x, use_reentrant=False), x)
    assert torch.equal(plain[1], again[1])


def test_forward_and_backward_do_not_wait_for_the_gpu() -> None:
    """A synchronization in every layer would stall training; torch raises on one here."""
    modules = [layer(weight_format, torch.bfloat16, True).cuda() for weight_format in PACKED]
    x = torch.randn(64, K, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.randn(64, N, dtype=torch.bfloat16, device="cuda")
    for module in modules:
        module(x).backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for module in modules:
            module(x).backward(grad)
        with pytest.raises(RuntimeError):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
