"""Benchmark jobs with a tiny model, and a scripted engine."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from qerl_lab.bench import random_model
from qerl_lab.bench.bench_options import AnyOptions, StepOptions
from qerl_lab.bench.job import Job, read_jobs

ARCHITECTURE = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def job(folder: Path, arm: str, options: AnyOptions) -> Job:
    """Create a job in `folder` with checkpoint and adapter, ready to start."""
    (made,) = read_jobs(replace(options, arms=[arm]), str(folder))
    made = replace(made, architecture=ARCHITECTURE)
    mean_tokens = options.mean_tokens if isinstance(options, StepOptions) else 0
    random_model.write(Path(made.folder), ARCHITECTURE, made.format_config, torch.device("cpu"), mean_tokens)
    random_model.write_adapter(Path(made.adapter), ARCHITECTURE, made.rank)
    return made


class FakeSampler:
    """A fake sampler that returns `answer(prompts, new)`; `asked` lists all calls."""

    def __init__(self, answer: Callable[[list[list[int]], int], list[list[float]]], **settings: Any) -> None:
        self.answer, self.row, self.asked, self.renewals = answer, {"start_seconds": 1.0}, [], 0
        self.llm = fake_llm(**settings)

    def renew(self) -> None:
        self.renewals += 1

    def generate(self, prompt_ids_P: list[list[int]], new: int, seed: int) -> list[list[float]]:
        self.asked.append((prompt_ids_P, new, seed))
        return self.answer(prompt_ids_P, new)


def fake_llm(blocks: int = 1000) -> Any:
    """Return the parts of vLLM's object that `bench.rollout` reads."""
    cache = SimpleNamespace(
        enable_prefix_caching=True, cache_dtype="auto", num_gpu_blocks=blocks, block_size=16,
        kv_cache_memory_bytes=2**30,
    )  # fmt: skip
    scheduler = SimpleNamespace(
        max_num_seqs=4, max_num_batched_tokens=2048, enable_chunked_prefill=True, async_scheduling=True
    )
    config = SimpleNamespace(
        cache_config=cache, scheduler_config=scheduler,
        model_config=SimpleNamespace(quantization=None, dtype=torch.bfloat16, enforce_eager=False),
        compilation_config=SimpleNamespace(cudagraph_mode="FULL"), kernel_config=SimpleNamespace(linear_backend="auto"),
        use_v2_model_runner=True,
    )  # fmt: skip
    model = torch.nn.Linear(8, 4)
    return SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=config), apply_model=lambda function: [function(model)]
    )
