"""Build the rollout baseline: unchanged vLLM with the adapter as a LoRARequest, in the process of the caller.

This is the only file outside `rollout/vllm/` that imports vllm: a baseline shares no code with the engine it judges.
"""

import os
import time
from typing import Any

from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

from qerl_lab.bench.job import Job
from qerl_lab.config.units import GIB
from qerl_lab.rollout.vllm.transfer import max_rank


class StockSampler:
    """Unchanged vLLM on the checkpoint of a job, with the methods that `rollout.measure` calls.

    The overrides of the arm are passed to `LLM` as arguments. With `enable_lora=false` there is no adapter, which is as
    fast as the merged weights that TRL uses.
    """

    def __init__(self, job: Job) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, as the lab's engine
        options, started = job.options, time.perf_counter()
        batch = max(options["batches"])
        given = {  # sizes of the lab's engine, vLLM's defaults for the rest
            "max_model_len": options["prompt"] + options["new"], "max_num_seqs": batch,
            "kv_cache_memory_bytes": int(job.kv_gib(batch) * GIB), "gpu_memory_utilization": 0.01,
            "enable_lora": True, "max_loras": 1, "max_lora_rank": max_rank(job.rank),
            "logprobs_mode": "processed_logprobs", "generation_config": "vllm", "use_tqdm_on_load": False,
            "distributed_executor_backend": "uni",
        }  # fmt: skip
        self.llm = LLM(model=job.folder, **given | job.overrides)
        with_adapter = self.llm.llm_engine.vllm_config.lora_config is not None
        self.request = LoRARequest("policy", 1, job.adapter) if with_adapter else None
        self.row = {"start_seconds": time.perf_counter() - started}

    def renew(self) -> None:
        """Reload the adapter and clear the prefix cache, as a trainer does before every rollout.

        Raises RuntimeError if vLLM keeps the cache.
        """
        if self.request:
            self.llm.llm_engine.add_lora(LoRARequest("policy", 1, self.request.lora_path, load_inplace=True))
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache")

    def generate(self, prompt_ids_P: list[list[int]], new: int, seed: int) -> list[list[float]]:
        """Sample one completion of `new` tokens per prompt; return the log-probs of its tokens, one list per prompt.

        Ignores `seed`, because vLLM is slow with a seed per request.
        """
        how = SamplingParams(
            max_tokens=new, ignore_eos=True, temperature=1.0, logprobs=0, flat_logprobs=True, detokenize=False
        )
        prompts: Any = [{"prompt_token_ids": ids} for ids in prompt_ids_P]
        outputs = self.llm.generate(prompts, how, use_tqdm=False, lora_request=self.request)
        return [list(output.outputs[0].logprobs.logprobs) for output in outputs]
