"""`python -m qerl_lab.evaluate entropy`: does quantization raise entropy? Every weight format on the same tokens.

The dense model (its Linears in bfloat16) samples one completion per prompt at temperature 1. Every other model is
evaluated on the same tokens: entropy and KL(quantized || dense) over the whole vocabulary, in nats per token. Entropy
differences are paired by token; their intervals are over prompts.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from qerl_lab import formats, rollout
from qerl_lab.config.conf_folder import choices_of
from qerl_lab.config.keys import spell_value
from qerl_lab.config.option import ConfigError
from qerl_lab.config.records import QUALITY
from qerl_lab.config.schema import DENSE_FORMAT, FormatConfig, RunConfig
from qerl_lab.evaluate import benchmarks, kl, weight_error
from qerl_lab.evaluate.evaluate_options import EntropyOptions, name_and_path
from qerl_lab.formats.format import Format
from qerl_lab.model import loading, policy
from qerl_lab.model.linear import packable
from qerl_lab.model.weight_files import WeightFiles, local_folder, read_json
from qerl_lab.record.environment import environment
from qerl_lab.report.stats import Interval, p_value
from qerl_lab.rollout.engine import Sampling
from qerl_lab.system import terminal
from qerl_lab.system.disk import make_directory, replace_file, strict_json

ABOUT = "entropy.json"
NOT_FINITE = "not finite"
PROMPT_TOKENS = 2048  # longer questions are left out


@dataclass(frozen=True)
class Arm:
    """A packed model that `cfg` loads: a checkpoint in `folder`, or with None the dense model rounded to nearest."""

    cfg: RunConfig
    weight_format: Format
    method: str
    folder: Path | None = None

    @property
    def name(self) -> str:
        """Format, non-default options that are recorded, and method."""
        usual, own = FormatConfig(), asdict(self.weight_format)
        changed = [
            f"{key}={spell_value(value)}" for key, value in own.items() if value not in (None, getattr(usual, key))
        ]
        return " ".join([self.weight_format.NAME, *changed, self.method])


@dataclass(frozen=True)
class Texts:
    """Prompts and completions, with the dense policy's hidden states [T, hidden] and entropies [T] on them."""

    policy: policy.Policy
    pairs: kl.Pairs
    states: Tensor
    entropies_T: Tensor

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model.get_base_model()

    @property
    def lengths(self) -> list[int]:
        return [len(completion) for _, completion in self.pairs]


def run(options: EntropyOptions) -> None:
    """Measure every arm, print the table and write the results.

    Raises ConfigError for a model that is packed or cannot be loaded.
    """
    folder = local_folder(options.model, options.revision, key="model")
    remedy = f"Type it, and checkpoints=[{options.model}]."
    loading.refuse_packed(folder, f"model={options.model}", f"which the others are compared with. {remedy}")
    out = folder_of(options)
    if not options.overwrite:
        refuse_written(options, out)
    make_directory(out, f"out={out}")
    device = policy.device_of(options.device)
    arms = list(arms_of(options))
    texts = sample(options, device)
    print(f"{len(texts.pairs)} completions of {options.prompts}, {len(texts.states)} tokens, on {device}")
    rows = [{"arm": "dense", "part": "", **estimates(texts.entropies_T, texts)}]
    dense = WeightFiles(folder)
    with terminal.Amount("models", len(arms), unit="model") as bar:
        for arm in arms:
            rows += measure_arm(options, arm, texts, dense, device)
            bar.advance(1)
    about = {
        "schema": 1, "options": asdict(options), "completions": len(texts.pairs), "tokens": len(texts.states),
        "rows": rows, "environment": environment(),
    }  # fmt: skip
    replace_file(out / ABOUT, strict_json(about))
    replace_file(out / "entropy.csv", pd.json_normalize(rows).to_csv(index=False, float_format="%.6g").encode())
    names = row_names(rows)
    draw(rows, names, out / "entropy.png")
    print("\n".join(["", table(rows, names)]))
    print(f"\nwritten: {terminal.format_path(out)}  ({ABOUT}, entropy.csv, entropy.png)")


def folder_of(options: EntropyOptions) -> Path:
    """Return `out`, or a folder below evaluations/ named by a hash of the options."""
    if options.out:
        return Path(options.out).expanduser().absolute()
    of = {key: value for key, value in asdict(options).items() if key != "overwrite"}
    key = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:8]
    return (Path("evaluations") / Path(options.model).name / f"entropy-{key}").absolute()


def refuse_written(options: EntropyOptions, out: Path) -> None:
    """Raise ConfigError if `out` holds results of other options. Results of the same options may be replaced."""
    if not (out / ABOUT).is_file():
        return
    before, now = read_json(out / ABOUT).get("options", {}), asdict(options)
    differ = [
        f"{key}={spell_value(value)} (was {spell_value(before[key])})"
        for key, value in now.items()
        if key not in ("out", "overwrite") and before.get(key, value) != value
    ]
    if differ:
        raise ConfigError(
            f"out={out} is of another command: {', '.join(differ)}. Type another out, or overwrite=true to replace it."
        )


def arms_of(options: EntropyOptions) -> Iterator[Arm]:
    """Yield an arm for every packed format, rounded to nearest, then for the given checkpoints."""
    names = choices_of("format") if "all" in options.formats else list(dict.fromkeys(options.formats))
    for name in names:
        if name != DENSE_FORMAT:
            cfg = run_config(options, name)
            yield Arm(cfg, formats.build(cfg.format), "rtn")
    for given in options.checkpoints:
        folder = local_folder(given, None, key="checkpoints")
        try:
            stored = loading.stored_as(folder)
        except ValueError as error:
            raise ConfigError(f"{folder} cannot be read ({error}). Type another in checkpoints.") from None
        if stored is None:
            raise ConfigError(f"{folder} in checkpoints is dense; allowed: packed ones. Leave it out.")
        quality = folder / QUALITY  # of the quantize command
        method = read_json(quality).get("method", "unknown") if quality.is_file() else "unknown"
        cfg, weight_format = run_config(options, stored.weight_format.NAME), stored.weight_format
        own = {key: value for key, value in asdict(weight_format).items() if value is not None}
        cfg.model.path, cfg.model.revision = str(folder), None
        cfg.format = replace(cfg.format, ignore=list(stored.ignore), **own)
        yield Arm(cfg, weight_format, str(method), folder)


def sample(options: EntropyOptions, device: torch.device) -> Texts:
    """Sample one completion per prompt from the dense model at temperature 1."""
    name, path = name_and_path(options.prompts)
    task = benchmarks.questions_of(benchmarks.task_config(None, name, path), f"prompts={name}:")
    cfg = run_config(options, DENSE_FORMAT)
    dense = policy.build(cfg, device)
    prompts = [dense.prompt_ids(task.messages(question)) for question in task.heldout[: options.questions]]
    prompts = [prompt for prompt in prompts if len(prompt) <= PROMPT_TOKENS]
    if len(prompts) < 2:
        raise ConfigError(f"prompts={options.prompts} has {len(prompts)} questions of at most {PROMPT_TOKENS} tokens; "
                          "allowed: two or more. Type another.")  # fmt: skip
    most = options.max_completion_tokens
    print(f"sampling {len(prompts)} completions of at most {most} tokens by the dense model, on {device}", flush=True)
    sampling = Sampling(most, options.seed)
    completions = rollout.build(cfg, dense).generate(prompts, 1, sampling).completion_ids_P_G
    pairs = [(prompt, group[0]) for prompt, group in zip(prompts, completions, strict=True)]
    model = dense.model.get_base_model()
    states = hidden_states(model, pairs, options.batch_size)
    entropies = torch.cat([kl.entropy_per_token(p).cpu() for p in kl.logprobs(model, states)])
    return Texts(dense, pairs, states, entropies)


def run_config(options: EntropyOptions, name: str) -> RunConfig:
    """Return the configuration that loads the model in the format `name`."""
    cfg = RunConfig()
    cfg.model.path, cfg.model.revision, cfg.format.name = options.model, options.revision, name
    return cfg


def hidden_states(model: PreTrainedModel, pairs: kl.Pairs, batch_size: int) -> Tensor:
    """Compute `kl.hidden_states` in batches of `batch_size` texts."""
    return torch.cat(
        [kl.hidden_states(model, pairs[begin : begin + batch_size]) for begin in range(0, len(pairs), batch_size)]
    )


def measure_arm(
    options: EntropyOptions, arm: Arm, texts: Texts, dense: WeightFiles, device: torch.device
) -> list[dict[str, Any]]:
    """Return the row of an arm, and for round to nearest also one row per part of its error."""
    model, _ = policy.load_base(arm.cfg, device)
    entropies_T, kl_T = compare_to_dense(model, texts, options.batch_size)
    del model
    folder = local_folder(options.model, options.revision, key="model")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    linears = packable(loading.empty_model(config, torch.float32), arm.cfg.format.ignore)
    packed = None if arm.folder is None else WeightFiles(arm.folder)
    errors = weight_error.layers(arm.weight_format, dense, packed, linears, device, fit_scales=arm.method == "awq")
    row = {"arm": arm.name, "part": "", **estimates(entropies_T, texts), "kl": mean_and_interval(kl_T, texts)}
    row |= {} if arm.folder is None else {"checkpoint": terminal.format_path(arm.folder)}
    row["weight_error"] = weight_error.total(errors)
    if not options.parts or arm.folder is not None or row["weight_error"]["parts"] is None:
        return [row]
    return [row, *measure_error_parts(options, arm, texts, dense, linears, entropies_T)]


def measure_error_parts(
    options: EntropyOptions, arm: Arm, texts: Texts, dense: WeightFiles, linears: list[str], whole_T: Tensor
) -> Iterator[dict[str, Any]]:
    """Measure the dense model with parts of the rounding error added: grid, dead, and both.

    Both together equal the format with ideal scales. The effect of rounding the scales is the arm's entropy, `whole_T`,
    minus the entropy with ideal scales.
    """
    model, _ = policy.load_base(run_config(options, DENSE_FORMAT), texts.states.device)
    entropies_T, kl_T = texts.entropies_T, torch.zeros_like(texts.entropies_T)
    for part in ("grid", "dead", "grid and dead"):
        for layer in weight_error.layers(arm.weight_format, dense, None, linears, texts.states.device):
            added = {"grid": layer.grid, "dead": layer.dead}
            weight = model.get_parameter(f"{layer.name}.weight")
            weight.data.copy_(layer.weight + sum(added[one] for one in part.split(" and ")))
        entropies_T, kl_T = compare_to_dense(model, texts, options.batch_size)
        yield {"arm": arm.name, "part": part, **estimates(entropies_T, texts), "kl": mean_and_interval(kl_T, texts)}
    yield {"arm": arm.name, "part": "scale", "entropy_change": change(whole_T - entropies_T, texts)}


def compare_to_dense(model: PreTrainedModel, texts: Texts, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return entropy of a model and KL(model || dense) at each token of the texts: float64 [T] each, on the CPU."""
    states, entropies, divergences = hidden_states(model, texts.pairs, batch_size), list[Tensor](), list[Tensor]()
    for q, p in zip(kl.logprobs(model, states), kl.logprobs(texts.model, texts.states), strict=True):
        entropies.append(kl.entropy_per_token(q).cpu())
        divergences.append(kl.per_token(q, p).cpu())
    return torch.cat(entropies), torch.cat(divergences)


def estimates(entropies_T: Tensor, texts: Texts) -> dict[str, Any]:
    """Return mean entropy and its change from the dense model, each with interval, and `forking`'s two means."""
    return {
        "entropy": mean_and_interval(entropies_T, texts),
        **dict(zip(("entropy_forking", "entropy_rest"), forking(entropies_T), strict=True)),
        "entropy_change": change(entropies_T - texts.entropies_T, texts),
    }


def forking(entropies_T: Tensor) -> tuple[float, float]:
    """Return mean entropy in nats of a model's forking tokens and of the rest.

    Forking tokens are the fifth with the highest entropy under the model itself (arXiv 2506.01939), rounded up.
    """
    ranked = entropies_T.double().sort(descending=True).values
    count = math.ceil(len(ranked) / 5)
    return ranked[:count].mean().item(), ranked[count:].mean().item()


def change(values_T: Tensor, texts: Texts) -> dict[str, float]:
    """Return a mean difference with interval and p-value; the p-value is NaN if the rest is not finite."""
    found = mean_and_interval(values_T, texts)
    if not all(map(math.isfinite, found.values())):
        return found | {"p": math.nan}
    return found | {"p": p_value(lambda level: interval(values_T, texts.lengths, level), len(texts.lengths))}


def mean_and_interval(values_T: Tensor, texts: Texts) -> dict[str, float]:
    """Return mean and interval of token values as a dict."""
    return dict(zip(("mean", "low", "high"), interval(values_T, texts.lengths), strict=True))


def interval(values_T: Tensor, lengths: list[int], level: float = 0.95) -> Interval:
    """Return mean over tokens with Student's t interval over texts, because tokens of one text are correlated."""
    found = kl.mean(values_T, lengths)
    assert found.standard_error is not None, "two texts at least"
    half = float(stats.t.ppf(0.5 + level / 2, len(lengths) - 1)) * found.standard_error
    return found.nats, found.nats - half, found.nats + half


def row_names(rows: list[dict[str, Any]]) -> list[str]:
    """Name each row by model and part, and by the checkpoint's directory where several models have one name."""
    models = Counter(row["arm"] for row in rows if not row["part"])
    names = []
    for row in rows:
        within = f" in {row['checkpoint']}" if models[row["arm"]] > 1 and "checkpoint" in row else ""
        names.append(f"{row['arm']}, by {row['part']}" if row["part"] else f"{row['arm']}{within}")
    return names


def table(rows: list[dict[str, Any]], names: list[str]) -> str:
    """Format the rows, one per model, and one per error part added alone to the dense weights; then notes."""
    head = ["weights", "entropy", "forking", "rest", "change, 95% interval", "p", "KL to dense", "error"]
    lines, notes = [[*head, *weight_error.PARTS]], list[str]()
    for row, name in zip(rows, names, strict=True):
        line = [f"  by {row['part']}" if row["part"] else name, *cells(row)]
        lines.append(line + [""] * (len(lines[0]) - len(line)))
        if NOT_FINITE in line:
            notes.append(
                f"note: {name}: logits or weights of the model are NaN or infinite; entropy.json has null there"
            )
    return "\n".join([terminal.columns(lines), *notes])


def cells(row: dict[str, Any]) -> list[str]:
    """Return the table cells of a row after its name."""

    def number(value: float, how: str) -> str:
        return format(value, how) if math.isfinite(value) else NOT_FINITE

    found, error = row["entropy_change"], row.get("weight_error")
    means = (row["entropy"]["mean"], row["entropy_forking"], row["entropy_rest"]) if "entropy" in row else ()
    line = [number(mean, ".4f") for mean in means] or [""] * 3
    if row["arm"] != "dense":
        is_known = all(map(math.isfinite, found.values()))
        line += [f"{found['mean']:+.4f} [{found['low']:+.4f}, {found['high']:+.4f}]" if is_known else NOT_FINITE]
        line += [number(found["p"], ".3f" if found["p"] >= 0.001 else ".0g")]
        line += [number(row["kl"]["mean"], ".5f") if "kl" in row else ""]
    if error:
        parts = (error["parts"] or {}).values()
        line += [number(error["relative"], ".5f"), *(number(share, "+.0%") for share in parts)]
    return line


def draw(rows: list[dict[str, Any]], names: list[str], path: Path) -> None:
    """Plot the entropy changes and the shares of the weight error."""
    from qerl_lab.report import plots  # matplotlib takes a second

    changes, shares = {}, {}
    for row, name in list(zip(rows, names, strict=True))[1:]:
        found = row["entropy_change"]
        changes[name] = found["mean"], found["low"], found["high"]
        if row.get("weight_error") and row["weight_error"]["parts"]:
            shares[name] = row["weight_error"]["parts"]
    plots.save_entropy(changes, shares, path)
