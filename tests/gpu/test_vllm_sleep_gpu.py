"""vLLM's engine before it sleeps, asleep and awake again: the same policy, and a cache that held no memory."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from qerl_lab import rollout
from qerl_lab.aqn import CLEAN, Noise
from qerl_lab.config.schema import RunConfig
from qerl_lab.config.units import GIB
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import ASLEEP, Rollout, Sampling
from rollouts import rows
from vllm_engines import NEEDS_VLLM, config, prompts, trainer_gap

pytestmark = [pytest.mark.gpu, NEEDS_VLLM]

CACHE_GIB = 2.0
BAND_MEAN = 0.06  # nats a token between sampler and trainer, as in test_vllm_engine.py
NEAR_MEAN, NEAR_MAX = 0.02, 0.2  # nats a token between two rollouts of one policy, whose sums a GPU may order anew
NOISE = Noise(0.05, seed=0, step=1)
SAMPLING = Sampling(64, seed=1)
WAYS = [("nvfp4", "dense"), ("nvfp4", "request"), ("nvfp4", "fp4_tiles"), ("nf4", "dense"), ("bf16", "fp8")]


@dataclass(frozen=True)
class Built:
    engine: object
    policy: Policy
    cfg: RunConfig
    prompts: list[list[int]]

    def sample(self) -> Rollout:
        return self.engine.generate(self.prompts, 2, SAMPLING)

    def lora_B(self) -> list[Tensor]:
        return [weight.data for name, weight in self.policy.model.named_parameters() if "lora_B" in name]


@pytest.fixture(scope="module", params=WAYS, ids="_".join)
def built(request, folder: Path, tiny: Callable[..., RunConfig], build_policy) -> Iterator[Built]:
    """One engine after another in this process, each of which can sleep."""
    name, way = request.param
    cfg = config(
        tiny, folder, name, way, rollout__vllm__kv_cache_dtype="fp8" if way == "fp8" else "auto",
        rollout__vllm__kv_cache_gib=CACHE_GIB, rollout__vllm__sleep=True,
    )  # fmt: skip
    policy = build_policy(cfg)
    engine = rollout.build(cfg, policy)
    yield Built(engine, policy, cfg, prompts())
    engine.close()


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def spoil_free_memory() -> None:
    """Leave NaN in memory that is free, and in torch's hands, as a trainer leaves its activations."""
    count = int(min(0.5 * torch.cuda.mem_get_info()[0], 16 * GIB)) // 4
    torch.full((count,), torch.nan, device="cuda")
    torch.cuda.synchronize()


def apart(one: Rollout, other: Rollout) -> Tensor:
    """Nats between the log-probs of the tokens that two rollouts have alike from the start, which are most."""
    found, total = [], 0
    for (_, ids, logprobs), (_, others, other_logprobs) in zip(rows(one), rows(other), strict=True):
        pairs = list(zip(ids, others, strict=False))
        alike = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        found += [abs(a - b) for a, b in zip(logprobs[:alike], other_logprobs[:alike], strict=True)]
        total += len(ids)
    assert len(found) > 0.5 * total, f"{len(found)} of {total} tokens are drawn again"
    return torch.tensor(found)


def gap(built: Built, out: Rollout, norms: dict[str, Tensor]) -> float:
    return trainer_gap(built.policy, out, norms).mean().item()


def base_sum(built: Built) -> list[float]:
    """Of everything that vLLM's model holds but the noisy norms, the adapter, and what `fp4_tiles`'s blocks count."""

    def total(model: nn.Module) -> list[float]:
        named = [*model.named_parameters(), *model.named_buffers()]
        moving = ("lora", "adapter", "layernorm", "meeting")
        held = [tensor for name, tensor in named if not any(part in name for part in moving)]
        return [tensor.detach().contiguous().flatten().view(torch.uint8).long().sum().item() for tensor in held]

    return built.engine.llm.apply_model(total)[0]


def test_log_probs_are_the_same_before_and_after(built: Built) -> None:
    built.engine.sync(NOISE)
    out = built.sample()
    built.engine.sync(NOISE)  # forgets the prefixes, as a sleep does
    again = built.sample()
    base, norms = base_sum(built), built.engine.norms()
    built.engine.sleep()
    assert base_sum(built) == base
    assert all(torch.equal(held, norms[name]) for name, held in built.engine.norms().items())
    spoil_free_memory()
    built.engine.sync(NOISE)
    awake = built.sample()
    assert base_sum(built) == base
    near, found = apart(out, again), apart(out, awake)
    nats = [f"{nats:.5f}" for nats in (near.mean(), near.max(), found.mean(), found.max())]
    said = f"nats a token, mean and largest: without sleep {nats[:2]}, across it {nats[2:]}"
    print(f"{built.cfg.format.name}: {said}")
    assert found.mean() < NEAR_MEAN, said
    assert found.max() < NEAR_MAX, said


def test_adapter_and_noise_that_change_meanwhile_act(built: Built) -> None:
    if built.cfg.rollout.vllm.kv_cache_dtype == "fp8":
        pytest.skip("fp8 moves the sampler away from the trainer")
    built.engine.sync(CLEAN)
    built.sample()
    built.engine.sleep()
    clean = CLEAN.onto_norms(built.policy.clean_norms)
    for weight in built.lora_B():
        weight.mul_(-1)
    try:
        built.engine.sync(NOISE)
        out = built.sample()
        right = gap(built, out, built.engine.norms())
        assert right < BAND_MEAN
        assert gap(built, out, clean) > 2 * right, "the noise"
    finally:
        for weight in built.lora_B():
            weight.mul_(-1)
    assert gap(built, out, built.engine.norms()) > 2 * right, "the adapter"
    built.engine.sleep()
    built.engine.sync(CLEAN)  # as an evaluation after training begins
    assert gap(built, built.sample(), clean) < BAND_MEAN


def test_the_memory_of_the_cache_is_free_meanwhile(built: Built) -> None:
    built.engine.sync(CLEAN)
    built.sample()
    before, budget = free_bytes(), CACHE_GIB * GIB
    for _ in range(3):
        started = time.perf_counter()
        built.engine.sleep()
        slept = time.perf_counter()
        asleep = free_bytes()
        assert asleep - before > 0.98 * budget  # what is left over of a block of every layer was never taken
        assert built.engine.held()[ASLEEP] == budget
        spoil_free_memory()
        begun = time.perf_counter()
        built.engine.sync(CLEAN)
        print(f"sleep {1e3 * (slept - started):.1f} ms, sync {1e3 * (time.perf_counter() - begun):.1f} ms with waking")
        assert asleep - free_bytes() > 0.98 * budget
        assert ASLEEP not in built.engine.held()
        built.sample()
    assert abs(free_bytes() - before) < 0.1 * GIB, "it leaks"


def test_it_is_closed_asleep_and_another_takes_its_place(built: Built) -> None:
    """Last in this file: the other tests share the engine."""
    built.engine.sync(CLEAN)
    out = built.sample()
    before = free_bytes()
    built.engine.sleep()
    built.engine.close()
    assert free_bytes() - before > 0.98 * CACHE_GIB * GIB
    other = rollout.build(built.cfg, built.policy)
    try:
        assert apart(out, other.generate(built.prompts, 2, SAMPLING)).mean() < NEAR_MEAN
        other.sleep()
        other.sync(CLEAN)
        assert apart(out, other.generate(built.prompts, 2, SAMPLING)).mean() < NEAR_MEAN
    finally:
        other.close()
