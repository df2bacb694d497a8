"""Rules of rollout.vllm and rollout.vllm_server: what an engine, its kernels and its server require of a run."""

import re
from collections.abc import Iterator

from qerl_lab.config.engines import VllmServerConfig
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig

TILES_RANKS, TILES_MAX_RANK = 8, 128  # fp4_tiles takes multiples of the first


def check(cfg: RunConfig) -> Iterator[str]:
    """Yield the message of each rule about rollout engines that the run breaks."""
    if cfg.device == "cpu":
        check_engine_on_cpu(cfg, "device=cpu was given")
    at_once, batch = cfg.rollout.vllm.max_num_batched_tokens, cfg.rollout.batch_size
    if at_once is not None and at_once < batch:
        yield (
            f"rollout.vllm.max_num_batched_tokens={at_once} is below rollout.batch_size={batch}, a token of each "
            f"completion. Type rollout.vllm.max_num_batched_tokens={max(2048, batch)}."
        )
    yield from _check_kernels(cfg)
    yield from _check_memory(cfg)
    if cfg.rollout.engine == "vllm_server":
        yield from _check_server(cfg)


def check_engine_on_cpu(cfg: RunConfig, why: str) -> None:
    """Raise ConfigError if the run's engine cannot run its format on a CPU; `why` says why a CPU is used."""
    if cfg.rollout.engine == "vllm" and cfg.format.name != DENSE_FORMAT:
        raise ConfigError(
            f"rollout.engine=vllm computes format.name={cfg.format.name} on a GPU only, and {why}; "
            f"allowed there: {DENSE_FORMAT}. Type rollout=transformers, or format={DENSE_FORMAT}."
        )
    if cfg.rollout.engine == "vllm" and cfg.rollout.vllm.sleep:
        raise ConfigError(
            f"rollout.vllm.sleep=true gives the memory of a GPU back, and {why}. Type rollout.vllm.sleep=false."
        )


def _check_kernels(cfg: RunConfig) -> Iterator[str]:
    """Yield the message of each rule about `rollout.vllm.linear_backend` that the run breaks."""
    own, name, dtype = cfg.rollout.vllm, cfg.format.name, cfg.model.dtype
    if own.linear_backend in ("marlin", "humming") and name not in ("nvfp4", "mxfp4"):
        yield (
            f"rollout.vllm.linear_backend={own.linear_backend} has no kernel for format.name={name}; allowed with it: "
            "nvfp4, mxfp4. Type rollout.vllm.linear_backend=auto."
        )
    if own.linear_backend != "fp4_tiles":
        return
    if cfg.rollout.engine == "vllm_server":
        yield (
            "rollout.vllm.linear_backend=fp4_tiles is a kernel of the lab's, which no server has; allowed with "
            "rollout=vllm_server: auto, vllm, marlin, humming. Type rollout.vllm.linear_backend=auto, or rollout=vllm."
        )
    if dtype == "float32":
        yield (
            f"rollout.vllm.linear_backend=fp4_tiles with model.dtype={dtype} is not allowed: it computes in bfloat16 "
            "alone. Type model.dtype=bfloat16, or rollout.vllm.linear_backend=auto."
        )
    if name != "nvfp4" or own.lora != "dense" or not fp4_tiles_takes_rank(cfg.lora.rank):
        yield (
            f"rollout.vllm.linear_backend=fp4_tiles with format.name={name}, rollout.vllm.lora={own.lora} and "
            f"lora.rank={cfg.lora.rank} is not allowed; allowed: nvfp4, dense, a rank in multiples of {TILES_RANKS} up "
            f"to {TILES_MAX_RANK}. Type rollout.vllm.linear_backend=auto, or format=nvfp4 rollout.vllm.lora=dense."
        )


def fp4_tiles_takes_rank(lora_rank: int) -> bool:
    """Tell whether the kernel `fp4_tiles` supports this LoRA rank; `fp4_tiles.supports` checks the rest."""
    return lora_rank % TILES_RANKS == 0 and 0 < lora_rank <= TILES_MAX_RANK


def _check_memory(cfg: RunConfig) -> Iterator[str]:
    """Yield the message of each rule about copies of the weights in vLLM that the run breaks."""
    own, name = cfg.rollout.vllm, cfg.format.name
    if own.dense_rows and (name != "nvfp4" or own.lora != "dense"):  # the dense adapter's layers implement it
        yield (
            f"rollout.vllm.dense_rows={own.dense_rows} with format.name={name} and rollout.vllm.lora={own.lora} is not "
            "allowed; allowed: nvfp4, dense. Type rollout.vllm.dense_rows=null, or format=nvfp4 "
            "rollout.vllm.lora=dense."
        )
    if own.share_base and (name != "nvfp4" or own.linear_backend == "humming"):  # layouts that the trainer reads
        yield (
            f"rollout.vllm.share_base=true with format.name={name} and rollout.vllm.linear_backend="
            f"{own.linear_backend} is not allowed; allowed: nvfp4, any but humming. Type "
            "rollout.vllm.share_base=false, or format=nvfp4 rollout.vllm.linear_backend=auto."
        )
    if own.share_base and own.sleep:
        yield (
            "rollout.vllm.sleep=true with rollout.vllm.share_base=true is not allowed: an engine that can sleep takes "
            "its weights' memory along when it ends, and the trainer would read them. Type "
            "rollout.vllm.share_base=false, or rollout.vllm.sleep=false."
        )


def _check_server(cfg: RunConfig) -> Iterator[str]:
    """Yield the message of each rule about `rollout.vllm_server` that the run breaks."""
    own = cfg.rollout.vllm_server
    found = re.fullmatch(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?/?", own.url)
    if found is None:
        yield (
            f"rollout.vllm_server.url={own.url} is no address of a server; allowed: http://HOST:PORT. "
            f"Type for example rollout.vllm_server.url={VllmServerConfig().url}."
        )
        return
    here = found[1] in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d{1,3}){3}", found[1]) is not None
    if not here and own.adapter_dir is None:  # the server reads the adapter from a shared folder
        yield (
            f"rollout.vllm_server.url={own.url} is another host, and the server reads the adapter's files itself. Type "
            "rollout.vllm_server.adapter_dir=DIR, a folder that both hosts see under one path."
        )
    if cfg.gpus > 1:
        yield (
            f"gpus={cfg.gpus} with rollout.engine=vllm_server is not supported: a server has one trainer. Type gpus=1 "
            "and give the server several GPUs (--tensor-parallel-size), or type rollout=vllm."
        )
