"""Declare every metric of a run (name, unit, meaning), and read and write RUN_DIR/metrics.jsonl."""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from qerl_lab.config.option import ConfigError, parse_json
from qerl_lab.system.disk import replace_file


@dataclass(frozen=True)
class Metric:
    """One metric.

    Attributes:
        trl: TRL's name for it if TRL measures it, else empty.
        over: weights for averaging TRL's per-micro-batch means: "tokens" (tokens in the loss) or "ratios" (the same,
            but one per completion with algorithm=gspo).
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
    PART: Metric(
        "reward",
        "mean of one part, weight x score; every task has answer, and format (paid as task.format_reward_for says)",
    ),
    "reward/overlong": Metric("reward", "mean punishment of algorithm.overlong_buffer_tokens"),
    "reward/unparsed": Metric(
        "fraction", "completions whose answer could not be read, or not compared in time: they count as wrong"
    ),
    "reward/zero_variance_groups": Metric(
        "fraction", "groups with equal rewards: their advantages are 0"
    ),
    "policy/entropy_nats": Metric(
        "nats",
        "entropy of the trainer's policy at rollout.temperature: exact over the vocabulary, mean over all completion "
        "tokens of the step's updates; without noise, unless aqn.scope=rollout_and_train",
    ),
    "policy/kl_reference": Metric(
        "nats",
        "KL of the policy from the base (no adapter, no noise) by algorithm.kl_estimator, mean over the tokens in "
        "the loss",
        trl="kl", over="tokens",
    ),
    "policy/clip_fraction": Metric(
        "fraction",
        "tokens in the loss whose probability ratio was clipped on either side (algorithm.mask_truncated excludes "
        "truncated completions); with algorithm=gspo completions, excluded ones too",
        trl="clip_ratio/region_mean", over="ratios",
    ),
    "policy/clip_fraction_low": Metric(
        "fraction", "clipped at 1 - epsilon_low (negative advantage)", trl="clip_ratio/low_mean", over="ratios"
    ),
    "policy/clip_fraction_high": Metric(
        "fraction", "clipped at 1 + epsilon_high (positive advantage)", trl="clip_ratio/high_mean", over="ratios"
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
        "was at or below algorithm.entropy_target",
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
    "sampler/logprob_gap_max": Metric(
        "nats", "largest abs(sampler - trainer) log-prob of a completion token"
    ),
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
        "a bug",
    ),
    "sampler/kernel_gap_max": Metric("nats", "largest single difference in sampler/kernel_gap_mean"),
    "rollout/tokens_per_second": Metric("tokens/s", "completion tokens / seconds/rollout"),
    "rollout/completion_tokens": Metric("tokens", "mean length of a completion, truncated ones included"),
    "rollout/truncated_fraction": Metric("fraction", "completions without an end token, cut at max_completion_tokens"),
    "rollout/engine_restarts": Metric(
        "1", "how often the step was sampled again with a new engine after a failure: 0 or 1"
    ),
    "rollout/prompts_drawn": Metric(
        "questions", "questions sampled; with algorithm.dynamic_sampling more than rollout.prompts_per_step"
    ),
    "rollout/resamples": Metric("1", "extra rollouts of the step for dynamic sampling"),
    "rollout/resampled_tokens": Metric("tokens", "completion tokens of those extra rollouts"),
    "rollout/groups_dropped": Metric(
        "questions", "sampled questions that the step does not train on, as their completions have equal rewards"
    ),
    "rollout/groups_dropped_unsolved": Metric(
        "questions", "part of rollout/groups_dropped: no completion earned any reward for the answer"
    ),
    "rollout/groups_flat": Metric(
        "questions",
        "questions with equal rewards that fill the batch because algorithm.max_resamples was reached",
    ),
    "step/seconds": Metric("s", "wall time of the whole step, until the device is done"),
    "step/tokens_per_second": Metric("tokens/s", "completion tokens / step/seconds"),
    "seconds/rollout": Metric("s", "wall time of generation"),
    "seconds/resample": Metric(
        "s", "part of seconds/rollout: generation in the extra rollouts of dynamic sampling, in the slowest process"
    ),
    "seconds/reward": Metric("s", "wall time of decoding and grading the completions"),
    "seconds/train": Metric("s", "the rest of step/seconds: log-probs, loss, backward and optimizer"),
    "seconds/sync": Metric(
        "s",
        "wall time of sending adapter and noisy norms to the engine, and of its sleep and waking (rollout.vllm.sleep)",
    ),
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
        "norm's root mean square; within 5% of noise/sigma where that is 1e-4 or more, since norms are float32",
    ),
    "noise/kl_target": Metric("nats", "target KL per token of the schedule, with aqn.unit=kl"),
    "noise/kl_solved": Metric(
        "nats",
        "KL per token measured for noise/sigma when its stage began, over aqn.solver.prompts completions sampled "
        "without noise and shared by aqn.solver.draws noise draws",
    ),
    "noise/probes": Metric("1", "sigmas tried when the stage began"),
    "noise/kl_nats": Metric(
        "nats",
        "KL of the policy with the engine's norms from the policy with clean norms, mean per token of "
        "aqn.probe_prompts completions; 0 without computation if the engine's norms are clean",
    ),
    "memory/rss_gib": Metric("GiB", "largest resident memory of the run's process so far"),
    "memory/gpu_peak_gib": Metric(
        "GiB", "largest GPU memory allocated by torch so far; a sleeping key-value cache still counts"
    ),
    "eval/accuracy": Metric("fraction", "held-out sampled answers that are right; step 0 is before training"),
    "eval/gain": Metric("fraction", "eval/accuracy after training minus before, paired by question"),
    "eval/gain_low": Metric("fraction", "lower end of the 95% interval of eval/gain over the questions"),
    "eval/gain_high": Metric("fraction", "upper end of the 95% interval of eval/gain over the questions"),
    "eval/format": Metric("fraction", "held-out completions in the required format"),
    "eval/completion_tokens": Metric("tokens", "mean length of a held-out completion"),
    "eval/truncated_fraction": Metric(
        "fraction", "held-out completions cut at max_completion_tokens; graded as they are, so mostly wrong"
    ),
    "eval/entropy_nats": Metric(
        "nats",
        "mean entropy of the policy over the tokens of the held-out completions, at eval.temperature (the other "
        "entropies are at rollout.temperature) and before the cut of eval.top_p; absent as sampler/entropy_nats is",
    ),
    "eval/subset_accuracy": Metric(
        "fraction", "right sampled answers to the first eval.subset_questions (the subset), every eval.every steps"
    ),
    "eval/subset_format": Metric("fraction", "subset completions in the required format"),
    "eval/subset_completion_tokens": Metric("tokens", "mean length of a subset completion"),
    "eval/subset_truncated_fraction": Metric("fraction", "as eval/truncated_fraction, on the subset"),
    "eval/subset_entropy_nats": Metric("nats", "as eval/entropy_nats, on the subset"),
}  # fmt: skip


def table() -> str:
    """Return METRICS as a Markdown table, the body of docs/metrics.md."""
    rows = [f"| `{name}` | {m.unit} | {m.meaning} | {f'`{m.trl}`' if m.trl else ''} |" for name, m in METRICS.items()]
    return "\n".join(["| metric | unit | meaning | in TRL |", "|---|---|---|---|", *rows]) + "\n"


def declared_metrics(parts: Iterable[str] = ()) -> dict[str, Metric]:
    """Return METRICS with one metric per reward part in `parts`.

    Raises ValueError if a part has the name of another metric.
    """
    of_parts = {PART.replace("<part>", part): METRICS[PART] for part in parts}
    if taken := of_parts.keys() & METRICS.keys():
        raise ValueError(f"a part of the reward is called {sorted(taken)}, which is another metric")
    return {name: metric for name, metric in METRICS.items() if name != PART} | of_parts


class MetricsLine(TypedDict):
    step: int
    time: float
    metrics: dict[str, float]


def encode(step: int, metrics: Mapping[str, float]) -> bytes:
    """Encode one line of strict JSON. NaN and infinite values become null, because JSON has neither."""
    values = {name: float(value) for name, value in metrics.items()}
    finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
    return json.dumps({"step": int(step), "time": time.time(), "metrics": finite}, allow_nan=False).encode() + b"\n"


def lines_from(path: Path, offset: int) -> tuple[list[MetricsLine], int]:
    """Return the lines from byte `offset` on, in file order, and the next offset.

    A step can have several lines (held-out evaluation). `time` is in unix seconds; null values become nan. An
    incomplete last line (the process was killed while writing) is skipped. Raises ConfigError for any other line that
    is not a record.
    """
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    whole = data[: data.rfind(b"\n") + 1]
    lines = [_decode(line, f"{path}, line {n} after byte {offset},") for n, line in enumerate(whole.splitlines(), 1)]
    return lines, offset + len(whole)


def _decode(line: bytes, where: str) -> MetricsLine:
    try:
        match parse_json(line):
            case {"step": int(step), "time": int() | float() as when, "metrics": dict(metrics)} if step >= 0:
                values = {name: math.nan if value is None else float(value) for name, value in metrics.items()}
                return {"step": step, "time": float(when), "metrics": values}
        raise ValueError("no step, time and metrics")
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(
            f"{where} is not a metrics record: {line[:80]!r}. Take the line out, or put the file back as it was."
        ) from error


def count_trained_steps(lines: Iterable[MetricsLine]) -> Counter[int]:
    """Count the lines of each trained step. Evaluation lines do not count."""
    return Counter(line["step"] for line in lines if any(not name.startswith("eval/") for name in line["metrics"]))


def check_steps(found: Mapping[int, int], steps: int, where: str = "metrics.jsonl") -> None:
    """Raise ConfigError unless each step up to `steps`, and up to the last of `found`, has exactly one line.

    `found` counts the lines per step. Duplicates mean that two processes wrote the file, which can happen on a file
    system without locks; a resumed run cuts the steps it trains again.
    """
    steps = max(steps, *found, 0)
    if missing := sorted(set(range(1, steps + 1)) - set(found)):
        raise ConfigError(f"{where} lacks {len(missing)} of {steps} steps, the first of them {missing[0]}")
    if twice := sorted(step for step, times in found.items() if times > 1):
        raise ConfigError(f"{where} has {len(twice)} steps more than once, the first of them {twice[0]}")


def steps_recorded(run_dir: Path) -> tuple[int, str]:
    """Return the last step before the first missing or duplicate one in metrics.jsonl, and a text saying what is wrong.

    Lines that are not records are skipped.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return 0, "is missing"
    whole, broken = _split_lines(path)
    steps, last = count_trained_steps(line for _, line in whole), 0
    while steps[last + 1] == 1:
        last += 1
    where = f" (line {broken[0][0]} is no metrics record)" if broken else ""
    return last, f"{'has' if steps[last + 1] else 'lacks'} step {last + 1}{' twice' if steps[last + 1] else ''}{where}"


def cut_metrics(run_dir: Path, last_step: int) -> None:
    """Delete the lines of metrics.jsonl after `last_step`, and a torn last line, atomically. The file may be missing.

    Moves lines that are not records to metrics.damaged.jsonl and prints a warning.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return
    whole, broken = _split_lines(path)
    if broken:
        aside = path.with_name("metrics.damaged.jsonl")
        with aside.open("ab") as file:
            file.writelines(text for _, text in broken)
        print(f"warning: {path}, line {broken[0][0]} is no metrics record; moved to {aside.name}.", file=sys.stderr)
    replace_file(path, b"".join(text for text, line in whole if line["step"] <= last_step))


def _split_lines(path: Path) -> tuple[list[tuple[bytes, MetricsLine]], list[tuple[int, bytes]]]:
    """Return the records with their text, and other lines with their number; skips a torn last line."""
    whole, broken = [], []
    for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            whole.append((text + b"\n", _decode(text, str(path))))
        except ConfigError:
            broken.append((number, text + b"\n"))
    return whole, broken


def last_logged(run_dir: Path) -> float:
    """Return the unix time of the newest line of metrics.jsonl; 0 without lines."""
    path = Path(run_dir) / "metrics.jsonl"
    return max((line["time"] for _, line in _split_lines(path)[0]), default=0.0) if path.exists() else 0.0
