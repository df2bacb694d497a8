"""Declare every metric of a run (name, unit, meaning), and the lines of RUN_DIR/metrics.jsonl."""

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from qerl_lab.config.message import with_noun
from qerl_lab.config.option import ConfigError
from qerl_lab.record.line_files import LineFile


@dataclass(frozen=True)
class Metric:
    """Unit and meaning of one metric.

    Attributes:
        trl: name of the metric in TRL if TRL measures it, else empty.
        over: how TRL's means of micro-batches are weighted in the mean of a step: "tokens" (by tokens in the loss),
            "ratios" (the same, but equally with algorithm=gspo), or empty if they need no weights.
    """

    unit: str
    meaning: str
    trl: str = ""
    over: str = ""


PART = "reward/<part>"
# The seconds/* that add up to step/seconds; with gpus above 1, seconds/wait is added.
PHASES = ("rollout", "reward", "sync", "probe", "train")
METRICS: dict[str, Metric] = {
    "reward/mean": Metric("reward", "mean reward of the step's completions, all parts added"),
    "reward/std": Metric("reward", "standard deviation of the reward over the step's completions"),
    PART: Metric("reward", "mean of one part, weight x score; every task has answer and format"),
    "reward/overlong": Metric("reward", "mean punishment by algorithm.overlong_buffer_tokens; only with such a buffer"),
    "reward/unparsed": Metric(
        "fraction", "completions whose answer could not be read, or not compared in time: they count as wrong"
    ),
    "reward/zero_variance_groups": Metric("fraction", "groups with equal rewards: their advantages are 0"),
    "policy/entropy_nats": Metric(
        "nats",
        "entropy of the trainer's policy at rollout.temperature: exact over the vocabulary, mean over all completion "
        "tokens of the step's updates; without noise, unless aqn.scope=rollout_and_train",
    ),
    "policy/entropy_forking_nats": Metric(
        "nats",
        "policy/entropy_nats of the forking tokens alone: the fifth of these tokens with the highest entropy "
        "(arXiv 2506.01939)",
    ),
    "policy/entropy_rest_nats": Metric("nats", "policy/entropy_nats of the other four fifths"),
    "policy/kl_reference": Metric(
        "nats",
        "KL of the policy from the base (no adapter, no noise) by algorithm.kl_estimator, mean over the tokens in "
        "the loss; only with algorithm.beta above 0",
        trl="kl", over="tokens",
    ),
    "policy/clip_fraction": Metric(
        "fraction",
        "tokens in the loss whose probability ratio was clipped on either side (algorithm.mask_truncated excludes "
        "truncated completions); with algorithm=gspo a fraction of the completions, excluded ones too",
        trl="clip_ratio/region_mean", over="ratios",
    ),
    "policy/clip_fraction_low": Metric(
        "fraction", "the same, clipped at 1 - epsilon_low (negative advantage)",
        trl="clip_ratio/low_mean", over="ratios",
    ),
    "policy/clip_fraction_high": Metric(
        "fraction", "the same, clipped at 1 + epsilon_high (positive advantage)",
        trl="clip_ratio/high_mean", over="ratios",
    ),
    "policy/weight_cut_fraction": Metric(
        "fraction",
        "tokens in the loss with a positive advantage whose weight was cut to 1 + epsilon_high; only with "
        "algorithm=cispo, in place of the three above",
        trl="cispo_clip_ratio", over="ratios",
    ),
    "policy/entropy_coef": Metric(
        "1",
        "weight of the entropy bonus after the step; an adaptive one applies in the next update if the last entropy "
        "was at or below algorithm.entropy_target; only with a bonus",
    ),
    "policy/loss": Metric("1", "loss, mean over the step's updates", trl="loss"),
    "policy/grad_norm": Metric("1", "gradient norm before clipping, of the step's last update", trl="grad_norm"),
    "policy/learning_rate": Metric("1", "learning rate of the step's last update", trl="learning_rate"),
    "sampler/entropy_nats": Metric(
        "nats",
        "entropy of the noisy sampler at rollout.temperature, mean over all completion tokens; absent if the engine "
        "never has log-probs of the whole vocabulary",
    ),
    "sampler/logprob_gap_mean": Metric(
        "nats", "mean abs(sampler - trainer) log-prob over all completion tokens, due to kernels and noise together"
    ),
    "sampler/logprob_gap_max": Metric("nats", "largest abs(sampler - trainer) log-prob of a completion token"),
    "sampler/importance_ratio_mean": Metric(
        "1",
        "mean corrected trainer / sampler probability ratio over all completion tokens (over completions with "
        "sequence corrections)",
    ),
    "sampler/kl_k1_nats": Metric(
        "nats",
        "KL of the sampler from the trainer, estimator k1: mean sampler - trainer log-prob over all completion "
        "tokens; may be below 0",
    ),
    "sampler/kl_k3_nats": Metric(
        "nats",
        "KL of the sampler from the trainer, Schulman's k3: mean r - 1 - log r over all completion tokens, r the "
        "uncorrected trainer / sampler probability ratio; never below 0",
    ),
    "sampler/effective_sample_size": Metric(
        "fraction",
        "(sum r)^2 / (N sum r^2) over all N completion tokens, r the uncorrected trainer / sampler probability ratio",
    ),
    "sampler/importance_clipped_fraction": Metric(
        "fraction",
        "completion tokens with a ratio (with sequence corrections: in a completion with a ratio) above "
        "rollout.importance_clip_max, lowered or set to 0; 0 with rollout.importance_correction=off and in_ratio",
    ),
    "sampler/kernel_gap_mean": Metric(
        "nats",
        "mean abs(sampler - trainer) log-prob with the engine's norms on both sides, over the tokens of "
        "aqn.probe_prompts completions (all completions without noise): what remains is the engine's arithmetic, or "
        "a bug; absent if rollout/staleness is 1 or aqn.probe_prompts is 0",
    ),
    "sampler/kernel_gap_max": Metric("nats", "largest single difference in sampler/kernel_gap_mean"),
    "rollout/tokens_per_second": Metric(
        "tokens/s",
        "completion tokens of all processes / seconds of generation in the slowest; with gpus=1 these are "
        "seconds/rollout, unless the step was sampled ahead",
    ),
    "rollout/completion_tokens": Metric("tokens", "mean length of a completion, truncated ones included"),
    "rollout/truncated_fraction": Metric("fraction", "completions without an end token, cut at max_completion_tokens"),
    "rollout/answer_entropy_nats": Metric(
        "nats",
        "entropy of the final answers to a question over its group, mean over questions: 0 if all answers are the same "
        "or missing, at most ln(rollout.group_size)",
    ),
    "rollout/staleness": Metric(
        "steps",
        "steps by which the sampler's adapter was older than the trainer's, 0 or 1; only with "
        "rollout.vllm_server.overlap",
    ),
    "rollout/prompts_drawn": Metric(
        "questions", "questions sampled, dropped ones too; only with dynamic sampling, as the next five"
    ),
    "rollout/resamples": Metric("1", "extra rollouts of the step"),
    "rollout/resampled_tokens": Metric("tokens", "completion tokens of those extra rollouts"),
    "rollout/groups_dropped": Metric("questions", "sampled questions left out of training, as their rewards are equal"),
    "rollout/groups_dropped_unsolved": Metric(
        "questions", "part of rollout/groups_dropped: no completion earned any reward for the answer"
    ),
    "rollout/groups_flat": Metric(
        "questions",
        "questions with equal rewards that fill the batch because algorithm.max_resamples was reached",
    ),
    "step/seconds": Metric("s", "wall time of the whole step, until the device is done"),
    "step/tokens_per_second": Metric("tokens/s", "completion tokens / step/seconds"),
    "seconds/rollout": Metric(
        "s", "wall time of generation in the recording process; for a step sampled ahead the wait for its batch"
    ),
    "seconds/resample": Metric(
        "s",
        "generation in the extra rollouts of dynamic sampling, in the slowest process; part of seconds/rollout with "
        "gpus=1, unless the step was sampled ahead; only with dynamic sampling",
    ),
    "seconds/reward": Metric("s", "wall time of decoding and grading the completions; 0 for a step sampled ahead"),
    "seconds/train": Metric("s", "the rest of step/seconds: log-probs, loss, backward and optimizer"),
    "seconds/sync": Metric("s", "wall time of sending adapter and noisy norms to the engine"),
    "seconds/wait": Metric(
        "s",
        "only with gpus above 1: wall time that the recording process waits for slower ones after its rollout and "
        "elsewhere; not part of other seconds/*, except that seconds/train includes waits in backward passes",
    ),
    "seconds/probe": Metric("s", "wall time of measuring the noise (noise/*) and the sampler (sampler/kernel_gap_*)"),
    "noise/sigma": Metric(
        "1", "standard deviation of the noise; with aqn.relative in units of each norm's root mean square"
    ),
    "noise/std_observed": Metric(
        "1",
        "standard deviation of the engine's norm weights minus the clean ones, with aqn.relative each divided by its "
        "norm's root mean square; near noise/sigma where that is 1e-4 or more, since norms are float32: of n weights "
        "it differs by about noise/sigma / sqrt(2n), which is 2.3% for the embedded policy",
    ),
    "noise/kl_target": Metric("nats", "target KL per token of the schedule, with aqn.unit=kl"),
    "noise/kl_solved": Metric(
        "nats",
        "KL per token measured for noise/sigma when its stage began, over aqn.solver.prompts completions sampled "
        "without noise, of which each of aqn.solver.draws draws of the noise gets a share",
    ),
    "noise/probes": Metric("1", "sigmas tried when the stage began"),
    "noise/kl_nats": Metric(
        "nats",
        "KL of the policy with the engine's norms from the policy with clean norms, mean per token of "
        "aqn.probe_prompts completions; 0 without computation if the engine's norms are clean; absent if "
        "aqn.probe_prompts is 0",
    ),
    "memory/rss_gib": Metric("GiB", "largest resident memory of the run's process so far"),
    "memory/gpu_peak_gib": Metric(
        "GiB",
        "largest GPU memory allocated by torch so far, or since optim.micro_batch_size=null was chosen; only on a GPU",
    ),
    "eval/accuracy": Metric("fraction", "held-out sampled answers that are right; step 0 is before training"),
    "eval/gain": Metric("fraction", "eval/accuracy after training minus before, paired by question"),
    "eval/gain_low": Metric("fraction", "lower end of the 95% interval of eval/gain over the questions"),
    "eval/gain_high": Metric("fraction", "upper end of the 95% interval of eval/gain over the questions"),
    "eval/format": Metric("fraction", "held-out completions in the required format"),
    "eval/completion_tokens": Metric("tokens", "mean length of a held-out completion"),
    "eval/truncated_fraction": Metric("fraction", "held-out completions cut at max_completion_tokens; mostly wrong"),
    "eval/entropy_nats": Metric(
        "nats",
        "mean entropy of the policy over the tokens of the held-out completions, at eval.temperature (the other "
        "entropies are at rollout.temperature) and before the cut of eval.top_p; absent as sampler/entropy_nats is",
    ),
    "eval/subset_accuracy": Metric("fraction", "accuracy on the first eval.subset_questions, every eval.every steps"),
    "eval/subset_format": Metric("fraction", "subset completions in the required format"),
    "eval/subset_completion_tokens": Metric("tokens", "mean length of a subset completion"),
    "eval/subset_truncated_fraction": Metric("fraction", "as eval/truncated_fraction, on the subset"),
    "eval/subset_entropy_nats": Metric("nats", "as eval/entropy_nats, on the subset"),
}  # fmt: skip


def metrics_table() -> str:
    """Return METRICS as a Markdown table, the body of docs/metrics.md."""
    rows = [f"| `{name}` | {m.unit} | {m.meaning} | {f'`{m.trl}`' if m.trl else ''} |" for name, m in METRICS.items()]
    return "\n".join(["| metric | unit | meaning | in TRL |", "|---|---|---|---|", *rows]) + "\n"


def declared_metrics(parts: Iterable[str] = ()) -> dict[str, Metric]:
    """Return all metrics of a run: METRICS, with `reward/<part>` replaced by one metric for each of `parts`."""
    of_parts = {PART.replace("<part>", part): METRICS[PART] for part in parts}
    return {name: metric for name, metric in METRICS.items() if name != PART} | of_parts


class MetricsLine(TypedDict):
    """A line of metrics.jsonl: metrics by name, measured at `step`. `time` is in Unix seconds.

    A step can have several lines, because held-out evaluations write their own.
    """

    step: int
    time: float
    metrics: dict[str, float]


def encode_line(step: int, metrics: Mapping[str, float]) -> bytes:
    """Encode one line of metrics.jsonl, with the current time in Unix seconds; NaN and infinity become null."""
    finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
    return json.dumps({"step": int(step), "time": time.time(), "metrics": finite}, allow_nan=False).encode() + b"\n"


def _decode_line(values: Any) -> MetricsLine:
    """Check a parsed line of metrics.jsonl, and turn null into NaN.

    Raises ValueError for anything else, or as `float` does for a metric that is no number.
    """
    match values:
        case {"step": int(step), "time": int() | float() as when, "metrics": dict(metrics)}:
            numbers = {name: math.nan if value is None else float(value) for name, value in metrics.items()}
            return {"step": step, "time": float(when), "metrics": numbers}
    raise ValueError("no step, time and metrics")


METRICS_FILE = LineFile("metrics.jsonl", "a metrics record", _decode_line)


def check_steps(lines: Iterable[MetricsLine], steps: int) -> None:
    """Raise ConfigError unless every step from 1 to `steps` has exactly one training line in `lines`.

    Checks up to the last step in `lines` if that is later. A training line has a metric outside of eval/. Duplicates
    mean that two processes wrote the file, which can happen on a file system without locks.
    """
    times_by_step = Counter(
        line["step"] for line in lines if any(not name.startswith("eval/") for name in line["metrics"])
    )
    steps = max(steps, *times_by_step, 0)
    if missing := [step for step in range(1, steps + 1) if step not in times_by_step]:
        raise ConfigError(f"{METRICS_FILE.name} lacks {len(missing)} of {steps} steps, the first of them {missing[0]}")
    if twice := sorted(step for step, times in times_by_step.items() if times > 1):
        many = with_noun(len(twice), "step")
        raise ConfigError(f"{METRICS_FILE.name} has {many} more than once, the first of them {twice[0]}")
