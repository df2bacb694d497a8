"""Detect from the metrics that a run does not learn, forgets, or samples from another policy. Imports no torch.

A sign must hold for `WINDOW` consecutive steps, because a single step can be bad luck. Each sign is reported once.
"""

import math
import shlex
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from qerl_lab.config.schema import RunConfig

WINDOW = 5  # steps
ENTROPY_LEFT = 0.02  # below this share of the initial entropy the policy hardly explores
REWARD_LEFT = 0.5  # below this share of the initial reward the policy has collapsed
APART = 5.0  # nats per token without noise; rounding alone gives a smaller sampler-trainer gap (docs/running.md)
LENGTH_LEFT = 1 / 3  # below this share of the initial completion length the policy may have stopped reasoning
HELD = 0.2  # allowed relative difference between requested and observed noise
SIGMAS = 4  # standard errors that a reward drop must exceed, so that a small batch does not trigger it

Metrics = Mapping[str, float]


class Watch:
    """Collect the metrics of every step and report new signs. A resumed run passes its earlier steps first."""

    def __init__(self, cfg: RunConfig, earlier: Iterable[Metrics]) -> None:
        self.cfg, self.told = cfg, set[str]()
        self.first: list[Metrics] = []
        self.last: deque[Metrics] = deque(maxlen=WINDOW)
        for metrics in earlier:
            self.see(metrics)

    def see(self, metrics: Metrics) -> dict[str, str]:
        """Add one step's metrics; return new signs, each with advice."""
        if "reward/mean" not in metrics:  # held-out evaluation
            return {}
        if len(self.first) < WINDOW:
            self.first.append(metrics)
        self.last.append(metrics)
        found = signs(self.first, list(self.last), self.cfg) if len(self.last) == WINDOW else {}
        new = {sign: advice for sign, advice in found.items() if sign not in self.told}
        self.told |= new.keys()
        return new


def signs(first: Sequence[Metrics], last: Sequence[Metrics], cfg: RunConfig) -> dict[str, str]:
    """Return signs of trouble and advice, from the first and the last `WINDOW` steps."""
    flat = all(metrics["reward/zero_variance_groups"] == 1 for metrics in last)
    worthless = all(metrics["reward/mean"] == 0 for metrics in last)
    truncated = all(metrics["rollout/truncated_fraction"] == 1 for metrics in last)
    longer = f"Type a higher rollout.max_completion_tokens (it is {cfg.rollout.max_completion_tokens})"
    slower = f"Type a lower optim.learning_rate (it is {cfg.optim.learning_rate:g})"
    varied = f"rollout.group_size (it is {cfg.rollout.group_size}), or a task that is neither solved nor hopeless."
    found: dict[str, str] = {}
    if truncated:
        found["every completion was cut at the token limit"] = f"{longer}."
    if _has_fallen(first, last, cfg):
        found["the policy has collapsed"] = (
            f"The reward was {_mean('reward/mean', first):.2f} as the run began and is "
            f"{_mean('reward/mean', last):.2f}. {slower}."
        )
    elif worthless:
        found["no completion has earned anything"] = (
            f"Look at the completions: python -m qerl_lab.tools.samples {shlex.quote(cfg.run_dir)}. "
            + (f"{longer}." if truncated else "Type an easier task, or a model that solves some of it.")
        )
    elif flat:
        found["all completions of every question earned the same"] = (
            "Their advantages are zero and nothing is learned. Type a higher rollout.temperature (it is "
            f"{cfg.rollout.temperature:g}) or {varied}"
        )
    if not flat and all(metrics.get("rollout/groups_flat", 0) for metrics in last):
        found["dynamic sampling fills no batch"] = (
            "In each of the last steps it reached its cap, and questions that say nothing filled the batch. Type a "
            f"higher algorithm.max_resamples (it is {cfg.algorithm.max_resamples}) or {varied}"
        )
    found |= _signs_of_the_engine(last, cfg)
    if _shrinks_for_nothing(first, last, cfg):
        found["completions shrink and right answers do not rise"] = _only_the_format(first, last, cfg)
    if _mean("policy/entropy_nats", last) < ENTROPY_LEFT * _mean("policy/entropy_nats", first):
        found["the policy's entropy has collapsed"] = (
            f"Under {ENTROPY_LEFT:.0%} of it is left, and nothing is explored any more. {slower}."
        )
    return found


def _signs_of_the_engine(last: Sequence[Metrics], cfg: RunConfig) -> dict[str, str]:
    found: dict[str, str] = {}
    sigmas = [metrics.get("noise/sigma", 0.0) for metrics in last]
    apart = min(metrics.get("sampler/logprob_gap_max", 0.0) for metrics in last)
    if not any(sigmas) and apart > APART:  # noise causes a gap by design
        found["sampler and trainer are two policies"] = (
            f"Without noise each of the last steps had a token whose log-probabilities were {apart:.0f} nats apart or "
            "more: one of them computes something else. Do not believe this run. "
        ) + (
            "Type model.dtype=float32."
            if cfg.rollout.engine == "transformers"
            else "Type rollout.vllm.linear_backend=marlin, or rollout=transformers, and compare "
            "sampler/logprob_gap_max."
        )
    held = [metrics.get("noise/std_observed", sigma) for metrics, sigma in zip(last, sigmas, strict=True)]
    if all(sigma > 0 and abs(std / sigma - 1) > HELD for std, sigma in zip(held, sigmas, strict=True)):
        found["the engine holds another noise than was asked"] = (
            f"The last step asked for sigma {sigmas[-1]:.2g}, and the engine's norms differ from clean ones by "
            f"{held[-1]:.2g}. Do not compare this run by its sigma. "
            "Type rollout=transformers, or a higher aqn.sigma_end."
        )
    return found


def _only_the_format(first: Sequence[Metrics], last: Sequence[Metrics], cfg: RunConfig) -> str:
    """Return the advice for completions that shrink while answers do not improve."""
    tokens, earned = ([_mean(name, steps) for steps in (first, last)]
                      for name in ("rollout/completion_tokens", "reward/answer"))  # fmt: skip
    said = (
        f"A completion had {tokens[0]:.0f} tokens as the run began and has {tokens[1]:.0f}; the answers earned "
        f"{earned[0]:.2f} and earn {earned[1]:.2f}. "
        f"Look at the completions: python -m qerl_lab.tools.samples {shlex.quote(cfg.run_dir)}."
    )
    if cfg.task.format_reward == 0 or cfg.task.format_reward_for == "right":
        return said
    return (
        f"{said} If they keep the format and do not think, the format reward alone is winning: type "
        f"task.format_reward_for=right, or a lower task.format_reward (it is {cfg.task.format_reward:g})."
    )


def _has_fallen(first: Sequence[Metrics], last: Sequence[Metrics], cfg: RunConfig) -> bool:
    """Return whether the reward fell below half of its initial value, beyond `SIGMAS` standard errors.

    Completions of one question are correlated, so they count as one sample.
    """
    before, now = _mean("reward/mean", first), _mean("reward/mean", last)
    variance = sum(_mean("reward/std", steps) ** 2 for steps in (first, last))
    error = math.sqrt(variance / (WINDOW * cfg.rollout.prompts_per_step))
    return now < REWARD_LEFT * before and before - now > SIGMAS * error


def _shrinks_for_nothing(first: Sequence[Metrics], last: Sequence[Metrics], cfg: RunConfig) -> bool:
    """Return whether completions shrank to under a third of their initial length and answers did not improve.

    An improvement is a rise of more than one standard error. Completions of one question count as one sample.
    """
    if cfg.task.answer_reward == 0:
        return False
    right = [_mean("reward/answer", steps) / cfg.task.answer_reward for steps in (first, last)]
    variance = sum(max(0.0, share * (1 - share)) for share in right)  # a rounded share may be above 1
    error = math.sqrt(variance / (WINDOW * cfg.rollout.prompts_per_step))
    shrunk = _mean("rollout/completion_tokens", last) < LENGTH_LEFT * _mean("rollout/completion_tokens", first)
    return shrunk and right[1] - right[0] <= error


def _mean(name: str, steps: Sequence[Metrics]) -> float:
    return sum(metrics[name] for metrics in steps) / len(steps)
