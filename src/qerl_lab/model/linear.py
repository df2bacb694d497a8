"""`PackedLinear`, a Linear with a frozen packed weight, and functions that put it into a model."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_lab.formats.format import Decoder, Format, pack_fused
from qerl_lab.formats.marlin import Marlin
from qerl_lab.formats.tiles import Tiles
from qerl_lab.model.on_disk import is_ignored

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Layers that engines fuse into one, so that they must share a tensor scale.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Linear):
    """y = alpha * (x @ W'^T) + bias, with W' unpacked from buffers at each call (see `formats.format.Decoder`).

    The numerics match the engines' FP4 kernels. W' = value * block scale is exact in bfloat16. alpha (NVFP4: 1 / global
    scale) multiplies the product's float32 sums before they are rounded, once, to the compute dtype.

    PEFT attaches LoRA to it as to any `nn.Linear`. The packed tensors are buffers with checkpoint names (in attribute
    names "." becomes "__"); they keep their dtypes when the model's dtype changes. The backward pass unpacks again
    instead of saving a dense weight. With `dense_cache` (CPU only) the unpacked weight is kept between calls, outside
    the state dict; the result is bit-equal.

    After `hold` with an `engine_layout` the buffers are an engine's tensors in the engine's layout. The layer computes
    the same bits.
    """

    def __init__(self, linear: nn.Linear, weight_format: Format, packed: Mapping[str, Tensor]) -> None:
        """Take sizes, bias and compute dtype from `linear`, and the weight from `packed`, tensors of `weight_format`.

        `linear` may be on the meta device.
        """
        nn.Module.__init__(self)  # nn.Linear's own would allocate the dense weight
        self.out_features, self.in_features = linear.out_features, linear.in_features
        self.weight_format = weight_format
        self.compute_dtype = linear.weight.dtype  # PEFT reads the dtype from this attribute
        self.dense_cache = False
        bias = linear.bias
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone(), False))
        self.hold(packed)

    def hold(self, tensors: Mapping[str, Tensor], engine_layout: Marlin | Tiles | None = None) -> None:
        """Store `tensors` in place of the buffers that now hold the weight. `tensors` must encode the same weight.

        `engine_layout` reads `tensors` that are in an engine's layout. None means that they are in checkpoint layout.
        """
        # Not register_buffer: bitsandbytes calls its packed tensor `weight`, which is a property here.
        self._buffer_names = {name: name.replace(".", "__") for name in tensors}  # torch allows no dots
        self._buffers.clear()
        self._buffers.update({self._buffer_names[name]: tensor for name, tensor in tensors.items()})
        self.engine_layout = engine_layout
        self._make_decoder()

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # nn.Linear has a parameter by this name
        """Return the first packed tensor, not a dense weight. PEFT reads the layer's device from it."""
        return next(iter(self.held().values()))

    def packed(self) -> dict[str, Tensor]:
        """Return the weight's packed tensors by checkpoint name, converted from an engine's layout if needed."""
        return self.held() if self.engine_layout is None else self.engine_layout.stored(self.held())

    def held(self) -> dict[str, Tensor]:
        """Return the buffers that hold the weight, by name, unconverted: they may be in an engine's layout."""
        # Not get_buffer: it would find the property `weight` instead of NF4's tensor of that name.
        return {name: cast(Tensor, self._buffers[buffer]) for name, buffer in self._buffer_names.items()}

    def packed_bytes(self) -> int:
        """Return the bytes of this layer's packed tensors in checkpoint layout, without bias and dense cache."""
        return self.weight_format.packed_bytes(self.out_features, self.in_features)

    def _make_decoder(self) -> None:
        """Make the decoder of the held tensors, unless they are on the meta device, and drop the cached dense weight.

        The decoder is made here, not at the first forward call: torch.compile could not read the decoder's constants
        from a GPU then.
        """
        self._dense: dict[torch.dtype, Tensor] = {}
        if not self.weight.is_meta:
            read = self.engine_layout or self.weight_format
            self.decoder: Decoder = read.decoder(self.held(), (self.out_features, self.in_features))

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """Return the dense W' `[N, K]` in `dtype`; the weight is `decoder.alpha` * W'."""
        if dtype in self._dense:
            return self._dense[dtype]
        dense = self.decoder.unpack(dtype)
        if self.dense_cache:
            self._dense[dtype] = dense
        return dense

    def forward(self, input: Tensor) -> Tensor:
        """Compute y[..., N] from `input` [..., K] with the packed weight and the bias.

        Under autocast y is computed and returned in autocast's dtype. Otherwise it is computed in `compute_dtype` and
        returned in the input's dtype.
        """
        dtype = autocast_dtype(input.device)
        x = input.to(dtype or self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        output = _PackedProduct.apply(x, bias, self)
        return output if dtype else output.to(input.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Override torch's hook behind `to` and `cuda`: move all tensors, and convert only the bias to a new dtype.

        The new dtype also becomes `compute_dtype`.
        """
        probe = fn(torch.empty(1, dtype=self.compute_dtype, device=self.weight.device))
        self.compute_dtype = probe.dtype
        packed = self.held().values()

        def keep_dtype(tensor: Tensor) -> Tensor:
            if not any(tensor is other for other in packed):
                return fn(tensor)
            given = tensor.view(torch.uint8)  # as bytes, so that a cast of floats leaves them alone
            got = fn(given)
            return tensor if got is given else got.view(tensor.dtype)  # keep sharing it with other layers

        super()._apply(keep_dtype, recurse)
        self._make_decoder()
        return self

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        """Override torch's hook: save the packed tensors under checkpoint names."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, buffer in self._buffer_names.items():
            destination[prefix + name] = destination.pop(prefix + buffer)


class _PackedProduct(torch.autograd.Function):
    """x[..., K], bias[N] -> y[..., N] for the frozen weight and bias of `layer`; x and bias have one dtype.

    Saves the layer for the backward pass, which unpacks the layer's weight again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: PackedLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return scaled_linear(x, layer.unpack(x.dtype), layer.decoder.alpha, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, None]:
        return scaled_linear(grad_y, ctx.layer.unpack(ctx.dtype).t(), ctx.layer.decoder.alpha), None, None


def scaled_linear(x: Tensor, weight: Tensor, alpha: float, bias: Tensor | None = None) -> Tensor:
    """Return alpha * (x[..., K] @ weight[N, K]^T) + bias[N], with alpha fused into the product."""
    if alpha == 1:
        return F.linear(x, weight, bias)
    start = x.new_empty(1) if bias is None else bias  # not read with beta=0
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    y = torch.addmm(start, rows, weight.t(), beta=int(bias is not None), alpha=alpha)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return autocast's dtype on `device`, None if autocast is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def packable_linears(model: nn.Module, ignore: Sequence[str]) -> list[str]:
    """List the full names of the Linears of a dense model that a format packs.

    Linears tied to an embedding, and those that an entry of `ignore` matches (`on_disk.is_ignored`), are left out. The
    model may be on the meta device.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return [
        name for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not is_ignored(name, ignore) and id(module.weight) not in embeddings
    ]  # fmt: skip


def packed_head(model: "PreTrainedModel", weight_format: Format, ignore: Sequence[str]) -> str | None:
    """Return the name of the output layer if `weight_format` and `ignore` would pack it, else None.

    Training needs a dense output layer, because the loss reads its weight.
    """
    head = model.get_output_embeddings()
    names = packable_linears(model, ignore) if weight_format.BLOCK is not None else []
    return next((name for name in names if model.get_submodule(name) is head), None)


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """Return a model's packed layers by their checkpoint names, which lack PEFT's suffix `.base_layer`."""
    return {
        name.removesuffix(".base_layer"): layer for name, layer in model.named_modules()
        if isinstance(layer, PackedLinear)
    }  # fmt: skip


def linear_bytes(model: nn.Module) -> int:
    """Return the size in bytes of the Linear weights in the run's format. Biases and dense caches do not count."""
    size = 0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            size += module.packed_bytes()
        elif isinstance(module, nn.Linear) and getattr(module, "weight_format", None) is not None:
            size += module.weight.nbytes
    return size


def total_bytes(model: nn.Module) -> int:
    """Return the size in bytes of a model's parameters and buffers. Dense caches do not count."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def pack_group(model: nn.Module, weights: dict[str, Tensor], weight_format: Format) -> None:
    """Pack the parts of one fused layer (q/k/v, gate/up), or a single Linear, and put them into the model.

    `weights` holds the dense weights by Linear name, in the dtype of the checkpoint; each is removed from the dict when
    packed. With a dense format (bf16) the Linear stays, and its weight is rounded.
    """
    for name, packed in pack_fused(weight_format, weights):
        linear = cast(nn.Linear, model.get_submodule(name))
        if weight_format.BLOCK is not None:
            model.set_submodule(name, PackedLinear(linear, weight_format, packed))
            continue
        shape, dtype = (linear.out_features, linear.in_features), linear.weight.dtype
        linear.weight = nn.Parameter(weight_format.dequantize(packed, shape, dtype))
        linear.requires_grad_(False)
        linear.__dict__["weight_format"] = weight_format  # read by `linear_bytes`


def fused_groups(names: Sequence[str]) -> list[list[str]]:
    """Group the full names of Linears into lists.

    The parts that engines fuse into one layer (FUSED) share a list. Every other Linear has a list of its own.
    """
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        parts = next((fused for fused in FUSED if leaf in fused), (leaf,))
        groups.setdefault((parent, parts), []).append(name)
    return list(groups.values())
