"""Measure the LoRA training step of a whole model: forward, backward and optimizer, with gradient checkpointing.

The step is the trainer's: PEFT's adapters in float32 under bfloat16 autocast, and TRL's head, which computes
log-probabilities and entropies in chunks, never the whole logits of a 152k vocabulary. Weights and tokens are random.
"""

import statistics
import time
from collections.abc import Iterator

import torch
from peft import PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import base_gib, clocks, wait_for_gpu
from qerl_lab.bench.job import Job
from qerl_lab.bench.random_model import plain_lora
from qerl_lab.config.units import GIB
from qerl_lab.model import policy


def build(job: Job, device: torch.device) -> PeftModel:
    """Load a job's checkpoint with new adapters by the lab's code, or for a baseline by transformers and PEFT.

    The model is in training mode, with gradient checkpointing and a fused LM head that returns log-probs and entropy.
    """
    if job.is_baseline:
        base = AutoModelForCausalLM.from_pretrained(
            job.folder, dtype=torch.bfloat16, device_map={"": device}, trust_remote_code=False, use_safetensors=True
        )
        add_fused_lm_head(base, outputs=("log_probs", "entropy"))
        model = get_peft_model(base, plain_lora(job.rank))
    else:
        model = policy.build(job.config(), device).model
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def train_step(model: PeftModel, optimizer: torch.optim.Optimizer, ids: Tensor, micro_batch_size: int) -> None:
    """Make one optimizer update on the token ids `ids` [sequences, length].

    The loss is the negative log-prob of the tokens, averaged over all sequences. Each forward and backward pass takes
    `micro_batch_size` sequences, and the gradients of the passes add up.
    """
    for part in ids.split(micro_batch_size):
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = -model(input_ids=part, labels=part, fused_lm_head=True).log_probs.mean()
        (loss * len(part) / len(ids)).backward()
    optimizer.step()
    optimizer.zero_grad()


def rows(job: Job) -> Iterator[Row]:
    """Time training steps; yield a row for micro-batches of all sequences, and a row for micro-batches of one sequence.

    A row has the median milliseconds of a step, tokens per second in a step of median time, and GB (1e9 bytes) of the
    base weights and at the peak.
    """
    options, device = job.options, policy.device_of("auto")
    model = build(job, device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    same = torch.Generator(device).manual_seed(0)  # every arm trains on the same tokens
    shape = options["sequences"], options["length"]
    ids = torch.randint(job.architecture["vocab_size"], shape, generator=same, device=device)
    for micro_batch_size in sorted({options["sequences"], 1}, reverse=True):
        train_step(model, optimizer, ids, micro_batch_size)  # warms up and makes optimizer state
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        with clocks() as clock:
            for _ in range(options["steps"]):
                wait_for_gpu()
                started = time.perf_counter()
                train_step(model, optimizer, ids, micro_batch_size)
                wait_for_gpu()
                seconds.append(time.perf_counter() - started)
        median = statistics.median(seconds)
        yield {
            "micro_batch_tokens": micro_batch_size * options["length"],
            "ms": 1e3 * median, "tokens_per_second": ids.numel() / median,
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "base_gb": base_gib(model) * GIB / 1e9, **clock,
        }  # fmt: skip
