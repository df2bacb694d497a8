"""Jobs of a benchmark: what the process of one arm measures, at one rank of its adapter. Imports no torch."""

import math
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf

from qerl_lab.bench.bench_options import ARCHITECTURES, FORMATS, AnyOptions, RolloutOptions, Row, StepOptions
from qerl_lab.config.keys import spell_value
from qerl_lab.config.option import ConfigError, did_you_mean
from qerl_lab.config.rules import from_dict
from qerl_lab.config.schema import FormatConfig, RunConfig
from qerl_lab.config.units import GIB
from qerl_lab.model.on_disk import cache_bytes_per_token

BFLOAT16_BYTES = 2
# Keys of the group `format` that change the files of a checkpoint.
CHECKPOINT_KEYS = ["ignore", *(field.name for field in fields(FormatConfig) if field.metadata["only"])]
BLOCK = 128  # tokens per block of vLLM's key-value cache: its largest default


@dataclass(frozen=True)
class Job:
    """An arm of a benchmark at one rank of the adapter, measured in processes of its own.

    Attributes:
        overrides: values by key of the run configuration; for a baseline by argument of `LLM` or `GRPOConfig`.
        architecture: the keys of config.json that affect speed.
        scratch: directory of the checkpoints and adapters.
        options: the benchmark's options by name.
    """

    benchmark: str
    arm: str
    format: str
    is_baseline: bool
    overrides: dict[str, Any]
    rank: int
    architecture: dict[str, Any]
    scratch: str
    options: dict[str, Any]

    @property
    def format_config(self) -> FormatConfig:
        """Return the settings that the arm's checkpoint depends on: its format, and the overrides of CHECKPOINT_KEYS.

        Arms that differ only in other keys of the group `format`, such as format.dense_cache, share a checkpoint. An
        override of format.name is left out here, and the loader refuses it: rows are listed under the arm's format.
        """
        given = {key: self.overrides[f"format.{key}"] for key in CHECKPOINT_KEYS if f"format.{key}" in self.overrides}
        return FormatConfig(name=self.format, **given)

    @property
    def folder(self) -> str:
        """Return the directory of the checkpoint. Arms with equal `format_config` share it."""
        is_usual = self.format_config == FormatConfig(name=self.format)
        return f"{self.scratch}/{self.format}" + (
            "" if is_usual else f"-{zlib.crc32(repr(self.format_config).encode()):08x}"
        )

    @property
    def adapter(self) -> str:
        """Return the directory of the adapter, in PEFT's format."""
        return f"{self.scratch}/rank{self.rank}"

    @property
    def gpus(self) -> int:
        """Return the number of GPUs, and so of processes: the arm's override `gpus`, or 1; always 1 for a baseline."""
        return 1 if self.is_baseline else self.overrides.get("gpus", 1)

    @property
    def about(self) -> Row:
        """Return the columns that all rows of the arm share: model, arm, format, baseline, rank, gpus."""
        return {
            "model": self.options["model"], "arm": self.arm, "format": self.format, "baseline": self.is_baseline,
            "rank": self.rank, "gpus": self.gpus,
        }  # fmt: skip

    def kv_gib(self, sequences: int) -> float:
        """Return the GiB of a bfloat16 key-value cache that holds `sequences` prompts and completions of full length.

        Adds room for one more sequence, and for one more block of `BLOCK` tokens in each sequence.
        """
        blocks = math.ceil((self.options["prompt"] + self.options["new"]) / BLOCK) + 1
        per_token = cache_bytes_per_token(self.architecture, BFLOAT16_BYTES)
        return float((sequences + 1) * blocks * BLOCK * per_token / GIB)

    def config(self) -> RunConfig:
        """Build the run configuration that measures this arm, from its overrides and the benchmark's options.

        Only for arms of the lab, not for baselines. Raises ConfigError if the configuration is invalid.
        """
        options = self.options
        given = {
            "model.path": self.folder, "model.name": options["model"], "format.name": self.format,
            "lora.rank": self.rank, "eval.questions": 0, "tracking.mlflow": False, "checkpoint.every": 0,
            "cpu_threads": 0,
        }  # fmt: skip
        if self.benchmark != "train_step":
            given |= {
                "rollout.engine": "vllm", "rollout.max_prompt_tokens": options["prompt"],
                "rollout.max_completion_tokens": options["new"],
            }  # fmt: skip
        if self.benchmark == "rollout":  # the engine has room for the largest batch
            batch = max(options["batches"])
            given |= {"rollout.batch_size": batch, "rollout.vllm.kv_cache_gib": self.kv_gib(batch)}
        if self.benchmark == "step":
            groups, group_size = options["groups"], options["group_size"]
            given |= {
                "rollout.prompts_per_step": groups, "rollout.group_size": group_size,
                "rollout.batch_size": groups * group_size, "optim.micro_batch_size": options["micro_batch"],
                "model.gradient_checkpointing": True, "steps": options["steps"] + 1,
            }  # fmt: skip
        nested = OmegaConf.create()
        for key, value in (given | self.overrides).items():
            OmegaConf.update(nested, key, value)
        values: Any = OmegaConf.to_container(nested)
        return from_dict(values)


def read_jobs(options: AnyOptions, scratch: str) -> list[Job]:
    """Parse the arms of `options`; return one job per arm and LoRA rank.

    An arm such as "nvfp4 rollout.vllm.kv_cache_dtype=fp8" is a format or baseline, then overrides. `scratch` is the
    directory for checkpoints and adapters. Raises ConfigError if an arm has an unknown name or an unreadable override.
    """
    jobs, baselines, architecture = [], options.BASELINES, ARCHITECTURES[options.model]
    ranks = options.ranks if isinstance(options, RolloutOptions) else [options.rank]
    for text in options.arms:
        name, *words = text.split() or [""]
        allowed = [*baselines, *FORMATS]
        if name not in allowed:
            hint = did_you_mean(name, allowed) or f" Type for example arms=[{allowed[0]}]."
            raise ConfigError(f"{text!r} in arms is not allowed; allowed: {', '.join(allowed)}.{hint}")
        overrides = {}
        for word in words:
            try:
                read = OverridesParser.create().parse_override(word)
            except HydraException:
                read = None
            if read is None or read.is_sweep_override():
                raise ConfigError(
                    f"{word} in the arm {text!r} is no KEY=VALUE that can be read. Type for example "
                    f"\"arms=['{name} KEY=VALUE']\", one value for each key."
                )
            overrides[read.key_or_group] = read.value()
        jobs += [
            Job(
                benchmark=options.BENCHMARK,
                arm=text,
                format=baselines.get(name, name),
                is_baseline=name in baselines,
                overrides=overrides,
                rank=rank,
                architecture=architecture,
                scratch=scratch,
                options=asdict(options),
            )
            for rank in ranks
        ]
    return jobs


def check(options: AnyOptions) -> None:
    """Raise ConfigError if options cannot be measured.

    Refuses empty lists of arms, batches or ranks; a lab arm that is invalid, has another number of completions in a
    step, or has several GPUs in a rollout; and a `scratch` that is no directory. vLLM or TRL check a baseline's
    arguments later, in its process.
    """
    for name in ("arms", "batches", "ranks"):
        if getattr(options, name, None) == []:
            example = spell_value(getattr(type(options)(), name)[:1])
            raise ConfigError(
                f"{name}=[] leaves nothing to measure; allowed: one entry or more. Type for example {name}={example}, "
                f"or leave {name} out."
            )
    completions = options.groups * options.group_size if isinstance(options, StepOptions) else None  # of a step
    for job in read_jobs(options, options.scratch):
        if isinstance(options, RolloutOptions) and job.gpus != 1:
            raise ConfigError(
                f"gpus={job.gpus} in the arm {job.arm!r} is for whole steps: a rank's engine samples for itself. "
                "Leave it out, or type python -m qerl_lab.bench step."
            )
        if job.is_baseline:
            continue
        try:
            cfg = job.config()
            _ = cfg.optim.chosen_micro_batch_size  # raises for null, which only a run replaces by a number
        except ConfigError as error:
            raise ConfigError(f"the arm {job.arm!r} with rank {job.rank}: {error}") from None
        if completions not in (None, cfg.completions_per_step):
            raise ConfigError(
                f"the arm {job.arm!r} has {cfg.completions_per_step} completions in a step (rollout.prompts_per_step x "
                f"rollout.group_size); allowed: groups x group_size = {completions}, because rows compare "
                "steps of the same size. Type groups=N and group_size=N for all arms."
            )
    if not Path(options.scratch).is_dir():
        raise ConfigError(f"scratch={options.scratch} is no directory. Type scratch=DIR of one that is there.")
