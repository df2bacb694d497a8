"""Compute a run's one adapter as dense products in vLLM's linear layers, instead of vLLM's multi-adapter LoRA.

Registers a quantization config with vLLM (`register_quantization_config`). For each linear layer it wraps the method of
the stored weights (compressed-tensors, bitsandbytes or none) and adds x A^T B^T from buffers of the layer. The buffers
keep their addresses, so that CUDA graphs see what `AdapterBuffers.write` puts into them.

There is exactly one adapter: vLLM's own LoRA is off, and vLLM refuses a request that names one.

On a GPU a layer is one operation opaque to torch.compile, so that the route can depend on the rows of a call:

- With `fp4_tiles` the layer holds NVFP4 weights in that kernel's layout only, and the kernel computes weight and
  adapter. A call with many rows, such as a prefill, unpacks the weights for this call and uses cuBLAS.
- With vLLM's kernels a call with many rows unpacks the policy's packed layers (`use_packed_layers`) and uses cuBLAS,
  too. With FP8 activations vLLM's kernel computes the weight's product in every call. It quantizes the activations,
  while the adapter's product takes them unquantized.
- With `dense_rows` the layer also holds the NVFP4 weights unpacked. A call with at least that many rows, also in
  decoding, multiplies with this copy: by cuBLAS, with A stacked below the copy so that one product computes both, or in
  FP8 (`dense_dtype`), half as large, with inputs rounded to FP8 for the weight's product.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from peft import PeftModel
from torch import Tensor, nn
from vllm.model_executor.layers.linear import (
    WEIGHT_LOADER_V2_SUPPORTED,
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import get_quantization_config, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from qerl_lab.config.option import ConfigError
from qerl_lab.formats.fp8 import W8A8
from qerl_lab.formats.nvfp4 import GLOBAL_SCALE, Nvfp4
from qerl_lab.formats.tiles import TILES, decoders, pack
from qerl_lab.model.linear import PackedLinear
from qerl_lab.model.lora import lora_layers
from qerl_lab.model.on_disk import read_model_json
from qerl_lab.rollout.vllm import fp4_tiles
from qerl_lab.rollout.vllm.product import (
    TILES_ROWS,
    UNPACK_ROWS,
    add_adapter,
    fp8_product,
    stacked_product,
    unpacked_product,
)

Pair = tuple[Tensor, Tensor]  # A[r, K] and B[N, r]

NAME = "one-adapter"
# Buffers of an `fp4_tiles` layer: the weight, its global scale, and the counters at which thread blocks synchronize.
OF_TILES = (TILES, GLOBAL_SCALE, "fp4_counters")
_OWN_KEY = "one_adapter"  # entry of quantization_config, which is part of the key of compiled graphs


@dataclass(frozen=True)
class Routes:
    """Which kernels may replace vLLM's own kernel of a packed NVFP4 layer.

    Attributes:
        fp4_tiles: use the kernel `fp4_tiles`.
        dense_rows: use an unpacked copy of the weight in calls with at least this many rows (tokens). None: never.
        dense_dtype: dtype of this copy, "auto" for the model's dtype, or "fp8", which also rounds the inputs to FP8.
    """

    fp4_tiles: bool = False
    dense_rows: int | None = None
    dense_dtype: str = "auto"


def llm_arguments(folder: Path, lora_rank: int, targets: Sequence[str], routes: Routes = Routes()) -> dict[str, Any]:
    """Return the arguments that make `vllm.LLM` compute the model in `folder` with one adapter (`OneAdapterConfig`).

    `targets` names the layers with an adapter as in PEFT, by the end of the layer's name, e.g. "q_proj".
    """
    stored = read_model_json(folder / "config.json").get("quantization_config") or {"quant_method": NAME}
    settings = {"rank": lora_rank, "targets": list(targets), "routes": asdict(routes)}
    arguments: dict[str, Any] = {
        "quantization": NAME,
        "hf_overrides": {"quantization_config": stored | {_OWN_KEY: settings}},
        "enable_lora": False,
    }
    if stored["quant_method"] == "bitsandbytes":
        arguments["load_format"] = "bitsandbytes"  # vLLM would set it by the quantization's name, which is now ours
    return arguments


@register_quantization_config(NAME)
class OneAdapterConfig(QuantizationConfig):
    """vLLM quantization config that wraps the weights' own config `base` and adds one adapter.

    `base` is None for unquantized weights, `targets` names the layers with an adapter, `routes` has the fields of
    `Routes`. Methods without a docstring override vLLM's hooks, most of them by the same hook of `base`.
    """

    def __init__(
        self, base: QuantizationConfig | None, rank: int, targets: Sequence[str], routes: Mapping[str, Any]
    ) -> None:
        self.base, self.rank, self.targets, self.routes = base, rank, tuple(targets), Routes(**routes)
        super().__init__()

    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        return self._parts if self.base is None else self.base.packed_modules_mapping

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, parts: dict[str, list[str]]) -> None:
        if self.base is None:
            self._parts = parts
        else:
            self.base.packed_modules_mapping = parts

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "OneAdapterConfig":
        """Override vLLM's hook: build from a `quantization_config` with the entry that `llm_arguments` added."""
        stored = dict(config)
        settings = stored.pop(_OWN_KEY)
        name = stored["quant_method"]
        base = None if name == NAME else get_quantization_config(name).from_config(stored)
        return cls(base, **settings)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Override vLLM's hook: use this config if `llm_arguments` asked for it, whatever method config.json names."""
        return NAME if user_quant == NAME else None

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        if self.base is None:
            return [torch.float32, torch.float16, torch.bfloat16]
        return self.base.get_supported_act_dtypes()

    def get_min_capability(self) -> int:
        return 0 if self.base is None else self.base.get_min_capability()

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        if self.base is not None:
            self.base.apply_vllm_mapper(hf_to_vllm_mapper)

    def maybe_update_config(self, model_name: str, hf_config: Any = None, revision: str | None = None) -> None:
        if self.base is not None:
            self.base.maybe_update_config(model_name, hf_config=hf_config, revision=revision)

    def get_cache_scale_mapper(self) -> Any:
        return super().get_cache_scale_mapper() if self.base is None else self.base.get_cache_scale_mapper()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Override vLLM's hook: return the method that computes `layer`; its full name is `prefix`.

        That is the method of `base`, wrapped in `OneAdapterMethod` if the layer has an adapter.
        """
        method = None if self.base is None else self.base.get_quant_method(layer, prefix)
        if not isinstance(layer, LinearBase):
            return method
        method = method or UnquantizedLinearMethod()
        parent, _, name = prefix.rpartition(".")
        parts = [f"{parent}.{part}" for part in self.packed_modules_mapping.get(name, [name])]
        adapted = [any(f".{part}".endswith(f".{target}") for target in self.targets) for part in parts]
        return OneAdapterMethod(method, self.rank, parts, adapted, self.routes) if any(adapted) else method


# Layers by the address of their adapter. A custom op takes tensors; with a layer's name as argument it would be
# compiled anew for each layer.
_BY_ADAPTER: WeakValueDictionary[int, LinearBase] = WeakValueDictionary()


@torch.library.custom_op("qerl_lab::linear_with_adapter", mutates_args=())
def linear_with_adapter(x: Tensor, adapter: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """Custom operation: return y[M, columns] = x[M, K] W^T + bias plus the adapter's product.

    The layer, which holds W, is found by `adapter`: it must be that layer's buffer `adapter_A`.
    """
    layer = _BY_ADAPTER[adapter.data_ptr()]
    return layer.quant_method.routed(layer, x, bias)


@linear_with_adapter.register_fake
def _empty_result(x: Tensor, adapter: Tensor, bias: Tensor | None, columns: int) -> Tensor:
    """Return an uninitialized y[M, columns], from which torch.compile takes shape and dtype."""
    return x.new_empty(x.shape[0], columns)


@register_weight_loader_v2_supported_method
class OneAdapterMethod(LinearMethodBase):
    """vLLM linear method that computes a layer by another method, `base`, and adds the product of one adapter.

    A layer with weight [N, K] and P fused parts (e.g. q, k, v) gets the buffers `adapter_A` [P * r, K] and `adapter_B`
    [N, r], where r is the rank. They are zero until `AdapterBuffers.write`. Tensor parallelism is not supported: it
    would have to cut B of a column-parallel layer and A of a row-parallel layer, in the same way as the weight.
    """

    def __init__(self, base: Any, rank: int, parts: list[str], adapted: list[bool], routes: Routes = Routes()) -> None:
        """Wrap the method `base`. `rank` is the rank of the adapter.

        `parts` has the full checkpoint name of each fused part. `adapted[i]` is True if `parts[i]` has an adapter.
        """
        self.base, self.rank, self.parts, self.adapted = base, rank, parts, adapted
        # A dense layer (`format.ignore`) has only the base's route.
        self.routes = Routes() if isinstance(base, UnquantizedLinearMethod) else routes
        self.packed_layers: list[PackedLinear] = []
        if hasattr(base, "quant_config"):
            self.quant_config = base.quant_config  # bitsandbytes' loader reads it to find packed layers

    def create_weights(
        self, layer: LinearBase, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
        output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        """Override vLLM's hook: create base weights and a zero adapter. The engine sets no tensor parallelism."""
        if type(self.base).__name__ not in WEIGHT_LOADER_V2_SUPPORTED:  # vLLM chose the loader by our class name
            extra_weight_attrs["weight_loader"] = layer.weight_loader
        self.base.create_weights(
            layer, input_size_per_partition, output_partition_sizes, input_size, output_size, params_dtype,
            **extra_weight_attrs,
        )  # fmt: skip
        # A checkpoint may store a fused layer as one: one part, several partitions.
        self.sizes = output_partition_sizes if len(self.parts) > 1 else [sum(output_partition_sizes)]
        A = torch.zeros(len(self.parts) * self.rank, input_size_per_partition, dtype=params_dtype)
        B = torch.zeros(sum(self.sizes), self.rank, dtype=params_dtype)
        layer.register_buffer("adapter_A", A, persistent=False)
        layer.register_buffer("adapter_B", B, persistent=False)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Override vLLM's hook: convert the loaded weights to the layout that the kernel in use expects.

        This kernel is `fp4_tiles` if `self.routes.fp4_tiles` is set, else the kernel of the wrapped vLLM method
        `self.base`. If `self.routes.dense_rows` is set, the layer keeps an unpacked copy of the weights beside them.
        The layer always keeps its bias in checkpoint order as `plain_bias`, because vLLM's kernels Marlin and Humming
        reorder `layer.bias`.
        """
        if (bias := getattr(layer, "bias", None)) is not None:
            layer.register_buffer("plain_bias", bias.data.clone(), persistent=False)
        if len(self.parts) == 1 and (scales := getattr(layer, "weight_global_scale", None)) is not None:
            scales.data.fill_(scales.data[0])  # vLLM fills only the first entry of a layer that is stored fused
        if self.routes.dense_rows:
            self._keep_dense(layer)
        if self.routes.fp4_tiles:
            self._convert_to_tiles(layer)
        else:
            self.base.process_weights_after_loading(layer)
        _BY_ADAPTER[layer.adapter_A.data_ptr()] = layer

    def _convert_to_tiles(self, layer: LinearBase) -> None:
        """Replace the layer's loaded weights by buffers in the layout of `fp4_tiles`.

        Raises ConfigError if `fp4_tiles` does not support this GPU, or the layer's shape or rank.
        """
        columns, why = layer.adapter_A.shape[1], fp4_tiles.refusal()
        if not why and not fp4_tiles.supports(self.sizes, columns, self.rank):
            shape = f"{self.parts[0]}, {self.sizes} x {columns} at rank {self.rank}"
            why = f"does not take {shape}: {fp4_tiles.SUPPORTED}"
        if why:
            # Do not propose `auto`, which may have chosen it.
            raise ConfigError(f"rollout.vllm.linear_backend=fp4_tiles {why}. Type rollout.vllm.linear_backend=vllm.")
        codes, scale = layer.weight_packed.data, layer.weight_scale.data
        global_scale = layer.weight_global_scale.data[:1].clone()
        for name, _ in list(layer.named_parameters(recurse=False)):
            if name.startswith("weight"):
                delattr(layer, name)
        N, device = len(codes), codes.device
        tile = fp4_tiles.tile_of(N, columns, fp4_tiles.device_properties(device).multiprocessors)
        packed = pack(codes, scale, tile)
        for name, tensor in zip(OF_TILES, (packed, global_scale, fp4_tiles.barrier_counters(N, device)), strict=True):
            layer.register_buffer(name, tensor, persistent=False)
        self.decoders = decoders({TILES: packed, GLOBAL_SCALE: global_scale}, self.sizes, columns)

    def _keep_dense(self, layer: LinearBase) -> None:
        """Give the layer an unpacked copy of its weight [N, K], in the model's dtype or in FP8.

        In the model's dtype the copy is the buffer `stacked` [N + P * r, K]: the weight, and below it A [P * r, K], of
        which `adapter_A` becomes a view. P is the number of fused parts, r the rank. Unpacking leaves out one factor of
        the weight, which `self.alpha` stores: the weight is `self.alpha * stacked[:N]`.

        In FP8 the copy is the buffer `fp8_copy` [N, K], and `fp8_scale` float32 [N, 1] has a scale for each row: the
        weight is about `fp8_scale * fp8_copy`.
        """
        stored = {name: getattr(layer, name).data for name in ("weight_packed", "weight_scale")}
        stored["weight_global_scale"] = layer.weight_global_scale.data[:1]
        A, N = layer.adapter_A, sum(self.sizes)
        decoder = Nvfp4(None).decoder(stored, (N, A.shape[1]))
        dense = decoder.unpack(A.dtype)
        if self.routes.dense_dtype == "fp8":
            copy = W8A8.quantize(dense, name=self.parts[0])
            layer.register_buffer("fp8_copy", copy["weight"], persistent=False)
            layer.register_buffer("fp8_scale", copy["weight_scale"].float() * decoder.alpha, persistent=False)
            return
        stacked = torch.cat([dense, A])
        layer.register_buffer("stacked", stacked, persistent=False)
        del layer.adapter_A  # A is now a view of `stacked`, not a second buffer
        layer.adapter_A, self.alpha = stacked[N:], decoder.alpha

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Override vLLM's hook: return x W^T + bias plus the adapter's product, on a GPU by one custom operation."""
        rows, columns = x.view(-1, x.shape[-1]), sum(self.sizes)
        if x.is_cuda:
            return linear_with_adapter(rows, layer.adapter_A, bias, columns).view(*x.shape[:-1], columns)
        y = self.base.apply(layer, x, bias)
        add_adapter(y.view(-1, columns), rows, layer.adapter_A, layer.adapter_B, self.sizes)
        return y

    def routed(self, layer: LinearBase, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x[M, K] W^T + bias plus the adapter's product, y[M, N]. `self.routes` and M select the kernel."""
        rows, dense_rows = len(x), self.routes.dense_rows
        A, B = layer.adapter_A, layer.adapter_B
        plain = None if bias is None else layer.plain_bias
        if dense_rows and rows >= dense_rows:
            if self.routes.dense_dtype == "fp8":
                return fp8_product(x, layer.fp8_copy, layer.fp8_scale, A, B, self.sizes, plain)
            return stacked_product(x, layer.stacked, self.alpha, B, self.sizes, plain)
        if self.routes.fp4_tiles and rows > TILES_ROWS:
            return unpacked_product(x, self.decoders, A, B, self.sizes, plain)
        if self.routes.fp4_tiles:
            packed, global_scale, counters = (getattr(layer, name) for name in OF_TILES)
            return fp4_tiles.linear(x, packed, global_scale, A, B, self.sizes, counters, plain)
        if self.packed_layers and rows >= UNPACK_ROWS:
            return unpacked_product(x, [part.decoder for part in self.packed_layers], A, B, self.sizes, plain)
        y = self.base.apply(layer, x, bias)
        add_adapter(y, x, A, B, self.sizes)
        return y

    def adapter_buffers(self, layer: LinearBase) -> dict[str, Pair]:
        """Return views of the layer's adapter buffers, A[r, K] and B[n, r], by name of each part with an adapter.

        n is the number of the part's output columns.
        """
        blocks = zip(self.parts, self.adapted, layer.adapter_A.split(self.rank), layer.adapter_B.split(self.sizes),
                     strict=True)  # fmt: skip
        return {part: (A, B) for part, is_adapted, A, B in blocks if is_adapted}


def use_packed_layers(model: nn.Module, layers: Mapping[str, PackedLinear]) -> None:
    """Let vLLM's `model` unpack the policy's packed `layers` for calls with `UNPACK_ROWS` rows or more.

    vLLM's own kernel computes calls with fewer rows, and the layers with a part that `layers` (by checkpoint name)
    lacks.
    """
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if isinstance(method, OneAdapterMethod) and all(part in layers for part in method.parts):
            method.packed_layers = [layers[part] for part in method.parts]


def lora_modules(model: PeftModel) -> dict[str, tuple[nn.Linear, nn.Linear]]:
    """Return the two PEFT modules that hold the policy's matrices A and B, by full name of the base layer."""
    return {
        name: (layer.lora_A["default"], layer.lora_B["default"])
        for name, layer in lora_layers(model.get_base_model()).items()
    }  # fmt: skip


class AdapterBuffers:
    """Copies the policy's adapter into the buffers of vLLM's layers.

    Finds the buffers once, when it is built, because the search takes 10 ms in a 7B model.
    """

    def __init__(self, model: nn.Module, adapter: Mapping[str, tuple[nn.Linear, nn.Linear]]) -> None:
        """Find the buffers in vLLM's `model` for the matrices of `adapter`, from `lora_modules`.

        Raises ConfigError unless `adapter` covers the same layers as the buffers, with the same shapes.
        """
        buffers = dict[str, Pair]()
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, OneAdapterMethod):
                buffers |= method.adapter_buffers(layer)
        given = {name: [tuple(A.weight.shape), tuple(B.weight.shape)] for name, (A, B) in adapter.items()}
        built = {name: [tuple(A.shape), tuple(B.shape)] for name, (A, B) in buffers.items()}
        if differing := sorted(name for name in given.keys() | built.keys() if given.get(name) != built.get(name)):
            name = differing[0]
            raise ConfigError(
                f"{len(differing)} layers have another adapter than the engine was built for, the first {name}: "
                f"shapes {given.get(name)}; allowed: {built.get(name)}, None for no adapter. Type lora.target_modules "
                "with linear layers of the model's blocks alone."
            )
        self.modules = [adapter[name] for name in buffers]
        self.buffers_of_A, self.buffers_of_B = [A for A, _ in buffers.values()], [B for _, B in buffers.values()]

    def write(self, scaling: float) -> None:
        """Copy the policy's adapter into the buffers of vLLM's layers, which use it from their next call on.

        The copy of B is multiplied by `scaling`, which is alpha / rank, and rounded once to the model's dtype.
        """
        # All layers in three calls, because one call per layer would take longer than the copy. `torch.optim` uses the
        # same private functions; tests/unit/rollout/test_one_adapter.py fails if they disappear.
        with torch.no_grad():
            torch._foreach_copy_(self.buffers_of_A, [A.weight for A, _ in self.modules])
            torch._foreach_copy_(self.buffers_of_B, torch._foreach_mul([B.weight for _, B in self.modules], scaling))
