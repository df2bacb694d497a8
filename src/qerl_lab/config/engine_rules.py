"""Check what rollout engines, their kernels and servers require of a run.

Rules that only exclude one value of a key with another are in `rules.NEEDS`.
"""

import re
from collections.abc import Iterator

from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig, VllmServerConfig

TILES_RANKS, TILES_MAX_RANK = 8, 128  # the kernel fp4_tiles takes ranks 8, 16 ... 128


def check(cfg: RunConfig) -> Iterator[str]:
    """Yield an error message for each rule about rollout engines that the run breaks.

    Raises ConfigError instead if device=cpu was given and vLLM needs a GPU for this run.
    """
    own, rollout, rank = cfg.rollout.vllm, cfg.rollout, cfg.lora.rank
    if cfg.device == "cpu":
        check_engine_on_cpu(cfg, "device=cpu was given")
    if own.linear_backend == "fp4_tiles" and not fp4_tiles_takes_rank(rank):
        yield (
            f"rollout.vllm.linear_backend=fp4_tiles with lora.rank={rank} is not allowed; allowed with it: a rank in "
            f"multiples of {TILES_RANKS} up to {TILES_MAX_RANK}. Type rollout.vllm.linear_backend=auto."
        )
    if rollout.engine != "vllm_server":
        return
    server = rollout.vllm_server
    found = re.fullmatch(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?/?", server.url)
    if found is None:
        yield (
            f"rollout.vllm_server.url={server.url} is no address of a server; allowed: http://HOST:PORT. "
            f"Type for example rollout.vllm_server.url={VllmServerConfig().url}."
        )
        return
    is_here = found[1] in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d{1,3}){3}", found[1]) is not None
    if not is_here and server.adapter_dir is None:  # the server reads the adapter from a shared folder
        yield (
            f"rollout.vllm_server.url={server.url} is another host, and the server reads the adapter's files itself. "
            "Type rollout.vllm_server.adapter_dir=DIR, a folder that both hosts see under one path."
        )


def fp4_tiles_takes_rank(lora_rank: int) -> bool:
    """Tell whether the kernel `fp4_tiles` supports this LoRA rank. `fp4_tiles.supports` checks shapes too."""
    return lora_rank % TILES_RANKS == 0 and 0 < lora_rank <= TILES_MAX_RANK


def check_engine_on_cpu(cfg: RunConfig, why: str) -> None:
    """Raise ConfigError if rollout.engine=vllm needs a GPU for this run, which has only a CPU.

    `why` goes into the message and says why there is only a CPU, e.g. `device=cpu was given`.
    """
    if cfg.rollout.engine == "vllm" and cfg.format.name != DENSE_FORMAT:
        raise ConfigError(
            f"rollout.engine=vllm computes format.name={cfg.format.name} on a GPU only, and {why}; "
            f"allowed there: {DENSE_FORMAT}. Type rollout=transformers, or format={DENSE_FORMAT}."
        )
    if cfg.rollout.engine == "vllm" and cfg.trains_all:
        raise ConfigError(
            f"rollout.engine=vllm with lora.rank=0 needs a GPU, and {why}: on a CPU vLLM reorders the weights, which "
            "then cannot be replaced. Type rollout=transformers, or lora=rank32."
        )
    if cfg.rollout.engine == "vllm" and cfg.rollout.vllm.sleep:
        raise ConfigError(
            f"rollout.vllm.sleep=true gives the memory of a GPU back, and {why}. Type rollout.vllm.sleep=false."
        )
