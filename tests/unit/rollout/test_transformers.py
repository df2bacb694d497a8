"""The transformers engine beyond its contract: end tokens, sampling defaults of a model, failures."""

import json
import shutil

import pytest
import torch

from qerl_lab.aqn import Noise
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.rollout.engine import Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from rollouts import distributions, gap, rows, unequal_prompts


@pytest.fixture(scope="module")
def prompts(policy, tiny) -> list[list[int]]:
    return unequal_prompts(policy, tiny())


def test_every_end_token_of_the_generation_config_ends_a_completion(policy, monkeypatch) -> None:
    """An end token may have id 0."""
    own = policy.tokenizer.eos_token_id
    for configured, ends in ((0, {0}), ([0, 7], {0, 7}), (None, set())):
        monkeypatch.setattr(policy.model.generation_config, "eos_token_id", configured)
        assert policy.end_ids() == sorted({own, *ends})


def test_a_models_own_sampling_defaults_do_not_reach_the_sampler(tmp_path, tiny, build_policy, prompts) -> None:
    """transformers takes open options of a call from the model's generation_config.json. Qwen2.5 has a repetition
    penalty there, which would make every sampler log-prob wrong."""
    shutil.copytree(ASSETS, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    defaults = {"repetition_penalty": 1.3, "top_k": 2, "min_p": 0.2, "temperature": 0.5, "do_sample": True}
    defaults |= {"eos_token_id": [5]}  # end tokens of the model count, beside the tokenizer's
    file.write_text(json.dumps(json.loads(file.read_text()) | defaults))
    other = build_policy(tiny(model__path=str(tmp_path)))
    assert other.end_ids() == sorted([5, other.tokenizer.eos_token_id])
    out = TransformersEngine(other, batch_size=64).generate(prompts, 3, Sampling(40, seed=1))
    found, ranks = distributions(other, out), []
    assert gap(out, found) < 1e-4
    for (_, completion, _), logps in zip(rows(out), found, strict=True):
        ranks += (logps > logps[torch.arange(len(completion)), completion][:, None]).sum(-1).tolist()
    assert max(ranks) > 1  # top_k=2 would allow ranks 0 and 1


def test_a_caller_may_stop_in_every_layer_of_a_token(policy, prompts) -> None:
    """The first token takes the longest, because all prompts go through the model before it."""
    told = list[int]()
    TransformersEngine(policy, batch_size=64).generate(prompts, 2, Sampling(1, seed=1), told.append)
    assert told.count(0) >= policy.model.config.num_hidden_layers > 1


def test_a_failure_while_sampling_leaves_the_policy_unchanged(policy, prompts, monkeypatch) -> None:
    engine = TransformersEngine(policy, batch_size=64)
    engine.sync(Noise(0.3, seed=0, step=1))
    held = {name: norm.data_ptr() for name, norm in policy.norms.items()}
    policy.model.train()

    def fail(*_: object, **__: object) -> None:
        assert not policy.model.training
        assert not torch.equal(next(iter(policy.norms.values())), next(iter(policy.clean_norms.values())))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(policy.model, "generate", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(prompts, 2, Sampling(8, seed=1))
    assert {name: norm.data_ptr() for name, norm in policy.norms.items()} == held
    assert all(torch.equal(policy.norms[name], clean) for name, clean in policy.clean_norms.items())
    assert all(module.training for module in policy.model.modules())
