"""LabTrainer with the real engine: forward passes, optimizer, noise, metrics, stops and checkpoints."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from transformers import GPTBigCodeConfig, GPTBigCodeForCausalLM, Olmo2Config, Olmo2ForCausalLM, TrainerCallback

import trained
from qerl_lab import tasks
from qerl_lab.aqn import Noise
from qerl_lab.model.policy import Policy
from qerl_lab.record import checkpoint
from qerl_lab.record.metrics import declared_metrics
from qerl_lab.rollout.engine import Rollout, Sampling
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.tasks import Task
from qerl_lab.train.noise_level import probe
from qerl_lab.train.ranks import Ranks
from qerl_lab.train.stop import Diverged, Stop
from small_checkpoints import write_dense
from trained import Trained

REFILLS = {"algorithm__dynamic_sampling": True, "algorithm__max_resamples": 2}
NOISE = {"aqn__schedule": "linear", "aqn__reading": "equation", "aqn__stages": 2, "aqn__sigma_start": 0.3}
SMALL = {"steps": 1, "rollout__prompts_per_step": 2, "rollout__max_completion_tokens": 40}
SHORT = {"rollout__max_completion_tokens": 8}  # for tests of when and whether: most of a step's time is sampling


@pytest.fixture
def train(tiny, build_policy, tmp_path) -> Callable[..., Trained]:
    def run(
        policy: Policy | None = None, kind: type[TransformersEngine] = TransformersEngine, task: Task | None = None,
        stop: Stop | None = None, prepare: Callable[[Trained], object] = lambda _: None, **changes: object,
    ) -> Trained:  # fmt: skip
        cfg = tiny(**(SMALL | changes))
        policy = policy or build_policy(cfg)
        return trained.train(cfg, policy, kind(policy, 64), tmp_path, task=task, stop=stop, prepare=prepare)

    return run


@pytest.mark.parametrize(
    ("changes", "forwards"),
    [
        ({}, 1),
        (NOISE | {"aqn__scope": "rollout_and_train"}, 1),
        ({"rollout__importance_correction": "off"}, 1),
        ({"algorithm__beta": 0.1}, 2),  # the reference's
        ({"lora__dropout": 0.5}, 2),
        ({"algorithm__updates_per_rollout": 2}, 2),
        ({"algorithm__num_iterations": 2}, 3),
    ],
)
def test_a_completion_is_scored_by_one_forward_on_policy(train, changes: dict[str, Any], forwards: int) -> None:
    """Dropout changes neither the gap of sampler and trainer nor the clipping. golden/test_loss.py has the loss."""
    run = train(**changes)
    assert run.scored == forwards * 8
    (metrics,) = run.steps
    assert metrics["sampler/logprob_gap_max"] < 1e-4
    assert metrics["policy/clip_fraction"] == 0


def test_a_token_has_the_position_that_it_was_sampled_at(train, tmp_path) -> None:
    """GPTBigCode learns its positions, and by itself counts the padding before a prompt among them."""
    torch.manual_seed(0)
    config = GPTBigCodeConfig(vocab_size=512, n_embd=32, n_layer=1, n_head=4, initializer_range=0.2, eos_token_id=2)
    folder = write_dense(tmp_path / "model", GPTBigCodeForCausalLM(config))
    found = train(
        model__path=str(folder), format__name="bf16", aqn__norms=["ln_1"], lora__target_modules=["c_attn"],
        rollout__max_completion_tokens=8, rollout__prompts_per_step=8, rollout__group_size=2,
    )  # fmt: skip
    assert len({len(group.prompt_ids) for group in found.batches[0].groups}) > 1, "no prompt is padded"
    assert found.steps[0]["sampler/logprob_gap_max"] < 1e-4


def test_a_model_without_a_norm_before_a_linear_trains_without_noise(train, tiny, build_policy, tmp_path) -> None:
    """OLMo 2 has its norms behind attention and MLP. `on_done` can end its sampling all the same."""
    config = Olmo2Config(
        vocab_size=512, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    folder = write_dense(tmp_path / "model", Olmo2ForCausalLM(config))
    policy = build_policy(tiny(model__path=str(folder), format__name="bf16", aqn__norms=[]))
    found = train(policy, aqn__norms=[])
    assert found.steps[0]["noise/std_observed"] == found.steps[0]["noise/kl_nats"] == 0
    assert found.steps[0]["sampler/logprob_gap_max"] < 1e-4
    told = Mock(side_effect=InterruptedError)
    with pytest.raises(InterruptedError):
        TransformersEngine(policy, 1).generate([[1]], 1, Sampling(4, seed=0), told)
    told.assert_called_once_with(0)


def test_a_base_with_dropout_of_its_own_keeps_the_forward_without(train, tiny, build_policy) -> None:
    policy = build_policy(tiny())
    assert not policy.uses_dropout
    policy.model.config.resid_pdrop = 0.1  # by the name that GPT-2 gives it
    assert policy.uses_dropout
    assert train(policy).scored == 2 * 8


def test_rates_betas_decay_and_clipping_are_those_asked_for(train) -> None:
    """Eight updates in four steps; 0.45 of them, 4 rounded up, warm up. Every value differs from TRL's default."""
    optim = {"learning_rate": 0.01, "warmup_ratio": 0.45, "weight_decay": 0.2, "beta1": 0.7, "beta2": 0.95}
    words = {f"optim__{name}": value for name, value in (optim | {"max_grad_norm": 1e-3}).items()}
    run = train(steps=4, algorithm__updates_per_rollout=2, rollout__prompts_per_step=4, **words)
    assert run.rates == pytest.approx([0, 0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01, 0.01])
    groups = [group for group in run.trainer.optimizer.param_groups if group["params"]]
    assert {(*group["betas"], group["weight_decay"]) for group in groups} == {(0.7, 0.95, 0.2)}
    norms = [torch.cat([grad.flatten() for grad in update.values()]).norm().item() for update in run.gradients]
    assert norms == pytest.approx([1e-3] * 8, rel=1e-2)


def test_every_step_is_reported_once_with_declared_metrics(train) -> None:
    changes = NOISE | REFILLS | {"algorithm__updates_per_rollout": 2, "algorithm__overlong_buffer_tokens": 8}
    run = train(steps=3, rollout__group_size=2, optim__micro_batch_size=2, **changes)
    assert run.numbers == [1, 2, 3]
    assert any(metrics["rollout/resamples"] for metrics in run.steps)
    names = set(declared_metrics(["format", "answer"]))
    for metrics, batch in zip(run.steps, run.batches, strict=True):
        assert set(metrics) <= names
        assert all(math.isfinite(value) for value in metrics.values())
        phases = [metrics[f"seconds/{name}"] for name in ("rollout", "reward", "sync", "probe", "train")]
        assert min(phases) >= 0
        assert metrics["step/seconds"] == pytest.approx(sum(phases))
        sampled = sum(rollout.tokens for rollout in batch.rollouts)  # refills too
        assert metrics["step/tokens_per_second"] * metrics["step/seconds"] == pytest.approx(sampled)
    of_others = {"policy/kl_reference", "policy/weight_cut_fraction", "policy/entropy_coef", "memory/gpu_peak_gib"}
    of_others |= {"noise/kl_target", "noise/kl_solved", "noise/probes", "seconds/wait"}  # aqn.unit=kl, gpus=2
    of_others.add("rollout/staleness")  # rollout.vllm_server.overlap=true
    missing = names - set(run.steps[0]) - of_others
    assert all(name.startswith("eval/") for name in missing)
    assert [metrics["noise/sigma"] for metrics in run.steps] == pytest.approx([0.3, 0.3, 5e-4])


@pytest.mark.parametrize(("algorithm", "group"), [("grpo", 16), ("dapo", 8)])
def test_equal_rewards_change_not_one_bit_of_the_adapter(train, tiny, build_policy, algorithm: str, group: int) -> None:
    policy = build_policy(tiny())
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters() if p.requires_grad}
    parts = {"format": 0.2, "answer": 0.0}
    ones = {"weights": parts, "grade": lambda texts, _: {part: np.ones(len(texts)) for part in parts}}
    task = replace(tasks.load(tiny().task), **ones)
    run = train(policy, task=task, steps=2, rollout__group_size=group, algorithm__name=algorithm, **SHORT)
    for metrics in run.steps:
        assert metrics["reward/zero_variance_groups"] == 1
        assert metrics["reward/mean"] == pytest.approx(0.2, abs=1e-15)
        assert metrics["policy/grad_norm"] == 0
    assert all(torch.equal(policy.model.get_parameter(name), weights) for name, weights in before.items())


class After(TrainerCallback):
    """Calls something after every optimizer update."""

    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call

    def on_optimizer_step(self, *_: object, **__: object) -> None:
        self.call()


def test_a_clock_is_read_when_the_device_is_done(train) -> None:
    """A GPU still works after a call has returned, so the clock waits for it after a sync and a step."""
    events: list[str] = []

    def watch(run: Trained) -> None:
        run.trainer.clock.wait = lambda: events.append("wait")
        run.trainer.add_callback(After(lambda: events.append("update")))
        run.keep = lambda *_: events.append("report")
        run.engine.sync = lambda *_: events.append("sync")

    train(prepare=watch, steps=2, algorithm__updates_per_rollout=2, **SHORT)
    step = ["sync", "wait", "wait", "update", "update", "wait", "report"]  # the second wait is that of the probes
    assert events == step * 2


def test_a_loss_that_is_nan_ends_the_run_with_its_line(train, tmp_path) -> None:
    """The second update of step 1 meets the weights that the first has made."""
    steps: list[dict[str, float]] = []

    def explode(run: Trained) -> None:
        run.keep = lambda _, metrics: steps.append(metrics)
        run.trainer.args.learning_rate = 1e30

    with pytest.raises(Diverged, match=r"loss is NaN at step 1\. Type a lower optim\.learning_rate \(it is 1e-05\)"):
        train(prepare=explode, steps=3, algorithm__updates_per_rollout=2, checkpoint__every=1, **SHORT)
    (metrics,) = steps
    assert math.isnan(metrics["policy/loss"])
    assert math.isnan(metrics["policy/entropy_nats"])
    assert math.isfinite(metrics["reward/mean"])
    assert not checkpoint.newest(tmp_path / "checkpoints")


def test_a_weight_that_is_nan_ends_the_run_before_it_is_saved(train, tmp_path) -> None:
    reported: list[int] = []

    def poison(run: Trained) -> None:
        weight = next(p for name, p in run.trainer.policy.model.named_parameters() if "lora_B" in name)
        run.keep = lambda step, _: reported.append(step)
        run.trainer.add_callback(After(lambda: run.trainer.step == 2 and weight.data[0].fill_(math.nan)))

    with pytest.raises(Diverged, match="largest weight of the adapter is NaN at step 2"):
        train(prepare=poison, steps=3, checkpoint__every=1, **SHORT)
    assert reported == [1, 2]
    assert checkpoint.newest(tmp_path / "checkpoints").step == 1


class Keeps(TransformersEngine):
    def generate(self, *asked: Any) -> Rollout:
        self.__dict__.setdefault("held", []).append({name: weight.clone() for name, weight in self.norms().items()})
        return super().generate(*asked)


def test_the_engine_holds_the_noise_of_the_seed_and_step(train) -> None:
    """Its last sigma is 5e-4, where bfloat16 weights of 1 have steps of 16 sigma."""
    run = train(
        kind=Keeps, steps=3, model__dtype="bfloat16", algorithm__updates_per_rollout=2, seed=7, **SHORT, **NOISE
    )
    assert len(run.engine.held) == 3
    clean_norms = run.trainer.policy.clean_norms
    for step, (held, metrics) in enumerate(zip(run.engine.held, run.steps, strict=True), start=1):
        noise = Noise(metrics["noise/sigma"], seed=7, step=step)
        gaps = [held[name] - clean for name, clean in clean_norms.items()]
        assert metrics["noise/std_observed"] == pytest.approx(torch.cat(gaps).std().item(), rel=1e-6)
        assert metrics["noise/std_observed"] == pytest.approx(noise.sigma, rel=0.1)
        for name, clean in clean_norms.items():
            assert torch.equal(held[name], noise.onto_norms({name: clean})[name])


def test_without_noise_nothing_is_probed(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """The KL is then 0, and all tokens give the kernels' gap. An engine with other norms is probed."""
    spy = Mock(wraps=probe)
    monkeypatch.setattr("qerl_lab.train.trainer.probe", spy)
    (metrics,) = train().steps
    assert not spy.called
    assert metrics["noise/kl_nats"] == 0
    for of in ("mean", "max"):
        assert metrics[f"sampler/kernel_gap_{of}"] == metrics[f"sampler/logprob_gap_{of}"] > 0
    (noisy,) = train(rollout__temperature=0.7, **NOISE).steps
    assert spy.call_count == 1
    assert noisy["sampler/kernel_gap_max"] < 1e-4 < noisy["sampler/logprob_gap_max"]

    def off(engine: TransformersEngine) -> dict[str, torch.Tensor]:
        return {name: norm + 0.1 for name, norm in held(engine).items()}

    held = TransformersEngine.norms
    monkeypatch.setattr(TransformersEngine, "norms", off)
    (wrong,) = train().steps
    assert spy.call_count == 2
    assert wrong["noise/kl_nats"] > 0


def test_all_ranks_probe_where_one_has_noise(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks pool their results, so a rank that probed alone would wait forever. Here another rank has noise."""
    spy = Mock(wraps=probe)
    monkeypatch.setattr("qerl_lab.train.trainer.probe", spy)
    monkeypatch.setattr(Ranks, "any", lambda ranks, flag: True)
    train(**SHORT)
    assert spy.call_count == 1


def test_peak_memory_is_that_of_the_rank_with_most(train, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank out of memory ends the run. Here another rank has twice the 3 GiB of this one."""

    def gather(ranks: Ranks, value: Any) -> list[Any]:
        is_peak = isinstance(value, dict) and "memory/rss_gib" in value
        return [value, value | {"memory/rss_gib": 2 * value["memory/rss_gib"]}] if is_peak else [value]

    monkeypatch.setattr(Ranks, "gather", gather)
    used = SimpleNamespace(ru_maxrss=3 * 2**20)  # KiB
    monkeypatch.setattr("qerl_lab.train.trainer.resource", SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: used))
    (metrics,) = train(**SHORT).steps
    assert metrics["memory/rss_gib"] == 6


def test_a_signal_that_arrives_while_stopping_is_decided_still_saves(train, tmp_path) -> None:
    """The signal must not stop the run after the decision not to save."""

    class Late(Stop):
        asked = 0

        @property
        def requested(self) -> bool:
            self.asked += 1
            return self.asked > 1

    run = train(stop=Late(), steps=3, checkpoint__every=0, **SHORT)
    assert checkpoint.newest(tmp_path / "checkpoints").step == run.trainer.steps_done == 2


def test_checkpoints_are_written_every_so_often_and_at_the_end(train, tmp_path) -> None:
    train(steps=5, checkpoint__every=2, **SHORT)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000004", "step-000005"]


def test_a_checkpoint_of_a_later_step_is_no_larger(train, tmp_path) -> None:
    """metrics.jsonl has the metrics of the steps before; the Trainer would write them into every checkpoint again."""
    train(steps=4, checkpoint__every=2, **SHORT)
    earlier, later = sorted((tmp_path / "checkpoints").iterdir())
    sizes = [(folder / "trainer_state.json").stat().st_size for folder in (earlier, later)]
    assert sizes[1] - sizes[0] < 100
