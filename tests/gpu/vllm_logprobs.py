"""Log-probabilities of prompts' own tokens in vLLM, in a process of its own, whose GPU memory comes back.

python vllm_logprobs.py FOLDER PROMPTS.json OUT.json     PROMPTS and OUT: [prompt][token], OUT without the first token
"""

import json
import os
import sys
from pathlib import Path


def main(folder: Path, prompts_file: Path, out_file: Path) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams

    prompts = json.loads(prompts_file.read_text())
    engine = LLM(
        model=str(folder), dtype="bfloat16", enforce_eager=True, gpu_memory_utilization=0.1,
        max_model_len=256, max_num_seqs=8, skip_tokenizer_init=True, enable_prefix_caching=False,
        kv_cache_memory_bytes=2**29,  # fixed, so that vLLM need not measure memory that others use too
    )  # fmt: skip
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, detokenize=False)
    results = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    found = [
        [at[token].logprob for at, token in zip(result.prompt_logprobs[1:], ids[1:], strict=True)]
        for ids, result in zip(prompts, results, strict=True)
    ]
    out_file.write_text(json.dumps(found))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
