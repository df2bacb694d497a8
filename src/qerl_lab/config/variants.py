"""Which keys have an effect only for some formats, noises, tasks, engines or launchers.

The schema holds every key for every run, since a scale may set keys that its run ignores. A user who types an ignored
key would be misled, so commands refuse the keys that `inert_keys` returns.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import NamedTuple

from qerl_lab.config.arm import OF_VLLM_HERE, values_of
from qerl_lab.config.keys import spell_value
from qerl_lab.config.schema import POCKET, FormatConfig, RunConfig
from qerl_lab.config.task import TaskConfig


class Variant(NamedTuple):
    """Keys that exist only for certain values of another key, and what to type to use them."""

    keys: str  # separated by spaces; a name that ends with a dot covers all keys below
    when: str  # KEY=VALUE|VALUE or KEY!=VALUE|VALUE
    remedy: str
    arm: str = ""

    @property
    def deciding_key(self) -> str:
        """Return the key whose value decides whether the variant's keys have an effect."""
        return self.when.partition("=")[0].rstrip("!")

    def has_key(self, key: str) -> bool:
        """Tell whether a dotted key belongs to this variant."""
        names = self.keys.split()
        return key != self.deciding_key and any(
            key == name or (name[-1] == "." and key.startswith(name)) for name in names
        )

    def is_active(self, value: str) -> bool:
        """Tell whether the variant's keys have an effect at this value of the deciding key."""
        found = value in self.when.partition("=")[2].split("|")
        return found != ("!=" in self.when)


# If several rows list a key, the last gives the reason in the error.
VARIANTS = (
    *(Variant(f"format.{f.name}", f"format.name={name}", f"format={name}", f"+experiment={name}")
      for f in fields(FormatConfig) if (name := f.metadata["only"])),
    Variant("format.ignore format.dense_cache", "format.name!=bf16", "format=nvfp4", "+experiment=nvfp4"),
    Variant("aqn.", "aqn.schedule!=off", "aqn=exponential", "+experiment=nvfp4_aqn"),
    Variant("aqn.sigma_end", "aqn.unit=sigma", "aqn=exponential", "+experiment=nvfp4_aqn"),
    Variant("aqn.kl_start aqn.kl_end aqn.sigma_min aqn.sigma_max aqn.solver.", "aqn.unit=kl", "aqn=kl",
            "+experiment=nvfp4_aqn_kl"),
    Variant("aqn.kl_end aqn.stages aqn.reading aqn.solver.", "aqn.schedule!=adaptive", "aqn=kl",
            "+experiment=nvfp4_aqn_kl"),
    Variant("aqn.adaptive.", "aqn.schedule=adaptive", "aqn=adaptive", "+experiment=nvfp4_aqn_adaptive"),
    *(Variant(f"task.{name}.", f"task.name={name}", f"task={name}")
      for name, group in vars(TaskConfig()).items() if is_dataclass(group) and name != "columns"),
    Variant("task.path task.columns.", "task.name!=arithmetic", "task=gsm8k"),
    Variant("rollout.vllm.", "rollout.engine=vllm|vllm_server", "rollout=vllm"),
    Variant(" ".join(OF_VLLM_HERE), "rollout.engine=vllm", "rollout=vllm"),
    Variant("rollout.vllm_server.", "rollout.engine=vllm_server", "rollout=vllm_server"),
    Variant("rollout.importance_clip_max", "rollout.importance_correction!=off|in_ratio",
            "rollout.importance_correction=token_truncate"),
    Variant("jobs_per_gpu", "jobs!=1", "jobs=2"),
    Variant("slurm", "launcher=slurm", "launcher=slurm"),
    Variant("algorithm.max_resamples", "algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling=true"),
    Variant("algorithm.kl_estimator", "algorithm.beta!=0|0.0", "algorithm.beta=0.001"),
    Variant("algorithm.entropy_coef_step algorithm.entropy_coef_max", "algorithm.entropy_target!=null",
            "algorithm.entropy_target=0.2"),
    Variant("eval.samples eval.temperature eval.top_p", "eval.questions!=0", "eval.questions=256"),
    Variant("eval.subset_questions eval.subset_samples", "eval.every!=0", "eval.every=50"),
)  # fmt: skip
ON_HUB = Variant("model.revision", "model.path=HUB_ID", "model.path=HUB_ID")


def inert_keys(cfg: RunConfig) -> Mapping[str, Variant]:
    """Map each key without effect in this configuration to the variant that it belongs to.

    With task.module no task key is included: the user's file may read any of them.
    """
    values = values_of(cfg)
    found = {
        key: variant
        for variant in VARIANTS if not variant.is_active(spell_value(values[variant.deciding_key]))
        for key in values if variant.has_key(key)
    }  # fmt: skip
    path = cfg.model.path
    if path == POCKET or path.endswith(".gguf") or Path(path).expanduser().is_dir():
        found["model.revision"] = ON_HUB
    return {key: variant for key, variant in found.items() if not (cfg.task.module and key.startswith("task."))}
