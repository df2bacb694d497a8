"""How good a quantized checkpoint is: bits, sizes, SQNR of every layer, and KL to the model that it was made from.

Everything is measured on the files that are there, in one way for all methods: weights tensor by tensor, then the two
models one after the other on the same text. `quality.json` is described in docs/quantize.md.
"""

import json
import math
import random
import re
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from qerl_lab import policy, progress
from qerl_lab.config import ConfigError, FormatConfig, ModelConfig, RunConfig
from qerl_lab.formats.codecs import codec
from qerl_lab.formats.files import WeightFiles
from qerl_lab.pretrain import task_config
from qerl_lab.quantize_config import QuantizeConfig
from qerl_lab.record import environment, replace_file
from qerl_lab.report import plots, tables
from qerl_lab.tasks import arithmetic

SCHEMA = 1
LOWEST = 5
PROBLEMS = 16
WINDOWS, WINDOW_TOKENS = 4, 192  # of a text file
EVERYTHING = "re:.*"  # as `ignore`: the dense model as it is, nothing rounded
FIT_ROUNDS = 4

Pairs = list[tuple[list[int], list[int]]]  # what is given, and the tokens on which the models are compared


class Layer(NamedTuple):
    """One packed Linear: sums of squares of its weight and of what packing changed, weights, bytes of its tensors."""

    name: str
    signal: float
    error: float
    weights: int
    bytes: int

    @property
    def sqnr_db(self) -> float:
        """10 log10(sum w^2 / sum (w - w')^2); infinite where nothing changed."""
        return decibels(self.signal, self.error)


def decibels(signal: float, error: float) -> float:
    """10 log10(signal / error)."""
    return 10 * math.log10(signal / error) if error > 0 < signal else math.inf


def measure(
    cfg: QuantizeConfig, source: Path, linears: list[str], folder: Path, device: torch.device
) -> dict[str, Any]:
    """Compare the checkpoint in `folder` with the dense `source`; write quality.json and sqnr.png there."""
    started = time.time()
    dense, packed = WeightFiles(source), WeightFiles(folder)
    layers = measure_layers(cfg, dense, packed, linears, device)
    before, after = (sum(_bytes(files, name) for name in files.names) for files in (dense, packed))
    count = sum(_numel(dense, name) for name in dense.names)
    in_linears = sum(layer.weights for layer in layers)
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "model": cfg.model, "revision": cfg.revision, "format": cfg.format, "method": cfg.method,
        "ignore": cfg.ignore, "options": codec_options(cfg),
        "calibration": None if cfg.method == "rtn" else
        {"dataset": cfg.dataset, "samples": cfg.samples, "tokens": cfg.tokens, "seed": cfg.seed},
        "weights": {"all": count, "quantized": in_linears},
        "bytes": {"before": before, "after": after},
        "bits_per_weight": {
            "quantized": sum(layer.bytes for layer in layers) * 8 / in_linears, "model": after * 8 / count,
        },
        "sqnr_db": sqnr(cfg, layers),
        "kl": compare(cfg, source, folder, count, device) if cfg.quality == "full" else None,
    }  # fmt: skip
    result |= {"device": device.type, "seconds": round(time.time() - started, 1), "environment": environment()}
    plots.save_sqnr(
        result["sqnr_db"]["layers"], f"{Path(cfg.model).name}, {cfg.format} by {cfg.method}", folder / "sqnr.png"
    )
    replace_file(folder / "quality.json", json.dumps(result, indent=1, allow_nan=False).encode() + b"\n")
    return result


def _numel(files: WeightFiles, name: str) -> int:
    return torch.Size(files.shape(name)).numel()


def _bytes(files: WeightFiles, name: str) -> int:
    return _numel(files, name) * files.dtype(name).itemsize


def measure_layers(
    cfg: QuantizeConfig, dense: WeightFiles, packed: WeightFiles, linears: list[str], device: torch.device
) -> list[Layer]:
    """One layer at a time; differences in float32, sums in float64."""
    sizes = {name: _bytes(dense, f"{name}.weight") for name in linears}
    layers = []
    with progress.Bytes("comparing weights", sum(sizes.values())) as bar:
        for name in linears:
            layers.append(measure_layer(cfg, dense, packed, name, device))
            bar.advance(sizes[name])
    return layers


def measure_layer(
    cfg: QuantizeConfig, dense: WeightFiles, packed: WeightFiles, name: str, device: torch.device
) -> Layer:
    """AWQ moves scales from a layer to the one before it; they are fitted and undone first."""
    weight = dense.tensor(f"{name}.weight", device).float()
    rows, columns = weight.shape
    made = codec(cfg.format)
    options = codec_options(cfg)
    parts = {key: packed.tensor(f"{name}.{key}", device) for key in made.layout((rows, columns), **options)}
    accepted = made.accept(parts, (rows, columns), name=name, **options)
    other = made.dequantize(accepted, (rows, columns), torch.float32)
    if cfg.method == "awq":
        other = without_scales(weight, other)
    signal, error = (part.square().sum(dtype=torch.float64).item() for part in (weight, weight - other))
    return Layer(name, signal, error, weight.numel(), sum(part.nbytes for part in parts.values()))


def without_scales(weight: Tensor, other: Tensor) -> Tensor:
    """`other[N, K]` times the scales of columns and rows that bring it closest to `weight`: least squares, in turns."""
    for dim in (0, 1) * FIT_ROUNDS:
        product, square = (weight * other).sum(dim, keepdim=True), other.square().sum(dim, keepdim=True)
        other = other * torch.where(square > 0, product / square, 1.0)
    return other


def sqnr(cfg: QuantizeConfig, layers: list[Layer]) -> dict[str, Any]:
    """Of the whole, of every layer, and the lowest; null stands for infinite."""
    values = {layer.name: layer.sqnr_db if math.isfinite(layer.sqnr_db) else None for layer in layers}
    ranked = sorted(layers, key=lambda layer: layer.sqnr_db)
    whole = decibels(sum(layer.signal for layer in layers), sum(layer.error for layer in layers))
    return {
        "all": whole if math.isfinite(whole) else None,
        "lowest": [{"layer": layer.name, "db": values[layer.name]} for layer in ranked[:LOWEST]],
        "scales_fitted": cfg.method == "awq",
        "layers": values,
    }


def compare(cfg: QuantizeConfig, source: Path, folder: Path, weights: int, device: torch.device) -> dict[str, Any]:
    """KL(quantized || original) and the entropies of both, in nats per token, on the same tokens.

    The models are loaded one after the other; of the first only its log-probs are kept (float32, on the CPU).
    """
    place = room(weights, device)
    if place is None:
        return {"skipped": f"{weights / 1e9:.1f} billion weights in bfloat16 fit neither the GPU nor the CPU memory"}
    where, dtype = place
    model, tokenizer = policy.load_base(run_config(cfg, source, dense=True, dtype=dtype), where)
    pairs = file_pairs(Path(cfg.text).expanduser(), tokenizer) if cfg.text else problem_pairs(tokenizer)
    original = [logprobs(model, pair) for pair in pairs]
    del model
    model, _ = policy.load_base(run_config(cfg, folder, dtype=dtype), where)
    sums = torch.zeros(len(pairs), 3, dtype=torch.float64)  # of each text: KL, both entropies
    for own, pair, p in zip(sums, pairs, original, strict=True):
        q = logprobs(model, pair)
        for n, terms in enumerate((q.exp() * (q - p), -p.exp() * p, -q.exp() * q)):
            own[n] = terms.sum(dtype=torch.float64)
    tokens = [len(compared) for _, compared in pairs]
    kl, before, after = (sums.sum(0) / sum(tokens)).tolist()
    return {
        "nats_per_token": kl, "standard_error": standard_error(sums[:, 0].tolist(), tokens),
        "entropy_original": before, "entropy_quantized": after, "tokens": sum(tokens),
        "text": cfg.text or "word problems", "device": where.type, "dtype": dtype,
    }  # fmt: skip


def standard_error(sums: list[float], counts: list[int]) -> float | None:
    """Of sum(sums) / sum(counts), texts being drawn and not tokens (ratio estimator); None for a single text."""
    texts, mean = len(sums), sum(sums) / sum(counts)
    if texts < 2:
        return None
    residuals = sum((value - mean * count) ** 2 for value, count in zip(sums, counts, strict=True))
    return math.sqrt(residuals * texts / (texts - 1)) / sum(counts)


def run_config(cfg: QuantizeConfig, folder: Path, *, dense: bool = False, dtype: str = "auto") -> RunConfig:
    """What loads `folder`: the checkpoint of `cfg`, or the dense model that it was made from."""
    ignore = [EVERYTHING] if dense else cfg.ignore
    name = "bf16" if dense else cfg.format
    model = ModelConfig(path=str(folder), dtype=dtype)
    return RunConfig(model=model, format=replace(format_config(cfg), name=name, ignore=ignore))


def format_config(cfg: QuantizeConfig) -> FormatConfig:
    """The group `format` of a run that trains on the checkpoint."""
    shared = {f.name: getattr(cfg, f.name) for f in fields(FormatConfig) if hasattr(cfg, f.name)}
    return FormatConfig(name=cfg.format, **shared)


def codec_options(cfg: QuantizeConfig) -> dict[str, Any]:
    """What `cfg` says to the codec of its format."""
    return policy.format_options(RunConfig(format=format_config(cfg)))


def room(weights: int, device: torch.device) -> tuple[torch.device, str] | None:
    """Where a dense model of so many weights fits, and in which dtype: `device` before the CPU."""
    needed = {dtype: 1.3 * weights * getattr(torch, dtype).itemsize for dtype in ("bfloat16", "float32")}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        if needed["bfloat16"] < torch.cuda.mem_get_info()[0]:
            return device, "bfloat16"
    free = available()
    return next(((torch.device("cpu"), dtype) for dtype in ("float32", "bfloat16") if needed[dtype] < free), None)


def available() -> int:
    """Bytes of memory that a process can take without swapping: the page cache, which weights just filled, counts."""
    return int(re.findall(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())[0]) * 1024


@torch.no_grad()
def logprobs(model: Any, pair: tuple[list[int], list[int]]) -> Tensor:
    """Log-probs `[tokens, vocabulary]` at the tokens that are compared; float32, on the CPU."""
    given, compared = pair
    ids = torch.tensor([given + compared], device=model.device)
    logits = model(input_ids=ids, logits_to_keep=len(compared) + 1).logits[0, :-1]
    return logits.float().log_softmax(-1).cpu()


def problem_pairs(tokenizer: Any) -> Pairs:
    """Word problems and worked solutions, which every tokenizer can spell; the solutions are compared."""
    rng, cfg = random.Random(0), task_config()
    pairs = []
    for problem in [arithmetic.problem(rng, cfg) for _ in range(PROBLEMS)]:
        chat = [{"role": "system", "content": cfg.instruction}, {"role": "user", "content": problem.text}]
        if tokenizer.chat_template:
            given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        else:
            given = tokenizer("\n\n".join(message["content"] for message in chat) + "\n\n")["input_ids"]
        solution = arithmetic.worked_solution(rng, problem)
        pairs.append((given, tokenizer(solution, add_special_tokens=False)["input_ids"]))
    return pairs


def file_pairs(file: Path, tokenizer: Any) -> Pairs:
    """The first tokens of a text, in windows; all of a window but its first token is compared."""
    ids = tokenizer(file.read_text(encoding="utf-8"))["input_ids"][: WINDOWS * WINDOW_TOKENS]
    if len(ids) < 2:
        raise ConfigError(f"text={file} has {len(ids)} tokens; allowed: 2 or more.")
    windows = [ids[begin : begin + WINDOW_TOKENS] for begin in range(0, len(ids), WINDOW_TOKENS)]
    return [(window[:1], window[1:]) for window in windows if len(window) > 1]


def table(cfg: QuantizeConfig, result: dict[str, Any]) -> str:
    """What the command prints at its end."""
    weights, sizes, bits, levels = (result[key] for key in ("weights", "bytes", "bits_per_weight", "sqnr_db"))
    fitted = ", after the scales that AWQ moves" if levels["scales_fitted"] else ""
    rows = [
        ("quantized", f"{weights['quantized']:,} of {weights['all']:,} weights to {cfg.format} by {cfg.method}"),
        ("bits per weight", f"{bits['quantized']:.3f} where quantized, {bits['model']:.3f} over the whole model"),
        ("size", " -> ".join(tqdm.format_sizeof(size, "B") for size in sizes.values())),
        ("SQNR", f"{_db(levels['all'])} over all weights{fitted}; the lowest:"),
        *((f"  {_db(layer['db'])}", layer["layer"]) for layer in levels["lowest"]),
        *_kl_rows(result["kl"]),
    ]
    return tables.aligned(rows)


def _db(value: float | None) -> str:
    return "inf dB" if value is None else f"{value:.2f} dB"


def _kl_rows(kl: dict[str, Any] | None) -> list[tuple[str, str]]:
    if kl is None or "skipped" in kl:
        return [("KL, entropy", f"not measured: {kl['skipped'] if kl else 'quality=weights'}")]
    error = "" if kl["standard_error"] is None else f" +- {kl['standard_error']:.5f}"
    return [
        ("KL to the original", f"{kl['nats_per_token']:.5f}{error} nats per token over {kl['tokens']} tokens"),
        ("entropy", f"{kl['entropy_original']:.4f} -> {kl['entropy_quantized']:.4f} nats per token"),
    ]
