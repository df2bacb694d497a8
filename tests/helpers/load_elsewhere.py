"""Compute log-probs of checkpoints in a process without the lab: with peft and transformers, or vLLM.

    python load_elsewhere.py transformers|vllm JOB.json OUT.json

JOB: {"prompts": [[token]], "models": [[BASE, ADAPTER or null]], "vllm": {argument of LLM: value}}, the last optional.
OUT: per model and prompt the log-probs of its tokens but the first.
"""

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any


def with_transformers(prompts: list[list[int]], base: str, adapter: str | None) -> list[list[float]]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        found = [model.eval()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for ids in prompts]
    pairs = zip(found, prompts, strict=True)
    return [logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist() for logits, ids in pairs]


def with_vllm(prompts: list[list[int]], base: str, adapter: str | None, **arguments: Any) -> list[list[float]]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8} if adapter else {}
    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4,
                "distributed_executor_backend": "uni", "enable_prefix_caching": False}  # fmt: skip
    engine = LLM(model=base, **settings | lora | arguments)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    request = LoRARequest("mine", 1, adapter) if adapter else None
    asked = [{"prompt_token_ids": ids} for ids in prompts]
    results = engine.generate(asked, sampling, use_tqdm=False, lora_request=request)
    return [
        [at[token].logprob for at, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
        for result, ids in zip(results, prompts, strict=True)
    ]


if __name__ == "__main__":
    if sys.argv[1] == "transformers":
        gc.disable()  # and no teardown below: together a third of the time
    job = json.loads(Path(sys.argv[2]).read_text())
    load = {"transformers": with_transformers, "vllm": with_vllm}[sys.argv[1]]
    found = [load(job["prompts"], base, adapter, **job.get("vllm", {})) for base, adapter in job["models"]]
    assert not [name for name in sys.modules if name.startswith("qerl_lab")]
    Path(sys.argv[3]).write_text(json.dumps(found))
    if sys.argv[1] == "transformers":
        os._exit(0)
