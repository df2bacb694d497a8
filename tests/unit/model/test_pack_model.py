"""A small Qwen2 with packed layers: LoRA trains as on a dense base, memory and files are what the format says."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from packed_layers import LAYER_NAMES, NVFP4, dense_twin, each_packed, pack_model, tiny_model, tokens
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


@pytest.mark.parametrize("checkpointing", [None, True, False], ids=["plain", "reentrant", "non_reentrant"])
def test_lora_gradients_equal_those_on_a_dense_base(checkpointing: bool | None) -> None:
    """test_packed_linear.py and test_lora.py have a layer of every format."""
    packed = tiny_model()
    pack_model(packed, NVFP4)
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
