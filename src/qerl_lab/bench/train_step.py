"""Measure the LoRA training step of a whole model: forward, backward and optimizer, with gradient checkpointing.

The step is the trainer's: PEFT's adapters in float32 under bfloat16 autocast, and TRL's head, which computes
log-probabilities and entropies in chunks, never the whole logits of a 152k vocabulary. Weights and tokens are random.
All arms stay in memory and alternate.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel
from trl.trainer.utils import add_fused_lm_head

from qerl_lab import formats
from qerl_lab.bench import random_model
from qerl_lab.bench.bench_options import Row, TrainStepOptions
from qerl_lab.bench.shapes import ARCHITECTURES
from qerl_lab.config.schema import FormatConfig, LoraConfig, RunConfig
from qerl_lab.model import policy

GB = 1e9
Loss = Callable[[PeftModel, Tensor], Tensor]  # of a model and ids[sequences, length]


@dataclass
class TrainedArm:
    model: PeftModel
    optimizer: torch.optim.Optimizer
    base_bytes: int
    held_bytes: int  # on the GPU after the build: base and adapters


def build(options: TrainStepOptions, arm: str) -> TrainedArm:
    """Build an arm: a format of the lab, or for `bf16_peft` and `qlora` PEFT's LoRA on a dense base or Linear4bit."""
    before = torch.cuda.memory_allocated()
    weight_format = formats.build(FormatConfig(name=arm if arm in formats.FORMATS else "bf16"))
    base = random_model.build(ARCHITECTURES[options.model], weight_format, torch.device("cuda"))
    if arm == "qlora":
        to_linear4bit(base)
    base_bytes = torch.cuda.memory_allocated() - before
    add_fused_lm_head(base, outputs=("log_probs", "entropy"))
    model = with_adapters(base, options.rank, plain=arm in ("qlora", "bf16_peft"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    adapters = [p for p in model.parameters() if p.requires_grad]
    held = torch.cuda.memory_allocated() - before
    return TrainedArm(model, torch.optim.AdamW(adapters, lr=1e-5, fused=True), base_bytes, held)


def with_adapters(base: PreTrainedModel, rank: int, *, plain: bool) -> PeftModel:
    """Attach the lab's adapters to a base, or with `plain` PEFT's own modules to the same layers."""
    if plain:
        return get_peft_model(base, random_model.plain_lora(rank))
    return policy.attach_adapters(base, RunConfig(lora=LoraConfig(rank=rank)))


def to_linear4bit(base: nn.Module) -> None:
    """Replace the Linears of the decoder layers by bitsandbytes' Linear4bit in place, one by one."""
    for name, module in list(base.named_modules()):
        if isinstance(module, nn.Linear) and not name.endswith("lm_head"):
            base.set_submodule(name, linear4bit(module))
    base.__dict__["is_loaded_in_4bit"] = True  # PEFT reads it


def linear4bit(dense: nn.Linear) -> nn.Module:
    """Convert a Linear to NF4 with double quantization, as QLoRA's `BitsAndBytesConfig(load_in_4bit=True, ...)`."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = Linear4bit(
        dense.in_features, dense.out_features, bias=dense.bias is not None, compute_dtype=torch.bfloat16,
        compress_statistics=True, quant_type="nf4", device="meta",
    )  # fmt: skip
    layer.weight = Params4bit(dense.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4").cuda()
    layer.bias = dense.bias
    return layer


def chunked_loss(model: PeftModel, ids: Tensor) -> Tensor:
    """Compute the mean negative log-probability of ids[sequences, length] in chunks of logits."""
    out = model(input_ids=ids, labels=ids, fused_lm_head=True)
    return -out.log_probs.mean()


def full_logits_loss(model: PeftModel, ids: Tensor) -> Tensor:
    """Compute `chunked_loss` from full float32 logits, to show what the chunks save."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return -torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None]).mean()


def train_step(arm: TrainedArm, ids: Tensor, micro: int, loss: Loss) -> None:
    """Train one optimizer update on `ids[sequences, length]`, `micro` sequences at a time."""
    for part in ids.split(micro):
        with torch.autocast("cuda", torch.bfloat16):
            value = loss(arm.model, part)
        (value * len(part) / len(ids)).backward()
    arm.optimizer.step()
    arm.optimizer.zero_grad()


def steps(options: TrainStepOptions) -> Iterator[Row]:
    """Measure and yield tokens per second (median of `steps`) and peak GB (1e9 bytes) by micro-batch size and arm.

    The arms alternate. The first also measures the loss from full logits.
    """
    arms = {name: build(options, name) for name in options.arms}
    first, vocabulary = options.arms[0], ARCHITECTURES[options.model]["vocab_size"]
    ids = torch.randint(vocabulary, (options.sequences, options.length), device="cuda")
    sizes = sorted({options.sequences, 1}, reverse=True)  # sequences of a micro-batch
    rounds: list[tuple[dict[str, TrainedArm], int, str, Loss]] = [
        (arms, size, "chunked", chunked_loss) for size in sizes
    ]
    rounds.append(({first: arms[first]}, options.sequences, "full logits", full_logits_loss))
    for some, micro, loss_name, loss in rounds:
        measured: dict[str, list[tuple[float, int]]] = {name: [] for name in some}  # seconds, peak bytes
        for turn in range(options.steps + 1):
            for name, arm in some.items():
                gc.collect()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                started = time.perf_counter()
                train_step(arm, ids, micro, loss)
                torch.cuda.synchronize()
                seconds, peak = time.perf_counter() - started, torch.cuda.max_memory_allocated()
                state = (tensor for values in arm.optimizer.state.values() for tensor in values.values())
                held = arm.held_bytes + sum(t.nbytes for t in state if isinstance(t, Tensor) and t.is_cuda)
                others = torch.cuda.memory_allocated() - held  # bytes of the other arms
                if turn:  # the first warms up and makes optimizer state
                    measured[name].append((seconds, peak - others))
        for name, values in measured.items():
            median = statistics.median(seconds for seconds, _ in values)
            yield {
                "model": options.model, "arm": name, "loss": loss_name, "micro_batch_tokens": micro * options.length,
                "step_tokens": ids.numel(), "rank": options.rank, "ms": 1e3 * median,
                "tokens_per_second": ids.numel() / median, "peak_gb": max(peak for _, peak in values) / GB,
                "base_gb": arms[name].base_bytes / GB,
            }  # fmt: skip
