"""Tensors as JSON, between the engine and the workers of the server. Imports no vllm."""

import base64

import torch
from torch import Tensor


def encoded(tensor: Tensor) -> list[str]:
    """A tensor as JSON, bit for bit: a number as text could be no NaN, and takes four times the room."""
    held = tensor.detach().cpu().contiguous()
    return [str(held.dtype).removeprefix("torch."), base64.b64encode(held.view(torch.uint8).numpy().tobytes()).decode()]


def decoded(dtype: str, data: str) -> Tensor:
    """Inverse of `encoded`, of a tensor with one axis."""
    return torch.frombuffer(bytearray(base64.b64decode(data)), dtype=getattr(torch, dtype))
