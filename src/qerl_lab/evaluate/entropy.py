"""`python -m qerl_lab.evaluate entropy`: does quantization raise entropy? Every weight format on the same tokens.

The dense model (its Linears in bfloat16) samples one completion per prompt at temperature 1. Every other model is
evaluated on the same tokens: entropy and KL(quantized || dense) over the whole vocabulary, in nats per token. Entropy
differences are paired by token; their intervals are over prompts.
"""

import hashlib
import json
import math
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from scipy import stats
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from qerl_lab import formats, rollout, terminal
from qerl_lab.config.keys import typed
from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.records import QUALITY
from qerl_lab.config.schema import DENSE_FORMAT, FormatConfig, RunConfig
from qerl_lab.config.spelling import word
from qerl_lab.disk import make_directory, replace_file, strict_json
from qerl_lab.evaluate import benchmarks, kl, weight_error
from qerl_lab.evaluate.options import CALIBRATED, EntropyOptions, chosen_formats, split
from qerl_lab.formats.format import Format
from qerl_lab.model import loading, policy
from qerl_lab.model.files import WeightFiles, local_folder, read_json
from qerl_lab.model.linear import packable
from qerl_lab.record.environment import environment
from qerl_lab.report.stats import Interval, p_value
from qerl_lab.rollout.engine import Sampling

ABOUT = "entropy.json"
NOT_FINITE = "not finite"
PROMPT_TOKENS = 2048  # longer questions are left out


@dataclass(frozen=True)
class Arm:
    """A packed model: a checkpoint in `folder`, or with None the dense model rounded to nearest while loading."""

    weight_format: Format
    method: str
    folder: Path | None = None

    @property
    def name(self) -> str:
        """Format, non-default options that are recorded, and method."""
        usual, own = FormatConfig(), asdict(self.weight_format)
        changed = [f"{key}={typed(value)}" for key, value in own.items() if value not in (None, getattr(usual, key))]
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

    Raises ConfigError for a model that is packed or cannot be loaded, and ValueError if a quantization method fails.
    """
    folder = local_folder(options.model, options.revision, key="model")
    remedy = f"Type it, and checkpoints=[{options.model}]."
    loading.refuse_packed(folder, f"model={options.model}", f"which the others are compared with. {remedy}")
    out = folder_of(options)
    if not options.overwrite:
        refuse_written(options, out)
    make_directory(out, f"out={out}")
    device = policy.device_of(options.device)
    arms = list(arms_of(options, out))
    texts = sample(options, device)
    print(f"{len(texts.pairs)} completions of {options.prompts}, {len(texts.states)} tokens, on {device}")
    rows = [{"arm": "dense", "part": "", **estimates(texts.entropies_T, texts)}]
    dense = WeightFiles(folder)
    with terminal.Amount("models", len(arms), unit="model") as bar:
        for arm in arms:
            rows += measured(options, arm, texts, dense, device)
            bar.advance(1)
    about = {
        "schema": 1, "options": asdict(options), "completions": len(texts.pairs), "tokens": len(texts.states),
        "rows": rows, "environment": environment(),
    }  # fmt: skip
    replace_file(out / ABOUT, strict_json(about))
    replace_file(out / "entropy.csv", pd.json_normalize(rows).to_csv(index=False, float_format="%.6g").encode())
    draw(rows, out / "entropy.png")
    print("\n".join(["", table(rows), *notes(rows)]))
    print(f"\nwritten: {terminal.near(out)}  ({ABOUT}, entropy.csv, entropy.png)")


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
    del now["out"], now["overwrite"]
    if differ := differences(now, before):
        raise ConfigError(
            f"out={out} is of another command: {differ}. Type another out, or overwrite=true to replace it."
        )


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """List the options that had another value before; empty if all agree."""
    return ", ".join(
        f"{key}={typed(value)} (was {typed(before[key])})"
        for key, value in now.items()
        if before.get(key, value) != value
    )


def arms_of(options: EntropyOptions, out: Path) -> Iterator[Arm]:
    """Yield an arm for every format and applicable method, then for the given checkpoints."""
    for name in chosen_formats(options):
        cfg = RunConfig()
        cfg.format.name = name
        for method in options.methods:
            if method == "rtn":
                yield Arm(formats.build(cfg.format), method)
            elif name in CALIBRATED:
                yield _arm_in(calibrated(options, name, method, out / f"{name}-{method}"))
    for given in options.checkpoints:
        yield _arm_in(local_folder(given, None, key="checkpoints"))


def _arm_in(folder: Path) -> Arm:
    """Return the arm of a packed directory; its method comes from quality.json of the quantize command."""
    try:
        stored = loading.stored_as(folder)
    except ValueError as error:
        raise ConfigError(f"{folder} cannot be read ({error}). Type another in checkpoints.") from None
    if stored is None:
        raise ConfigError(f"{folder} in checkpoints is dense; allowed: packed ones. Leave it out.")
    noted = folder / QUALITY
    method = read_json(noted).get("method", "unknown") if noted.is_file() else "unknown"
    return Arm(stored.weight_format, str(method), folder)


def calibrated(options: EntropyOptions, name: str, method: str, folder: Path) -> Path:
    """Create a calibrated checkpoint with the quantize command unless it exists; return its folder.

    Raises ValueError if the command fails, and ConfigError for a checkpoint of another model or other options.
    """
    words = {"model": options.model, "format": name, "method": method, "out": folder, "quality": "weights",
             "samples": options.samples, "tokens": options.tokens, "seed": options.seed, "dataset": options.dataset,
             "revision": options.revision, "device": options.device}  # fmt: skip
    dense = model_hash(local_folder(options.model, options.revision, key="model"))
    of = {key: value for key, value in words.items() if key not in ("out", "device")} | {"model_hash": dense}
    _refuse_another(folder, of)
    if not (folder / "config.json").is_file():
        line = [word(key, str(value)) for key, value in words.items() if value is not None]
        # In a separate process, so that llmcompressor's memory is freed when it ends.
        code = subprocess.run([sys.executable, "-m", "qerl_lab.quantize", *line], stdout=sys.stderr).returncode
        if code != 0:
            raise ValueError(f"python -m qerl_lab.quantize {shlex.join(line)} ended with {code}; its message is above")
    return folder


def _refuse_another(folder: Path, of: dict[str, Any]) -> None:
    """Record the options of a checkpoint before making it. Raises ConfigError if one made with others exists."""
    note = folder.with_name(f"{folder.name}.json")
    before = read_json(note) if note.is_file() else {}
    if (folder / "config.json").is_file() and before != of:
        differ = differences(of, before)
        why = f"is of another command: {differ}" if differ else "does not say what it was made of"
        raise ConfigError(f"{folder} {why}. Type another out, or move it away.")
    replace_file(note, json.dumps(of, indent=1).encode() + b"\n")


def sample(options: EntropyOptions, device: torch.device) -> Texts:
    """Sample one completion per prompt from the dense model at temperature 1."""
    name, path = split(options.prompts)
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


def measured(
    options: EntropyOptions, arm: Arm, texts: Texts, dense: WeightFiles, device: torch.device
) -> list[dict[str, Any]]:
    """Return the row of an arm, and for round to nearest also one row per part of its error."""
    cfg = arm_config(options, arm)
    model, _ = policy.load_base(cfg, device)
    entropies_T, kl_T = compared(model, texts, options.batch_size)
    del model
    folder = local_folder(options.model, options.revision, key="model")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    linears = packable(loading.empty_model(config, torch.float32), cfg.format.ignore)
    packed = None if arm.folder is None else WeightFiles(arm.folder)
    errors = weight_error.layers(arm.weight_format, dense, packed, linears, device, fit_scales=arm.method == "awq")
    row = {"arm": arm.name, "part": "", **estimates(entropies_T, texts), "kl": named(kl_T, texts)}
    row |= {} if arm.folder is None else {"checkpoint": terminal.near(arm.folder)}
    row["weight_error"] = weight_error.total(errors)
    if not options.parts or arm.folder is not None or row["weight_error"]["parts"] is None:
        return [row]
    return [row, *parts_alone(options, arm, texts, dense, linears, entropies_T)]


def arm_config(options: EntropyOptions, arm: Arm) -> RunConfig:
    """Return the configuration that loads an arm's model."""
    cfg = run_config(options, arm.weight_format.NAME)
    if arm.folder is None:
        return cfg
    stored = loading.stored_as(arm.folder)
    assert stored is not None
    own = {key: value for key, value in asdict(stored.weight_format).items() if value is not None}
    cfg.model.path, cfg.model.revision = str(arm.folder), None
    cfg.format = replace(cfg.format, ignore=list(stored.ignore), **own)
    return cfg


def parts_alone(
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
        entropies_T, kl_T = compared(model, texts, options.batch_size)
        yield {"arm": arm.name, "part": part, **estimates(entropies_T, texts), "kl": named(kl_T, texts)}
    yield {"arm": arm.name, "part": "scale", "entropy_change": change(whole_T - entropies_T, texts)}


def compared(model: PreTrainedModel, texts: Texts, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return entropy of a model and KL(model || dense) at each token of the texts: float64 [T] each, on the CPU."""
    states, entropies, divergences = hidden_states(model, texts.pairs, batch_size), list[Tensor](), list[Tensor]()
    for q, p in zip(kl.logprobs(model, states), kl.logprobs(texts.model, texts.states), strict=True):
        entropies.append(kl.entropy_per_token(q).cpu())
        divergences.append(kl.per_token(q, p).cpu())
    return torch.cat(entropies), torch.cat(divergences)


def estimates(entropies_T: Tensor, texts: Texts) -> dict[str, Any]:
    """Return mean entropy and its change from the dense model, each with interval."""
    return {
        "entropy": named(entropies_T, texts),
        "entropy_change": change(entropies_T - texts.entropies_T, texts),
    }


def change(values_T: Tensor, texts: Texts) -> dict[str, float]:
    """Return a mean difference with interval and p-value; the p-value is NaN if the rest is not finite."""
    found = named(values_T, texts)
    if not all(map(math.isfinite, found.values())):
        return found | {"p": math.nan}
    return found | {"p": p_value(lambda level: interval(values_T, texts.lengths, level), len(texts.lengths))}


def named(values_T: Tensor, texts: Texts) -> dict[str, float]:
    """Return mean and interval of token values as a dict."""
    return dict(zip(("mean", "low", "high"), interval(values_T, texts.lengths), strict=True))


def interval(values_T: Tensor, lengths: list[int], level: float = 0.95) -> Interval:
    """Return mean over tokens with Student's t interval over texts, because tokens of one text are correlated."""
    found = kl.mean(values_T, lengths)
    assert found.standard_error is not None, "two texts at least"
    half = float(stats.t.ppf(0.5 + level / 2, len(lengths) - 1)) * found.standard_error
    return found.nats, found.nats - half, found.nats + half


def label(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """Return a row's model name, with the checkpoint's directory if several rows share the name."""
    alike = [other for other in rows if other["arm"] == row["arm"] and not other["part"]]
    return f"{row['arm']} in {row['checkpoint']}" if len(alike) > 1 and "checkpoint" in row else str(row["arm"])


def table(rows: list[dict[str, Any]]) -> str:
    """Format the rows: one per model, and one per error part added alone to the dense weights."""
    head = ["weights", "entropy", "change, 95% interval", "p", "KL to dense", "error", *weight_error.PARTS]
    lines = [cells(row, rows) for row in rows]
    return terminal.columns([head, *(line + [""] * (len(head) - len(line)) for line in lines)])


def cells(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    """Return the table cells of a row."""
    found, error = row["entropy_change"], row.get("weight_error")
    line = [f"  by {row['part']}" if row["part"] else label(row, rows)]
    line += [number(row["entropy"]["mean"], ".4f") if "entropy" in row else ""]
    if row["arm"] != "dense":
        is_known = all(map(math.isfinite, found.values()))
        line += [f"{found['mean']:+.4f} [{found['low']:+.4f}, {found['high']:+.4f}]" if is_known else NOT_FINITE]
        line += [number(found["p"], ".3f" if found["p"] >= 0.001 else ".0g")]
        line += [number(row["kl"]["mean"], ".5f") if "kl" in row else ""]
    if error:
        parts = (error["parts"] or {}).values()
        line += [number(error["relative"], ".5f"), *(number(share, "+.0%") for share in parts)]
    return line


def number(value: float, how: str) -> str:
    return format(value, how) if math.isfinite(value) else NOT_FINITE


def notes(rows: list[dict[str, Any]]) -> list[str]:
    """Return a note for each row with NaN or infinite numbers."""
    broken = [row for row in rows if NOT_FINITE in cells(row, rows)]
    names = [label(row, rows) + (f" by {row['part']}" if row["part"] else "") for row in broken]
    why = "logits or weights of the model are NaN or infinite; entropy.json has null there"
    return [f"note: {name}: {why}" for name in names]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Plot the entropy changes and the shares of the weight error."""
    from qerl_lab.report import plots  # matplotlib takes a second

    named_rows = {f"{row['arm']}, by {row['part']}" if row["part"] else label(row, rows): row for row in rows[1:]}
    changes = {name: row["entropy_change"] for name, row in named_rows.items()}
    shares = {
        name: row["weight_error"]["parts"] for name, row in named_rows.items()
        if row.get("weight_error") and row["weight_error"]["parts"]
    }  # fmt: skip
    plots.save_entropy({name: (c["mean"], c["low"], c["high"]) for name, c in changes.items()}, shares, path)
