"""The transformers engine: what it samples, what it says about it, and that it leaves the policy as it found it."""

import json
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM

from qerl_lab import tasks
from qerl_lab.aqn import Noise
from qerl_lab.formats.files import POCKET
from qerl_lab.policy import Policy
from qerl_lab.rollout import Rollout, Sampling
from qerl_lab.rollout import transformers as transformers_engine
from qerl_lab.rollout.transformers import Recorder, TransformersEngine
from small_checkpoints import write_dense

NOISE = Noise(0.3, seed=0, step=1)
SHAPE = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2,
}  # fmt: skip
BAND = 1e-4  # nats, between two float32 forward passes that batch and pad differently


@pytest.fixture(scope="module")
def policy(tiny, build_policy) -> Policy:
    return build_policy(tiny())


@pytest.fixture(scope="module")
def prompts(policy, tiny) -> list[list[int]]:
    """Five prompts of unequal length."""
    task = tasks.load(tiny().task)
    by_length = {len(ids): ids for ids in (policy.prompt_ids(task.messages(question)) for question in task.train)}
    lengths = sorted(by_length)
    return [by_length[length] for length in (*lengths[:3], *lengths[-2:])]


@pytest.fixture
def engine(policy) -> TransformersEngine:
    return TransformersEngine(policy, batch_size=64)


@pytest.fixture(autouse=True)
def left_as_found(policy) -> Iterator[None]:
    """After every test the policy has its own norm weights, untouched, and is in the mode that it was in."""
    held = {name: norm.data_ptr() for name, norm in policy.norms.items()}
    policy.model.train()
    yield
    assert {name: norm.data_ptr() for name, norm in policy.norms.items()} == held
    assert all(torch.equal(policy.norms[name], clean) for name, clean in policy.clean_norms.items())
    assert all(module.training for module in policy.model.modules())


def forward(policy: Policy, prompt: list[int], completion: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probs [tokens, vocabulary] at the completion's tokens: one sequence, no padding, no cache, all logits."""
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt + completion])).logits[0]
    return (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)


def rows(rollout: Rollout) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, completion, sampler log-probs) of every completion."""
    groups = zip(rollout.prompt_ids_P, rollout.completion_ids_P_G, rollout.logprobs_P_G, strict=True)
    return [(p, c, lp) for p, cs, lps in groups for c, lp in zip(cs, lps, strict=True)]


def gap(policy: Policy, rollout: Rollout, temperature: float = 1.0) -> float:
    """Largest distance between the sampler's and the forward pass's log-probs."""
    gaps = []
    for prompt, completion, logprobs in rows(rollout):
        own = forward(policy, prompt, completion, temperature)[torch.arange(len(completion)), completion]
        gaps.append((own - torch.tensor(logprobs)).abs().max().item())
    return max(gaps)


def mean_entropy(policy: Policy, rollout: Rollout) -> float:
    logps = torch.cat([forward(policy, prompt, completion) for prompt, completion, _ in rows(rollout)])
    return -(logps.exp() * logps).sum(-1).mean().item()


@pytest.mark.parametrize("sampling", [
    Sampling(40, seed=1), Sampling(40, seed=1, temperature=0.6), Sampling(40, seed=1, top_p=0.5),
], ids=["plain", "temperature", "nucleus"])  # fmt: skip
def test_sampler_logprobs_are_those_of_a_forward_pass(policy, engine, prompts, sampling) -> None:
    """At the sampling temperature, and before the nucleus cut."""
    out = engine.generate(prompts, 3, sampling)
    assert gap(policy, out, sampling.temperature) < BAND


def test_a_nucleus_is_sampled_from(policy, engine, prompts) -> None:
    """The log-probs are those before the cut, so the cut has to be seen in the tokens."""
    for prompt, completion, _ in rows(engine.generate(prompts, 3, Sampling(40, seed=1, top_p=0.5))):
        probabilities = forward(policy, prompt, completion).exp()
        chosen = probabilities[torch.arange(len(completion)), completion]
        assert ((probabilities * (probabilities > chosen[:, None] + 1e-6)).sum(-1) < 0.5 + 1e-6).all()


def test_noise_changes_the_samplers_logprobs(policy, engine, prompts) -> None:
    """They are then those of a model with these norm weights, and no longer the clean model's."""
    engine.sync(policy, NOISE)
    out = engine.generate(prompts, 3, Sampling(40, seed=1))
    assert gap(policy, out) > 0.1
    with policy.norms_as({name: NOISE.onto(w, name, w.dtype) for name, w in policy.clean_norms.items()}):
        policy.model.eval()
        assert gap(policy, out) < BAND
        policy.model.train()
    engine.sync(policy, None)
    assert gap(policy, engine.generate(prompts, 3, Sampling(40, seed=1))) < BAND


def test_a_models_own_sampling_defaults_do_not_reach_the_sampler(tmp_path, tiny, build_policy, prompts) -> None:
    """transformers fills what a call leaves open from the model's generation_config.json: Qwen2.5 ships a
    repetition penalty, which would make every sampler log-prob wrong."""
    shutil.copytree(POCKET, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "generation_config.json"
    defaults = {"repetition_penalty": 1.3, "top_k": 2, "min_p": 0.2, "temperature": 0.5, "do_sample": True}
    file.write_text(json.dumps(json.loads(file.read_text()) | defaults))
    other = build_policy(tiny(model__path=str(tmp_path)))
    assert other.end_ids() == [other.tokenizer.eos_token_id]
    out = TransformersEngine(other, batch_size=64).generate(prompts, 3, Sampling(40, seed=1))
    assert gap(other, out) < BAND
    ranks = []
    for prompt, completion, _ in rows(out):
        logps = forward(other, prompt, completion)
        ranks += (logps > logps[torch.arange(len(completion)), completion][:, None]).sum(-1).tolist()
    assert max(ranks) > 1  # top_k=2 would allow ranks 0 and 1


@pytest.mark.parametrize("batch_size", [64, 4])
def test_entropy_is_the_mean_over_completion_tokens_for_any_batch_split(policy, prompts, batch_size) -> None:
    """Completions end early and batches differ in length, so that padding or a mean of means would show."""
    out = TransformersEngine(policy, batch_size).generate(prompts, 3, Sampling(80, seed=1))
    assert len({len(completion) for _, completion, _ in rows(out)}) > 3
    assert out.entropy == pytest.approx(mean_entropy(policy, out), abs=1e-5)


def test_entropy_of_uniform_and_of_certain_logits(policy, engine, prompts) -> None:
    vocabulary = policy.model.config.vocab_size
    final = policy.model.get_base_model().model.norm.weight
    own = final.data
    try:
        final.data = torch.zeros_like(own)  # all logits are zero
        out = engine.generate(prompts, 2, Sampling(8, seed=1))
        assert out.entropy == pytest.approx(torch.tensor(float(vocabulary)).log().item(), abs=1e-5)
        final.data = own * 1e4  # one logit is far above all others
        assert engine.generate(prompts, 2, Sampling(8, seed=1)).entropy == pytest.approx(0, abs=1e-3)
    finally:
        final.data = own


def test_recorder_by_hand() -> None:
    """Two rows, two steps, a temperature: log 4 where all four logits are equal, 0 where one is certain."""
    recorder, ids = Recorder(temperature=2.0), torch.tensor([[0], [0]])
    certain = torch.tensor([[0.0, 1e4, 0.0, 0.0]])
    mixed = torch.tensor([[0.0, 2 * torch.tensor(3.0).log(), -1e4, -1e4]])  # at temperature 2: 1/4 and 3/4
    recorder(ids, torch.cat([torch.full((1, 4), 7.0), certain]))
    recorder(torch.tensor([[0, 2], [0, 1]]), torch.cat([mixed, mixed]))
    logprobs, entropies = recorder.finish(torch.tensor([[2, 0], [1, 1]]))
    log = torch.tensor([0.25, 1.0, 0.25, 0.75]).log()
    torch.testing.assert_close(logprobs, torch.stack([log[[0, 2]], log[[1, 3]]]))
    of_mixed = -(0.25 * log[2] + 0.75 * log[3])
    torch.testing.assert_close(
        entropies, torch.stack([torch.stack([-log[0], of_mixed]), torch.stack([log[1], of_mixed])])
    )


def test_the_seed_decides_the_draw(policy, engine, prompts) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = engine.generate(prompts, 3, Sampling(24, seed=7))
    assert torch.equal(torch.get_rng_state(), state)  # the trainer's own draws go on as if nothing had happened
    torch.manual_seed(2)
    again, other = engine.generate(prompts, 3, Sampling(24, seed=7)), engine.generate(prompts, 3, Sampling(24, seed=8))
    assert again.completion_ids_P_G == first.completion_ids_P_G
    assert again.logprobs_P_G == first.logprobs_P_G
    assert other.completion_ids_P_G != first.completion_ids_P_G
    assert len({tuple(ids) for ids in first.completion_ids_P_G[0]}) > 1  # a group is not one draw repeated


def stopped(rollout: Rollout) -> list[list[int]]:
    """The completions that an end token closed."""
    groups = zip(rollout.completion_ids_P_G, rollout.finish_reasons_P_G, strict=True)
    return [c for cs, reasons in groups for c, reason in zip(cs, reasons, strict=True) if reason == "stop"]


def test_shapes_and_finish_reasons(policy, engine, prompts) -> None:
    """ "stop" is an end token, the first and last; "length" is the limit without one."""
    lengths = sorted(len(completion) for completion in stopped(engine.generate(prompts, 6, Sampling(80, seed=3))))
    limit, end = lengths[len(lengths) // 2], policy.tokenizer.eos_token_id
    out = engine.generate(prompts, 6, Sampling(limit, seed=3))
    assert out.prompt_ids_P == prompts
    assert [len(group) for group in out.completion_ids_P_G] == [6] * 5
    assert out.tokens == sum(len(completion) for _, completion, _ in rows(out))
    reasons = [reason for group in out.finish_reasons_P_G for reason in group]
    assert set(reasons) == {"stop", "length"}
    for (_, completion, logprobs), reason in zip(rows(out), reasons, strict=True):
        assert len(logprobs) == len(completion)
        assert end not in completion[:-1]
        assert reason == ("stop" if completion[-1] == end else "length")
        assert reason == "stop" or len(completion) == limit


def test_an_end_token_at_the_limit_is_a_stop(policy, engine, prompts) -> None:
    lengths = [len(completion) for completion in stopped(engine.generate(prompts[:1], 8, Sampling(80, seed=3)))]
    cut = stopped(engine.generate(prompts[:1], 8, Sampling(min(lengths), seed=3)))
    assert [len(completion) for completion in cut] == [min(lengths)] * lengths.count(min(lengths))


def test_noise_kl_is_zero_without_noise_and_the_vocabulary_sum_with_it(policy, engine, prompts) -> None:
    out = engine.generate(prompts, 2, Sampling(30, seed=1))
    assert engine.noise_kl(out, 4, temperature=1.0) == 0
    engine.sync(policy, NOISE)
    measured = engine.noise_kl(out, 10, temperature=0.8)

    noisy_norms = {name: NOISE.onto(w, name, w.dtype) for name, w in policy.clean_norms.items()}
    policy.model.eval()
    clean = torch.cat([forward(policy, prompt, completion, 0.8) for prompt, completion, _ in rows(out)])
    with policy.norms_as(noisy_norms):
        noisy = torch.cat([forward(policy, prompt, completion, 0.8) for prompt, completion, _ in rows(out)])
    policy.model.train()
    expected = (noisy.exp() * (noisy - clean)).sum(-1).mean().item()
    assert expected > 0.01
    assert measured == pytest.approx(expected, rel=1e-3)
    assert engine.noise_kl(out, 2, temperature=0.8) != pytest.approx(expected, rel=1e-3)  # as many as asked for
    assert engine.noise_std() == pytest.approx(0.3, rel=0.1)  # and the engine is as noisy as before


def test_noise_kl_holds_the_logits_of_a_chunk_of_tokens(policy, engine, prompts, monkeypatch) -> None:
    engine.sync(policy, NOISE)
    out = engine.generate(prompts, 2, Sampling(30, seed=1))
    whole, seen = engine.noise_kl(out, 10, temperature=1.0), []
    monkeypatch.setattr(transformers_engine, "CHUNK", 7)
    with policy.model.get_output_embeddings().register_forward_pre_hook(lambda _, args: seen.append(len(args[0]))):
        assert engine.noise_kl(out, 10, temperature=1.0) == pytest.approx(whole, rel=1e-5)
    assert max(seen) == 7
    assert sum(seen) == 2 * sum(len(completion) for _, completion, _ in rows(out))


@pytest.mark.parametrize(
    "model",
    [
        GraniteForCausalLM(GraniteConfig(**SHAPE, logits_scaling=0.25)),
        Gemma2ForCausalLM(Gemma2Config(**SHAPE, head_dim=16, final_logit_softcapping=0.5)),
    ],
    ids=["granite divides", "gemma 2 caps"],
)
def test_logprobs_are_those_of_models_that_go_on_after_the_head(model, tmp_path, tiny, build_policy, prompts) -> None:
    built = build_policy(tiny(model__path=str(write_dense(tmp_path, model)), format__name="mxfp4"))
    completion = prompts[1]
    found = TransformersEngine(built, batch_size=4).logprobs([(prompts[0], completion)], 0.8)
    assert (found - forward(built, prompts[0], completion, 0.8)).abs().max() < BAND


@pytest.mark.parametrize("call", ["generate", "noise_kl"])
def test_a_failure_inside_leaves_the_policy_as_it_was(policy, engine, prompts, monkeypatch, call) -> None:
    """Whether it does is checked after every test of this file."""
    out = engine.generate(prompts, 2, Sampling(8, seed=1))
    engine.sync(policy, NOISE)

    def fail(*_: object, **__: object) -> None:
        assert not policy.model.training
        assert not torch.equal(next(iter(policy.norms.values())), next(iter(policy.clean_norms.values())))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(policy.model, "generate", fail)
    monkeypatch.setattr(policy.model.get_base_model().base_model, "forward", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(prompts, 2, Sampling(8, seed=1)) if call == "generate" else engine.noise_kl(out, 2, 1.0)


def test_an_evaluating_policy_stays_so(policy, engine, prompts) -> None:
    policy.model.eval()
    engine.generate(prompts[:1], 2, Sampling(4, seed=1))
    assert not policy.model.training
    policy.model.train()
    engine.generate(prompts[:1], 2, Sampling(4, seed=1))
    assert policy.model.training


def test_nothing_that_the_engine_computes_has_a_gradient(policy, engine, prompts) -> None:
    pairs = [(prompt, completion) for prompt, completion, _ in rows(engine.generate(prompts, 2, Sampling(4, seed=1)))]
    assert not engine.logprobs(pairs, 1.0).requires_grad
    assert all(parameter.grad is None for parameter in policy.model.parameters())
