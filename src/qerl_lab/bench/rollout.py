"""Measure an arm's rollouts: completion tokens per second of whole calls with prefill, and of decoding alone.

Every call has new prompts, so that no prefix cache helps. Each completion must have exactly the requested tokens.
"""

import itertools
import math
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pandas as pd
from torch import nn

from qerl_lab import aqn
from qerl_lab.bench import lab, random_model
from qerl_lab.bench.bench_options import Row
from qerl_lab.bench.gpu import clocks, memory_at_end, wait_for_gpu
from qerl_lab.bench.job import Job
from qerl_lab.config.units import GIB
from qerl_lab.rollout.engine import Sampling

if TYPE_CHECKING:
    from qerl_lab.bench.stock_vllm import StockSampler


class LabSampler:
    """The lab's engine, with the methods that `measure` calls. `stock_vllm.StockSampler` has the same methods."""

    def __init__(self, job: Job) -> None:
        engine: Any  # some engines have no `llm`, which is vLLM's object
        _, engine, self.row = lab.build(job)
        self.engine, self.llm = engine, engine.llm

    def renew(self) -> None:
        """Send the adapter and the norms of the policy to the engine, as the trainer does before every rollout."""
        self.engine.sync(aqn.CLEAN)

    def generate(self, prompt_ids_P: list[list[int]], new: int, seed: int) -> list[list[float]]:
        """Sample one completion of `new` tokens per prompt; return the log-probs of its tokens, one list per prompt."""
        out = self.engine.generate(prompt_ids_P, 1, Sampling(new, seed=seed))
        return [completion.logprobs for completion in out.completions]


def rows(job: Job) -> Iterator[Row]:
    """Build the engine of the job's arm, and yield a row of measurements per batch size. Raises as `measure` does."""
    if job.is_baseline:
        from qerl_lab.bench.stock_vllm import StockSampler

        yield from measure(StockSampler(job), job)
    else:
        yield from measure(LabSampler(job), job)


def measure(sampler: "LabSampler | StockSampler", job: Job) -> Iterator[Row]:
    """Measure an engine and yield a row per batch size.

    Raises RuntimeError if the key-value cache cannot hold the largest batch, if the engine samples too few completions
    or tokens, or if the sampled log-probs are NaN or too certain for a random model.
    """
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


def time_calls(sampler: "LabSampler | StockSampler", job: Job, batch: int) -> Row:
    """Time calls that sample the tokens of the option `new`, in turn with short calls that sample a quarter of them.

    The first two calls do not count. Returns a row, mostly of medians. `decode_ms` is the time to decode one token of
    each completion, without prefill: the difference between both kinds of call, per extra token. Raises RuntimeError as
    `time_call` does.
    """
    new, seeds = job.options["new"], itertools.count(1_000_000 * batch)
    short_new, tokens = max(1, new // 4), batch * new
    timed = []
    for _ in range(job.options["repeats"] + 1):
        for asked in (new, short_new):
            timed.append({"new": asked} | time_call(sampler, job, batch, asked, next(seeds)))
    calls = pd.DataFrame(timed[2:])
    medians, whole = calls.groupby("new").median(), calls[calls["new"] == new]
    seconds = medians.loc[new, "seconds"]
    return {
        "tokens_per_second": tokens / seconds, "tokens_per_second_min": tokens / whole["seconds"].max(),
        "tokens_per_second_max": tokens / whole["seconds"].min(), "seconds": seconds,
        "decode_ms": 1e3 * (seconds - medians.loc[short_new, "seconds"]) / (new - short_new),
        "host_share": medians.loc[new, "host_share"], "sync_ms": 1e3 * calls["sync_seconds"].median(),
        "nats": calls["nats"].mean(),
    }  # fmt: skip


def time_call(sampler: "LabSampler | StockSampler", job: Job, batch: int, new: int, seed: int) -> Row:
    """Time a sync of the engine, then a call that samples `new` tokens for each of `batch` fresh prompts.

    The row has the seconds of the sync and of the call, the share of the call in which this thread computed, and nats
    per sampled token. Raises RuntimeError if completions or tokens are missing, or if the nats are NaN or at most 0.5.
    """
    prompts = random_model.prompt_ids(batch, job.options["prompt"], job.architecture["vocab_size"], seed)
    started = time.perf_counter()
    sampler.renew()
    wait_for_gpu()
    synced, thread_started = time.perf_counter(), time.thread_time()
    logprobs_P = sampler.generate(prompts, new, seed)
    took = time.perf_counter() - synced
    host_share = (time.thread_time() - thread_started) / took
    lengths = {len(logprobs) for logprobs in logprobs_P}
    if len(logprobs_P) != batch or lengths != {new}:
        raise RuntimeError(
            f"asked for {batch} x {new} tokens, and got {len(logprobs_P)} completions of {lengths} tokens"
        )
    nats = -statistics.fmean(value for logprobs in logprobs_P for value in logprobs)
    if not (math.isfinite(nats) and nats > 0.5):
        raise RuntimeError(f"the tokens have {nats:.3g} nats in the mean: the logits of the random model say nothing")
    return {"seconds": took, "sync_seconds": synced - started, "host_share": host_share, "nats": nats}


def memory(llm: Any) -> Row:
    """Return the GiB of vLLM's weights and of its key-value cache.

    The cache is None if vLLM was given a share of the GPU. Weights include the lab's dense adapter, but not the buffers
    of vLLM's own LoRA.
    """

    def sum_bytes(model: nn.Module) -> int:
        tensors = {tensor.data_ptr(): tensor for tensor in (*model.parameters(), *model.buffers())}  # shared ones once
        return sum(tensor.nbytes for tensor in tensors.values())

    cache = llm.llm_engine.vllm_config.cache_config.kv_cache_memory_bytes  # null if a share of the GPU was requested
    return {"weights_gib": llm.apply_model(sum_bytes)[0] / GIB, "kv_gib": cache and cache / GIB}


def settings(llm: Any) -> Row:
    """Return the vLLM settings that affect speed, as a row; compare arms only where these agree."""
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
