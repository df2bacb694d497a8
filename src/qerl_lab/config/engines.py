"""The keys of one engine each, `rollout.vllm.*` and `rollout.vllm_server.*`: a part of the schema."""

from dataclasses import dataclass

from qerl_lab.config.option import option


@dataclass
class VllmConfig:
    lora: str = option(
        "dense", "how the adapter is computed: dense products in vLLM's layers, or vLLM's own LoRARequest",
        choices=("dense", "request"),
    )  # fmt: skip
    kv_cache_gib: float | None = option(
        None, "memory of the key-value cache in GiB; null: what a full batch fills, at most half of what is free "
        "beside the weights", above=0, at_most=100_000, unit="GiB",
    )  # fmt: skip
    kv_cache_dtype: str = option(
        "auto", "fp8 halves the key-value cache and changes the numbers; auto is the compute dtype",
        choices=("auto", "fp8"),
    )  # fmt: skip
    max_num_batched_tokens: int | None = option(
        None, "tokens that vLLM computes at once, most of them of prompts: fewer need less memory; null: vLLM's "
        "choice, 16,384 on an H200", at_least=1, at_most=10_000_000, unit="tokens",
    )  # fmt: skip
    linear_backend: str = option(
        "auto",
        "kernels of the 4-bit products; auto: the fastest, timed once for a GPU and a model (a server's own choice); "
        "vllm: vLLM's choice; fp4_tiles: the lab's own, NVFP4 with lora=dense on an H100 or H200, adapter included",
        choices=("auto", "vllm", "marlin", "humming", "fp4_tiles"),
    )  # fmt: skip
    dense_rows: int | None = option(
        None, "NVFP4 with lora=dense: from so many rows on (completions at once) by cuBLAS, over a copy of the weights "
        "in 16 bits; null: no copy. At batch 256 of 7B it gave 11% more tokens",
        at_least=1, at_most=1_000_000,
    )  # fmt: skip
    share_base: bool = option(
        False,
        "NVFP4 by Marlin or fp4_tiles: the trainer reads the engine's packed weights and keeps none of its own; tried "
        "in short runs alone",
    )
    sleep: bool = option(
        False,
        "while the trainer computes, the key-value cache gives its GPU memory back; its cost was not measured yet",
    )
    enforce_eager: bool = option(False, "run without torch.compile and CUDA graphs: a quick start, slow tokens")
    timeout_minutes: float = option(
        60.0, "a rollout that takes longer counts as failed", above=0, at_most=100_000, unit="min"
    )


@dataclass
class VllmServerConfig:
    url: str = option("http://127.0.0.1:8000", "address of `vllm serve`; a key comes from VLLM_API_KEY")
    adapter_dir: str | None = option(
        None, "folder for the adapter that server and trainer see under one path; null: the memory of this machine"
    )
    patience_seconds: float = option(
        60.0, "a lost connection is tried again for so long, after pauses of 0.25 to 10 s", at_least=0, at_most=86_400,
        unit="s",
    )  # fmt: skip
