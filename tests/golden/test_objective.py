"""Every algorithm with every correction, on random ragged batches, against the papers' formulas: loss and gradient.

The model is a table of logits. Its log-probs can differ from those of the rollout enough to reach every branch. The
rest of an update (advantages, masks, log-probs of a real model) is tested in tests/golden/test_loss.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from qerl_lab import tasks
from qerl_lab.algorithms import correction, groups
from qerl_lab.config.schema import ALGORITHMS, CORRECTIONS, RunConfig
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.transformers import TransformersEngine
from qerl_lab.train.stop import Stop
from qerl_lab.train.trainer import LabTrainer
from qerl_lab.train.training_data import Cursor, select
from reference_losses import END, Bonus, Sample, advantages, clipped, counts, policy_loss, tokens_of

pytestmark = pytest.mark.usefixtures("drawn_once")
WORDS, LONGEST, PROMPTS, GROUP, MICRO = 6, 9, 4, 4, 4  # tokens of the vocabulary and of a completion; completions


class Table(torch.nn.Module):
    """A policy with a table of logits by row and place. The prompt is the number of the row."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids: Tensor, **_: object) -> SimpleNamespace:
        logps = self.logits[input_ids[:, 0]].log_softmax(-1)
        taken = logps.gather(-1, input_ids[:, 1:, None])[..., 0]
        return SimpleNamespace(log_probs=taken, entropy=-(logps.exp() * logps).sum(-1))


@dataclass(frozen=True)
class Ragged:
    """A rollout of random completions, one a row, with lengths [N] from 0 on. One group has equal rewards."""

    lengths_N: Tensor
    tokens_N_T: Tensor
    logits_N_T_V: Tensor
    old_N_T: Tensor
    sampler_N_T: Tensor
    reference_N_T: Tensor
    reward_P_G: np.ndarray


def ragged(seed: int, is_on_policy: bool) -> Ragged:
    draw, rows = torch.Generator().manual_seed(seed), PROMPTS * GROUP
    lengths = torch.randint(0, LONGEST + 1, (rows,), generator=draw)
    lengths[:4] = torch.tensor([0, 1, 1, LONGEST])
    tokens = torch.randint(END + 1, WORDS, (rows, LONGEST), generator=draw)
    for row in range(rows):
        if lengths[row] and (row % 3 or row == 1):  # the others are cut
            tokens[row, lengths[row] - 1] = END
    logits = torch.randn(rows, LONGEST, WORDS, generator=draw)
    new = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]

    def beside(spread: float) -> Tensor:
        return new + spread * torch.randn(new.shape, generator=draw)

    old = new if is_on_policy else beside(0.4)
    rewards = np.random.default_rng(seed).integers(0, 5, (PROMPTS, GROUP)) / 4
    rewards[1] = 0.3
    return Ragged(lengths, tokens, logits, old, old + beside(0.6) - new, beside(0.5), rewards)


def trained(trainer: LabTrainer, batch: Ragged, cfg: RunConfig) -> tuple[float, Tensor]:
    """Return the summed loss of the updates and its gradient by the logits, which no update changes."""
    inputs = as_trl_has_it(batch, cfg)
    if cfg.updates_per_step == 1:
        del inputs["old_per_token_logps"]
    trainer._set_old_logprobs(inputs)
    table, total = Table(batch.logits_N_T_V.clone()), 0.0
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    for start in range(0, len(batch.tokens_N_T), MICRO):
        rows = slice(start, start + MICRO)
        part = {name: value[rows] if value.dim() else value for name, value in inputs.items()}
        loss = trainer.compute_loss(table, part)
        loss.backward()
        total += loss.item()
    return total, table.logits.grad


def as_trl_has_it(batch: Ragged, cfg: RunConfig) -> dict[str, Tensor]:
    """Return the inputs of the loss as TRL and `LabTrainer` compute them from a rollout."""
    places = torch.arange(LONGEST)
    mask = (places < batch.lengths_N[:, None]).long()
    finished = (batch.tokens_N_T.gather(1, batch.lengths_N[:, None].clamp(min=1) - 1)[:, 0] == END) & mask[:, 0].bool()
    in_loss = mask * finished[:, None] if cfg.algorithm.mask_truncated else mask
    advantage = groups.advantage(batch.reward_P_G, cfg.algorithm.normalize_std)
    rollout = cfg.rollout
    weights = correction.importance_weights(
        rollout.importance_correction, rollout.importance_clip_max, batch.old_N_T, batch.sampler_N_T, in_loss
    )
    return {
        "prompt_ids": torch.arange(len(mask))[:, None], "prompt_mask": torch.ones(len(mask), 1, dtype=torch.long),
        "completion_ids": batch.tokens_N_T, "completion_mask": mask, "tool_mask": in_loss,
        "advantages": torch.from_numpy(advantage.ravel()).float(), "num_items_in_batch": in_loss.sum(),
        "old_per_token_logps": batch.old_N_T, "sampling_per_token_logps": batch.sampler_N_T,
        "ref_per_token_logps": batch.reference_N_T, "importance_sampling_ratio": weights.value,
    }  # fmt: skip


def expected(batch: Ragged, cfg: RunConfig) -> tuple[float, Tensor, list[Sample]]:
    logits = batch.logits_N_T_V.double().requires_grad_()
    advantage_N = advantages(batch.reward_P_G, cfg.algorithm.normalize_std).ravel()
    samples = [sample_of(batch, row, logits[row], advantage_N[row]) for row in range(len(logits))]
    share = len(samples) // cfg.algorithm.updates_per_rollout
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(samples), share):
        update = samples[start : start + share]
        total = total + policy_loss(update, samples, cfg) + Bonus(cfg).loss(update, samples)
    (gradient,) = torch.autograd.grad(total, logits)
    return total.item(), gradient, samples


def sample_of(batch: Ragged, row: int, logits_T_V: Tensor, advantage: float) -> Sample:
    length = int(batch.lengths_N[row])
    logps, tokens = logits_T_V[:length].log_softmax(-1), batch.tokens_N_T[row, :length]
    old, sampler, reference = (
        each[row, :length].double() for each in (batch.old_N_T, batch.sampler_N_T, batch.reference_N_T)
    )
    return Sample(
        [row], tokens.tolist(), old, sampler, reference, float(advantage) if abs(advantage) > 1e-9 else 0.0,
        logps[torch.arange(length), tokens], -(logps.exp() * logps).sum(-1),
    )  # fmt: skip


@pytest.fixture
def trainer_of(policy: Policy, tmp_path: Path) -> Callable[[RunConfig], LabTrainer]:
    def make(cfg: RunConfig) -> LabTrainer:
        cursor = Cursor(select(cfg, policy, tasks.load(cfg.task)))
        return LabTrainer(cfg, policy, TransformersEngine(policy, 64), cursor, tmp_path, Stop())

    return make


SHAPE = {
    "rollout__prompts_per_step": PROMPTS, "rollout__group_size": GROUP, "optim__micro_batch_size": MICRO,
    "rollout__max_completion_tokens": LONGEST, "rollout__importance_clip_max": 1.3, "algorithm__beta": 0.1,
    "algorithm__kl_estimator": "k3", "algorithm__entropy_coef": 0.05,
}  # fmt: skip
OF_ALGORITHM = {
    "gspo": {"algorithm__epsilon_low": 0.1, "algorithm__epsilon_high": 0.1},
    "cispo": {"algorithm__epsilon_low": 1.0},
    "dr_grpo": {"algorithm__normalize_std": False},
    "dapo": {"algorithm__kl_estimator": "k3_ratio"},
}


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_loss_and_gradient_equal_the_formulas(tiny, trainer_of, name: str, updates: int) -> None:
    of_case = {"algorithm__name": name, "algorithm__updates_per_rollout": updates}
    trainer = trainer_of(tiny(**(SHAPE | OF_ALGORITHM.get(name, {}) | of_case)))
    given, are_clipped = trainer.cfg, list[bool]()
    for how, is_masked, seed in product(CORRECTIONS, (False, True), range(2)):
        trainer.cfg = cfg = replace(
            given, algorithm=replace(given.algorithm, mask_truncated=is_masked),
            rollout=replace(given.rollout, importance_correction=how),
        )  # fmt: skip
        batch = ragged(seed, updates == 1)
        loss, gradient = trained(trainer, batch, cfg)
        value, slopes, samples = expected(batch, cfg)
        assert loss == pytest.approx(value, rel=1e-5, abs=1e-6), (how, is_masked)
        torch.testing.assert_close(gradient, slopes.float(), rtol=1e-4, atol=1e-6)
        check_case(batch, samples, gradient, cfg)
        if updates == 2 or how == "in_ratio":
            are_clipped.append(max(clipped(samples, cfg)) > 0)
    assert any(are_clipped), "there was nothing to clip"


def check_case(batch: Ragged, samples: list[Sample], gradient: Tensor, cfg: RunConfig) -> None:
    """Check that completions out of the loss have no gradient, and that the batch has something to mask."""
    lost = [row for row, sample in enumerate(samples) if not sample.tokens or not counts(sample, cfg)]
    assert (gradient[lost] == 0).all()
    assert gradient.abs().max() > 1e-3
    if cfg.algorithm.mask_truncated:
        assert 0 < tokens_of(samples, cfg) < batch.lengths_N.sum(), "there was nothing to mask"
