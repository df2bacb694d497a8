"""Log-probabilities of prompts' own tokens in vLLM, in a process of its own, whose GPU memory comes back.

python vllm_logprobs.py FOLDER PROMPTS.json OUT.json [HOW ADAPTER]     PROMPTS: [prompt][token]

Without HOW, OUT is [prompt][token], with none for the first token. HOW is `request` (vLLM's LoRA), `dense` or
`dense_graphs` (the products of one adapter, eager or in CUDA graphs); OUT is then {"adapter": [prompt][token]}, and of
the dense ones besides "before" any write, "zero" after one with scaling 0, and "write_ms".
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main(folder: Path, prompts_file: Path, out_file: Path, how: str = "", adapter: str = "") -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    import torch
    from safetensors.torch import load_file
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    prompts = json.loads(prompts_file.read_text())
    config = json.loads(Path(adapter, "adapter_config.json").read_text()) if how else {}
    arguments: dict[str, Any] = {}
    if how == "request":
        arguments = {"enable_lora": True, "max_loras": 1, "max_lora_rank": config["r"]}
    elif how:
        from qerl_lab.rollout.vllm import one_adapter

        arguments = one_adapter.llm_arguments(folder, config["r"], config["target_modules"])
    if how == "dense_graphs":
        arguments["compilation_config"] = {"cudagraph_capture_sizes": [8, 128, 512]}
    engine = LLM(
        model=str(folder), dtype="bfloat16", enforce_eager=how != "dense_graphs", gpu_memory_utilization=0.1,
        max_model_len=256, max_num_seqs=8, skip_tokenizer_init=True, enable_prefix_caching=False,
        kv_cache_memory_bytes=2**29,  # fixed, so that vLLM need not measure memory that others use too
        **arguments,
    )  # fmt: skip

    def logprobs(request: LoRARequest | None = None) -> list[list[float]]:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
        asked = [{"prompt_token_ids": ids} for ids in prompts]
        results = engine.generate(asked, sampling, use_tqdm=False, lora_request=request)
        return [
            [at[token].logprob for at, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
            for ids, result in zip(prompts, results, strict=True)
        ]

    if not how:
        out_file.write_text(json.dumps(logprobs()))
        return
    if how == "request":
        out_file.write_text(json.dumps({"adapter": logprobs(LoRARequest("policy", 1, adapter))}))
        return
    tensors = {key: tensor.cuda() for key, tensor in load_file(Path(adapter, "adapter_model.safetensors")).items()}
    start, end = "base_model.model.", ".lora_A.weight"
    pairs = {
        key.removeprefix(start).removesuffix(end): (tensor, tensors[key.replace("lora_A", "lora_B")])
        for key, tensor in tensors.items() if key.endswith(end)
    }  # fmt: skip

    def write(scaling: float) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        engine.apply_model(lambda model: one_adapter.AdapterBuffers(model, pairs).write(scaling))
        torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - started)

    found: dict[str, Any] = {"before": logprobs()}
    write(config["lora_alpha"] / config["r"])
    found["adapter"] = logprobs()
    write(0.0)
    found["zero"] = logprobs()
    found["write_ms"] = write(0.0)
    out_file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), *sys.argv[4:])
