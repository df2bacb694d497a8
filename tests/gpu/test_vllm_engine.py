"""vLLM's engine in every format: near the trainer, following adapter and noise, over a base that never changes."""

import gc
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from scipy.stats import chi2_contingency
from torch import Tensor, nn

from qerl_lab import rollout
from qerl_lab.aqn import CLEAN, Noise, observed_std
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Rollout, Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.rollout.vllm.backends import humming_races
from rollouts import ids_of
from vllm_engines import BAND_MAX, BAND_MEAN, NEEDS_VLLM, config, prompts, told, trainer_gap, trainer_logprobs

pytestmark = [pytest.mark.gpu, NEEDS_VLLM]

FORMATS = ["nvfp4", "mxfp4", "nf4", "fp8", "bf16"]
NOISE = Noise(0.05, seed=0, step=1)
SAMPLING = Sampling(64, seed=1)


@dataclass(frozen=True)
class Built:
    engine: object
    policy: Policy
    cfg: RunConfig
    way: str
    prompts: list[list[int]]
    bytes_before: int

    def sample(self, sampling: Sampling = SAMPLING, group_size: int | None = None) -> Rollout:
        """Sample `group_size` completions of each prompt, 4 by default."""
        return self.engine.generate(self.prompts, group_size or 4, sampling)


WAYS = [
    *((name, lora) for name in FORMATS for lora in ("request", "dense")),
    ("bf16", "full"),
    ("nvfp4", "fp4_tiles"),
    ("nvfp4", "fp4_tiles+ignore"),
    ("nvfp4", "dense_rows"),
    ("nvfp4", "share_base"),
    ("nvfp4", "fp4_tiles+share_base+dense_rows"),
    ("nvfp4", "humming"),
    ("mxfp4", "humming"),
]


@pytest.fixture(scope="module", params=WAYS, ids="_".join)
def built(request, folder: Path, tiny: Callable[..., RunConfig], build_policy) -> Iterator[Built]:
    name, way = request.param
    if way == "humming" and humming_races():
        pytest.skip("the installed Humming has races on this GPU")
    cfg = config(tiny, folder, name, way, rollout__vllm__kv_cache_gib=1.0)
    policy = build_policy(cfg)
    before = held_bytes()
    engine = rollout.build(cfg, policy)
    yield Built(engine, policy, cfg, way, prompts(), before)
    engine.close()


def held_bytes() -> int:
    """Return the GPU memory that torch holds in this process. Other processes may use the GPU too."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def clean_norms(policy: Policy) -> dict[str, Tensor]:
    return CLEAN.onto_norms(policy.clean_norms)


@pytest.mark.parametrize("noise", [CLEAN, NOISE], ids=["clean", "noisy"])
def test_sampler_and_trainer_agree_on_the_same_norms(built: Built, noise: Noise) -> None:
    built.engine.sync(noise)
    out = built.sample()
    log_ratio = (trainer_logprobs(built.policy, out, built.engine.norms()) - told(out)).double()
    ratio = log_ratio.exp()
    said = (
        f"{built.cfg.format.name}, {built.way}, sigma {noise.sigma:g}, {len(ratio)} tokens: "
        f"gap {log_ratio.abs().mean():.4f} nats "
        f"in the mean, {log_ratio.abs().max():.4f} at most, k1 {-log_ratio.mean():+.5f}, "
        f"k3 {(ratio - 1 - log_ratio).mean():.6f}, effective sample size "
        f"{ratio.sum().square() / (len(ratio) * ratio.square().sum()):.5f}"
    )
    print(said)
    assert told(out).std() > 0.5, "the log-probabilities hardly vary"
    assert log_ratio.abs().mean() < BAND_MEAN, said
    assert log_ratio.abs().max() < BAND_MAX, said


def test_log_probs_follow_trained_weights_and_noise_and_return(built: Built) -> None:
    """CUDA graphs read weights at the addresses of the time of their capture."""
    policy, trained = built.policy, "down_proj.weight" if built.way == "full" else "lora_B"
    weights = [parameter for name, parameter in policy.model.named_parameters() if trained in name]
    built.engine.sync(NOISE)
    out = built.sample()
    right, wrong = (
        trainer_gap(built.policy, out, norms).mean() for norms in (built.engine.norms(), clean_norms(policy))
    )
    assert right < BAND_MEAN
    assert wrong > 2 * right
    for weight in weights:
        weight.data.mul_(-1)
    built.engine.sync(CLEAN)
    turned = built.sample()
    right = trainer_gap(policy, turned, clean_norms(policy)).mean()
    assert right < BAND_MEAN
    for weight in weights:
        weight.data.mul_(-1)
    assert trainer_gap(policy, turned, clean_norms(policy)).mean() > 2 * right
    built.engine.sync(CLEAN)
    assert trainer_gap(built.policy, built.sample(), clean_norms(policy)).mean() < BAND_MEAN


def test_the_engine_holds_the_noise_of_the_step_alone(built: Built) -> None:
    for step in range(1, 11):
        noise = Noise(0.02, seed=3, step=step)
        built.engine.sync(noise)
        held, expected = built.engine.norms(), noise.onto_norms(built.policy.clean_norms)
        assert all(torch.equal(held[name], weight) for name, weight in expected.items())
        assert observed_std(held, built.policy.clean_norms) == pytest.approx(0.02, rel=0.1)
    built.engine.sync(CLEAN)
    assert observed_std(built.engine.norms(), built.policy.clean_norms) == 0


@pytest.mark.parametrize("sigma", [1e-4, 1e-3])
def test_small_noise_is_held_and_reaches_the_log_probs(built: Built, sigma: float) -> None:
    """Sigma is far below the bfloat16 step of 0.0078 at 1. vLLM's modules hold it, and CUDA graphs compute with it."""

    def first_logprobs(noise: Noise) -> Tensor:
        """Return the log-prob of the likeliest first token of each prompt, from the same prompts and kernels."""
        built.engine.sync(noise)
        out = built.sample(Sampling(1, seed=1, temperature=0), group_size=1)
        return torch.tensor([group[0].logprobs[0] for group in out.completions_P_G])

    noise = Noise(sigma, seed=3, step=1)
    clean, noisy = first_logprobs(CLEAN), first_logprobs(noise)
    held = built.engine.norms()
    assert {weight.dtype for weight in held.values()} == {torch.float32}
    assert observed_std(held, built.policy.clean_norms) == pytest.approx(sigma, rel=0.05)
    print(f"{built.way}: sigma {sigma:g} held {observed_std(held, built.policy.clean_norms):.3g}, "
          f"log-probs moved by {(noisy - clean).abs().mean():.2g} nats")  # fmt: skip
    again = first_logprobs(CLEAN)
    assert observed_std(built.engine.norms(), built.policy.clean_norms) == 0
    if built.way != "request":  # with "request" vLLM adds by atomics, so two equal calls differ
        assert torch.equal(again, clean)
        assert not torch.equal(noisy, clean)


def base_hash(engine: object) -> str:
    """Hash all tensors of the engine except the noisy norms, the adapter, and the counters of `fp4_tiles`."""

    def digest(model: nn.Module) -> str:
        hashed = hashlib.sha256()
        named = [*model.named_parameters(), *model.named_buffers()]
        for name, tensor in sorted(named, key=lambda item: item[0]):
            if not any(moving in name for moving in ("lora", "adapter", "layernorm", "counters")):
                hashed.update(name.encode())
                hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()

    return engine.llm.apply_model(digest)[0]


def test_the_base_never_changes(built: Built) -> None:
    before = base_hash(built.engine)
    for step in range(1, 4):
        built.engine.sync(Noise(0.05, seed=0, step=step))
        built.sample()
    assert base_hash(built.engine) == before


def test_many_rows_go_through_unpacked_weights(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed formats do so with the dense adapter and without `dense_rows`. No CUDA graph has a prefill of 600 rows."""
    from qerl_lab.rollout.vllm import one_adapter, product

    calls: list[int] = []

    def spy(x: Tensor, *rest: object) -> Tensor:
        calls.append(len(x))
        return unpacked(x, *rest)

    unpacked = product.unpacked_product
    monkeypatch.setattr(one_adapter, "UNPACK_ROWS", 600)
    monkeypatch.setattr(one_adapter, "unpacked_product", spy)
    built.engine.sync(CLEAN)
    out = built.sample(Sampling(1, seed=1), group_size=1)
    far = trainer_gap(built.policy, out, clean_norms(built.policy))
    assert far.mean() < BAND_MEAN
    assert far.max() < BAND_MAX
    unpacks = built.way != "request" and "dense_rows" not in built.way and built.cfg.format.name != "bf16"
    assert bool(calls) == unpacks
    assert min(calls, default=600) >= (product.TILES_ROWS if "fp4_tiles" in built.way else 600)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_first_tokens_have_the_distribution_of_the_transformers_engine(built: Built, temperature: float) -> None:
    """Each engine draws 4,096 first tokens of one prompt. Rare tokens are counted together."""
    prompts, how = [built.prompts[0]], Sampling(1, seed=5, temperature=temperature)
    built.engine.sync(CLEAN)
    engines = built.engine, TransformersEngine(built.policy, 1024)
    drawn = [torch.tensor(ids_of(engine.generate(prompts, 4096, how))[0]).flatten() for engine in engines]
    counts = torch.stack([torch.bincount(ids, minlength=1024) for ids in drawn])
    common = counts.sum(0) >= 20
    table = torch.cat([counts[:, common], counts[:, ~common].sum(1, keepdim=True)], dim=1)
    table = table[:, table.sum(0) > 0]
    assert table.shape[1] > 20
    assert chi2_contingency(table.numpy()).pvalue > 1e-4


def test_completions_of_a_prompt_differ_and_a_seed_repeats_them(built: Built) -> None:
    built.engine.sync(CLEAN)
    state, python_state = torch.get_rng_state(), torch.cuda.get_rng_state()
    groups = ids_of(built.sample(group_size=8))
    assert all(len({tuple(ids) for ids in group}) == 8 for group in groups)
    first = [ids[0] for group in groups for ids in group]
    again = [ids[0] for group in ids_of(built.sample(group_size=8)) for ids in group]
    assert sum(a == b for a, b in zip(first, again, strict=True)) >= 0.9 * len(first)  # except where bf16 sums differ
    other = ids_of(built.sample(Sampling(64, seed=2), group_size=8))
    assert other != groups
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(torch.cuda.get_rng_state(), python_state)


def test_a_closed_engine_frees_its_memory(built: Built) -> None:
    """This test is the last in the file, because the other tests share the engine."""
    held = torch.cuda.memory_allocated()  # tensors, not blocks: the cache may lie in blocks of earlier tests
    built.engine.close()
    gc.collect()
    assert held - torch.cuda.memory_allocated() > 2**30  # the cache alone is larger
    assert held_bytes() - built.bytes_before < 300 * 2**20  # workspaces of cuBLAS stay with the process
