"""A real `vllm serve` with two tensor-parallel workers on a CPU, driven like a server on GPUs.

The tests show that noise reaches every worker bit for bit, that the adapter is split like the layers, and that the
log-probs equal those of one worker. They show nothing about NCCL, CUDA graphs or speed.
"""

import importlib.util
from collections.abc import Callable, Iterator

import pytest
import torch

import vllm_servers
from qerl_lab import rollout
from qerl_lab.aqn import CLEAN, Noise, observed_std
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import EngineFailed, Sampling
from qerl_lab.rollout.vllm_server.server_engine import VllmServerEngine
from rollouts import distributions, gap, ids_of
from small_checkpoints import write_random

pytestmark = [
    pytest.mark.integration, pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
]  # fmt: skip

NATS = 1e-4  # largest error of log-probs against float64, as for one worker (test_contract.NATS)
PROMPTS = [[3, 4, 5], list(range(10, 60))]


@pytest.fixture(scope="module")
def policy_and_engine(
    tiny: Callable[..., RunConfig], build_policy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Policy, VllmServerEngine]]:
    folder = tmp_path_factory.mktemp("two")
    cfg = tiny(
        model__path=str(write_random(folder, hidden_size=256, intermediate_size=256, num_hidden_layers=2)),
        model__dtype="float32", format__name="bf16", lora__rank=16, rollout__engine="vllm_server",
        rollout__batch_size=16, rollout__max_completion_tokens=64, rollout__vllm__enforce_eager=True,
        rollout__vllm__kv_cache_gib=0.25, rollout__vllm_server__url=f"http://127.0.0.1:{vllm_servers.free_port()}",
        rollout__vllm_server__tensor_parallel=2,
    )  # fmt: skip
    policy = build_policy(cfg)
    with vllm_servers.served(cfg, folder / "log"):
        engine = rollout.build(cfg, policy)
        yield policy, engine
        engine.close()


def test_both_workers_hold_the_same_noise_and_sample_like_one_worker(policy_and_engine) -> None:
    policy, engine = policy_and_engine
    adapter = [weight for name, weight in policy.model.named_parameters() if "lora_B" in name]
    first = engine.generate(PROMPTS, 4, Sampling(32, seed=1))
    count = sum(norm.numel() for norm in policy.norms.values())
    for step in range(1, 7):
        for weight in adapter:
            weight.data.mul_(-1)
        noise = Noise(0.05, seed=0, step=step)
        engine.sync(noise)
        held = engine._call_workers("qerl_norms", names=[*policy.norms])
        assert len(held) == 2
        assert held[0] == held[1]
        norms, expected = engine.norms(), noise.onto_norms(policy.clean_norms)
        assert all(torch.equal(norms[name], weight) for name, weight in expected.items())
        assert abs(observed_std(norms, policy.clean_norms) / 0.05 - 1) < 4 / (2 * count) ** 0.5  # nothing accumulates
        out = engine.generate(PROMPTS, 4, Sampling(32, seed=step))
        assert gap(out, distributions(policy, out, norms)) < NATS
        assert gap(out, distributions(policy, out)) > 100 * NATS
    engine.sync(CLEAN)
    again = engine.generate(PROMPTS, 4, Sampling(32, seed=1))
    assert ids_of(again) == ids_of(first)


def test_after_an_unreadable_adapter_the_workers_still_answer_in_order(policy_and_engine) -> None:
    """If both workers raised, the second's answer would stay unread, and every later answer would come a call late."""
    _, engine = policy_and_engine
    settings = engine._folder / "adapter_config.json"
    text = settings.read_text()
    settings.write_text("{}")
    with pytest.raises(EngineFailed, match=r"answered the adapter with \['"):
        engine.sync(CLEAN)
    settings.write_text(text)
    engine.sync(Noise(0.05, seed=0, step=1))
    assert engine.norms()
