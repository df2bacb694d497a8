"""Check the overrides (`key=value`) that a user typed, set implied values, add notes. Imports no torch.

Every run has all keys of the schema, and a scale may set keys that a run ignores. But a user who types an ignored key
is misled, so a typed key must have an effect.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import NamedTuple

import yaml

from qerl_lab import tasks
from qerl_lab.config.arm import ENGINE_KEYS, OF_SWEEPS, values_of
from qerl_lab.config.conf_folder import group_folder
from qerl_lab.config.keys import SET_BY_LAB, is_met, settings_of
from qerl_lab.config.message import with_noun
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import with_absolute_paths
from qerl_lab.config.rules import largest_divisor, remedy_in_arm
from qerl_lab.config.schema import POCKET, AqnConfig, FormatConfig, RunConfig
from qerl_lab.config.task import TaskConfig
from qerl_lab.model import on_disk

CLIPS = ("algorithm.epsilon_low", "algorithm.epsilon_high")


class ConditionalKeys(NamedTuple):
    """Keys that have an effect only if a condition is met (see `keys.is_met`), and what to type to meet it."""

    keys: str  # separated by spaces; a name that ends with a dot covers all keys below
    when: str  # condition on other keys
    remedy: str

    def has_key(self, key: str) -> bool:
        """Tell whether this row lists the dotted key, or a section that holds it."""
        return any(key == name or (name[-1] == "." and key.startswith(name)) for name in self.keys.split())


# If several rows with an unmet condition list a key, the error gives the last row as the reason.
CONDITIONAL_KEYS = (
    *(ConditionalKeys(f"format.{f.name}", f"format.name={name}", f"format={name}")
      for f in fields(FormatConfig) if (name := f.metadata["only"])),
    ConditionalKeys("format.ignore format.dense_cache", "format.name!=bf16", "format=nvfp4"),
    # Not aqn.norms: every run holds these norms in float32, and refuses a model that lacks one.
    ConditionalKeys(" ".join(f"aqn.{name}" for name in values_of(AqnConfig()) if name != "norms"),
            "aqn.schedule!=off", "aqn=exponential"),
    ConditionalKeys("aqn.sigma_end", "aqn.unit=sigma", "aqn=exponential"),
    ConditionalKeys("aqn.kl_start aqn.kl_end aqn.sigma_min aqn.sigma_max aqn.solver.", "aqn.unit=kl", "aqn=kl"),
    ConditionalKeys("aqn.kl_end aqn.stages aqn.reading aqn.solver.", "aqn.schedule!=adaptive", "aqn=kl"),
    ConditionalKeys("aqn.adaptive.", "aqn.schedule=adaptive", "aqn=adaptive"),
    *(ConditionalKeys(f"task.{name}.", f"task.name={name}", f"task={name}")
      for name, group in vars(TaskConfig()).items() if is_dataclass(group) and name != "columns"),
    ConditionalKeys("task.format_reward_for", "task.format_reward!=0", "task.format_reward=0.2"),
    ConditionalKeys("task.path task.columns.", "task.name!=arithmetic", "task=gsm8k"),
    *(ConditionalKeys(key, f"rollout.engine={'|'.join(engines)}", f"rollout={engines[0]}")
      for key, engines in ENGINE_KEYS.items()),
    ConditionalKeys("lora. rollout.vllm.lora", "lora.rank!=0", "lora=rank32"),
    ConditionalKeys("task.module_hash", "task.module!=null", "task.module=FILE.py"),
    ConditionalKeys("lora.start_hash", "lora.start_from!=null", "lora.start_from=RUN_DIR"),
    ConditionalKeys("preregistration_sha256", "preregistration!=null", "preregistration=FILE.yaml"),
    ConditionalKeys("rollout.importance_clip_max", "rollout.importance_correction!=off|in_ratio",
            "rollout.importance_correction=token_truncate"),
    ConditionalKeys("slurm", "launcher=slurm", "launcher=slurm"),
    ConditionalKeys("algorithm.max_resamples", "algorithm.dynamic_sampling=true", "algorithm.dynamic_sampling=true"),
    ConditionalKeys("algorithm.kl_estimator", "algorithm.beta!=0", "algorithm.beta=0.001"),
    ConditionalKeys("algorithm.entropy_coef_step algorithm.entropy_coef_max", "algorithm.entropy_target!=null",
            "algorithm.entropy_target=0.2"),
    ConditionalKeys("eval.samples eval.samples_before", "eval.questions!=0", "eval.questions=256"),
    ConditionalKeys("eval.temperature eval.top_p", "eval.questions!=0 or eval.every!=0", "eval.questions=256"),
    ConditionalKeys("eval.subset_questions eval.subset_samples", "eval.every!=0", "eval.every=50"),
)  # fmt: skip


def overrides_by_key(overrides: Sequence[str]) -> dict[str, str]:
    """Map the key or group of each override (`key=value`), without a leading plus, to its value as text."""
    return {key.lstrip("+"): value for key, _, value in (line.partition("=") for line in overrides)}


def with_implied_values(cfg: RunConfig, typed: Collection[str]) -> RunConfig:
    """Fill in the values that follow from others; return the configuration. May change `cfg`.

    Local paths become absolute and get hashes of their files. Also sets, unless the key is in `typed`: the model's
    name, a micro-batch size that divides the completions of an update, and the rounding rules that a quantized
    checkpoint records. Raises ConfigError if a file is missing or a hash does not match its file.
    """
    option = group_folder("model") / f"{cfg.model.name}.yaml"
    if "model.name" not in typed and option.is_file():
        usual = yaml.safe_load(option.read_text(encoding="utf-8")) or {}
        if cfg.model.path != usual.get("path", POCKET):  # an option of conf/model with another path
            cfg.model.name = Path(cfg.model.path).absolute().name.removesuffix(".gguf")
    cfg = with_absolute_paths(cfg)
    mini_batch, micro_batch = cfg.mini_batch_size_per_gpu, cfg.optim.micro_batch_size
    is_even = mini_batch and cfg.completions_per_gpu % cfg.algorithm.updates_per_rollout == 0  # else `rules` refuses
    if "optim.micro_batch_size" not in typed and micro_batch and is_even:
        cfg.optim.micro_batch_size = largest_divisor(mini_batch, micro_batch)
    name, rules = on_disk.noted_format(Path(cfg.model.path)) if cfg.model.path != POCKET else ("", {})
    noted = rules if name == cfg.format.name else {}
    for key, value in noted.items():
        if getattr(cfg.format, key) == getattr(FormatConfig(), key) and f"format.{key}" not in typed:
            setattr(cfg.format, key, value)
    return cfg


def check_overrides(cfg: RunConfig, typed: Mapping[str, str]) -> None:
    """Raise ConfigError if a typed override is not allowed in this job, whatever other jobs the sweep has.

    `typed` maps typed keys to their values.
    """
    for key in SET_BY_LAB:
        if key in typed:
            raise ConfigError(f"{key} is set by the lab, not by the command. Leave {key} out.")
    for group, value in (("task", cfg.task.name), ("algorithm", cfg.algorithm.name)):
        if f"{group}.name" in typed:  # an option of these groups sets more than its name
            raise ConfigError(f"{group}.name={value} leaves out what belongs to it. Type {group}={value}.")
    if cfg.scale == POCKET and "scale" not in typed and cfg.model.path != POCKET:
        on_disk.local_path(cfg.model.path)  # raises for a missing path: that comes before advice on scales
        raise ConfigError(
            f"model.path={cfg.model.path} with scale={POCKET} would train it by the recipe of the embedded policy "
            f"(learning rate {cfg.optim.learning_rate:g}, {cfg.rollout.max_completion_tokens} tokens a completion). "
            f"Type scale=custom for the schema's ({RunConfig().optim.learning_rate:g}, "
            f"{RunConfig().rollout.max_completion_tokens}), a paper scale, or scale={POCKET} to mean it."
        )


def refuse_conflicting_jobs(configs: Sequence[RunConfig]) -> None:
    """Raise ConfigError if jobs of a sweep differ in a key of `OF_SWEEPS`, or would use one vLLM server at once."""
    for key in OF_SWEEPS:
        if len({getattr(cfg, key) for cfg in configs}) > 1:
            raise ConfigError(f"{key} holds for the whole sweep; allowed: one value. Type {key}=VALUE, once.")
    first = configs[0]
    urls = [cfg.rollout.vllm_server.url for cfg in configs if cfg.rollout.engine == "vllm_server"]
    if len(set(urls)) < len(urls) and (first.jobs, first.launcher) != (1, "local"):
        raise ConfigError(
            f"jobs={first.jobs} with launcher={first.launcher} lets several runs sample on one server at once "
            "(rollout.vllm_server.url), and it has one run at a time. Type jobs=1 launcher=local, or rollout=vllm."
        )


def inert_keys(cfg: RunConfig) -> dict[str, ConditionalKeys]:
    """Map each key without effect in this configuration to the `ConditionalKeys` row with the condition that it needs.

    If task.module is set, keys of task.* are left out, because the module may read them. Exception: task.path and
    task.columns.* stay if one of them is set and the module makes no questions.
    """
    values, inert = values_of(cfg), dict[str, ConditionalKeys]()
    for row in CONDITIONAL_KEYS:
        if not is_met(row.when, values):
            inert |= {key: row for key in values if row.has_key(key) and key not in settings_of(row.when, values)}
    path = cfg.model.path
    if path == POCKET or path.endswith(".gguf") or Path(path).expanduser().is_dir():
        inert["model.revision"] = ConditionalKeys("model.revision", "model.path=HUB_ID", "model.path=HUB_ID")
    if not Path(path).is_absolute():
        inert["model.hash"] = ConditionalKeys("model.hash", "model.path=DIR", "model.path=DIR")
    if cfg.task.module:
        of_questions = [key for key in inert if key == "task.path" or key.startswith("task.columns.")]
        is_any_set = any(values[key] is not None for key in of_questions)  # first: makes_questions imports the module
        unread = of_questions if is_any_set and not tasks.makes_questions(cfg.task) else []
        inert = {key: row for key, row in inert.items() if key in unread or not key.startswith("task.")}
    return inert


def refuse_inert_overrides(jobs: Sequence[tuple[RunConfig, Mapping[str, str]]]) -> None:
    """Raise ConfigError for an override without effect. `jobs` has (configuration, typed values by key) of each job.

    An override that all jobs share must have an effect in at least one of them. An override that differs between jobs
    must have an effect in each, because otherwise two jobs would be the same run under two names.
    """
    inert = [inert_keys(cfg) for cfg, _ in jobs]
    for number, (cfg, words) in enumerate(jobs):
        for key in [key for key in inert[number] if key in words]:
            is_shared = all(others.get(key) == words[key] for _, others in jobs)
            if is_shared and any(key not in of_job for of_job in inert):
                continue
            row = inert[number][key]
            where = f"job {number}: " if len(jobs) > 1 else ""
            given = " and ".join(f"{other}={value}" for other, value in settings_of(row.when, values_of(cfg)).items())
            raise ConfigError(
                f"{where}{key}={words[key]} does nothing in a run with {given}. "
                f"Leave {key} out, or type for example {remedy_in_arm(cfg, row.remedy)}."
            )


def notes_before_start(cfg: RunConfig, micro_batch_size: int | None, typed: Collection[str]) -> list[str]:
    """Return notes to print before a job starts, on overrides with little effect and on changed or unusual values.

    `micro_batch_size` is the composed value, before `with_implied_values` reduced it to a divisor of an update's
    completions; None if a run chooses it. `typed` holds the keys that the user typed.
    """
    notes = []
    if cfg.updates_per_step == 1 and (clips := [key for key in CLIPS if key in typed]):
        notes.append(
            f"{', '.join(clips)}: with one update per rollout every probability ratio is 1, but for dropout and "
            "rollout.importance_correction=in_ratio, and nothing is clipped"
        )
    if cfg.optim.micro_batch_size != micro_batch_size:
        notes.append(
            f"optim.micro_batch_size={cfg.optim.micro_batch_size} instead of {micro_batch_size}: it must divide the "
            f"{cfg.mini_batch_size_per_gpu} completions of an update"
        )
    if cfg.trains_all and "optim.learning_rate" not in typed:
        notes.append(
            f"optim.learning_rate={cfg.optim.learning_rate:g} is made for adapters; for all weights 1e-6 is usual"
        )
    if cfg.aqn.schedule not in ("off", "adaptive") and cfg.steps < cfg.aqn.stages:  # adaptive noise has no stages
        is_clean = cfg.steps == 1 and cfg.aqn.reading != "equation"  # the other readings keep the first stage clean
        notes.append(
            f"aqn.stages={cfg.aqn.stages} in {with_noun(cfg.steps, 'step')}: some stages are skipped, the last among "
            f"them. Type for example aqn.stages={cfg.steps}{' aqn.reading=equation' if is_clean else ''}"
        )
    return notes
