"""LoRA (arXiv 2106.09685) on frozen Linears, packed or dense. Importing this module imports peft."""

from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora.layer import Linear, LoraLayer
from torch import Tensor, nn

from qerl_lab.model.linear import PackedLinear, autocast_dtype, scaled_linear


def register_lora(lora_config: LoraConfig) -> None:
    """Make PEFT use `LoraLinear`, which is faster than its own layer, for `lora_config`."""
    lora_config._register_custom_module({nn.Linear: LoraLinear})  # PackedLinear is a kind of nn.Linear


def lora_layers(base: nn.Module) -> dict[str, LoraLayer]:
    """Return PEFT's layers with an adapter in `base`, the model below PEFT's wrapper, by full name."""
    return {name: layer for name, layer in base.named_modules() if isinstance(layer, LoraLayer)}


class LoraLinear(Linear):
    """PEFT's LoRA layer, computed as one operation (`_LoraProduct`) for one plain adapter without dropout.

    The adapter is computed in the dtype of autocast or, without autocast, of the base layer. The trained weights of the
    adapter keep their own dtype.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Override PEFT's hook: compute the output of the base layer plus the adapter as one operation.

        PEFT's code computes the output if the adapter uses dropout, is merged or disabled, or is not the active one.
        """
        drops_out = self.training and not isinstance(self.lora_dropout["default"], nn.Identity)
        is_other = self.merged or self.disable_adapters or self.active_adapters != ["default"]
        if args or kwargs or drops_out or is_other:
            return super().forward(x, *args, **kwargs)
        base, lora_A, lora_B = self.base_layer, self.lora_A["default"], self.lora_B["default"]
        dtype = autocast_dtype(x.device)
        base_dtype = base.compute_dtype if isinstance(base, PackedLinear) else base.weight.dtype
        rows = x.reshape(-1, x.shape[-1]).to(dtype or base_dtype)
        A, B = lora_A.weight.to(rows.dtype), lora_B.weight.to(rows.dtype)
        y = _LoraProduct.apply(rows, A, B, self.scaling["default"], base)
        y = y.reshape(*x.shape[:-1], base.out_features)
        return y if dtype else y.to(x.dtype)


class _LoraProduct(torch.autograd.Function):
    """x @ W^T + bias + scaling * x @ A^T @ B^T for x[M, K], A[r, K], B[N, r] and the frozen weight W of `base`.

    x, A and B have one dtype. The adapter's product is added in the epilogue of a matrix product, forward and backward.
    This avoids the copies of x and y that PEFT's modules make and keep. Saved for the backward pass: x, A, B and
    x @ A^T.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, A: Tensor, B: Tensor, scaling: float, base: nn.Linear) -> Tensor:
        weight, alpha = _scaled_weight(base, x.dtype)
        bias = None if base.bias is None else base.bias.to(x.dtype)
        inner = x @ A.t()
        ctx.save_for_backward(x, inner, A, B)
        ctx.scaling, ctx.base = scaling, base
        return scaled_linear(x, weight, alpha, bias).addmm_(inner, B.t(), alpha=scaling)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        x, inner, A, B = ctx.saved_tensors
        grad_inner = scaled_linear(grad_y, B.t(), ctx.scaling)
        grad_A = grad_inner.t() @ x
        grad_B = scaled_linear(grad_y.t(), inner.t(), ctx.scaling)
        if not ctx.needs_input_grad[0]:
            return None, grad_A, grad_B, None, None
        weight, alpha = _scaled_weight(ctx.base, x.dtype)
        grad_x = scaled_linear(grad_y, weight.t(), alpha).addmm_(grad_inner, A)
        return grad_x, grad_A, grad_B, None, None


def _scaled_weight(base: nn.Linear, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Return `(W', alpha)` of a base layer, dense or packed: W' `[N, K]` in `dtype`, and W = alpha * W'."""
    if isinstance(base, PackedLinear):
        return base.unpack(dtype), base.decoder.alpha
    return base.weight.to(dtype), 1.0
