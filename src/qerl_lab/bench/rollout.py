"""Measure an arm's rollouts: completion tokens per second of whole calls with prefill, and of decoding alone.

Every call has new prompts, so that no prefix cache helps. Each completion must have exactly the requested tokens.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from torch import nn

from qerl_lab.bench import random_model
from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import clocks, memory_at_end, wait_for_gpu
from qerl_lab.bench.job import Job
from qerl_lab.config.units import GIB


class Sampler(Protocol):
    """An engine under test."""

    llm: Any  # vLLM's `LLM`
    row: Row  # measured while the engine started

    def renew(self) -> None:
        """Reload the adapter and clear the prefix cache, as before every rollout."""

    def generate(self, prompt_ids_P: list[list[int]], new: int, seed: int) -> list[list[float]]:
        """Sample one completion of `new` tokens per prompt; return its log-probs."""


class Call(NamedTuple):
    """Measured values of one call."""

    seconds: float
    sync_seconds: float
    host_share: float  # of `seconds`, in which this thread computed
    nats: float  # per sampled token


def rows(job: Job) -> Iterator[Row]:
    """Build the arm's engine, and yield a row of measurements per batch size."""
    sampler: Sampler
    if job.arm.is_baseline:
        from qerl_lab.bench.stock_vllm import StockSampler

        sampler = StockSampler(job)
    else:
        from qerl_lab.bench.lab import LabSampler

        sampler = LabSampler(job)
    yield from measure(sampler, job)


def measure(sampler: Sampler, job: Job) -> Iterator[Row]:
    """Measure an engine and yield a row per batch size. Raises RuntimeError if the numbers would not be comparable."""
    options = job.options
    held, about = memory(sampler.llm), settings(sampler.llm)
    need = max(options["batches"]) * (options["prompt"] + options["new"])
    if about["kv_tokens"] < need:
        raise RuntimeError(f"the key-value cache holds {about['kv_tokens']} tokens, and the largest batch has {need}")
    for batch in options["batches"]:
        with clocks() as clock:
            timed = time_calls(sampler, job, batch)
        if about["model_runner"] == 1:  # this runner polls the GPU
            timed["host_share"] = None
        yield {
            "batch": batch, "prompt": options["prompt"], "new": options["new"], "repeats": options["repeats"], **timed,
            **about, **sampler.row, **held, **clock, **memory_at_end(),
        }  # fmt: skip


def time_calls(sampler: Sampler, job: Job, batch: int) -> Row:
    """Time whole and short calls alternately, after a warm-up of each; their difference is decoding alone."""
    new, seeds = job.options["new"], itertools.count(1_000_000 * batch)
    short_new = max(1, new // 4)
    pairs = [
        (time_call(sampler, job, batch, new, next(seeds)), time_call(sampler, job, batch, short_new, next(seeds)))
        for _ in range(job.options["repeats"] + 1)
    ]
    whole, short = zip(*pairs[1:], strict=True)
    seconds = [call.seconds for call in whole]
    median, tokens = statistics.median(seconds), batch * new
    step = (median - statistics.median(call.seconds for call in short)) / (new - short_new)
    return {
        "tokens_per_second": tokens / median, "tokens_per_second_min": tokens / max(seconds),
        "tokens_per_second_max": tokens / min(seconds), "seconds": median,
        "decode_ms": 1e3 * step, "decode_tokens_per_second": batch / step if step > 0 else None,
        "short_new": short_new, "host_share": statistics.median(call.host_share for call in whole),
        "sync_ms": 1e3 * statistics.median(call.sync_seconds for call in [*whole, *short]),
        "nats": statistics.fmean(call.nats for call in [*whole, *short]),
    }  # fmt: skip


def time_call(sampler: Sampler, job: Job, batch: int, new: int, seed: int) -> Call:
    """Time a call that samples `new` tokens for each of `batch` fresh prompts.

    Raises RuntimeError if completions or tokens are missing, or if log-probs are NaN or all certain.
    """
    prompts = random_model.prompt_ids(batch, job.options["prompt"], job.architecture["vocab_size"], seed)
    started = time.perf_counter()
    sampler.renew()
    wait_for_gpu()
    synced, busy = time.perf_counter(), time.thread_time()
    logprobs_P = sampler.generate(prompts, new, seed)
    took = time.perf_counter() - synced
    host_share = (time.thread_time() - busy) / took
    lengths = {len(logprobs) for logprobs in logprobs_P}
    if len(logprobs_P) != batch or lengths != {new}:
        raise RuntimeError(
            f"asked for {batch} x {new} tokens, and got {len(logprobs_P)} completions of {lengths} tokens"
        )
    nats = -statistics.fmean(value for logprobs in logprobs_P for value in logprobs)
    if not (math.isfinite(nats) and nats > 0.5):
        raise RuntimeError(f"the tokens have {nats:.3g} nats in the mean: the logits of the random model say nothing")
    return Call(took, synced - started, host_share, nats)


def memory(llm: Any) -> Row:
    """Return the GiB of vLLM's weights (with the lab's dense adapter, without vLLM's LoRA buffers) and of its cache."""

    def sum_bytes(model: nn.Module) -> int:
        tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}  # shared ones once
        return sum(tensor.nbytes for tensor in tensors.values())

    cache = llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes  # null if a share of the GPU was requested
    return {"weights_gib": llm.apply_model(sum_bytes)[0] / GIB, "kv_gib": cache and cache / GIB}


def settings(llm: Any) -> Row:
    """Return the vLLM settings that affect speed; compare arms only where these agree."""
    config = llm.llm_engine.vllm_config
    scheduler, cache = config.scheduler_config, config.cache_config
    return {
        "max_num_seqs": scheduler.max_num_seqs, "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "chunked_prefill": scheduler.enable_chunked_prefill, "async_scheduling": scheduler.async_scheduling,
        "prefix_caching": cache.enable_prefix_caching, "kv_cache_dtype": str(cache.cache_dtype),
        "kv_tokens": cache.num_gpu_blocks * cache.block_size, "quantization": config.model_config.quantization,
        "dtype": str(config.model_config.dtype), "eager": config.model_config.enforce_eager,
        "cuda_graphs": str(config.compilation_config.cudagraph_mode),
        "linear_backend": str(config.kernel_config.linear_backend),
        # vLLM has two model runners; some settings select the first, which samples request by request.
        "model_runner": 2 if getattr(config, "use_v2_model_runner", False) else 1,
    }  # fmt: skip
