"""Detect from the metrics that a run does not learn, forgets, or samples from another policy. Imports no torch.

A sign of trouble must hold for `WINDOW` consecutive steps, because a single step can be bad luck. Each sign is reported
once.
"""

import math
import shlex
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from qerl_lab.config.schema import RunConfig

WINDOW = 5  # steps
ENTROPY_LEFT = 0.02  # below this share of the initial entropy the policy hardly explores
REWARD_LEFT = 0.5  # below this share of the initial reward the policy has collapsed
LARGEST_GAP = 5.0  # nats per token without noise; rounding alone gives a smaller sampler-trainer gap (docs/running.md)
LENGTH_LEFT = 1 / 3  # below this share of the initial completion length the policy may have stopped reasoning
SIGMA_TOLERANCE = 0.2  # allowed relative difference between the sigma asked for and the sigma observed in the engine
SIGMAS = 4  # standard errors that a reward drop must exceed, so that a small batch does not trigger it

Metrics = Mapping[str, float]


class Watch:
    """Collects the metrics of every step and reports new signs of trouble.

    A resumed run passes the metrics of its earlier steps as `earlier`; their signs are not reported again.
    """

    def __init__(self, cfg: RunConfig, earlier: Iterable[Metrics]) -> None:
        self.cfg, self.told = cfg, set[str]()
        self.first, self.last = list[Metrics](), deque[Metrics](maxlen=WINDOW)  # the first and the last steps
        for metrics in earlier:
            self.add_step(metrics)

    def add_step(self, metrics: Metrics) -> dict[str, str]:
        """Add one step's metrics; return a dict from each new sign of trouble to advice, both text for the user.

        Ignores metrics of a held-out evaluation.
        """
        if "reward/mean" not in metrics:  # held-out evaluation
            return {}
        self.last.append(metrics)
        if len(self.first) < WINDOW:
            self.first.append(metrics)
        if len(self.first) < WINDOW:
            return {}
        found = trouble_signs(self.first, self.last, self.cfg)
        new = {sign: advice for sign, advice in found.items() if sign not in self.told}
        self.told |= new.keys()
        return new


def trouble_signs(first: Sequence[Metrics], last: Sequence[Metrics], cfg: RunConfig) -> dict[str, str]:
    """Return a dict from each sign of trouble to advice; {} without trouble. Both are text for the user.

    `first` and `last` are the metrics of the run's first and last `WINDOW` steps.
    """
    began, now = _mean_metrics(first), _mean_metrics(last)
    is_flat = now["reward/zero_variance_groups"] == 1
    look = f"Look at the completions: python -m qerl_lab.tools.samples {shlex.quote(cfg.run_dir)}."
    longer = f"Type a higher rollout.max_completion_tokens (it is {cfg.rollout.max_completion_tokens})."
    slower = f"Type a lower optim.learning_rate (it is {cfg.optim.learning_rate:g})."
    varied = f"rollout.group_size (it is {cfg.rollout.group_size}), or a task that is neither solved nor hopeless."
    was, earns = began["reward/mean"], now["reward/mean"]
    variance = began["reward/std"] ** 2 + now["reward/std"] ** 2
    error = math.sqrt(variance / (WINDOW * cfg.rollout.prompts_per_step))  # completions of a question are correlated
    has_collapsed = earns < REWARD_LEFT * was and was - earns > SIGMAS * error
    is_certain = now["policy/entropy_nats"] < ENTROPY_LEFT * began["policy/entropy_nats"]
    # A collapsed policy writes on to any limit, unless the completions were cut before.
    lacks_tokens = now["rollout/truncated_fraction"] == 1 and (
        began["rollout/truncated_fraction"] == 1 or not (has_collapsed or is_certain)
    )
    signs: dict[str, str] = {}
    if lacks_tokens:
        signs["every completion was cut at the token limit"] = longer
    if has_collapsed:
        signs["the policy has collapsed"] = f"The reward was {was:.2f} as the run began and is {earns:.2f}. {slower}"
    elif all(metrics["reward/mean"] == 0 for metrics in last):
        easier = longer if lacks_tokens else "Type an easier task, or a model that solves some of it."
        signs["no completion has earned anything"] = f"{look} {easier}"
    elif is_flat:
        signs["all completions of every question earned the same"] = (
            "Their advantages are zero and nothing is learned. Type a higher rollout.temperature (it is "
            f"{cfg.rollout.temperature:g}) or {varied}"
        )
    if not is_flat and all(metrics.get("rollout/groups_flat", 0) for metrics in last):
        signs["dynamic sampling fills no batch"] = (
            "In each of the last steps it reached its cap, and questions that say nothing filled the batch. Type a "
            f"higher algorithm.max_resamples (it is {cfg.algorithm.max_resamples}) or {varied}"
        )
    if advice := _advice_if_shrunk(began, now, cfg):
        signs["completions shrink and right answers do not rise"] = f"{advice} {look}"
    if is_certain:
        signs["the policy's entropy has collapsed"] = (
            f"Under {ENTROPY_LEFT:.0%} of it is left, and nothing is explored any more. {slower}"
        )
    return signs | _engine_signs(last, cfg)


def _mean_metrics(steps: Sequence[Metrics]) -> Metrics:
    """Return the mean over `steps` of each metric that all of them have."""
    return {name: fmean(step[name] for step in steps) for name in steps[0] if all(name in step for step in steps)}


def _advice_if_shrunk(began: Metrics, now: Metrics, cfg: RunConfig) -> str:
    """Return advice if completions shrank below a third of their initial length while answers did not improve, else "".

    Answers improve if the share of right ones rises by more than a standard error. `began` and `now` are mean metrics
    of the first and the last steps.
    """
    is_short = now["rollout/completion_tokens"] < LENGTH_LEFT * began["rollout/completion_tokens"]
    if cfg.task.answer_reward == 0 or not is_short:
        return ""
    right = [means["reward/answer"] / cfg.task.answer_reward for means in (began, now)]
    variance = sum(max(0.0, share * (1 - share)) for share in right)  # a rounded share may be above 1
    if right[1] - right[0] > math.sqrt(variance / (WINDOW * cfg.rollout.prompts_per_step)):
        return ""
    observation = (
        f"A completion had {began['rollout/completion_tokens']:.0f} tokens as the run began and has "
        f"{now['rollout/completion_tokens']:.0f}; the answers earned {began['reward/answer']:.2f} and earn "
        f"{now['reward/answer']:.2f}."
    )
    if cfg.task.format_reward == 0 or cfg.task.format_reward_for == "right":
        return observation
    return (
        f"{observation} If they keep the format and do not think, the format reward alone is winning: type "
        f"task.format_reward_for=right, or a lower task.format_reward (it is {cfg.task.format_reward:g})."
    )


def _engine_signs(last: Sequence[Metrics], cfg: RunConfig) -> dict[str, str]:
    """Return a dict from each sign of trouble in the sampler to advice for the user. All `last` steps must show it."""
    signs: dict[str, str] = {}
    sigmas = [metrics.get("noise/sigma", 0.0) for metrics in last]
    gap = min(metrics.get("sampler/logprob_gap_max", 0.0) for metrics in last)
    if not any(sigmas) and gap > LARGEST_GAP:  # noise causes a gap by design
        if cfg.rollout.engine == "transformers":
            remedy = "model.dtype=float32"
        else:
            vllm = cfg.rollout.vllm
            causes_gap = {  # besides a wrong kernel
                "rollout.vllm_server.overlap=false": cfg.overlaps,
                "format.activations=auto": cfg.format.activations == "fp8",
                "rollout.vllm.dense_dtype=auto": vllm.dense_dtype == "fp8",
                "rollout.vllm.kv_cache_dtype=auto": vllm.kv_cache_dtype == "fp8",
            }
            words = [word for word, does in causes_gap.items() if does] + ["rollout.vllm.linear_backend=marlin"]
            remedy = f"{', '.join(words)}, or rollout=transformers, and compare sampler/logprob_gap_max"
        signs["sampler and trainer are two policies"] = (
            f"Without noise each of the last steps had a token with log-probabilities {gap:.0f} nats apart or "
            f"more: sampler or trainer computes something else. Do not believe this run. Type {remedy}."
        )
    observed = [metrics.get("noise/std_observed", sigma) for metrics, sigma in zip(last, sigmas, strict=True)]
    if all(sigma > 0 and abs(std / sigma - 1) > SIGMA_TOLERANCE for std, sigma in zip(observed, sigmas, strict=True)):
        signs["the engine holds another noise than was asked"] = (
            f"The last step asked for sigma {sigmas[-1]:.2g}, and the engine's norms differ from clean ones by "
            f"{observed[-1]:.2g}. Do not compare this run by its sigma. "
            "Type rollout=transformers, or a higher aqn.sigma_end."
        )
    return signs
