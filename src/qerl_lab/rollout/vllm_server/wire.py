"""Encode tensors as JSON between the engine and the server's workers. Imports no vllm."""

import base64

import torch
from torch import Tensor


def encoded(tensor: Tensor) -> list[str]:
    """Encode a tensor as dtype and base64, bit for bit. Decimal numbers take four times the space and cannot be NaN."""
    held = tensor.detach().cpu().contiguous()
    return [str(held.dtype).removeprefix("torch."), base64.b64encode(held.view(torch.uint8).numpy().tobytes()).decode()]


def decoded(dtype: str, data: str) -> Tensor:
    """Decode the result of `encoded` to a tensor with one axis."""
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype))
