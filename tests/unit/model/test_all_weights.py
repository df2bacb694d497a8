"""A policy that trains all weights: its logits, its updates, and the files that it writes and reads."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import all_weights, dense
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from rollouts import ids_of
from small_checkpoints import write_dense
from trained import train

pytestmark = pytest.mark.usefixtures("drawn_once")
FULL = {"lora__rank": 0, "format__name": "bf16"}
IDS = torch.tensor([list(range(5, 45)), list(range(105, 145))])


def logits(policy: Policy) -> Tensor:
    with policy.as_sampler(policy.clean_norms):
        return policy.model(input_ids=IDS).logits


@pytest.fixture
def full(tiny: Callable[..., RunConfig], build_policy: Callable[[RunConfig], Policy]) -> Policy:
    return build_policy(tiny(**FULL))


@pytest.fixture(scope="module")
def unrounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the embedded policy with float32 weights that bfloat16 does not hold, as in GGUF files."""
    model = AutoModelForCausalLM.from_pretrained(ASSETS, dtype=torch.float32, use_safetensors=True)
    for weight in model.parameters():
        weight.data += 1e-3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    return write_dense(tmp_path_factory.mktemp("float32"), model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_before_training_the_logits_equal_the_base_of_a_run_with_an_adapter(
    tiny, build_policy, unrounded, dtype
) -> None:
    """Logits are equal bit for bit, also if the files are not in bfloat16. Engines load and compute with this base."""
    same = {"format__name": "bf16", "model__dtype": dtype, "model__path": str(unrounded)}
    full, adapter = (build_policy(tiny(**same, lora__rank=rank)) for rank in (0, 4))
    with adapter.model.disable_adapter():
        expected = logits(adapter)
    assert (full.dtype, full.model.dtype) == (getattr(torch, dtype), torch.float32)
    assert torch.equal(logits(full), expected)
    assert all(torch.equal(norm, full.clean_norms[name]) for name, norm in adapter.clean_norms.items())
    tensors = dense.base_tensors(full)
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in dense.base_tensors(adapter).items())


def test_every_weight_gets_a_gradient_and_moves_and_the_sampler_follows(tiny, build_policy, tmp_path) -> None:
    """The learning rate is 1e-6. Weights in bfloat16 would lose most of such updates.

    golden/test_full_training.py tests the updates of a run in float32.
    """
    cfg = tiny(**FULL, model__dtype="bfloat16", optim__learning_rate=1e-6, algorithm__updates_per_rollout=2)
    policy = build_policy(cfg)
    before = {name: weight.detach().clone() for name, weight in policy.model.named_parameters()}
    addresses = {name: weight.data_ptr() for name, weight in policy.model.named_parameters()}
    engine = TransformersEngine(policy, 64)
    found = train(cfg, policy, engine, tmp_path)
    for name, weight in policy.model.named_parameters():
        gradients = [update[name] for update in found.gradients]  # an update of flat groups alone has gradient zero
        assert all(gradient.dtype == torch.float32 for gradient in gradients), name
        assert max(gradient.abs().max() for gradient in gradients) > 0, name
        moved = (weight.detach() - before[name]).abs()
        assert 0 < moved.max() < 1e-5, name
        assert (moved > 0).float().mean() > 0.5, name
        assert weight.data_ptr() == addresses[name], name
    assert found.steps[-1]["sampler/kernel_gap_max"] < 0.2
    for noise in (CLEAN, Noise(0.3, seed=0, step=1)):
        engine.sync(noise)
        trained = {name: policy.norms[name].detach() for name in policy.norms}
        expected = noise.onto_norms(trained)
        assert all(torch.equal(norm, expected[name]) for name, norm in engine.norms().items())
        assert not any(torch.equal(norm, before[f"{name}.weight"]) for name, norm in trained.items())


def test_weights_are_written_and_read_in_place_bit_for_bit(full: Policy, tiny, build_policy, tmp_path: Path) -> None:
    for weight in full.model.parameters():
        weight.data += 0.01 * torch.randn_like(weight)
    full.save_trained(tmp_path)
    other = build_policy(tiny(**FULL))
    addresses = [weight.data_ptr() for weight in other.model.parameters()]
    assert not torch.equal(logits(other), logits(full))
    other.load_trained(tmp_path)
    assert torch.equal(logits(other), logits(full))
    assert addresses == [weight.data_ptr() for weight in other.model.parameters()]
    assert all(torch.equal(norm, full.clean_norms[name]) for name, norm in other.clean_norms.items())


def test_the_written_model_is_rounded_to_bfloat16_and_loads_like_any_other(full, tiny, build_policy, tmp_path) -> None:
    for weight in full.model.parameters():
        weight.data += 0.01 * torch.randn_like(weight)
    dense.write_model(dense.base_tensors(full), torch.bfloat16, ASSETS, tmp_path / "model")
    loaded = build_policy(tiny(**FULL, model__path=str(tmp_path / "model")))
    expected = {name: weight.bfloat16().float() for name, weight in all_weights.weights(full.base).items()}
    found = all_weights.weights(loaded.base)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    with_adapter = build_policy(tiny(model__path=str(tmp_path / "model")))  # in NVFP4, the usual next step
    assert with_adapter.chat.prompt_ids([{"role": "user", "content": "1"}])


@pytest.mark.parametrize(("dtype", "says"), [(None, {"torch_dtype": "float32"}), (torch.float16, {"dtype": "float16"})])
def test_the_config_of_a_dense_copy_does_not_say_that_it_is_packed(tmp_path: Path, dtype, says) -> None:
    config = {"torch_dtype": "float32", "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.bfloat16)}
    dense.write_model(tensors, dtype, tmp_path, tmp_path / "copy")
    assert json.loads((tmp_path / "copy" / "config.json").read_text()) == says
    written = load_file(tmp_path / "copy" / "model.safetensors")
    assert {name: tensor.dtype for name, tensor in written.items()} == {
        name: dtype or tensor.dtype for name, tensor in tensors.items()
    }


def test_a_full_checkpoint_that_lacks_a_weight_is_refused(full: Policy, tmp_path: Path) -> None:
    full.save_trained(tmp_path)
    full.model.register_parameter("one_more", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(KeyError, match="one_more"):
        full.load_trained(tmp_path)


def test_the_transformers_engine_samples_from_the_current_weights(full: Policy) -> None:
    """The engine has no copy of the weights, so a change has an effect without a sync."""
    engine, sampling = TransformersEngine(full, 8), Sampling(8, seed=0)
    before = engine.generate([[3, 4, 5]], 4, sampling)
    full.base.get_output_embeddings().weight.data.zero_()  # all tokens are equally likely
    after = engine.generate([[3, 4, 5]], 4, sampling)
    logprobs = [logprob for completion in after.completions for logprob in completion.logprobs]
    assert logprobs == pytest.approx([-math.log(full.base.config.vocab_size)] * len(logprobs), abs=1e-5)
    assert ids_of(before) != ids_of(after)
