"""What an engine, its kernels and its server ask of a run: the rules of rollout.vllm and rollout.vllm_server."""

import re

from qerl_lab.config.engines import VllmServerConfig
from qerl_lab.config.option import ConfigError
from qerl_lab.config.schema import DENSE_FORMAT, RunConfig

FP4_MAX_RANK = 128  # of rollout.vllm.fp4_linear and fp4_tiles, held by a test


def engine_fits_device(cfg: RunConfig) -> None:
    if cfg.device == "cpu":
        check_engine_on_cpu(cfg, "device=cpu was given")


def check_engine_on_cpu(cfg: RunConfig, why: str) -> None:
    """Raise ConfigError for an engine that a CPU cannot run in the run's format; `why` says that it is a CPU."""
    if cfg.rollout.engine == "vllm" and cfg.format.name != DENSE_FORMAT:
        raise ConfigError(
            f"rollout.engine=vllm computes format.name={cfg.format.name} on a GPU only, and {why}; "
            f"allowed there: {DENSE_FORMAT}. Type rollout=transformers, or format={DENSE_FORMAT}."
        )
    if cfg.rollout.engine == "vllm" and cfg.rollout.vllm.sleep:
        raise ConfigError(
            f"rollout.vllm.sleep=true gives the memory of a GPU back, and {why}. Type rollout.vllm.sleep=false."
        )


def backend_fits(cfg: RunConfig) -> None:
    """`linear_backend` names kernels of 4-bit products; the dense adapter's layers alone ask Humming for schedules."""
    own, name, engine = cfg.rollout.vllm, cfg.format.name, cfg.rollout.engine
    if own.linear_backend in ("marlin", "humming", "tuned") and name not in ("nvfp4", "mxfp4"):
        raise ConfigError(
            f"rollout.vllm.linear_backend={own.linear_backend} has no kernel for format.name={name}; allowed with it: "
            "nvfp4, mxfp4. Type rollout.vllm.linear_backend=vllm."
        )
    if own.linear_backend in ("auto", "tuned") and engine == "vllm_server":
        raise ConfigError(
            f"rollout.vllm.linear_backend={own.linear_backend} times kernels in the trainer's process, where no server "
            "is; allowed with rollout=vllm_server: vllm, marlin, humming. Type rollout.vllm.linear_backend=humming or "
            "rollout=vllm."
        )
    if own.linear_backend == "tuned" and own.lora != "dense":
        raise ConfigError(
            f"rollout.vllm.linear_backend=tuned with rollout.vllm.lora={own.lora} is not allowed; allowed: dense. Type "
            "rollout.vllm.linear_backend=humming, or rollout.vllm.lora=dense."
        )


def fp4_kernels_fit(cfg: RunConfig) -> None:
    """They are products of NVFP4 with the adapter in them."""
    own, name = cfg.rollout.vllm, cfg.format.name
    for key, wanted in (("fp4_linear", own.fp4_linear), ("fp4_tiles", own.fp4_tiles)):
        if wanted and (name != "nvfp4" or own.lora != "dense" or cfg.lora.rank > FP4_MAX_RANK):
            raise ConfigError(
                f"rollout.vllm.{key}=true with format.name={name}, rollout.vllm.lora={own.lora} and lora.rank="
                f"{cfg.lora.rank} is not allowed; allowed: nvfp4, dense, a rank up to {FP4_MAX_RANK}. Type "
                f"rollout.vllm.{key}=false, or format=nvfp4 rollout.vllm.lora=dense."
            )


def dense_rows_fit(cfg: RunConfig) -> None:
    """They spend the memory that `share_base` saves."""
    own, name = cfg.rollout.vllm, cfg.format.name
    if own.dense_rows and (name != "nvfp4" or own.lora != "dense" or own.share_base):
        raise ConfigError(
            f"rollout.vllm.dense_rows={own.dense_rows} with format.name={name}, rollout.vllm.lora={own.lora} and "
            f"rollout.vllm.share_base={str(own.share_base).lower()} is not allowed; allowed: nvfp4, dense, false. Type "
            "rollout.vllm.dense_rows=null, or format=nvfp4 rollout.vllm.lora=dense rollout.vllm.share_base=false."
        )


def base_can_be_shared(cfg: RunConfig) -> None:
    """The trainer reads weights in the form of one kernel, Marlin, in memory that outlives the engine."""
    own, name = cfg.rollout.vllm, cfg.format.name
    copies = own.fp4_linear or own.fp4_tiles
    if own.share_base and (name != "nvfp4" or copies or own.linear_backend not in ("vllm", "marlin")):
        raise ConfigError(
            f"rollout.vllm.share_base=true with format.name={name}, "
            f"rollout.vllm.fp4_linear={str(own.fp4_linear).lower()}, "
            f"rollout.vllm.fp4_tiles={str(own.fp4_tiles).lower()} and rollout.vllm.linear_backend="
            f"{own.linear_backend} is not allowed; allowed: nvfp4, false, false, vllm or marlin. Type "
            "rollout.vllm.share_base=false, or format=nvfp4 rollout.vllm.linear_backend=marlin."
        )
    if own.share_base and own.sleep:
        raise ConfigError(
            "rollout.vllm.sleep=true with rollout.vllm.share_base=true is not allowed: an engine that can sleep takes "
            "its weights' memory along when it ends, and the trainer would read them. Type "
            "rollout.vllm.share_base=false, or rollout.vllm.sleep=false."
        )


def server_reachable(cfg: RunConfig) -> None:
    """The server reads the adapter's files, which another host does not see by itself."""
    own, engine = cfg.rollout.vllm_server, cfg.rollout.engine
    if engine != "vllm_server":
        return
    found = re.fullmatch(r"https?://(\[[0-9a-fA-F:.]+\]|[\w.-]+)(:\d{1,5})?/?", own.url)
    if found is None:
        raise ConfigError(
            f"rollout.vllm_server.url={own.url} is no address of a server; allowed: http://HOST:PORT. "
            f"Type for example rollout.vllm_server.url={VllmServerConfig().url}."
        )
    here = found[1] in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d{1,3}){3}", found[1]) is not None
    if not here and own.adapter_dir is None:
        raise ConfigError(
            f"rollout.vllm_server.url={own.url} is another host, and the server reads the adapter's files itself. Type "
            "rollout.vllm_server.adapter_dir=DIR, a folder that both hosts see under one path."
        )


def server_has_one_trainer(cfg: RunConfig) -> None:
    if cfg.rollout.engine == "vllm_server" and cfg.gpus > 1:
        raise ConfigError(
            f"gpus={cfg.gpus} with rollout.engine=vllm_server is not supported: a server has one trainer. Type gpus=1 "
            "and give the server several GPUs (--tensor-parallel-size), or type rollout=vllm."
        )


RULES = (
    engine_fits_device, backend_fits, fp4_kernels_fit, dense_rows_fit, base_can_be_shared, server_reachable,
    server_has_one_trainer,
)  # fmt: skip
