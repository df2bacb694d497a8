"""A small Qwen2 with packed layers: LoRA trains as on a dense base, memory and files are what the format says."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from packed_layers import (
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
from qerl_lab.model.linear import PackedLinear
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
