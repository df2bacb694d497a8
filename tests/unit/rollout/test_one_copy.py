"""The policy's packed layers share the tensors of a fake engine, in the layout of its kernel.

tests/gpu/test_one_copy_gpu.py has vLLM's own tensors.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import marlin_packer
from played_vllm import PlayedLlm, played_engine
from qerl_lab.config.option import ConfigError
from qerl_lab.formats.marlin import CODES, SCALE
from qerl_lab.formats.nvfp4 import GLOBAL_SCALE
from qerl_lab.formats.tiles import TILES, pack
from qerl_lab.model.dense import base_tensors, dense_tensors
from qerl_lab.model.linear import PackedLinear, linear_bytes, packed_layers, total_bytes
from qerl_lab.model.policy import Policy, save_adapter
from qerl_lab.model.weight_files import WeightFiles
from qerl_lab.rollout.vllm import base, one_copy
from small_checkpoints import equal, write_random

PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
MarlinNvFp4LinearKernel = type("MarlinNvFp4LinearKernel", (), {})


def in_marlin(packed: list[dict[str, Tensor]]) -> nn.Module:
    """Build a vLLM layer for Marlin."""
    made = marlin_packer.layer(packed)
    made.scheme = SimpleNamespace(kernel=MarlinNvFp4LinearKernel())
    return made


def in_tiles(packed: list[dict[str, Tensor]]) -> nn.Module:
    """Build a layer for `fp4_tiles`; its tile borders differ from the borders of fused parts."""
    made = nn.Module()
    codes, scale = (torch.cat([part[key] for part in packed]) for key in ("weight_packed", "weight_scale"))
    made.register_buffer(TILES, pack(codes, scale, 3))
    made.register_buffer(GLOBAL_SCALE, packed[0][GLOBAL_SCALE])
    return made


Form = Callable[[list[dict[str, Tensor]]], nn.Module]


def engine_of(policy: Policy, wrapped: bool = False, form: Form = in_marlin) -> nn.Module:
    """Build the policy's base as vLLM holds it; `wrapped` as its LoRA for many adapters wraps layers."""
    return model_of({name: layer.packed() for name, layer in packed_layers(policy.base).items()}, wrapped, form)


def model_of(layers: dict[str, dict[str, Tensor]], wrapped: bool = False, form: Form = in_marlin) -> nn.Module:
    """Build vLLM's model from packed layers, given by checkpoint name."""
    model = nn.Module()
    model.packed_modules_mapping = PARTS
    whole = {part: name for name, parts in PARTS.items() for part in parts}
    for name in dict.fromkeys(f"{parent}.{whole.get(leaf, leaf)}" for parent, _, leaf in map(split, layers)):
        parent, _, leaf = split(name)
        made = form([layers[f"{parent}.{part}"] for part in PARTS.get(leaf, [leaf])])
        put(model, f"{name}.base_layer" if wrapped else name, made)
    return model


def split(name: str) -> tuple[str, str, str]:
    return name.rpartition(".")


def put(model: nn.Module, name: str, layer: nn.Module) -> None:
    *parents, leaf = name.split(".")
    for one in parents:
        if not hasattr(model, one):
            model.add_module(one, nn.Module())
        model = model.get_submodule(one)
    model.add_module(leaf, layer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random(
        tmp_path_factory.mktemp("dense"), hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, initializer_range=0.1,
    )  # fmt: skip


@pytest.fixture
def cfg(folder: Path, tiny: Callable) -> Any:
    return tiny(format__name="nvfp4", model__path=str(folder))


@pytest.fixture
def policy(cfg: Any, build_policy: Callable) -> Policy:
    return build_policy(cfg)


def gradients(policy: Policy) -> list[Tensor]:
    """Return the logits, and the gradients of the adapter."""
    ids = torch.arange(3, 35).view(2, 16)
    policy.model.zero_grad()
    logits = policy.model(input_ids=ids).logits
    logits.logsumexp(-1).square().sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in policy.model.parameters() if p.requires_grad)]


def storages(model: nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}


@pytest.mark.parametrize(
    ("wrapped", "form", "parts"),
    [(False, in_marlin, [CODES, SCALE]), (True, in_marlin, [CODES, SCALE]), (False, in_tiles, [TILES])],
)
def test_a_shared_layer_gives_the_same_bits_and_has_no_weight_of_its_own(
    policy: Policy, wrapped: bool, form: Form, parts: list[str]
) -> None:
    layers = packed_layers(policy.base)
    before, size = gradients(policy), sum(layer.packed_bytes() for layer in layers.values())
    engine = engine_of(policy, wrapped, form)
    assert one_copy.share(policy, engine) == []
    after = gradients(policy)
    assert len(before) == len(after) > 20
    assert all(equal(a, b) for a, b in zip(before, after, strict=True))
    for layer in layers.values():
        held = layer.held()
        assert {held[key].untyped_storage().data_ptr() for key in parts} <= storages(engine)
        assert form is in_tiles or sum(tensor.nbytes for tensor in layer.buffers()) == layer.packed_bytes()
    assert one_copy.bytes_shared_with_vllm(policy) == size  # a part of a fused layer counts its part of the tensor


@pytest.mark.parametrize(("form", "scale", "kept"), [(in_marlin, 7, True), (in_tiles, 7, False), (in_tiles, 0, True)])
def test_a_layer_with_a_scale_that_the_form_drops_keeps_its_own(
    policy: Policy, form: Form, scale: int, kept: bool
) -> None:
    """7 stands for 7/512, the largest subnormal number. All others are shared, also parts of the same fused layer."""
    name = "model.layers.1.self_attn.k_proj"
    layer = packed_layers(policy.base)[name]
    layer.weight_scale.view(torch.uint8)[3, 5] = scale
    layer.hold(layer.packed())
    before = gradients(policy)
    with one_copy.packed_on_host(policy):
        assert one_copy.share(policy, engine_of(policy, form=form)) == [name] * kept
    shared = [one for one, layer in packed_layers(policy.base).items() if layer.engine_layout is not None]
    assert len(shared) == 14 - kept
    assert (name in shared) != kept
    assert all(equal(a, b) for a, b in zip(gradients(policy), before, strict=True))


@pytest.mark.parametrize("form", [in_marlin, in_tiles])
def test_readers_of_the_base_get_the_same_weights(policy: Policy, cfg: Any, tmp_path: Path, form: Form) -> None:
    before, dense = base_tensors(policy), dense_tensors(policy, torch.float32)[0]
    sizes = linear_bytes(policy.model), total_bytes(policy.model)
    one_copy.share(policy, engine_of(policy, form=form))
    after = base_tensors(policy)
    assert after.keys() == before.keys()
    assert all(equal(after[name], tensor) for name, tensor in before.items())
    assert all(equal(tensor, dense[name]) for name, tensor in dense_tensors(policy, torch.float32)[0].items())
    if form is in_marlin:  # tiles can be larger than their parts
        # each byte has one owner, and that is the policy
        assert (linear_bytes(policy.model), total_bytes(policy.model)) == sizes
    with base.model_folder(policy, cfg) as folder:
        files = WeightFiles(folder)
        assert sorted(files.names) == sorted(before)
        assert all(equal(files.tensor(name), tensor.cpu()) for name, tensor in before.items())
    save_adapter(policy.model, tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 2**20  # without the base


def test_only_layers_that_are_not_shared_go_back_to_the_gpu(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands for the GPU."""
    layers = packed_layers(policy.base)
    layers["model.layers.1.self_attn.k_proj"].weight_scale.view(torch.uint8)[3, 5] = 7
    monkeypatch.setattr(type(policy), "device", torch.device("meta"))
    with one_copy.packed_on_host(policy):
        assert {layer.weight.device.type for layer in layers.values()} == {"cpu"}
        (kept,) = one_copy.share(policy, engine_of(policy))
    assert {name for name, layer in layers.items() if layer.weight.is_meta} == {kept}


def another_kernel(layers: dict[str, PackedLinear], engine: nn.Module) -> None:
    engine.get_submodule("model.layers.1.mlp.down_proj").scheme.kernel = type("HummingNvFp4LinearKernel", (), {})()


def dense_in_the_engine(layers: dict[str, PackedLinear], engine: nn.Module) -> None:
    del engine.get_submodule("model.layers.1.mlp.down_proj").scheme


def other_names(layers: dict[str, PackedLinear], engine: nn.Module) -> None:
    engine.packed_modules_mapping = {}


def padded(layers: dict[str, PackedLinear], engine: nn.Module) -> None:
    layer = engine.get_submodule("model.layers.1.mlp.down_proj")
    layer.weight = nn.Parameter(nn.functional.pad(layer.weight, (0, 128)), requires_grad=False)


def inside_of_a_tile(layers: dict[str, PackedLinear], engine: nn.Module) -> None:
    """Move a border between parts into a tile; the fused layer still fills whole tiles."""
    q, k = layers["model.layers.0.self_attn.q_proj"], layers["model.layers.0.self_attn.k_proj"]
    q.out_features, k.out_features = q.out_features - 32, k.out_features + 32


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_kernel, r"MarlinNvFp4LinearKernel, and model.layers.1.mlp.down_proj has HummingNvFp4LinearKernel\."),
        (dense_in_the_engine, r"model.layers.1.mlp.down_proj has NoneType"),
        (other_names, r"finds no layer in vLLM's model that holds model.layers.0.self_attn.q_proj"),
        (padded, r"does not pad, and model.layers.1.mlp.down_proj is \[128\] x 192"),
        (inside_of_a_tile, r"multiples of 64 rows .*q_proj is \[96, 96, 64\] x 128"),
    ],
)
def test_an_engine_that_cannot_share_is_refused_and_nothing_changes(
    policy: Policy, change: Callable, said: str
) -> None:
    engine = engine_of(policy)
    change(packed_layers(policy.base), engine)
    with pytest.raises(ConfigError, match=f"share_base=true .*{said}.*Type rollout.vllm.share_base=false"):
        one_copy.share(policy, engine)
    assert not any(layer.engine_layout for layer in packed_layers(policy.base).values())


# The engine without vLLM: over an LLM that reads its folder, packs, and does nothing else.


class Llm(PlayedLlm):
    """A fake LLM: records the devices of the policy's packed weights in `seen` when it starts, and raises `wrong`."""

    seen: ClassVar[list[set[str]]] = []
    wrong: ClassVar[Exception | None] = None
    policy: ClassVar[Policy | None] = None

    def __init__(self, model: str, *, kv_cache_memory_bytes: int, **_: Any) -> None:
        layers = packed_layers(self.policy.base).values()
        self.seen.append({"shared" if layer.engine_layout else layer.weight.device.type for layer in layers})
        if self.wrong is not None:
            raise self.wrong
        files, parts = WeightFiles(Path(model)), ("weight_packed", "weight_scale", "weight_global_scale")
        names = [name.removesuffix(".weight_packed") for name in files.names if name.endswith(".weight_packed")]
        own = model_of({name: {part: files.tensor(f"{name}.{part}") for part in parts} for name in names})
        for name in files.names:
            if name.endswith("norm.weight"):
                norm = nn.Module()
                norm.weight = nn.Parameter(files.tensor(name).float())
                put(own, name.removesuffix(".weight"), norm)
        super().__init__(own, kv_cache_memory_bytes)


@pytest.fixture
def engine_module(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(Llm, "seen", [])
    monkeypatch.setattr(Llm, "policy", policy)
    with played_engine(monkeypatch, Llm) as module:
        yield module


def test_an_engine_and_a_second_one_after_it_share_the_base(policy: Policy, cfg: Any, engine_module: Any) -> None:
    expected = gradients(policy)
    alone = engine_module.VllmEngine(policy, cfg).memory_bytes()["vLLM's weights"]
    assert Llm.seen.pop() == {"cpu"}
    assert not any(layer.engine_layout for layer in packed_layers(policy.base).values())
    cfg.rollout.vllm.share_base = True
    engine = engine_module.VllmEngine(policy, cfg)
    assert all(layer.engine_layout for layer in packed_layers(policy.base).values())
    size = one_copy.bytes_shared_with_vllm(policy)
    assert alone - engine.memory_bytes()["vLLM's weights"] == size > 0
    engine.close()
    again = engine_module.VllmEngine(policy, cfg)
    assert Llm.seen == [{"cpu"}, {"cpu"}]  # the shared weights of the first engine are freed first
    held = {layer.weight.untyped_storage().data_ptr() for layer in packed_layers(policy.base).values()}
    assert held <= storages(again.llm.apply_model(lambda model: model)[0])
    assert all(equal(a, b) for a, b in zip(gradients(policy), expected, strict=True))


def test_an_engine_that_does_not_start_leaves_the_policy_its_weights(
    policy: Policy, cfg: Any, engine_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: tensor.clone() for name, tensor in base_tensors(policy).items()}
    cfg.rollout.vllm.share_base = True
    engine_module.VllmEngine(policy, cfg)
    monkeypatch.setattr(Llm, "wrong", ValueError("no memory"))
    with pytest.raises(ConfigError, match="no memory"):
        engine_module.VllmEngine(policy, cfg)
    assert not any(layer.engine_layout for layer in packed_layers(policy.base).values())
    assert all(equal(base_tensors(policy)[name], tensor) for name, tensor in before.items())


def test_the_engine_names_the_layers_that_are_not_shared(
    policy: Policy, cfg: Any, engine_module: Any, capsys: pytest.CaptureFixture
) -> None:
    cfg.rollout.vllm.share_base = True
    name = "model.layers.1.self_attn.k_proj"
    packed_layers(policy.base)[name].weight_scale.view(torch.uint8)[3, 5] = 7
    engine_module.VllmEngine(policy, cfg)
    assert f"packed layers that keep weights of their own: 1, the first {name}. The engine" in capsys.readouterr().out


def test_an_engine_that_ignores_the_adapter_is_refused(policy: Policy, cfg: Any, engine_module: Any) -> None:
    cfg.rollout.vllm.lora = "request"
    with pytest.raises(ConfigError, match=r"^vLLM, for .* holds no adapter in 14 of 14 layers .* Type rollout\."):
        engine_module.VllmEngine(policy, cfg)
