"""LabTrainer's advantages, losses and gradients against the papers' formulas, written once more in numpy float64.

The engine is a stand-in that returns random token ids with sampler log-probs of its own choosing, so that every branch
of the formulas is reached. The policy's log-probs come from a twin that gets its adapter and the norm weights that the
test wants, in a forward pass over one unpadded sequence at a time.
Sources: QeRL (arXiv 2510.11696), Eq. 3 and 4; DAPO (arXiv 2503.14476), without dynamic sampling; for the KL term
DeepSeek-V3.2 (arXiv 2512.02556).
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from qerl_lab import tasks
from qerl_lab.aqn import Noise
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Rollout, Sampling
from qerl_lab.tasks import Question, Task
from qerl_lab.train.data import Cursor, select
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer

END = 2  # <|im_end|> of the pocket
FLAT = "flat"  # the answer of a question whose completions all earn the same
Array = np.ndarray


@dataclass(frozen=True)
class Sample:
    """One completion: its token ids, log-probs of its tokens under each policy concerned, and its advantage."""

    prompt: list[int]
    tokens: list[int]
    old: Array  # the trainer's policy at the time of the rollout
    sampler: Array  # as the engine gave them
    reference: Array  # the policy as training began
    advantage: float = 0.0
    new: Array = field(default_factory=lambda: np.zeros(0))  # the trainer's policy in the update under way

    @property
    def finished(self) -> bool:
        return self.tokens[-1] == END


# --- the formulas


def advantages(rewards_P_G: Array, normalize_std: bool) -> Array:
    """Eq. 4, with the unbiased standard deviation and 1e-4 added to it."""
    centred = rewards_P_G - rewards_P_G.mean(1, keepdims=True)
    return centred / (rewards_P_G.std(1, ddof=1, keepdims=True) + 1e-4) if normalize_std else centred


def token_terms(sample: Sample, cfg: RunConfig) -> tuple[Array, Array]:
    """Loss of each token, and its derivative by the token's new log-prob (the sampler's ratio is a constant)."""
    algorithm, advantage = cfg.algorithm, sample.advantage
    ratio = np.exp(sample.new - sample.old)
    clipped = np.clip(ratio, 1 - algorithm.epsilon_low, 1 + algorithm.epsilon_high)
    gain = np.minimum(ratio * advantage, clipped * advantage)
    slope = np.where(ratio * advantage <= clipped * advantage, ratio * advantage, 0.0)
    correction = importance(sample, cfg)
    kl = weighted_kl(sample)
    kl_slope = kl + ratio * (1 - np.exp(sample.reference - sample.new))
    return -correction * gain + algorithm.beta * kl, -correction * slope + algorithm.beta * kl_slope


def weighted_kl(sample: Sample) -> Array:
    """The estimator k3 of each token, times the ratio, so that its gradient is that of KL(new || reference)."""
    to_reference = sample.reference - sample.new
    return np.exp(sample.new - sample.old) * (np.exp(to_reference) - to_reference - 1)


def importance(sample: Sample, cfg: RunConfig) -> Array:
    """Weight of each token for having been drawn by the sampler and not by the policy."""
    kind, most = cfg.rollout.importance_correction, cfg.rollout.importance_clip_max
    log_ratio = sample.old - sample.sampler
    ratio = np.exp(np.full_like(log_ratio, log_ratio.sum()) if kind.startswith("sequence") else log_ratio)
    if kind == "off":
        return np.ones_like(ratio)
    return np.minimum(ratio, most) if kind.endswith("truncate") else np.where(ratio > most, 0.0, ratio)


def counts(sample: Sample, cfg: RunConfig) -> bool:
    return sample.finished or not cfg.algorithm.mask_truncated


def loss_of(update: list[Sample], rollout: list[Sample], cfg: RunConfig) -> tuple[float, list[Array]]:
    """Loss of one update and its derivative by each new log-prob.

    GRPO: mean over the tokens of a completion, then over the completions, of which a masked one is a zero. DAPO: mean
    over tokens; an update on a share of a rollout divides by that share of the rollout's tokens.
    """
    if cfg.algorithm.name == "grpo":
        weights = [1 / len(update) / len(sample.tokens) for sample in update]
    else:
        tokens = sum(len(sample.tokens) for sample in rollout if counts(sample, cfg))
        weights = [cfg.algorithm.updates_per_rollout / tokens for _ in update]
    weights = [weight * counts(sample, cfg) for weight, sample in zip(weights, update, strict=True)]
    terms = [token_terms(sample, cfg) for sample in update]
    total = sum(weight * loss.sum() for weight, (loss, _) in zip(weights, terms, strict=True))
    return total, [weight * slope for weight, (_, slope) in zip(weights, terms, strict=True)]


def clipped_tokens(sample: Sample, cfg: RunConfig) -> Array:
    """[below 1 - epsilon_low with a negative advantage, above 1 + epsilon_high with a positive one], in tokens."""
    ratio = np.exp(sample.new - sample.old)
    low = (ratio < 1 - cfg.algorithm.epsilon_low) & (sample.advantage < 0)
    high = (ratio > 1 + cfg.algorithm.epsilon_high) & (sample.advantage > 0)
    return np.array([low.sum(), high.sum()], float)


# --- the policy, the stand-in engine and the recording


def logps(policy: Policy, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> Tensor:
    """Log-probs [tokens, vocabulary] in float64."""
    logits = policy.model(input_ids=torch.tensor([prompt + tokens])).logits[0]
    return (logits[len(prompt) - 1 : -1].double() / temperature).log_softmax(-1)


def logps_of_tokens(policy: Policy, prompt: list[int], tokens: list[int], temperature: float = 1.0) -> Tensor:
    return logps(policy, prompt, tokens, temperature)[torch.arange(len(tokens)), tokens]


class Twin:
    """A second policy of the same making, with the adapter of the first as it is now, and norms of its own."""

    def __init__(self, cfg: RunConfig, build_policy: Callable[[RunConfig], Policy], original: Policy) -> None:
        self.cfg, self.original, self.policy = cfg, original, build_policy(cfg)
        self.parameters = {n: p for n, p in self.policy.model.named_parameters() if p.requires_grad}

    def follow(self, step: int) -> Policy:
        """As the trainer's policy should be in this step."""
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
    return Noise(sigma, cfg.seed, step).onto(clean, name, torch.float32)


class ScriptedEngine:
    """Random completions of random length, some cut; sampler log-probs up to two nats off the policy's."""

    def __init__(self, twin: Twin, initial: Policy) -> None:
        self.twin, self.initial, self.rng = twin, initial, random.Random(11)
        self.samples: list[Sample] = []  # of the last rollout, a group after another
        self.asked: list[tuple[list[list[int]], Sampling]] = []

    def sync(self, noise: Noise) -> None: ...

    def norms(self) -> dict[str, Tensor]:
        return self.initial.clean_norms

    def generate(self, prompt_ids_P: list[list[int]], group_size: int, sampling: Sampling) -> Rollout:
        self.asked.append((prompt_ids_P, sampling))
        self.twin.follow(len(self.asked))
        self.samples = [self._sample(prompt, sampling) for prompt in prompt_ids_P for _ in range(group_size)]
        groups = [self.samples[at : at + group_size] for at in range(0, len(self.samples), group_size)]
        return Rollout(
            prompt_ids_P=prompt_ids_P,
            completion_ids_P_G=[[sample.tokens for sample in group] for group in groups],
            logprobs_P_G=[[sample.sampler.tolist() for sample in group] for group in groups],
            finish_reasons_P_G=[["stop" if sample.finished else "length" for sample in group] for group in groups],
            entropy=0.0,
            seconds=1.0,
        )

    def _sample(self, prompt: list[int], sampling: Sampling) -> Sample:
        length = self.rng.randint(1, sampling.max_tokens)
        tokens = [self.rng.randrange(20, 300) for _ in range(length)]
        tokens = tokens if length == sampling.max_tokens or self.rng.random() < 0.2 else [*tokens, END]
        with torch.no_grad():
            old = logps_of_tokens(self.twin.policy, prompt, tokens, sampling.temperature).numpy()
            reference = logps_of_tokens(self.initial, prompt, tokens, sampling.temperature).numpy()
        sampler = old + np.array([self.rng.uniform(-2, 2) for _ in tokens])
        return Sample(prompt, tokens, old, sampler.astype(np.float32).astype(float), reference)


@dataclass
class Update:
    """What one optimizer update did, and what the formulas say it should have done."""

    samples: list[Sample]
    loss: float
    expected_loss: float
    gradient: dict[str, Tensor]
    expected_gradient: dict[str, Tensor]
    entropies: list[Array]


class Watch(TrainerCallback):
    """Works out the reference just before each optimizer update, when the gradient is complete."""

    def __init__(self, trainer: "WatchedTrainer") -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        self.trainer.compare()


class WatchedTrainer(LabTrainer):
    """Compares every update with the formulas, and keeps it."""

    def __init__(self, cfg: RunConfig, build_policy: Callable[[RunConfig], Policy], task: Task, folder: Path) -> None:
        self.updates, self.batches, self.losses, self.steps = [], [], [], []
        policy, initial = build_policy(cfg), build_policy(cfg)
        self.twin = Twin(cfg, build_policy, policy)
        self.data = select(cfg, policy, task)
        super().__init__(cfg, policy, ScriptedEngine(self.twin, initial), Cursor(self.data), folder, self._keep, Stop())
        self.add_callback(Watch(self))

    def _keep(self, step: int, metrics: dict[str, float]) -> None:
        self.steps.append((metrics, self.updates, self.engine.samples, self.reward_P_G))
        self.updates = []

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        for name, clean in self.twin.policy.clean_norms.items():  # which the backward pass reads again
            assert torch.equal(self.policy.norms[name], expected_norm(clean, name, self.cfg, self.step))
        assert {0.0} >= set(inputs["advantages"][inputs["advantages"].abs() < 1e-2].tolist()), "a flat group counts"
        self.batches.append(inputs)
        self.losses.append(loss.item())
        return loss

    def expected_rewards(self) -> Array:
        """[P, G], from the text of the completions and the questions in the order of use."""
        group, start = self.cfg.rollout.group_size, self.steps_done * self.cfg.rollout.prompts_per_step
        used = islice(self.data.order(), start, start + self.cfg.rollout.prompts_per_step)
        answers = [self.data.questions[index].answer for index in used for _ in range(group)]
        texts = [self.policy.decode(sample.tokens) for sample in self.engine.samples]
        pairs = list(zip(texts, answers, strict=True))
        return np.array([fraction(*pair) + 0.2 * short(*pair) for pair in pairs]).reshape(-1, group)

    def compare(self) -> None:
        if not self.updates:  # the first of a rollout, when `steps_done` still says which questions it asked
            self.reward_P_G = self.expected_rewards()
            advantage = advantages(self.reward_P_G, self.cfg.algorithm.normalize_std).flat
            self.engine.samples = [replace(s, advantage=a) for s, a in zip(self.engine.samples, advantage, strict=True)]
        by_tokens = {tuple(sample.tokens): sample for sample in self.engine.samples}
        samples = [by_tokens[tokens] for inputs in self.batches for tokens in completions_in(inputs, by_tokens)]
        twin = self.twin.follow(self.step)
        distributions = [logps(twin, s.prompt, s.tokens, self.cfg.rollout.temperature) for s in samples]
        new = [d[torch.arange(len(s.tokens)), s.tokens] for d, s in zip(distributions, samples, strict=True)]
        samples = [replace(s, new=n.detach().numpy()) for s, n in zip(samples, new, strict=True)]
        expected, slopes = loss_of(samples, self.engine.samples, self.cfg)
        surrogate = sum((torch.from_numpy(slope) * n).sum() for slope, n in zip(slopes, new, strict=True))
        gradient = torch.autograd.grad(surrogate, list(self.twin.parameters.values()))
        self.updates.append(
            Update(
                samples, sum(self.losses), expected,
                {name: self.model.get_parameter(name).grad.clone() for name in self.twin.parameters},
                dict(zip(self.twin.parameters, gradient, strict=True)),
                [-(d.exp() * d).sum(-1).detach().numpy() for d in distributions],
            )
        )  # fmt: skip
        self.batches, self.losses = [], []


def completions_in(inputs: dict[str, Tensor], known: dict[tuple[int, ...], Sample]) -> list[tuple[int, ...]]:
    """The rows of a micro-batch. A masked completion has no mask to cut its padding by, but it is a known one."""
    padded = [tuple(row) for row in inputs["completion_ids"].tolist()]
    found = [[tokens for tokens in known if row[: len(tokens)] == tokens] for row in padded]
    return [max(tokens, key=len) for tokens in found]


def fraction(text: str, answer: str) -> float:
    """A score that differs between completions, in quarters, and is one where the question is flat."""
    return 1.0 if answer == FLAT else hashlib.sha256(text.encode()).digest()[0] % 5 / 4


def short(text: str, answer: str) -> float:
    return 1.0 if answer == FLAT else float(len(text) < 20)


def grade(texts: list[str], questions: list[Question]) -> dict[str, Array]:
    pairs = [(text, question.answer) for text, question in zip(texts, questions, strict=True)]
    return {part.__name__: np.array([part(*pair) for pair in pairs]) for part in (fraction, short)}


@pytest.fixture(scope="module")
def task(tiny) -> Task:
    """Sixteen arithmetic questions, every other one flat."""
    real = tasks.load(tiny().task)
    questions = [Question(q.id, q.prompt, FLAT if n % 2 else q.answer) for n, q in enumerate(real.train[:16])]
    return replace(real, train=questions, weights={"fraction": 1.0, "short": 0.2}, grade=grade)


@pytest.fixture
def train(tiny, build_policy, task, tmp_path) -> Callable[..., WatchedTrainer]:
    """Runs a small training to its end and returns the trainer."""

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
CASES = {
    "grpo": {},
    "grpo, one micro-batch": {"optim__micro_batch_size": 8},
    "grpo, std off, kl": {"algorithm__normalize_std": False, "algorithm__beta": 0.2},
    "grpo, no correction": {"rollout__importance_correction": "off"},
    "grpo, token mask": {"rollout__importance_correction": "token_mask", "rollout__importance_clip_max": 2.0},
    "grpo, sequence mask": {"rollout__importance_correction": "sequence_mask", "rollout__importance_clip_max": 2.0},
    "grpo, four updates, sequence truncate": BIG_STEPS | {"rollout__importance_correction": "sequence_truncate"},
    "dapo, sequence truncate": {"algorithm__name": "dapo", "rollout__importance_correction": "sequence_truncate"},
    "grpo, temperature": {"rollout__temperature": 0.7},
    "grpo, four updates": BIG_STEPS,
    "grpo, four updates, kl, masked": BIG_STEPS | {"algorithm__beta": 0.2, "algorithm__mask_truncated": True},
    "grpo, noise in the sampler only": NOISE,
    "grpo, kl, noise in the trainer too": NOISE | {"aqn__scope": "rollout_and_train", "algorithm__beta": 0.2},
    "grpo, noise in the trainer too": NOISE | {"aqn__scope": "rollout_and_train", "aqn__sigma_end": 0.2},
    "grpo, four updates, noise in the trainer too": BIG_STEPS | NOISE | {"aqn__scope": "rollout_and_train"},
    "dapo": {"algorithm__name": "dapo"},
    "dapo, masked": {"algorithm__name": "dapo", "algorithm__mask_truncated": True},
    "dapo, four updates": BIG_STEPS | {"algorithm__name": "dapo", "algorithm__epsilon_low": 0.1},
    "dapo, four updates, kl, masked, no correction": BIG_STEPS | {
        "algorithm__name": "dapo", "algorithm__beta": 0.2, "algorithm__mask_truncated": True,
        "rollout__importance_correction": "off",
    },
}  # fmt: skip


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_loss_gradient_and_metrics_are_the_papers(train, changes: dict[str, object]) -> None:
    trainer = train(**changes)
    cfg, largest = trainer.cfg, []
    for metrics, updates, rollout, rewards in trainer.steps:
        assert len(updates) == cfg.updates_per_step
        for update in updates:
            assert len(update.samples) == cfg.completions_per_step // cfg.algorithm.updates_per_rollout
            assert update.loss == pytest.approx(update.expected_loss, rel=1e-4, abs=2e-5)
            largest.append(check_gradient(update))
        check_metrics(metrics, updates, rollout, rewards, cfg)
    assert max(largest) > 1e-3
    for name, clean in trainer.twin.policy.clean_norms.items():
        assert torch.equal(trainer.policy.norms[name], clean)
        assert torch.equal(trainer.policy.clean_norms[name], clean)
    if cfg.updates_per_step > 1:  # the cases have to reach both clips to mean anything
        tokens = sum(clipped_tokens(s, cfg) for _, updates, _, _ in trainer.steps for u in updates for s in u.samples)
        assert (tokens > 0).all()


def check_gradient(update: Update) -> float:
    """Returns the largest entry: an update may have none, where all that it holds is masked or of a flat group."""
    largest = max(gradient.abs().max().item() for gradient in update.expected_gradient.values())
    for name, expected in update.expected_gradient.items():
        torch.testing.assert_close(update.gradient[name], expected, rtol=1e-3, atol=2e-4 * largest, msg=name)
    return largest


def check_metrics(
    metrics: dict[str, float], updates: list[Update], rollout: list[Sample], rewards: Array, cfg: RunConfig
) -> None:
    """Clipping and KL are means over the tokens of the loss, all others over all completion tokens."""
    in_loss = [sample for update in updates for sample in update.samples if counts(sample, cfg)]
    tokens = sum(len(sample.tokens) for sample in in_loss)
    low, high = sum(clipped_tokens(sample, cfg) for sample in in_loss) / tokens
    log_ratio = np.concatenate([sample.old - sample.sampler for sample in rollout])
    gaps, ratio = np.abs(log_ratio), np.exp(log_ratio)
    weights = [importance(sample, cfg) for sample in rollout]
    if cfg.rollout.importance_correction.startswith("sequence"):
        weights = [weight[:1] for weight in weights]
    expected = {
        "policy/loss": np.mean([update.expected_loss for update in updates]),
        "policy/entropy_nats": np.concatenate([entropy for update in updates for entropy in update.entropies]).mean(),
        "policy/clip_fraction_low": low,
        "policy/clip_fraction_high": high,
        "policy/clip_fraction": low + high,
        "policy/grad_norm": sum(g.norm() ** 2 for g in updates[-1].expected_gradient.values()).sqrt().item(),
        "policy/learning_rate": cfg.optim.learning_rate,
        "sampler/logprob_gap_mean": gaps.mean(),
        "sampler/logprob_gap_max": gaps.max(),
        "sampler/importance_ratio_mean": np.concatenate(weights).mean(),
        "sampler/kl_k1_nats": -log_ratio.mean(),
        "sampler/kl_k3_nats": (ratio - 1 - log_ratio).mean(),
        "sampler/effective_sample_size": ratio.sum() ** 2 / len(ratio) / (ratio**2).sum(),
        "rollout/completion_tokens": np.mean([len(sample.tokens) for sample in rollout]),
        "rollout/truncated_fraction": np.mean([not sample.finished for sample in rollout]),
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(ddof=1),
        "reward/zero_variance_groups": (np.ptp(rewards, 1) == 0).mean(),
    }
    if cfg.algorithm.beta:
        expected["policy/kl_reference"] = sum(weighted_kl(sample).sum() for sample in in_loss) / tokens
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=2e-4, abs=2e-5)
    assert ("policy/kl_reference" in metrics) == (cfg.algorithm.beta > 0)
