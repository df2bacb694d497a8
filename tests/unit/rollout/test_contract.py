"""The contract of an engine (`rollout/engine.py`), on every engine.

For a new engine add a line to `NATS`, and to `built` the setup that it needs.
"""

import importlib.util
import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import vllm_servers
from qerl_lab import rollout
from qerl_lab.aqn import CLEAN, Noise, observed_std
from qerl_lab.config.schema import ENGINES, MAX_TEMPERATURE
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine, Rollout, Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.rollout.vllm.transfer import MARLIN_FOR_FP8
from rollouts import distributions, gap, ids_of, of_tokens, rows, unequal_prompts

NATS = {"transformers": 1e-4, "vllm": 1e-4, "vllm_server": 1e-4}  # largest gap of an engine's log-probs to float64
NOISE = Noise(0.3, seed=0, step=1)
SAMPLINGS = [Sampling(40, seed=1), Sampling(40, seed=2, temperature=0.6), Sampling(40, seed=3, temperature=1.7),
             Sampling(40, seed=4, top_p=0.5)]  # fmt: skip


@dataclass(frozen=True)
class Built:
    """A policy, a way to build an engine on it, and prompts of unequal lengths, the first of one token.

    Each check gets its own engine, because a process can have only one engine of vLLM at a time.
    """

    make: Callable[[], Engine]
    policy: Policy
    prompts: list[list[int]]
    nats: float
    engine: Engine | None = None

    def sample(self, sampling: Sampling = SAMPLINGS[0], group_size: int = 3) -> Rollout:
        return self.engine.generate(self.prompts, group_size, sampling)


# vLLM computes packed formats on GPUs only.
VLLM = {"rollout__engine": "vllm", "format__name": "bf16", "rollout__vllm__enforce_eager": True}
SETTINGS = {
    "transformers": {"rollout__engine": "transformers"},
    "transformers_full": {"rollout__engine": "transformers", "format__name": "bf16", "lora__rank": 0},
    "vllm_request": VLLM | {"rollout__vllm__lora": "request"},
    "vllm_dense": VLLM | {"rollout__vllm__lora": "dense"},
    "vllm_server": VLLM | {"rollout__engine": "vllm_server", "rollout__vllm__kv_cache_gib": 0.25},
}


def engine_param(name: str):
    missing = "vllm" in name and importlib.util.find_spec("vllm") is None
    return pytest.param(name, marks=pytest.mark.skipif(missing, reason="needs vLLM"))


@pytest.fixture(scope="module", params=[engine_param(name) for name in SETTINGS if name != "transformers_full"])
def built(request, tiny, build_policy, tmp_path_factory) -> Iterator[Built]:
    url = f"http://127.0.0.1:{vllm_servers.free_port()}"
    cfg = tiny(rollout__batch_size=64, rollout__vllm_server__url=url, **SETTINGS[request.param])
    needed = nullcontext()
    if cfg.rollout.engine == "vllm_server":
        needed = vllm_servers.served(cfg, tmp_path_factory.mktemp("server") / "log")
    policy = build_policy(cfg)
    with needed:
        yield Built(partial(rollout.build, cfg, policy), policy, unequal_prompts(policy, cfg), NATS[cfg.rollout.engine])


# --- checks of every engine


def check_shapes(built: Built) -> None:
    """A rollout has P groups of G completions and a log-prob per token. The completions of a group differ."""
    out = built.sample()
    assert out.prompt_ids_P == built.prompts
    assert [len(group) for group in out.completions_P_G] == [3] * len(built.prompts)
    for _, completion, logprobs in rows(out):
        assert len(logprobs) == len(completion) > 0
        assert max(logprobs) <= 0
    assert out.tokens == sum(len(completion) for _, completion, _ in rows(out))
    assert out.seconds > 0
    assert all(len({tuple(ids) for ids in group}) > 1 for group in ids_of(out))


def check_logprobs(built: Built) -> None:
    """For every prompt, log-probs belong to the weights in `norms`, at the temperature, before the nucleus cut."""
    built.engine.sync(NOISE)
    for sampling in SAMPLINGS:
        out = built.sample(sampling)
        if sampling.top_p < 1 and not any(logprobs for _, _, logprobs in rows(out)):
            continue
        assert gap(out, distributions(built.policy, out, built.engine.norms(), sampling.temperature)) < built.nats
    out = built.sample()
    assert gap(out, distributions(built.policy, out)) > 0.1  # the noise has an effect


def check_draw(built: Built) -> None:
    """Tokens follow the returned distribution: their surprise is its entropy, within five standard errors.

    For transformers a high temperature is tried too, at which its default top_k=50 would remove most tokens.
    """
    hot = [Sampling(8, seed=5, temperature=50.0)] if isinstance(built.engine, TransformersEngine) else []
    for sampling in (*SAMPLINGS[1:3], *hot):  # vLLM refuses temperatures above 2
        out = built.sample(sampling, group_size=8)
        logps_of_each = distributions(built.policy, out, temperature=sampling.temperature)
        logps = torch.cat(logps_of_each)
        entropy = -(logps.exp() * logps).sum(-1)
        variance = (logps.exp() * logps.square()).sum(-1) - entropy.square()
        surprise = -of_tokens(logps_of_each, out)
        assert abs((surprise - entropy).sum()) < 5 * variance.sum().sqrt()


def check_nucleus(built: Built) -> None:
    """No token is drawn that lies outside of the smallest set with probability `top_p`."""
    out = built.sample(Sampling(40, seed=1, top_p=0.5))
    for (_, completion, _), logps in zip(rows(out), distributions(built.policy, out), strict=True):
        chosen = logps[torch.arange(len(completion)), completion][:, None]
        assert (logps.exp() * (logps > chosen + built.nats)).sum(-1).max() < 0.5 + built.nats


def check_greedy(built: Built) -> None:
    """Temperature 0 takes the most probable token with any seed, and returns log-probs at temperature 1."""
    out = built.sample(Sampling(40, seed=1, temperature=0), group_size=1)
    told = distributions(built.policy, out)
    for (_, completion, _), logps in zip(rows(out), told, strict=True):
        chosen = logps[torch.arange(len(completion)), completion]
        assert (logps.max(-1).values - chosen).max() < built.nats
    assert gap(out, told) < built.nats
    assert out.entropy is None or out.entropy > 0.01
    again = built.sample(Sampling(40, seed=2, temperature=0), group_size=1)
    assert ids_of(again) == ids_of(out)


def check_entropy(built: Built) -> None:
    """The entropy is the mean over all completion tokens, or None."""
    out = built.sample(Sampling(80, seed=1, temperature=0.8))
    if out.entropy is not None:
        logps = torch.cat(distributions(built.policy, out, temperature=0.8))
        assert out.entropy == pytest.approx(-(logps.exp() * logps).sum(-1).mean().item(), abs=built.nats)


def check_nan(built: Built) -> None:
    """NaN logits end no process. The log-probs are NaN, and so is the entropy if there is one."""
    built.engine.sync(Noise(math.nan, seed=0, step=1))
    out = built.sample(Sampling(4, seed=1))
    assert all(math.isnan(logprob) for _, _, logprobs in rows(out) for logprob in logprobs)
    assert out.entropy is None or math.isnan(out.entropy)


def check_seed(built: Built) -> None:
    """Only the seed decides the draw. Draws of the trainer do not change it, and are not changed."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = built.sample(Sampling(24, seed=7))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert ids_of(built.sample(Sampling(24, seed=7))) == ids_of(first)
    assert ids_of(built.sample(Sampling(24, seed=8))) != ids_of(first)


def check_parts(built: Built) -> None:
    """Prompts sampled in parts share no draw. With vLLM the draws equal those of all prompts at once."""
    whole = built.sample(Sampling(24, seed=7))
    same, part = (built.engine.generate(built.prompts[2:], 3, Sampling(24, seed=7, first=first)) for first in (0, 2))
    assert ids_of(part) != ids_of(same)
    if "vllm" in type(built.engine).__module__:
        assert ids_of(part) == ids_of(whole)[2:]


def check_finish_reasons(built: Built) -> None:
    """A completion that ends by "stop" has one end token, the last; at the limit it ends by "length" without one."""
    lengths = sorted(len(c) for _, c, _ in rows(built.sample(Sampling(80, seed=3), 6)) if c[-1] in ends(built))
    limit = lengths[len(lengths) // 2]
    out = built.sample(Sampling(limit, seed=3), 6)
    reasons = [completion.finish_reason for completion in out.completions]
    assert set(reasons) == {"stop", "length"}
    for (_, completion, _), reason in zip(rows(out), reasons, strict=True):
        assert not set(completion[:-1]) & ends(built)
        assert reason == ("stop" if completion[-1] in ends(built) else "length")
        assert len(completion) <= limit
        assert reason == "stop" or len(completion) == limit


def ends(built: Built) -> set[int]:
    return set(built.policy.end_ids())


def check_end_at_the_limit(built: Built) -> None:
    """An end token at the limit gives "stop"."""
    prompts = built.prompts[1:2]
    long = built.engine.generate(prompts, 8, Sampling(80, seed=3))
    shortest = min(len(c) for c in ids_of(long)[0])
    cut = built.engine.generate(prompts, 8, Sampling(shortest, seed=3))
    stopped = [c[-1] in ends(built) for c in ids_of(cut)[0]]
    assert any(stopped)
    assert [one.finish_reason for one in cut.completions] == ["stop" if stop else "length" for stop in stopped]


def check_progress(built: Built) -> None:
    """`on_done` counts every completion once."""
    told: list[int] = []
    built.engine.generate(built.prompts, 3, Sampling(4, seed=1), told.append)
    assert sum(told) == 3 * len(built.prompts)
    assert min(told) >= 0


def check_stop(built: Built) -> None:
    """An exception in `on_done` ends the sampling, also before a completion ends. The next call is as usual."""
    told: list[int] = []

    def stop(count: int) -> None:
        told.append(count)
        raise InterruptedError

    whole = built.sample(Sampling(24, seed=7))
    with pytest.raises(InterruptedError):
        built.engine.generate(built.prompts, 3, Sampling(200, seed=1), stop)
    assert len(told) == 1
    if isinstance(built.engine, TransformersEngine):  # a server still samples, and then sums in another order
        assert told == [0]
        assert_same(built.policy.norms, built.policy.clean_norms)
        assert ids_of(built.sample(Sampling(24, seed=7))) == ids_of(whole)


def check_adapter(built: Built) -> None:
    """A sync takes over the current adapter of the policy."""
    weights = [p for name, p in built.policy.model.named_parameters() if "lora_B" in name]
    before = [weight.data.clone() for weight in weights]
    try:
        for weight in weights:
            weight.data.mul_(-1)
        built.engine.sync(CLEAN)
        out = built.sample()
        assert gap(out, distributions(built.policy, out)) < built.nats
    finally:
        for weight, old in zip(weights, before, strict=True):
            weight.data.copy_(old)
    assert gap(out, distributions(built.policy, out)) > 0.1
    built.engine.sync(CLEAN)
    out = built.sample()
    assert gap(out, distributions(built.policy, out)) < built.nats


def check_noise(built: Built) -> None:
    """The norms are the clean ones plus the noise of (seed, step, layer), and clean again after a clean sync."""
    for noise in (NOISE, Noise(0.05, seed=3, step=9, relative=True), CLEAN):
        built.engine.sync(noise)
        assert_same(built.engine.norms(), noise.onto_norms(built.policy.clean_norms))
        out = built.sample()
        assert gap(out, distributions(built.policy, out, built.engine.norms())) < built.nats


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu(), weight.cpu()) for name, weight in expected.items())


def check_no_accumulation(built: Built) -> None:
    """After twenty syncs only the noise of the last is held. A random walk would have 4.5 times as much."""
    stds = []
    for step in range(1, 21):
        built.engine.sync(Noise(0.02, seed=0, step=step))
        stds.append(observed_std(built.engine.norms(), built.policy.clean_norms))
    assert stds == pytest.approx([0.02] * 20, rel=0.1)
    assert len(set(stds)) == 20


def check_close(built: Built) -> None:
    """`close` may be called twice. The policy works with another engine, and building that draws no random number."""
    first = built.engine.generate(built.prompts, 3, SAMPLINGS[0])
    built.engine.close()
    built.engine.close()
    random.random(), np.random.rand(), torch.rand(())  # noqa: NPY002 - so that a fixed seed would show too
    states = global_randomness()
    other = built.make()
    assert global_randomness() == states
    assert ids_of(other.generate(built.prompts, 3, SAMPLINGS[0])) == ids_of(first)
    other.close()


def global_randomness() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002


def check_memory(built: Built) -> None:
    """Every entry of `memory_bytes` has a name and a size."""
    assert all(name and size > 0 for name, size in built.engine.memory_bytes().items())


def check_policy_is_left_as_found(built: Built) -> None:
    """Syncs, sampling and closing leave the weights, the mode and the gradients of the policy."""
    policy = built.policy
    pointers = {name: norm.data_ptr() for name, norm in policy.norms.items()}
    for training in (True, False):
        policy.model.train(training)
        built.engine.sync(NOISE)
        built.sample(Sampling(4, seed=1))
        assert {module.training for module in policy.model.modules()} == {training}
    built.engine.close()
    assert {name: norm.data_ptr() for name, norm in policy.norms.items()} == pointers
    assert_same(policy.norms, policy.clean_norms)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


CHECKS = [check for name, check in list(globals().items()) if name.startswith("check_")]


@pytest.fixture
def fresh(built: Built) -> Iterator[Built]:
    """Give a check its own engine without noise, which it may close. Restore the policy afterwards."""
    policy, training = built.policy, built.policy.model.training
    norms = {name: norm.data for name, norm in policy.norms.items()}
    clean = {name: weight.clone() for name, weight in policy.clean_norms.items()}
    engine = built.make()
    yield replace(built, engine=engine)
    engine.close()
    policy.model.train(training)
    for name, weight in clean.items():
        policy.clean_norms[name].copy_(weight)
        policy.norms[name].data = norms[name].copy_(weight)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_engine_keeps_the_contract(fresh: Built, check: Callable[[Built], None]) -> None:
    check(fresh)


@pytest.mark.parametrize("built", ["transformers_full"], indirect=True)
@pytest.mark.parametrize(
    "check", [check_no_accumulation, check_policy_is_left_as_found], ids=lambda check: check.__name__
)
def test_an_engine_over_all_weights_passes_the_checks_of_weights(fresh: Built, check: Callable[[Built], None]) -> None:
    """tests/unit/model/test_all_weights.py tests its log-probs and its noise after training."""
    check(fresh)


def test_every_engine_is_checked() -> None:
    assert {settings["rollout__engine"] for settings in SETTINGS.values()} == set(ENGINES)


def test_vllm_samples_up_to_the_highest_temperature_that_the_rules_allow() -> None:
    arguments = pytest.importorskip("vllm").SamplingParams
    arguments(temperature=MAX_TEMPERATURE)
    with pytest.raises(Exception, match="temperature"):  # an exception class of vLLM
        arguments(temperature=MAX_TEMPERATURE + 0.01)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
@pytest.mark.parametrize(("backend", "is_marlin"), [("marlin", True), ("vllm", False)])
def test_an_fp8_engine_gets_its_kernel_after_another_engine_has_started(
    backend: str, is_marlin: bool, tiny, build_policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM caches environment variables at the first start, and would silently choose another kernel."""
    from vllm import envs

    from qerl_lab.rollout.vllm import vllm_engine

    (variable,) = MARLIN_FOR_FP8  # vLLM 0.26 reads it; later versions let linear_backend decide
    monkeypatch.setitem(envs.environment_variables, variable, lambda: os.environ[variable] == "1")
    monkeypatch.setenv(variable, str(int(not is_marlin)))
    envs.enable_envs_cache()  # as vLLM does when an engine has started
    seen = list[bool]()

    def build_llm(*_: object) -> None:
        seen.append(getattr(envs, variable))
        raise NotImplementedError("packed formats need a GPU")

    monkeypatch.setattr(vllm_engine, "build_llm", build_llm)
    monkeypatch.setattr(vllm_engine, "check_engine_on_cpu", lambda *_: None)
    cfg = tiny(**VLLM | {"format__name": "fp8"}, device="cuda", rollout__vllm__linear_backend=backend)
    with pytest.raises(NotImplementedError):
        vllm_engine.VllmEngine(build_policy(tiny(format__name="fp8")), cfg)
    assert seen == [is_marlin]
