"""Signs that a run learns nothing, unlearns, or is not of one policy: from its metrics, each told once. No torch.

A sign must hold over `WINDOW` steps in a row, because one step may be unlucky.
"""

import math
import shlex
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from qerl_lab.config.schema import RunConfig

WINDOW = 5  # steps
ENTROPY_LEFT = 0.02  # share of the first steps' entropy under which next to nothing is explored
REWARD_LEFT = 0.5  # share of the first steps' reward under which the policy has unlearned what it could
APART = 5.0  # nats at a token without noise; rounding parts sampler and trainer by less (docs/running.md)
LENGTH_LEFT = 1 / 3  # share of the first steps' completion length under which a policy may have stopped thinking
HELD = 0.2  # share of the noise asked by which the noise held may differ from it
SIGMAS = 4  # standard errors that a fall of the reward must exceed, or a small batch would be enough for it

Metrics = Mapping[str, float]


class Watch:
    """Sees the metrics of every step of a run, those of a resumed one's earlier steps first."""

    def __init__(self, cfg: RunConfig, earlier: Iterable[Metrics]) -> None:
        self.cfg, self.told = cfg, set[str]()
        self.first: list[Metrics] = []
        self.last: deque[Metrics] = deque(maxlen=WINDOW)
        for metrics in earlier:
            self.see(metrics)

    def see(self, metrics: Metrics) -> dict[str, str]:
        """Say what is new and wrong, and what to do about it."""
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
    """Say what is wrong in the last steps of a run and what to type, from them and its first ones, `WINDOW` each."""
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
    if (apart := min(_apart(metrics) for metrics in last)) > APART:
        found["sampler and trainer are two policies"] = _two_policies(apart, cfg)
    if all(_is_other_noise(metrics) for metrics in last):
        found["the engine holds another noise than was asked"] = (
            f"The last step asked for sigma {last[-1]['noise/sigma']:.2g}, and the engine's norms differ from clean "
            f"ones by {last[-1]['noise/std_observed']:.2g}. Do not compare this run by its sigma. "
            "Type rollout=transformers, or a higher aqn.sigma_end."
        )
    return found


def _only_the_format(first: Sequence[Metrics], last: Sequence[Metrics], cfg: RunConfig) -> str:
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


def _two_policies(apart: float, cfg: RunConfig) -> str:
    vllm = "Type rollout.vllm.linear_backend=marlin, or rollout=transformers, and compare sampler/logprob_gap_max."
    return (
        f"Without noise each of the last steps had a token whose log-probabilities were {apart:.0f} nats apart or "
        "more: one of them computes something else. Do not believe this run. "
        + ("Type model.dtype=float32." if cfg.rollout.engine == "transformers" else vllm)
    )


def _apart(metrics: Metrics) -> float:
    """How far a token was off in a step without noise, which parts the two on purpose; 0 in one with it."""
    return 0.0 if metrics.get("noise/sigma", 0.0) > 0 else metrics.get("sampler/logprob_gap_max", 0.0)


def _is_other_noise(metrics: Metrics) -> bool:
    """Whether the noise held differs from the noise asked by more than `HELD`; a step without noise asks for none."""
    asked = metrics.get("noise/sigma", 0.0)
    return asked > 0 and abs(metrics.get("noise/std_observed", asked) / asked - 1) > HELD


def _has_fallen(first: Sequence[Metrics], last: Sequence[Metrics], cfg: RunConfig) -> bool:
    """Whether the reward is clearly under half of what it was. Completions of a question count as one: they agree."""
    before, now = _mean("reward/mean", first), _mean("reward/mean", last)
    variance = sum(_mean("reward/std", steps) ** 2 for steps in (first, last))
    error = math.sqrt(variance / (WINDOW * cfg.rollout.prompts_per_step))
    return now < REWARD_LEFT * before and before - now > SIGMAS * error


def _shrinks_for_nothing(first: Sequence[Metrics], last: Sequence[Metrics], cfg: RunConfig) -> bool:
    """Whether completions are under a third as long as at first, and the answers earn no more than by chance.

    More than by chance is a rise of over one standard error, the completions of a question counted as one.
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
