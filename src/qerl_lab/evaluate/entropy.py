"""`python -m qerl_lab.evaluate entropy`: does quantization raise entropy? Every weight format on the same tokens.

The dense model (its Linears in bfloat16) samples one completion per prompt at temperature 1. Every other model is
evaluated on the same tokens: entropy and KL(quantized || dense) over the whole vocabulary, in nats per token. Entropy
differences are paired by token; their intervals are over prompts. An arm is a format with its method.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy import stats
from torch import Tensor
from transformers import PreTrainedModel

from qerl_lab import formats, rollout
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.keys import spell_value
from qerl_lab.config.message import with_noun
from qerl_lab.config.option import ConfigError
from qerl_lab.config.records import QUALITY
from qerl_lab.config.schema import DENSE_FORMAT, FormatConfig, RunConfig
from qerl_lab.evaluate import kl
from qerl_lab.evaluate.evaluate_options import EntropyOptions, split_name_and_path
from qerl_lab.evaluate.subject import load_questions, packed_format, task_config
from qerl_lab.model import loading, policy, weight_error
from qerl_lab.model.linear import packed_layers
from qerl_lab.model.on_disk import read_model_json
from qerl_lab.model.weight_files import WeightFiles, local_folder
from qerl_lab.record.environment import environment
from qerl_lab.report.stats import Interval, format_interval, p_value
from qerl_lab.rollout.engine import Sampling
from qerl_lab.system import terminal
from qerl_lab.system.disk import make_directory, replace_file, strict_json
from qerl_lab.tasks import Task

ABOUT = "entropy.json"
SCHEMA = 2  # 1 also had rows for parts of the weight error


class Arm(NamedTuple):
    """A packed model that is compared with the dense one: a format, rounded to nearest, or a checkpoint."""

    cfg: RunConfig  # loads the model
    method: str  # of quantization: rtn, gptq, awq or unknown
    folder: Path | None = None  # of the packed checkpoint; None: the dense model, rounded to nearest

    @property
    def name(self) -> str:
        """Return the name in the results: format, recorded options that differ from the default, and method."""
        usual, values = FormatConfig(), asdict(formats.build(self.cfg.format))
        options = [f"{key}={spell_value(value)}" for key, value in values.items() if value != getattr(usual, key)]
        return " ".join([self.cfg.format.name, *options, self.method])


@dataclass(frozen=True)
class Texts:
    """Texts that the dense model sampled, with its hidden states and entropies at all T completion tokens.

    Every other model is compared with the dense one on these texts.
    """

    policy: policy.Policy
    pairs: kl.Pairs
    states: Tensor  # [T, hidden]
    entropies_T: Tensor
    batch_size: int  # texts that a model reads at once

    @property
    def model(self) -> PreTrainedModel:
        """Return the dense model that sampled the texts."""
        return self.policy.base

    @property
    def lengths(self) -> list[int]:
        """Return the number of completion tokens of each text."""
        return [len(completion) for _, completion in self.pairs]


def run(options: EntropyOptions) -> None:
    """Measure every format and checkpoint, print the table, and write entropy.json and entropy.png.

    Raises ConfigError if the model is packed or cannot be loaded, or if `out` holds results and `overwrite` is not set.
    """
    folder = local_folder(options.model, options.revision, key="model")
    remedy = f"Type it, and checkpoints=[{options.model}]."
    loading.require_dense(folder, f"model={options.model}", f"which the others are compared with. {remedy}")
    out = results_folder(options)
    if options.out and (out / ABOUT).is_file() and not options.overwrite:
        raise ConfigError(f"out={options.out} holds results. Type another out, or overwrite=true to replace them.")
    device = policy.device_of(options.device)
    arms = list(arms_to_measure(options))
    task = read_questions(options)
    make_directory(out, f"out={out}")  # before the model answers, and after all that may be refused
    texts = sample_texts(options, device, task)
    print(f"{with_noun(len(texts.pairs), 'completion')} of {options.prompts}, {len(texts.states)} tokens, on {device}")
    rows = [{"arm": "dense", **entropy_columns(texts.entropies_T, texts)}]
    with terminal.ProgressBar("models", len(arms), unit="model") as bar:
        for arm in arms:
            rows.append(measure_arm(arm, texts, folder))
            bar.advance(1)
    about = {
        "schema": SCHEMA, "options": asdict(options), "completions": len(texts.pairs), "tokens": len(texts.states),
        "rows": rows, "environment": environment(),
    }  # fmt: skip
    replace_file(out / ABOUT, strict_json(about))
    from qerl_lab.report import plots  # matplotlib takes a second

    changes = {row_name(row): row["entropy_change"] for row in rows[1:]}
    intervals = {name: (change["mean"], change["low"], change["high"]) for name, change in changes.items()}
    plots.save_entropy(intervals, out / "entropy.png")
    print(f"\n{table(rows)}\n\nwritten: {terminal.format_path(out)}  ({ABOUT}, entropy.png)")


def results_folder(options: EntropyOptions) -> Path:
    """Return the absolute path for results: `options.out`, else evaluations/MODEL/entropy-(hash of the options)."""
    if options.out:
        return Path(options.out).expanduser().absolute()
    of = {key: value for key, value in asdict(options).items() if key != "overwrite"}
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:8]
    return (Path("evaluations") / Path(options.model).name / f"entropy-{key}").absolute()


def arms_to_measure(options: EntropyOptions) -> Iterator[Arm]:
    """Yield an arm for every packed format, rounded to nearest, then for every checkpoint.

    Raises ConfigError if a checkpoint cannot be found or is dense.
    """
    names = choices_of("format") if "all" in options.formats else dict.fromkeys(options.formats)
    for name in names:
        if name != DENSE_FORMAT:
            yield Arm(run_config(options, name), "rtn")
    for given in options.checkpoints:
        folder = local_folder(given, None, key="checkpoints")
        stored = loading.stored_as(folder)
        if stored is None:
            raise ConfigError(f"{given} in checkpoints is dense; allowed: packed ones. Leave it out.")
        quality = folder / QUALITY  # of the quantize command
        method = read_model_json(quality).get("method") if quality.is_file() else None
        cfg = RunConfig(format=packed_format(stored))
        cfg.model.path = str(folder)
        yield Arm(cfg, method or "unknown", folder)


def read_questions(options: EntropyOptions) -> Task:
    """Read the questions of `options.prompts`. Raises ConfigError if they cannot be read, or are fewer than two."""
    name, path = split_name_and_path(options.prompts)
    task = load_questions(task_config(None, name, path), f"prompts={name}:")
    if len(task.heldout) < 2:
        raise ConfigError(
            f"prompts={options.prompts} has {with_noun(len(task.heldout), 'question')}; allowed: two or more, because "
            "the intervals are over texts. Type prompts=NAME:PATH of more questions."
        )
    return task


def sample_texts(options: EntropyOptions, device: torch.device, task: Task | None = None) -> Texts:
    """Let the dense model answer each question once at temperature 1, and measure its entropy at each token.

    The packed models are compared with it on these texts (`compare_to_dense`), so its hidden states are kept. `task`
    has the questions; None calls `read_questions`.
    """
    task = task or read_questions(options)
    cfg = run_config(options, DENSE_FORMAT)
    dense = policy.build(cfg, device, fits_names=True)
    dense.chat.key = ""  # these commands have no option for the instruction
    prompts = [dense.chat.prompt_ids(task.messages(question)) for question in task.heldout[: options.questions]]
    most = options.max_completion_tokens
    sampled = with_noun(len(prompts), "completion")
    print(f"sampling {sampled} of at most {most} tokens by the dense model, on {device}", flush=True)
    completions = rollout.build(cfg, dense).generate(prompts, 1, Sampling(most, options.seed)).completions
    pairs = [(prompt, completion.ids) for prompt, completion in zip(prompts, completions, strict=True)]
    model = dense.base
    states = kl.hidden_states(model, pairs, options.batch_size)
    entropies = torch.cat([kl.entropy_per_token(p).cpu() for p in kl.logprobs(model, states)])
    return Texts(dense, pairs, states, entropies, options.batch_size)


def run_config(options: EntropyOptions, name: str) -> RunConfig:
    """Return the configuration that loads `options.model` in the weight format `name`."""
    cfg = RunConfig()
    cfg.model.path, cfg.model.revision, cfg.format.name = options.model, options.revision, name
    return cfg


def measure_arm(arm: Arm, texts: Texts, folder: Path) -> dict[str, Any]:
    """Measure a packed model against the dense model in `folder`; return its row of the results.

    The row has entropy and KL on `texts`, and the error of the weights.
    """
    model, _ = policy.load_base(arm.cfg, texts.states.device)
    entropies_T, kl_T = compare_to_dense(model, texts)
    row = {"arm": arm.name, **entropy_columns(entropies_T, texts), "kl": mean_and_interval(kl_T, texts)}
    if arm.folder is not None:
        row["checkpoint"] = terminal.format_path(arm.folder)
    error = weight_error.of_layers(packed_layers(model), WeightFiles(folder), fit_scales=arm.method == "awq")
    return row | {"weight_error": error}


def compare_to_dense(model: PreTrainedModel, texts: Texts) -> tuple[Tensor, Tensor]:
    """Return entropy and KL(`model` || dense model) at each token of `texts`, in nats: float64 [T] each, on the CPU.

    Only `model` reads the texts: `texts` holds the hidden states of the dense model.
    """
    states = kl.hidden_states(model, texts.pairs, texts.batch_size)
    both = zip(kl.logprobs(model, states), kl.logprobs(texts.model, texts.states), strict=True)
    measured = [torch.stack([kl.entropy_per_token(q), kl.per_token(q, p)]).cpu() for q, p in both]
    entropies_T, kl_T = torch.cat(measured, 1)
    return entropies_T, kl_T


def entropy_columns(entropies_T: Tensor, texts: Texts) -> dict[str, Any]:
    """Return the columns on entropy in a row of the results, from a model's entropy in nats at each token [T].

    They are the mean, the change from the dense model, and means over the model's own forking tokens (see
    `kl.split_by_entropy`) and over the rest.
    """
    forking, rest = kl.split_by_entropy(entropies_T)
    return {
        "entropy": mean_and_interval(entropies_T, texts),
        "entropy_forking": forking,
        "entropy_rest": rest,
        "entropy_change": mean_change(entropies_T - texts.entropies_T, texts),
    }


def mean_change(values_T: Tensor, texts: Texts) -> dict[str, float]:
    """Return mean, 95% interval and p-value of differences at each token [T], as `mean`, `low`, `high`, `p`.

    `p` is NaN if a difference is not finite.
    """
    is_finite = bool(values_T.isfinite().all())
    p = p_value(lambda level: interval(values_T, texts.lengths, level), len(texts.lengths)) if is_finite else math.nan
    return mean_and_interval(values_T, texts) | {"p": p}


def mean_and_interval(values_T: Tensor, texts: Texts) -> dict[str, float]:
    """Return the mean of token values [T] and its 95% interval, as `mean`, `low`, `high`."""
    return dict(zip(("mean", "low", "high"), interval(values_T, texts.lengths), strict=True))


def interval(values_T: Tensor, lengths: list[int], level: float = 0.95) -> Interval:
    """Return (mean, low, high) of the values at all tokens, by Student's t over texts. Needs two texts or more.

    `values_T` and `lengths` are as in `kl.mean_and_error`.
    """
    mean, standard_error = kl.mean_and_error(values_T, lengths)
    half = float(stats.t.ppf(0.5 + level / 2, len(lengths) - 1)) * standard_error
    return mean, mean - half, mean + half


def row_name(row: dict[str, Any]) -> str:
    """Return the name of a row of the results: the model, for a checkpoint also its directory."""
    return row["arm"] + (f" in {row['checkpoint']}" if "checkpoint" in row else "")


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows as the printed table: one line per model, the dense one first."""
    lines = [["weights", "entropy", "forking", "rest", "change, 95% interval", "p", "KL to dense", "weight error"]]
    for row in rows:
        means = (row["entropy"]["mean"], row["entropy_forking"], row["entropy_rest"])
        cells = [row_name(row), *(f"{mean:.4f}" for mean in means)]
        if row["arm"] != "dense":
            change = row["entropy_change"]
            cells += [
                f"{change['mean']:+.4f} {format_interval(change['low'], change['high'], '{:+.4f}'.format)}",
                f"{change['p']:.3f}" if change["p"] >= 0.001 else f"{change['p']:.0g}",
                f"{row['kl']['mean']:.5f}",
                f"{row['weight_error']['relative']:.5f}",
            ]
        lines.append(cells + [""] * (len(lines[0]) - len(cells)))
    return terminal.columns(lines)
