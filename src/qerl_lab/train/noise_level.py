"""Choose the noise level (sigma) of each step: scheduled, solved for a target KL per stage, or adaptive.

Sigma depends only on the configuration and on `NoiseLevel.state`, which checkpoints store. All ranks get the same
sigma, because measurements are pooled over ranks.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qerl_lab import aqn
from qerl_lab.aqn import schedule, solver
from qerl_lab.aqn.solver import Solution
from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate import kl
from qerl_lab.model.policy import Policy
from qerl_lab.rollout.engine import Engine, EngineFailed, Rollout
from qerl_lab.train.ranks import Ranks
from qerl_lab.train.step import sample_completions, sampling_settings
from qerl_lab.train.training_data import Cursor

MAX_TEXT_TOKENS = 1024  # when solving for sigma: longer texts delay every rank and add little information
SOLVING_ATTEMPT = -1  # number that seeds the texts to solve on; the attempts of a step are numbered from 0


class NoiseLevel:
    """Chooses sigma of each step.

    Attributes:
        state: what checkpoints store, JSON-serializable. With aqn.schedule=adaptive: sigma of the next step. Else with
            aqn.unit=kl: the last solved stage and its `solver.Solution`. Otherwise empty.
        kl: KL in nats per token, measured with the noise of the current step. The trainer sets it.
    """

    def __init__(self, cfg: RunConfig) -> None:
        self.cfg, self.aqn = cfg, cfg.aqn
        self.is_adaptive = cfg.aqn.schedule == "adaptive"
        self.solves = cfg.aqn.unit == "kl" and cfg.aqn.schedule not in ("off", "adaptive")
        self.state: dict[str, Any] = {"sigma": cfg.aqn.sigma_start} if self.is_adaptive else {}
        self.kl = math.nan

    def target(self, step: int) -> float:
        """Return the scheduled noise level of a step, in units of aqn.unit: a sigma, or a KL in nats per token."""
        return aqn.level(self.aqn, step, self.cfg.steps)

    def stage(self, step: int) -> int:
        """Return which of the run's aqn.stages a step is in, from 0. A solved sigma serves all steps of its stage."""
        return schedule.stage(step, self.cfg.steps, self.aqn.stages)

    def noise(self, step: int) -> aqn.Noise:
        """Return the noise to sample `step` with. If `needs_solving(step)`, call `solve(step, ...)` before."""
        sigma = self.target(step)
        if sigma > 0 and (self.solves or self.is_adaptive):
            sigma = self.state["sigma"]
        return aqn.Noise(sigma, self.cfg.seed, step, self.aqn.relative)

    def needs_solving(self, step: int) -> bool:
        """Return whether `solve` must run before the step, because its stage has noise and no solved sigma yet."""
        return self.solves and self.target(step) > 0 and self.state.get("stage") != self.stage(step)

    def solve(self, step: int, nats_per_token: Callable[[list[aqn.Noise]], float]) -> Solution:
        """Find the sigma at which the KL equals the target of the step's stage; return it and store it in `state`.

        `nats_per_token` must return the mean KL, in nats per token, of a list of noises. `solve` passes it the noises
        of evenly spread steps of the stage, so that the KL fits the noise actually used.
        """
        stage, target = self.stage(step), self.target(step)
        of_stage = [number for number in range(1, self.cfg.steps + 1) if self.stage(number) == stage]
        count = min(self.aqn.solver.draws, len(of_stage))
        steps = [of_stage[n * len(of_stage) // count] for n in range(count)]
        draws = [aqn.Noise(0.0, self.cfg.seed, number, self.aqn.relative) for number in steps]
        last_kl = self.state.get("kl", 0.0)
        guess = self.state["sigma"] * math.sqrt(target / last_kl) if last_kl > 0 else self.aqn.sigma_start
        result = solver.solve(
            self.aqn, lambda sigma: nats_per_token([replace(draw, sigma=sigma) for draw in draws]), target, guess
        )
        self.state = {"stage": stage, **asdict(result)}
        return result

    def end_step(self) -> None:
        """Set sigma of the next step from the measured `kl` if aqn.schedule=adaptive; otherwise do nothing.

        Call it after the step's last update.
        """
        if self.is_adaptive:
            self.state = {"sigma": solver.adapt_sigma(self.aqn, self.state["sigma"], self.kl)}

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics `noise/*` that are known before a step: sigma, target KL, and the result of `solve`.

        Both KLs are in nats per token.
        """
        target, sigma = self.target(step), self.noise(step).sigma
        metrics = {"noise/sigma": sigma}
        if self.aqn.unit == "kl" and self.aqn.schedule != "off":
            metrics["noise/kl_target"] = target
        if self.solves and target > 0:
            metrics |= {"noise/kl_solved": self.state["kl"], "noise/probes": self.state["probes"]}
        return metrics

    def warning_if_missed(self, step: int) -> str:
        """Return a warning if the KL found by `solve` misses the target of the step's stage, else an empty string."""
        target, kl, sigma = self.target(step), self.state["kl"], self.state["sigma"]
        if abs(math.log(max(kl, 1e-300) / target)) <= math.log1p(self.aqn.solver.tolerance):
            return ""
        return (
            f"no sigma was found with a KL of {target:.2g} nats: it is {kl:.2g} at sigma {sigma:.2g}, after "
            f"{self.state['probes']} tries between aqn.sigma_min={self.aqn.sigma_min:g} and "
            f"aqn.sigma_max={self.aqn.sigma_max:g}. Type another aqn.kl_start or aqn.kl_end, or more aqn.solver.probes."
        )


def build_kl_measure(
    cfg: RunConfig, step: int, cursor: Cursor, policy: Policy, engine: Engine, ranks: Ranks
) -> Callable[[list[aqn.Noise]], float]:
    """Return a function that gives the mean KL(noisy || clean) of a list of noises on sampled texts, in nats per token.

    Each batch of texts gets one of the noises, in turn, so each text gets one draw only. This is enough, because KL
    varies more between texts than between draws: a few texts dominate it. Hidden states without noise are computed once
    and kept. Raises EngineFailed on every rank if any rank fails or its texts are incomplete.
    """
    pairs = ranks.run_on_all(partial(sample_clean_texts, cfg, step, cursor, policy, engine, ranks), EngineFailed)
    size = max(1, min(cfg.optim.chosen_micro_batch_size, len(pairs) // cfg.aqn.solver.draws))
    batches = [pairs[begin : begin + size] for begin in range(0, len(pairs), size)]

    def hidden_states(noise: aqn.Noise, batch: kl.Pairs) -> Tensor:
        with policy.as_sampler(noise.onto_norms(policy.clean_norms)):
            return kl.hidden_states(policy.base, batch)

    clean = [hidden_states(aqn.CLEAN, batch) for batch in batches]
    tokens = sum(ranks.gather(sum(map(len, clean))))

    def mean_kl_of_noises(noises: list[aqn.Noise]) -> float:
        nats = 0.0
        # Each rank starts at another noise, so that ranks with few texts cover all noises.
        for number, (batch, clean_states) in enumerate(zip(batches, clean, strict=True), start=ranks.rank):
            both = hidden_states(noises[number % len(noises)], batch), clean_states
            chunks = (kl.logprobs(policy.base, states, cfg.rollout.temperature) for states in both)
            with policy.autocasting():
                nats += sum(kl.per_token(p, q).sum().item() for p, q in zip(*chunks, strict=True))
        return sum(ranks.gather(nats)) / tokens

    return mean_kl_of_noises


def sample_clean_texts(
    cfg: RunConfig, step: int, cursor: Cursor, policy: Policy, engine: Engine, ranks: Ranks
) -> kl.Pairs:
    """Sample this rank's share of aqn.solver.prompts completions without noise; return (prompt ids, completion ids).

    The questions are the next of `cursor`, which does not move. Leaves clean norms in the engine. Raises EngineFailed
    if the engine fails.
    """
    engine.sync(aqn.CLEAN)
    share = ranks.share(cfg.aqn.solver.prompts)
    questions = Cursor(cursor.data, cursor.position).take(share.stop)[share.start :]
    prompts = [policy.chat.prompt_ids(cursor.data.task.messages(question)) for question in questions]
    sampling = sampling_settings(cfg, step, SOLVING_ATTEMPT, ranks.rank)
    sampling = replace(sampling, max_tokens=min(sampling.max_tokens, MAX_TEXT_TOKENS))
    out = sample_completions(engine, prompts, 1, sampling)
    if not out:
        return []
    return [(prompt, sampled.ids) for prompt, sampled in zip(out.prompt_ids_P, out.completions, strict=True)]


def probe(
    policy: Policy, norms: dict[str, Tensor], rollout: Rollout, completions: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """Measure on a rollout the KL that noise causes, and the gap between the sampler's and the trainer's log-probs.

    Returns two float64 tensors [T], in nats for each token: KL(policy with `norms` || policy with clean norms), and
    abs(sampler's log-prob - log-prob of the policy with `norms`). That gap comes from other arithmetic in the engine,
    or from an error.

    Args:
        norms: the engine's noisy norms by full layer name.
        completions: number of completions to measure on, spread over the prompts of `rollout`.
        temperature: sampling temperature of `rollout`.
    """
    groups = zip(rollout.prompt_ids_P, rollout.completions_P_G, strict=True)
    rows = [(prompt_ids, completion) for prompt_ids, completions_G in groups for completion in completions_G]
    rows = rows[:: max(1, len(rows) // completions)][:completions]
    pairs = [(prompt_ids, completion.ids) for prompt_ids, completion in rows]
    tokens_T = torch.tensor([token for _, ids in pairs for token in ids], device=policy.device)
    logprobs = [logprob for _, completion in rows for logprob in completion.logprobs]
    sampler_T = torch.tensor(logprobs, dtype=torch.float64)
    noisy = {name: weight.to(policy.norms[name]) for name, weight in norms.items()}
    kl_chunks, noisy_chunks = list[Tensor](), list[Tensor]()
    with policy.as_sampler(policy.clean_norms):
        clean_states = kl.hidden_states(policy.base, pairs)
        with policy.norms_as(noisy):
            noisy_states = kl.hidden_states(policy.base, pairs)
        noisy_logprobs = kl.logprobs(policy.base, noisy_states, temperature)
        clean_logprobs = kl.logprobs(policy.base, clean_states, temperature)
        for p, q, tokens in zip(noisy_logprobs, clean_logprobs, tokens_T.split(kl.CHUNK), strict=True):
            kl_chunks.append(kl.per_token(p, q).cpu())
            noisy_chunks.append(p.gather(-1, tokens[:, None])[:, 0].double().cpu())
    return torch.cat(kl_chunks), (sampler_T - torch.cat(noisy_chunks)).abs()
