"""The engine sections of the schema: `rollout.vllm.*` and `rollout.vllm_server.*`."""

from dataclasses import dataclass

from qerl_lab.config.option import option


@dataclass
class VllmConfig:
    lora: str = option(
        "dense", "adapter computed by dense products in vLLM's layers, or by vLLM's own LoRARequest",
        choices=("dense", "request"),
    )  # fmt: skip
    kv_cache_gib: float | None = option(
        None, "size of the key-value cache; null: enough for a full batch, at most half of the memory left "
        "beside the weights", above=0, at_most=100_000, unit="GiB",
    )  # fmt: skip
    kv_cache_dtype: str = option(
        "auto", "fp8 halves the key-value cache and changes the numbers; auto is the compute dtype",
        choices=("auto", "fp8"),
    )  # fmt: skip
    max_num_batched_tokens: int | None = option(
        None, "most tokens that vLLM computes at once, mainly prompts: fewer need less memory; null: vLLM's "
        "choice, 16,384 on an H200", at_least=1, at_most=10_000_000, unit="tokens",
    )  # fmt: skip
    linear_backend: str = option(
        "auto",
        "kernel of 4-bit products; auto: fp4_tiles where it fits, otherwise vLLM's choice; "
        "vllm: vLLM's choice; fp4_tiles: the lab's own, NVFP4 with lora=dense on an H100 or H200, adapter included",
        choices=("auto", "vllm", "marlin", "humming", "fp4_tiles"),
    )  # fmt: skip
    dense_rows: int | None = option(
        None, "NVFP4 with lora=dense: from this many completions at once use cuBLAS on a 16-bit copy of the weights; "
        "null: no copy. At batch 256 of 7B it gave 11% more tokens/s",
        at_least=1, at_most=1_000_000,
    )  # fmt: skip
    share_base: bool = option(
        False,
        "NVFP4 with Marlin or fp4_tiles: the trainer reads the engine's packed weights and keeps no copy; tried "
        "only in short runs",
    )
    sleep: bool = option(
        False, "free the key-value cache's GPU memory while the trainer computes; cost not measured yet"
    )
    enforce_eager: bool = option(False, "run without torch.compile and CUDA graphs: faster start, slower tokens")
    timeout_minutes: float = option(
        60.0, "a rollout that takes longer counts as failed", above=0, at_most=100_000, unit="min"
    )


@dataclass
class VllmServerConfig:
    url: str = option("http://127.0.0.1:8000", "address of `vllm serve`; a key comes from VLLM_API_KEY")
    adapter_dir: str | None = option(
        None, "folder for the adapter, at the same path for server and trainer; null: this machine's memory"
    )
    patience_seconds: float = option(
        60.0, "how long to retry a lost connection, every half second", at_least=0, at_most=86_400, unit="s"
    )
