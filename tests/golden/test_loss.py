"""LabTrainer's advantages, losses and gradients against the papers' formulas (tests/helpers/reference_losses.py).

The engine is a stand-in that returns random token ids with random sampler log-probs, so that every branch of the
formulas is reached: completions of many tokens and of one, cut completions, and groups of equal rewards. (An engine may
not return empty completions; tests/golden/test_objective.py has them.)
The expected log-probs come from a second policy, which copies the adapter and has the norm weights that the test sets,
in a forward pass over one unpadded sequence at a time.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from qerl_lab import tasks
from qerl_lab.aqn import Noise
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Completion, Rollout, Sampling
from qerl_lab.tasks import Question, Task
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer
from qerl_lab.train.training_data import Cursor, select
from reference_losses import END, Bonus, Sample, advantages, clipped, counts, importance, kl, policy_loss, tokens_of

pytestmark = pytest.mark.usefixtures("drawn_once")
FLAT = "flat"  # the answer of a question for which all completions earn the same
Array = np.ndarray


# --- the policy, the stand-in engine and the recording


def logps(policy: Policy, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Return log-probs [tokens, vocabulary] in float64."""
    logits = policy.model(input_ids=torch.tensor([prompt + tokens])).logits[0]
    return (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)


def logps_of_tokens(policy: Policy, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> Tensor:
    with torch.no_grad():
        return logps(policy, prompt, tokens, temperature)[torch.arange(len(tokens)), tokens]


class Twin:
    """A second policy of the same configuration, with the current adapter of the first and its own norms."""

    def __init__(self, cfg: RunConfig, build_policy: Callable[[RunConfig], Policy], original: Policy) -> None:
        self.cfg, self.original, self.policy = cfg, original, build_policy(cfg)
        self.parameters = {n: p for n, p in self.policy.model.named_parameters() if p.requires_grad}

    def follow(self, step: int) -> Policy:
        """Copy the adapter, set the norms that the trainer's policy should have in `step`, and return the policy."""
        for name, parameter in self.parameters.items():
            parameter.data = self.original.model.get_parameter(name).data.clone()
        for name, norm in self.policy.norms.items():
            norm.data = expected_norm(self.policy.clean_norms[name], name, self.cfg, step)
        return self.policy


def expected_norm(clean: Tensor, name: str, cfg: RunConfig, step: int) -> Tensor:
    if cfg.aqn.scope == "rollout" or cfg.aqn.schedule == "off":
        return clean
    assert (cfg.aqn.reading, cfg.aqn.stages) == ("equation", 2)
    sigma = [cfg.aqn.sigma_start, cfg.aqn.sigma_end][(step - 1) * 2 // cfg.steps]
    return Noise(sigma, cfg.seed, step).onto_norms({name: clean})[name]


class ScriptedEngine:
    """Return random completions of random length, some cut, with sampler log-probs up to two nats off the policy's."""

    def __init__(self, twin: Twin, initial: Policy) -> None:
        self.twin, self.initial, self.rng = twin, initial, random.Random(11)
        self.samples: list[Sample] = []  # of the last rollout, group by group
        self.asked: list[tuple[list[list[int]], Sampling]] = []

    def sync(self, noise: Noise) -> None: ...

    def norms(self) -> dict[str, Tensor]:
        return self.initial.clean_norms

    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling) -> Rollout:
        self.asked.append((prompt_ids_P, sampling))
        self.twin.follow(len(self.asked))
        self.samples = [self._sample(prompt, n, sampling) for prompt in prompt_ids_P for n in range(group_size)]
        sampled = [
            Completion(sample.tokens, sample.sampler.tolist(), "stop" if sample.finished else "length", entropy=0.0)
            for sample in self.samples
        ]
        groups = [sampled[at : at + group_size] for at in range(0, len(sampled), group_size)]
        return Rollout(prompt_ids_P, groups, seconds=1.0)

    def _sample(self, prompt: list[int], number: int, sampling: Sampling) -> Sample:
        """Draw a completion. The first two of a group have one token: the end token, and a token that is cut."""
        length = self.rng.randint(1, sampling.max_tokens)
        tokens = [self.rng.randrange(20, 300) for _ in range(length)]
        tokens = tokens if length == sampling.max_tokens or self.rng.random() < 0.2 else [*tokens, END]
        if number < 2:
            tokens = [[END], [self.rng.randrange(20, 300)]][number]
        old = logps_of_tokens(self.twin.policy, prompt, tokens, sampling.temperature)
        with self.initial.model.disable_adapter():
            reference = logps_of_tokens(self.initial, prompt, tokens, sampling.temperature)
        jitter = torch.tensor([self.rng.uniform(-2, 2) for _ in tokens], dtype=torch.float64)
        return Sample(prompt, tokens, old, (old + jitter).float().double(), reference)


@dataclass
class Update:
    """Loss and gradient of one optimizer update, as found and as the formulas give them."""

    samples: list[Sample]
    loss: float
    expected_loss: float
    gradient: dict[str, Tensor]
    expected_gradient: dict[str, Tensor]


class Watch(TrainerCallback):
    """Compute the reference just before each optimizer update, when the gradient is complete."""

    def __init__(self, trainer: "WatchedTrainer") -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        self.trainer.compare()


class WatchedTrainer(LabTrainer):
    """A trainer that keeps each update with the values of the formulas."""

    def __init__(self, cfg: RunConfig, build_policy: Callable[[RunConfig], Policy], task: Task, folder: Path) -> None:
        self.updates, self.batches, self.losses, self.steps, self.bonus = [], [], [], [], Bonus(cfg)
        policy, initial = build_policy(cfg), build_policy(cfg)
        self.twin = Twin(cfg, build_policy, policy)
        self.data = select(cfg, policy, task)
        super().__init__(cfg, policy, ScriptedEngine(self.twin, initial), Cursor(self.data), folder, Stop())
        self.on_step = self._keep
        self.add_callback(Watch(self))

    def _keep(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append((metrics, self.updates, self.engine.samples, self.reward_P_G, self.bonus.coef))
        self.updates = []

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor], **kwargs: Any) -> Tensor:
        loss = super().compute_loss(model, inputs, **kwargs)
        for name, clean in self.twin.policy.clean_norms.items():  # the backward pass reads them again
            assert torch.equal(self.policy.norms[name], expected_norm(clean, name, self.cfg, self.step))
        size = inputs["advantages"].abs()
        assert not ((size > 1e-12) & (size < 1e-2)).any(), "a flat group counts"  # with advantages in float32 it would
        self.batches.append(inputs)
        self.losses.append(loss.item())
        return loss

    def expected_rewards(self) -> Array:
        """Return rewards [P, G] from the texts of the completions and the questions in the order of use."""
        group, start = self.cfg.rollout.group_size, self.steps_done * self.cfg.rollout.prompts_per_step
        used = islice(self.data.order(), start, start + self.cfg.rollout.prompts_per_step)
        answers = [self.data.questions[index].answer for index in used for _ in range(group)]
        texts = [self.policy.decode_completion(sample.tokens) for sample in self.engine.samples]
        pairs = list(zip(texts, answers, strict=True))
        return np.array([fraction(*pair) + 0.2 * short(*pair) for pair in pairs]).reshape(-1, group)

    def compare(self) -> None:
        if not self.updates:  # first update of a rollout: `steps_done` still gives its questions
            self.reward_P_G = self.expected_rewards()
            advantage = advantages(self.reward_P_G, self.cfg.algorithm.normalize_std).flat
            self.engine.samples = [replace(s, advantage=a) for s, a in zip(self.engine.samples, advantage, strict=True)]
        twin, known = self.twin.follow(self.step), {key(s.prompt, s.tokens): s for s in self.engine.samples}
        samples = [scored(twin, known[at], self.cfg) for inputs in self.batches for at in keys_in(inputs)]
        nothing, rollout = 0 * sum(sample.new.sum() for sample in samples), self.engine.samples
        expected = nothing + policy_loss(samples, rollout, self.cfg) + self.bonus.loss(samples, rollout)
        gradient = torch.autograd.grad(expected, list(self.twin.parameters.values()), materialize_grads=True)
        self.updates.append(
            Update(
                [replace(s, new=s.new.detach(), entropy=s.entropy.detach()) for s in samples],
                sum(self.losses), expected.item(),
                {name: self.model.get_parameter(name).grad.clone() for name in self.twin.parameters},
                dict(zip(self.twin.parameters, gradient, strict=True)),
            )
        )  # fmt: skip
        self.batches, self.losses = [], []


def scored(policy: Policy, sample: Sample, cfg: RunConfig) -> Sample:
    """Return the sample with log-probs and entropies of the current policy, with gradients."""
    distributions = logps(policy, sample.prompt, sample.tokens, cfg.rollout.temperature)
    new = distributions[torch.arange(len(sample.tokens)), sample.tokens]
    return replace(sample, new=new, entropy=-(distributions.exp() * distributions).sum(-1))


Key = tuple[tuple[int, ...], tuple[int, ...]]


def key(prompt: list[int], tokens: list[int]) -> Key:
    return tuple(prompt), tuple(tokens)


def keys_in(inputs: dict[str, Tensor]) -> list[Key]:
    """Return the rows of a micro-batch without their padding."""
    parts = [
        [ids[mask.bool()].tolist() for ids, mask in zip(inputs[f"{name}_ids"], inputs[f"{name}_mask"], strict=True)]
        for name in ("prompt", "completion")
    ]
    return [key(*pair) for pair in zip(*parts, strict=True)]


def fraction(text: str, answer: str) -> float:
    """Return a multiple of 1/4 that depends on the text; for a flat question return 1."""
    return 1.0 if answer == FLAT else hashlib.sha256(text.encode()).digest()[0] % 5 / 4


def short(text: str, answer: str) -> float:
    return 1.0 if answer == FLAT else float(len(text) < 20)


def grade(texts: list[str], questions: list[Question]) -> dict[str, Array]:
    pairs = [(text, question.answer) for text, question in zip(texts, questions, strict=True)]
    return {part.__name__: np.array([part(*pair) for pair in pairs]) for part in (fraction, short)}


@pytest.fixture(scope="module")
def task(tiny) -> Task:
    """Return a task of sixteen arithmetic questions, every other one flat."""
    real = tasks.load(tiny().task)
    questions = [Question(q.id, q.prompt, FLAT if n % 2 else q.answer) for n, q in enumerate(real.train[:16])]
    return replace(real, train=questions, weights={"fraction": 1.0, "short": 0.2}, grade=grade)


@pytest.fixture
def train(tiny, build_policy, task, tmp_path) -> Callable[..., WatchedTrainer]:
    """Return a function that runs a small training to its end and returns the trainer."""

    def run(**changes: object) -> WatchedTrainer:
        small = {"steps": 2, "rollout__prompts_per_step": 2, "rollout__max_completion_tokens": 12}
        optim = {"optim__micro_batch_size": 2, "optim__max_grad_norm": 1e9, "optim__learning_rate": 0.03}
        cfg = tiny(**(small | optim | changes))
        trainer = WatchedTrainer(cfg, build_policy, task, tmp_path)
        trainer.train()
        assert len(trainer.steps) == cfg.steps
        return trainer

    return run


NOISE = {"aqn__schedule": "linear", "aqn__reading": "equation", "aqn__stages": 2, "aqn__sigma_start": 0.3}
BIG_STEPS = {"algorithm__updates_per_rollout": 2, "algorithm__num_iterations": 2}
IN_RATIO = {"rollout__importance_correction": "in_ratio"}
GSPO = {"algorithm__name": "gspo", "algorithm__epsilon_low": 0.05, "algorithm__epsilon_high": 0.05}
CISPO = {"algorithm__name": "cispo", "algorithm__epsilon_low": 1.0, "algorithm__epsilon_high": 0.5}
# test_objective.py has the loss of every algorithm with every correction, masked or not.
CASES = {
    "grpo, one micro-batch": {"optim__micro_batch_size": 8},
    "grpo, std off, kl, temperature": {
        "algorithm__normalize_std": False, "algorithm__beta": 0.2, "rollout__temperature": 0.7,
    },
    "grpo, sequence mask": {"rollout__importance_correction": "sequence_mask", "rollout__importance_clip_max": 2.0},
    "grpo, four updates, sequence truncate": BIG_STEPS | {"rollout__importance_correction": "sequence_truncate"},
    "grpo, four updates, kl, masked": BIG_STEPS | {"algorithm__beta": 0.2, "algorithm__mask_truncated": True},
    "grpo, noise in the sampler only": NOISE,
    "grpo, four updates, kl, noise in the trainer too": BIG_STEPS | NOISE | {
        "aqn__scope": "rollout_and_train", "algorithm__beta": 0.2,
    },
    "grpo, plain k3, ratio to the sampler": BIG_STEPS | IN_RATIO | {
        "algorithm__beta": 0.2, "algorithm__kl_estimator": "k3",
    },
    "grpo, ratio to the sampler, one update": IN_RATIO,
    "grpo, four updates, adaptive entropy": BIG_STEPS | {
        "algorithm__entropy_coef": 0.0, "algorithm__entropy_target": 3.0, "algorithm__entropy_coef_step": 0.05,
        "algorithm__entropy_coef_max": 0.12,
    },
    "dr_grpo, four updates, masked": BIG_STEPS | {"algorithm__name": "dr_grpo", "algorithm__mask_truncated": True},
    "gspo, four updates, kl, masked": BIG_STEPS | GSPO | {
        "algorithm__beta": 0.2, "algorithm__kl_estimator": "k3", "algorithm__mask_truncated": True,
    },
    "cispo, four updates, masked, entropy": BIG_STEPS | CISPO | {
        "algorithm__mask_truncated": True, "algorithm__entropy_coef": 0.1,
    },
    "dapo, masked": {"algorithm__name": "dapo", "algorithm__mask_truncated": True},
    "dapo, four updates, kl, masked, no correction": BIG_STEPS | {
        "algorithm__name": "dapo", "algorithm__epsilon_low": 0.1, "algorithm__beta": 0.2,
        "algorithm__mask_truncated": True, "rollout__importance_correction": "off",
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_loss_gradient_and_metrics_equal_the_formulas(train, changes: dict[str, object]) -> None:
    trainer = train(**changes)
    cfg, largest = trainer.cfg, []
    for metrics, updates, rollout, rewards, entropy_coef in trainer.steps:
        assert len(updates) == cfg.updates_per_step
        for update in updates:
            assert len(update.samples) == cfg.completions_per_step // cfg.algorithm.updates_per_rollout
            assert update.loss == pytest.approx(update.expected_loss, rel=1e-4, abs=2e-5)
            largest.append(check_gradient(update))
        check_metrics(metrics, updates, rollout, rewards, cfg, entropy_coef)
    assert max(largest) > 1e-3
    for name, clean in trainer.twin.policy.clean_norms.items():
        assert torch.equal(trainer.policy.norms[name], clean)
        assert torch.equal(trainer.policy.clean_norms[name], clean)
    if cfg.updates_per_step > 1 and cfg.algorithm.name != "cispo":  # the cases have to reach both clips
        low, high = clipped([s for _, updates, *_ in trainer.steps for u in updates for s in u.samples], cfg)
        assert min(low, high) > 0


def check_gradient(update: Update) -> float:
    """Compare gradients; return the largest entry. It is 0 if all completions are masked or in flat groups."""
    largest = max(gradient.abs().max().item() for gradient in update.expected_gradient.values())
    for name, expected in update.expected_gradient.items():
        torch.testing.assert_close(update.gradient[name], expected, rtol=1e-3, atol=2e-4 * largest, msg=name)
    return largest


def check_metrics(
    metrics: dict[str, float], updates: list[Update], rollout: list[Sample], rewards: Array, cfg: RunConfig,
    entropy_coef: float,
) -> None:  # fmt: skip
    """Compare the metrics. Clipping and KL are means over the tokens of the loss, the others over all tokens."""
    trained = [sample for update in updates for sample in update.samples]
    low, high = clipped(trained, cfg)
    log_ratio = torch.cat([sample.old - sample.sampler for sample in rollout]).numpy()
    gaps, ratio = np.abs(log_ratio), np.exp(log_ratio)
    weights = [importance(sample, cfg) for sample in rollout]
    if cfg.rollout.importance_correction.startswith("sequence"):
        weights = [weight[:1] for weight in weights]
    entropies = sorted(torch.cat([sample.entropy for sample in trained]).tolist(), reverse=True)
    fifth = -(-len(entropies) // 5)
    expected = {
        "policy/loss": np.mean([update.expected_loss for update in updates]),
        "policy/entropy_nats": np.mean(entropies),
        "policy/entropy_forking_nats": np.mean(entropies[:fifth]),
        "policy/entropy_rest_nats": np.mean(entropies[fifth:]),
        "policy/grad_norm": sum(g.norm() ** 2 for g in updates[-1].expected_gradient.values()).sqrt().item(),
        "policy/learning_rate": cfg.optim.learning_rate,
        "sampler/logprob_gap_mean": gaps.mean(),
        "sampler/logprob_gap_max": gaps.max(),
        "sampler/importance_ratio_mean": torch.cat(weights).mean().item(),
        "sampler/kl_k1_nats": -log_ratio.mean(),
        "sampler/kl_k3_nats": (ratio - 1 - log_ratio).mean(),
        "sampler/effective_sample_size": ratio.sum() ** 2 / len(ratio) / (ratio**2).sum(),
        "rollout/completion_tokens": np.mean([len(sample.tokens) for sample in rollout]),
        "rollout/truncated_fraction": np.mean([not sample.finished for sample in rollout]),
        "rollout/answer_entropy_nats": 0.0,  # no completion has a final answer
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(ddof=1),
        "reward/zero_variance_groups": (np.ptp(rewards, 1) == 0).mean(),
    }
    if cfg.algorithm.name == "cispo":
        expected["policy/weight_cut_fraction"] = high
    else:
        clips = {"clip_fraction": low + high, "clip_fraction_low": low, "clip_fraction_high": high}
        expected |= {f"policy/{name}": share for name, share in clips.items()}
    if cfg.algorithm.beta:
        total = sum(kl(sample, cfg).sum().item() for sample in trained if counts(sample, cfg))
        expected["policy/kl_reference"] = total / tokens_of(trained, cfg)
    if cfg.algorithm.entropy_coef or cfg.algorithm.entropy_target is not None:
        expected["policy/entropy_coef"] = entropy_coef
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-4, abs=2e-5)
    for name in ("policy/kl_reference", "policy/weight_cut_fraction", "policy/entropy_coef"):
        assert (name in metrics) == (name in expected)
