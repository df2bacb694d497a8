"""A small Qwen2 with packed layers: LoRA trains as on a dense base, memory and files are what the format says."""

import copy
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from packed_layers import (
    BF16,
    LAYER_NAMES,
    MXFP4,
    NVFP4,
    dense_twin,
    each_format,
    each_packed,
    pack_model,
    tiny_model,
    tokens,
)
from qerl_lab.formats.format import Format
from qerl_lab.formats.nvfp4 import Nvfp4
from qerl_lab.model.linear import PackedLinear, weight_bytes
from qerl_lab.model.lora import PackedLoraLinear, register_lora


def with_lora(model: nn.Module) -> PeftModel:
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LAYER_NAMES), init_lora_weights=False)
    register_lora(config)
    return get_peft_model(model, config)


def lora_gradients(model: PeftModel) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(tokens(), labels=tokens()).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


@each_packed
def test_safetensors_round_trip_gives_identical_logits(weight_format: Format, tmp_path: Path) -> None:
    model, other = tiny_model(), tiny_model(seed=9)
    for each in (model, other):
        pack_model(each, weight_format)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert not torch.equal(model(tokens()).logits, other(tokens()).logits)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model(tokens()).logits, other(tokens()).logits)


@each_format
@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
def test_lora_gradients_equal_those_on_a_dense_base(weight_format: Format, checkpointing: bool | None) -> None:
    packed = tiny_model()
    pack_model(packed, weight_format)
    dense = copy.deepcopy(packed)
    for path, module in list(dense.named_modules()):
        if isinstance(module, PackedLinear):
            dense.set_submodule(path, dense_twin(module))
    packed, dense = with_lora(packed), with_lora(dense)
    if checkpointing is not None:
        packed.enable_input_require_grads()
        packed.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        assert packed.training
        assert packed.is_gradient_checkpointing
    (loss, grads), (dense_loss, dense_grads) = lora_gradients(packed), lora_gradients(dense)
    torch.testing.assert_close(loss, dense_loss, rtol=1e-5, atol=1e-6)
    assert len(grads) == 2 * 2 * len(LAYER_NAMES)
    torch.testing.assert_close(grads, dense_grads, rtol=1e-3, atol=1e-6)


@each_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_lora_learns_and_the_base_stays(weight_format: Format, dtype: torch.dtype) -> None:
    base = tiny_model(dtype=dtype)
    pack_model(base, weight_format, dense_cache=True)
    model = with_lora(base)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items() if "lora_" not in key}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    for key, tensor in before.items():
        assert torch.equal(model.state_dict()[key].view(torch.uint8), tensor.view(torch.uint8)), key


@each_packed
def test_lora_sits_on_packed_layers_and_cannot_be_merged(weight_format: Format) -> None:
    base = tiny_model()
    pack_model(base, weight_format)
    model = with_lora(base)
    assert sum(isinstance(module, PackedLoraLinear) for module in model.modules()) == 2 * len(LAYER_NAMES)
    for merge in (model.merge_adapter, model.merge_and_unload):
        with pytest.raises(
            ValueError, match=f"cannot merge LoRA into a {weight_format.NAME} weight: keep the adapter apart"
        ):
            merge()
    unloaded = model.unload()
    assert sum(isinstance(module, PackedLinear) for module in unloaded.modules()) == 2 * len(LAYER_NAMES)


def test_all_linear_finds_packed_layers() -> None:
    base = tiny_model()
    pack_model(base, NVFP4)
    config = LoraConfig(r=4, target_modules="all-linear")
    register_lora(config)
    model = get_peft_model(base, config)
    assert sum(isinstance(module, PackedLoraLinear) for module in model.modules()) == 2 * len(LAYER_NAMES)


def test_adapters_that_need_the_dense_weight_are_refused() -> None:
    with pytest.raises(ValueError, match=r"init_lora_weights='pissa' needs the dense weight.*allowed: True, False"):
        register_lora(LoraConfig(init_lora_weights="pissa"))
    base = tiny_model()
    pack_model(base, NVFP4)
    config = LoraConfig(target_modules=["q_proj"], use_dora=True)
    register_lora(config)
    with pytest.raises(ValueError, match="use_dora"):
        get_peft_model(base, config)


@each_format
def test_pack_model_replaces_the_linears_and_nothing_else(weight_format: Format) -> None:
    model = tiny_model(dtype=torch.bfloat16)
    others = {key: tensor.clone() for key, tensor in model.state_dict().items() if "_proj.weight" not in key}
    dense = {path: module.weight.clone() for path, module in model.named_modules() if path.endswith("_proj")}
    pack_model(model, weight_format)
    kind = nn.Linear if weight_format.NAME == "bf16" else PackedLinear
    layers = {path: module for path, module in model.named_modules() if path.endswith("_proj")}
    assert len(layers) == 2 * len(LAYER_NAMES)
    for path, layer in layers.items():
        assert type(layer) is kind
        assert not any(p.requires_grad for p in layer.parameters())
        shared = {"global_scale": layer.weight_global_scale} if weight_format == NVFP4 else {}
        expected = weight_format.quantize(dense[path], **shared)
        own = {"weight": layer.weight} if weight_format.NAME == "bf16" else layer.packed()
        assert all(
            torch.equal(own[key].view(torch.uint8), tensor.view(torch.uint8)) for key, tensor in expected.items()
        )
    for key, tensor in others.items():
        assert torch.equal(model.state_dict()[key], tensor)
    assert type(model.lm_head) is nn.Linear
    assert model(tokens()).logits.dtype is torch.bfloat16


def test_bf16_rounds_in_the_dtype_of_the_model() -> None:
    model = tiny_model()
    expected = model.model.layers[0].mlp.up_proj.weight.bfloat16().float()
    pack_model(model, BF16)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.dtype is torch.float32
    assert torch.equal(weight, expected)
    assert weight_bytes(model).linears == 4 * 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)


def test_fused_layers_share_the_largest_global_scale() -> None:
    model = tiny_model()
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    groups = [[attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]]
    expected = [min(448 * 6 / layer.weight.abs().max() for layer in group) for group in groups]
    own = 448 * 6 / attention.o_proj.weight.abs().max()
    pack_model(model, NVFP4)
    for names, owner, scale in (("qkv", attention, expected[0]), (["gate", "up"], mlp, expected[1])):
        for part in names:
            assert owner.get_submodule(f"{part}_proj").weight_global_scale.item() == pytest.approx(
                scale.item(), rel=1e-6
            )
    assert attention.o_proj.weight_global_scale.item() == pytest.approx(own.item(), rel=1e-6)
    assert attention.o_proj.weight_global_scale != attention.q_proj.weight_global_scale


def test_the_rule_of_a_format_reaches_the_weights() -> None:
    weights = [tiny_model().model.layers[0].self_attn.get_submodule(f"{part}_proj").weight for part in "qkv"]
    largest = max(weight.abs().max() for weight in weights).item()
    model = tiny_model()
    pack_model(model, Nvfp4("four_over_six"))
    for part, weight in zip("qkv", weights, strict=True):
        packed = model.model.layers[0].self_attn.get_submodule(f"{part}_proj").packed()
        assert packed["weight_global_scale"].item() == pytest.approx(256 * 6 / largest, rel=1e-6)
        scale = Nvfp4("four_over_six").global_scale(weights)
        expected = Nvfp4("four_over_six").quantize(weight, global_scale=scale)
        assert torch.equal(packed["weight_packed"], expected["weight_packed"])
        assert not torch.equal(packed["weight_packed"], NVFP4.quantize(weight, global_scale=scale)["weight_packed"])


@each_format
def test_tied_embeddings_are_left_alone(weight_format: Format) -> None:
    model = tiny_model(tied=True)
    embedding = model.get_input_embeddings().weight
    before = embedding.clone()
    pack_model(model, weight_format, ignore=())
    assert model.lm_head.weight is model.get_input_embeddings().weight is embedding
    assert torch.equal(embedding, before)
    untied = tiny_model(hidden=128)
    pack_model(untied, weight_format, ignore=())
    assert (
        getattr(untied.lm_head, "weight_format", None) == weight_format
    )  # not tied and not ignored: packed like any other


def test_ignored_layers_stay_dense() -> None:
    model = tiny_model()
    pack_model(model, MXFP4, ignore=("lm_head", "down_proj", "model.layers.1.self_attn.q_proj"))
    dense = {path for path, module in model.named_modules() if type(module) is nn.Linear}
    layers = {f"model.layers.{i}.mlp.down_proj" for i in (0, 1)}
    assert dense == {"lm_head", "model.layers.1.self_attn.q_proj", *layers}


def test_errors_name_the_module() -> None:
    model = tiny_model(hidden=60)
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.self_attn\.q_proj: K=60 is not divisible by 16"):
        pack_model(model, NVFP4)
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"^model\.layers\.1\.mlp\.up_proj: 1 values .* the first nan at \[3, 4\]"):
        pack_model(model, NVFP4)
    model = tiny_model()
    model.model.layers[0].self_attn.v_proj.weight.data[1, 2] = float("inf")  # its scale is that of q and k too
    with pytest.raises(
        ValueError, match=r"^model\.layers\.0\.self_attn\.v_proj: 1 values .* the first inf at \[1, 2\]"
    ):
        pack_model(model, NVFP4)
    packed = tiny_model()
    pack_model(packed, NVFP4)
    with pytest.raises(ValueError, match=r"^model\.layers\.0\.self_attn\.q_proj is packed as nvfp4 already"):
        pack_model(packed, NVFP4)


@each_packed
def test_memory_is_what_bits_per_weight_says(weight_format: Format) -> None:
    model = tiny_model(hidden=256, dtype=torch.bfloat16)
    weights = sum(m.weight.numel() for path, m in model.named_modules() if path.endswith("_proj"))
    rest = sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]) - 2 * weights
    assert weight_bytes(model) == (0, rest + 2 * weights)
    pack_model(model, weight_format)
    linears, total = weight_bytes(model)
    stated = weights * weight_format.bits_per_weight / 8
    constants = 2 * len(LAYER_NAMES) * (1400 if weight_format.NAME == "nf4" else 4)
    assert stated <= linears <= stated + constants
    assert total == rest + linears
    assert linears == sum(m.packed_bytes() for m in model.modules() if isinstance(m, PackedLinear))


def test_dense_weights_go_one_fused_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    refs = [weakref.ref(m.weight) for path, m in model.named_modules() if path.endswith("_proj")]
    alive = []
    quantize = Nvfp4.quantize

    def watched(self: Nvfp4, weight: Tensor, **options: Any) -> dict[str, Tensor]:
        alive.append(sum(ref() is not None for ref in refs))
        return quantize(self, weight, **options)

    monkeypatch.setattr(Nvfp4, "quantize", watched)
    pack_model(model, NVFP4)
    assert alive == list(range(14, 0, -1))
    assert not any(ref() is not None for ref in refs)
