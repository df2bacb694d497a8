"""A Linear whose frozen weight is packed, and the step that puts it into a model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_lab.formats.codecs import Decoder, check_weight, codec, quantize_by_rows
from qerl_lab.formats.hf_config import is_ignored

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)  # sums over W' of NVFP4 (up to 2688) overflow float16

# Layers that engines fuse into one, and that must therefore agree on the scale of the tensor.
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class WeightBytes(NamedTuple):
    """`linears`: the weights in the format, without biases. `total`: every parameter and buffer of the model."""

    linears: int
    total: int


class PackedLinear(nn.Linear):
    """y = alpha * (x @ W'^T) + bias, with W' unpacked from buffers at each call (see `codecs.Decoder`).

    The numerics are those of the engines' FP4 kernels: W' = value * block scale is exact in bfloat16, and alpha (NVFP4:
    1 / global scale) multiplies the float32 sums of the product before they are rounded, once, to the compute dtype.

    Being an `nn.Linear` it takes LoRA from PEFT like any other. The packed tensors are buffers with the names of a
    checkpoint (in attribute names "." becomes "__"); they keep their dtypes when the model changes its own. The
    backward pass unpacks again instead of saving a dense weight. With `dense_cache` (CPU only) the unpacked weight is
    kept between calls, outside of the state dict; the result is the same, bit for bit.
    """

    def __init__(
        self,
        weight_format: str,
        packed: Mapping[str, Tensor],
        shape: tuple[int, int],
        *,
        compute_dtype: torch.dtype,
        bias: Tensor | None = None,
        dense_cache: bool = False,
    ) -> None:
        """`shape` is (out_features, in_features). Raises ValueError for another dtype or a cache on an accelerator."""
        nn.Module.__init__(self)  # nn.Linear's own would allocate the dense weight
        self.out_features, self.in_features = shape
        self.weight_format = weight_format
        self.compute_dtype = _checked_dtype(compute_dtype)
        self.dense_cache = dense_cache
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach().clone(), False))
        self._packed_names = tuple(packed)
        self._decoder: Decoder | None = None
        self._dense: dict[torch.dtype, Tensor] = {}
        for name, tensor in packed.items():
            _check_cache_device(dense_cache, tensor.device)
            # Not register_buffer: bitsandbytes calls its packed tensor `weight`, which is a property here.
            self._buffers[_attribute(name)] = tensor
        self._packed_changed(decode=True)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, weight_format: str, *, name: str = "weight", dense_cache: bool = False, **options: Any
    ) -> Self:
        """Quantize `linear`; it computes in the dtype of its weight. `options` go to the codec's `quantize`."""
        module_codec = codec(weight_format)
        options |= module_codec.shared_options([linear.weight], **options)
        packed = quantize_by_rows(module_codec, linear.weight, name=name, **options)
        shape, dtype = (linear.out_features, linear.in_features), linear.weight.dtype
        return cls(weight_format, packed, shape, compute_dtype=dtype, bias=linear.bias, dense_cache=dense_cache)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # nn.Linear has a parameter by this name
        """The packed codes. PEFT reads the device here, and the dtype of the adapter from `compute_dtype`."""
        return self._held(self._packed_names[0])

    def packed(self) -> dict[str, Tensor]:
        """The packed tensors by their names in a checkpoint."""
        return {name: self._held(name) for name in self._packed_names}

    def _held(self, name: str) -> Tensor:
        # Not get_buffer: it would find the property `weight` where NF4 has a tensor by that name.
        return cast(Tensor, self._buffers[_attribute(name)])

    def packed_bytes(self) -> int:
        """Bytes of the packed tensors: bias and dense cache not counted."""
        return sum(tensor.nbytes for tensor in self.packed().values())

    @property
    def decoder(self) -> Decoder:
        """Made anew after every change of the packed tensors; reads a constant or two back from a GPU then."""
        if self._decoder is None:
            shape = (self.out_features, self.in_features)
            self._decoder = codec(self.weight_format).decoder(self.packed(), shape)
        return self._decoder

    def _packed_changed(self, *, decode: bool = False) -> None:
        """With `decode` the new decoder is made at once, because torch.compile cannot read constants from a GPU."""
        self._decoder = None
        self._dense.clear()
        if decode and not self.weight.is_meta:
            self._decoder = self.decoder

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """W' `[N, K]` in `dtype`."""
        if dtype in self._dense:
            return self._dense[dtype]
        dense = self.decoder.unpack(_checked_dtype(dtype))
        if self.dense_cache:
            self._dense[dtype] = dense
        return dense

    def forward(self, input: Tensor) -> Tensor:
        """`[..., K]` to `[..., N]`, in the dtype of autocast if that is on, else computed in `compute_dtype` and
        returned in the dtype of `input`."""
        dtype = autocast_dtype(input.device)
        x = input.to(dtype or self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        output = _PackedProduct.apply(x, bias, self)
        return output if dtype else output.to(input.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, weight_format={self.weight_format}, dense_cache={self.dense_cache}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move with the model. Of a change of dtype only `compute_dtype` and the bias take part."""
        probe = fn(torch.empty(1, dtype=self.compute_dtype, device=self.weight.device))
        self.compute_dtype = _checked_dtype(probe.dtype)
        _check_cache_device(self.dense_cache, probe.device)
        packed = self.packed().values()

        def keep_dtype(tensor: Tensor) -> Tensor:
            if any(tensor is other for other in packed):
                return fn(tensor.view(torch.uint8)).view(tensor.dtype)  # bytes: no cast of floats touches them
            return fn(tensor)

        decoded = self._decoder is not None
        super()._apply(keep_dtype, recurse)
        self._packed_changed(decode=decoded)
        return self

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in self._packed_names:
            destination[prefix + name] = destination.pop(prefix + _attribute(name))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        error_msgs: list[str] = args[-1]
        for name, own in self.packed().items():
            if (tensor := state_dict.pop(prefix + name, None)) is None:
                continue  # reported as missing below
            state_dict[prefix + _attribute(name)] = tensor
            if tensor.dtype is not own.dtype:
                error_msgs.append(f"dtype mismatch for {prefix}{name}: {tensor.dtype} given, {own.dtype} expected")
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._packed_changed()


class _PackedProduct(torch.autograd.Function):
    """x[..., K], bias[N] -> y[..., N] for the frozen packed weight of `layer`; x and bias are in one dtype.

    Keeps the layer, not a tensor, for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: PackedLinear) -> Tensor:
        ctx.layer, ctx.dtype = layer, x.dtype
        return scaled_linear(x, layer.unpack(x.dtype), layer.decoder.alpha, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            with dtypes_as_they_are(grad_y):
                grad_x = scaled_linear(grad_y, ctx.layer.unpack(ctx.dtype).t(), ctx.layer.decoder.alpha)
        if ctx.needs_input_grad[1]:
            grad_bias = grad_y.reshape(-1, grad_y.shape[-1]).sum(0)
        return grad_x, grad_bias, None


def scaled_linear(x: Tensor, weight: Tensor, alpha: float, bias: Tensor | None = None) -> Tensor:
    """alpha * (x[..., K] @ weight[N, K]^T) + bias[N]; alpha rides in the epilogue of the product and costs nothing."""
    if alpha == 1:
        return F.linear(x, weight, bias)
    start = x.new_empty(1) if bias is None else bias  # beta=0 reads nothing
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    y = torch.addmm(start, rows, weight.t(), beta=int(bias is not None), alpha=alpha)
    return y if x.ndim == 2 else y.reshape(*x.shape[:-1], y.shape[-1])


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast computes products in on `device`; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def dtypes_as_they_are(x: Tensor) -> AbstractContextManager[Any]:
    """For a backward pass that may run inside an autocast that its forward pass did not know."""
    on = autocast_dtype(x.device) not in (None, x.dtype)
    return torch.autocast(x.device.type, enabled=False) if on else nullcontext()


def pack_model(
    model: nn.Module,
    codec_name: str,
    *,
    ignore: Iterable[str] = ("lm_head",),
    dense_cache: bool = False,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Freeze the Linears of a transformers causal LM in the format `codec_name`, in place.

    Each becomes a `PackedLinear` in the dtype of its weight; under BF16 it stays an `nn.Linear` with rounded weights.
    Left alone: a layer that `ignore` names (see `hf_config.is_ignored`), and one that shares its weight with an
    embedding. The parts of a fused layer get common options (NVFP4: one global scale). The dense weights of one layer
    are dropped before the next is packed. Raises ValueError, naming the module, for a weight that the format cannot
    hold (the layers before it are packed by then), and for a model that has adapters or is packed already.
    """
    if getattr(model, "peft_config", None) is not None:
        raise ValueError("the model has adapters, whose matrices would be packed too: pack first, then add LoRA")
    for group in fused_groups(packable(model, ignore)):
        pack_group(model, group, codec_name, dense_cache, dict(options or {}))


def packable(model: nn.Module, ignore: Iterable[str]) -> list[str]:
    """The Linears that `pack_model` packs; the model may be on the meta device. Raises ValueError for a packed one."""
    ignore = tuple(ignore)
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    names = []
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            raise ValueError(f"{name} is packed as {module.weight_format} already: load the dense model again")
        if isinstance(module, nn.Linear) and not is_ignored(name, ignore) and id(module.weight) not in embeddings:
            names.append(name)
    return names


def weight_bytes(model: nn.Module) -> WeightBytes:
    """Bytes that the formatted weights and the whole model take; dense caches are not counted."""
    linears = 0
    for module in model.modules():
        if isinstance(module, PackedLinear):
            linears += module.packed_bytes()
        elif isinstance(module, nn.Linear) and getattr(module, "weight_format", None) is not None:
            linears += module.weight.nbytes
    tensors = [*model.parameters(), *model.buffers()]
    return WeightBytes(linears, sum(tensor.nbytes for tensor in tensors))


def register_lora(lora_config: Any) -> None:
    """Make a `peft.LoraConfig` use the layers of `formats.lora`: fast on every base, and no merge into a packed one.

    Raises ValueError for an adapter whose initialization reads the dense weight (PiSSA, OLoRA, LoftQ and their like).
    """
    from qerl_lab.formats.lora import INITIALIZATIONS, LoraLinear, PackedLoraLinear

    if lora_config.init_lora_weights not in INITIALIZATIONS:
        raise ValueError(
            f"init_lora_weights={lora_config.init_lora_weights!r} needs the dense weight, the base is packed; "
            f"allowed: {', '.join(map(repr, INITIALIZATIONS))}"
        )
    lora_config._register_custom_module({PackedLinear: PackedLoraLinear, nn.Linear: LoraLinear})


def pack_group(model: nn.Module, names: list[str], codec_name: str, dense_cache: bool, options: dict[str, Any]) -> None:
    """Pack the parts of one fused layer. No reference to a dense weight outlives the call."""
    module_codec = codec(codec_name)
    linears = {name: cast(nn.Linear, model.get_submodule(name)) for name in names}
    weights = [linear.weight for linear in linears.values()]
    for name, weight in zip(names, weights, strict=True):  # before a bad value reaches the scale that all share
        check_weight(weight, name=name, format_name=codec_name)
    options = options | module_codec.shared_options(weights, **options)
    for name, linear in linears.items():
        if module_codec.BLOCK is None:
            _round_weight(linear, codec_name, name, options)
        else:
            packed = PackedLinear.from_linear(linear, codec_name, name=name, dense_cache=dense_cache, **options)
            model.set_submodule(name, packed)


def _round_weight(linear: nn.Linear, codec_name: str, name: str, options: dict[str, Any]) -> None:
    """Round and freeze the weight of a Linear that a dense format leaves as it is."""
    dense = codec(codec_name)
    rounded = dense.quantize(linear.weight, name=name, **options)
    linear.weight.data = dense.dequantize(rounded, (linear.out_features, linear.in_features), linear.weight.dtype)
    linear.requires_grad_(False)
    linear.__dict__["weight_format"] = codec_name  # `weight_bytes` counts it


def fused_groups(names: list[str]) -> Iterator[list[str]]:
    """`names` in their order, those that share a parent and a fused layer together."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        parts = next((fused for fused in FUSED if leaf in fused), (leaf,))
        groups.setdefault((parent, parts), []).append(name)
    yield from groups.values()


def _attribute(checkpoint_name: str) -> str:
    """The buffer that holds a tensor of the checkpoint: torch allows no dot in it."""
    return checkpoint_name.replace(".", "__")


def _checked_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in COMPUTE_DTYPES:
        allowed = ", ".join(map(str, COMPUTE_DTYPES))
        raise ValueError(f"a packed Linear cannot compute in {dtype}; allowed: {allowed} (also as the autocast dtype)")
    return dtype


def _check_cache_device(dense_cache: bool, device: torch.device) -> None:
    if dense_cache and device.type not in ("cpu", "meta"):
        raise ValueError(f"dense_cache=True is for the CPU, not for {device.type}: set dense_cache=False")
