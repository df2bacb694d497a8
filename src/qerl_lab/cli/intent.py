"""The meaning of a command's words: which act nowhere, what follows from them, what a run cuts. Imports no torch.

The schema and its rules judge values; here it counts that a user typed them. A scale may set a key that its run has no
use for, and a user who types that key expects something of it.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qerl_lab.config.arm import ENGINE_KEYS, OF_SWEEPS, OF_VLLM_HERE, leaves, values_of
from qerl_lab.config.engines import VllmConfig, VllmServerConfig
from qerl_lab.config.keys import typed
from qerl_lab.config.option import ConfigError
from qerl_lab.config.records import QUALITY
from qerl_lab.config.rules import largest_divisor
from qerl_lab.config.schema import (
    DENSE_FORMAT,
    POCKET,
    AqnAdaptiveConfig,
    AqnConfig,
    AqnSolverConfig,
    FormatConfig,
    RunConfig,
    TaskConfig,
)  # fmt: skip
from qerl_lab.disk import read_json


class ActsWith(NamedTuple):
    """Keys that act only where another key has certain values, and what to type to get there without or with an arm."""

    keys: tuple[str, ...]
    decider: str
    acts: Callable[[Any], bool]
    remedy: str
    arm: str = ""


def _is(value: Any) -> Callable[[Any], bool]:
    return lambda given: given == value


def _is_not(value: Any) -> Callable[[Any], bool]:
    return lambda given: given != value


def _is_on_the_hub(path: str) -> bool:
    return path != POCKET and not path.endswith(".gguf") and not Path(path).expanduser().is_dir()


CLIPS = ("algorithm.epsilon_low", "algorithm.epsilon_high")
AQN_SOLVER = tuple(key for key, _, _ in leaves(AqnSolverConfig(), "aqn.solver."))
AQN_ADAPTIVE = tuple(key for key, _, _ in leaves(AqnAdaptiveConfig(), "aqn.adaptive."))
ACTS_WITH = (
    *(
        ActsWith((f"format.{f.name}",), "format.name", _is(name), f"format={name}", f"+experiment={name}")
        for f in fields(FormatConfig) if (name := f.metadata["only"])
    ),
    ActsWith(("format.ignore", "format.dense_cache"), "format.name", _is_not(DENSE_FORMAT), "format=nvfp4",
             "+experiment=nvfp4"),
    ActsWith(("aqn.sigma_end",), "aqn.unit", _is("sigma"), "aqn=exponential", "+experiment=nvfp4_aqn"),
    ActsWith(("aqn.kl_start", "aqn.kl_end", "aqn.sigma_min", "aqn.sigma_max", *AQN_SOLVER), "aqn.unit", _is("kl"),
             "aqn=kl", "+experiment=nvfp4_aqn_kl"),
    ActsWith(("aqn.kl_end", "aqn.stages", "aqn.reading", *AQN_SOLVER), "aqn.schedule", _is_not("adaptive"), "aqn=kl",
             "+experiment=nvfp4_aqn_kl"),
    ActsWith(AQN_ADAPTIVE, "aqn.schedule", _is("adaptive"), "aqn=adaptive", "+experiment=nvfp4_aqn_adaptive"),
    ActsWith(tuple(key for key, _, _ in leaves(AqnConfig(), "aqn.")
                   if key not in ("aqn.schedule", *AQN_SOLVER, *AQN_ADAPTIVE)),
             "aqn.schedule", _is_not("off"), "aqn=exponential", "+experiment=nvfp4_aqn"),
    *(ActsWith(tuple(key for key, _, _ in leaves(group, f"task.{name}.")), "task.name", _is(name), f"task={name}")
      for name, group in vars(TaskConfig()).items() if is_dataclass(group) and name != "columns"),
    ActsWith(OF_VLLM_HERE, "rollout.engine", _is("vllm"), "rollout=vllm"),
    *(
        ActsWith(tuple(key for key, _, _ in leaves(group, prefix) if key not in OF_VLLM_HERE), "rollout.engine",
                 ENGINE_KEYS[prefix].__contains__, f"rollout={ENGINE_KEYS[prefix][0]}")
        for prefix, group in (("rollout.vllm.", VllmConfig()), ("rollout.vllm_server.", VllmServerConfig()))
    ),
    ActsWith(("task.path", *(key for key, _, _ in leaves(TaskConfig().columns, "task.columns."))), "task.name",
             _is_not("arithmetic"), "task=gsm8k"),
    ActsWith(("task.columns.tests",), "task.name", _is("code_io"), "task=code_io"),
    ActsWith(("task.columns.answer",), "task.name", _is_not("code_io"), "task=gsm8k"),
    ActsWith(("task.code_io.min_level", "task.code_io.max_level", "task.code_io.tests"), "task.path", _is(None),
             "task=code_io without task.path"),
    ActsWith(("lora.start_hash",), "lora.start_from", _is_not(None), "lora.start_from=RUN_DIR"),
    ActsWith(("preregistration_sha256",), "preregistration", _is_not(None), "preregistration=results/NAME/claims.yaml"),
    ActsWith(("task.module_hash",), "task.module", _is_not(None), "task.module=FILE.py"),
    ActsWith(("jobs_per_gpu",), "jobs", _is_not(1), "jobs=2"),
    ActsWith(("jobs_per_gpu",), "launcher", _is_not("slurm"), "launcher=local"),
    ActsWith(("jobs_per_gpu",), "device", _is_not("cpu"), "device=auto"),
    ActsWith(("slurm",), "launcher", _is("slurm"), "launcher=slurm"),
    ActsWith(("algorithm.max_resamples",), "algorithm.dynamic_sampling", _is(True),
             "algorithm.dynamic_sampling=true"),
    ActsWith(("algorithm.kl_estimator",), "algorithm.beta", _is_not(0), "algorithm.beta=0.001"),
    ActsWith(("algorithm.entropy_coef_step", "algorithm.entropy_coef_max"), "algorithm.entropy_target", _is_not(None),
             "algorithm.entropy_target=0.2"),
    ActsWith(("rollout.importance_clip_max",), "rollout.importance_correction",
             lambda correction: correction not in ("off", "in_ratio"), "rollout.importance_correction=token_truncate"),
    ActsWith(("eval.samples", "eval.temperature", "eval.top_p"), "eval.questions", _is_not(0), "eval.questions=256"),
    ActsWith(("eval.subset_questions", "eval.subset_samples"), "eval.every", _is_not(0), "eval.every=50"),
    ActsWith(("tracking.uri", "tracking.experiment"), "tracking.mlflow", _is(True), "tracking=mlflow"),
    ActsWith(("model.revision",), "model.path", _is_on_the_hub, "model.path=HUB_ID"),
    ActsWith(("model.hash",), "model.path", lambda path: path != POCKET and not _is_on_the_hub(path), "model.path=DIR"),
)  # fmt: skip


def words_by_key(lines: Sequence[str]) -> dict[str, str]:
    """`KEY=VALUE` and `GROUP=OPTION` overrides as a mapping from what stands before the sign to what stands after."""
    return {key.lstrip("+"): value for key, _, value in (line.partition("=") for line in lines)}


def fit_micro_batch(cfg: RunConfig, words: Mapping[str, str]) -> None:
    """Shrink a micro-batch that nobody typed to the largest that divides an update, in place."""
    per_update, rest = divmod(cfg.completions_per_gpu, cfg.algorithm.updates_per_rollout)
    if "optim.micro_batch_size" not in words and rest == 0 and per_update:
        cfg.optim.micro_batch_size = largest_divisor(per_update, cfg.optim.micro_batch_size)


def name_model(cfg: RunConfig) -> None:
    """Label a model that was given by its path alone, in place."""
    if cfg.model.name == POCKET and cfg.model.path != POCKET:
        cfg.model.name = Path(cfg.model.path).name.removesuffix(".gguf")


def take_rounding(cfg: RunConfig, words: Mapping[str, str]) -> None:
    """Take the rule that the quantize command noted of a checkpoint, where nobody said another, in place."""
    for key, value in _noted_rounding(cfg).items():
        if f"format.{key}" not in words and getattr(cfg.format, key) == getattr(FormatConfig(), key):
            setattr(cfg.format, key, value)


def _noted_rounding(cfg: RunConfig) -> dict[str, Any]:
    """What quality.json beside the weights says of the run's own format. Raises ConfigError for what no format has."""
    file, name = Path(cfg.model.path) / QUALITY, cfg.format.name
    about = read_json(file, dict) if cfg.model.path != POCKET and file.is_file() else {}
    noted = about.get("options", {}) if about.get("format") == name else {}
    own = [f for f in fields(FormatConfig) if f.metadata["only"] == name]
    allowed = [json.dumps({f.name: value}) for f in own for value in f.metadata["choices"] or (True, False)]
    given = [json.dumps({key: value}) for key, value in noted.items()] if isinstance(noted, dict) else [str(noted)]
    if wrong := next((entry for entry in given if entry not in allowed), None):
        raise ConfigError(
            f"{file} notes {wrong} under options; allowed for {name}: {', '.join(allowed) or 'nothing'}. "
            "Correct it there, or move the file away."
        )
    return noted


def check_words(cfg: RunConfig, words: Mapping[str, str]) -> None:
    """Raise ConfigError for a typed word that one job alone shows to be a mistake."""
    if "extended" in words:
        raise ConfigError("extended is what resume=RUN_DIR steps=N notes of a run. Leave extended out.")
    if "differs_in" in words:
        raise ConfigError("differs_in is what the file of an experiment declares. Leave differs_in out.")
    for group, value in (("task", cfg.task.name), ("algorithm", cfg.algorithm.name)):
        if f"{group}.name" in words:  # an option of these groups is more than its name
            raise ConfigError(f"{group}.name={value} leaves out what belongs to it. Type {group}={value}.")
    if cfg.scale == POCKET and "scale" not in words and cfg.model.path != POCKET:
        raise ConfigError(
            f"model.path={cfg.model.path} with scale={POCKET} would train it by the recipe of the embedded policy "
            f"(learning rate {cfg.optim.learning_rate:g}, {cfg.rollout.max_completion_tokens} tokens a completion). "
            f"Type scale=custom for the schema's ({RunConfig().optim.learning_rate:g}, "
            f"{RunConfig().rollout.max_completion_tokens}), a paper scale, or scale={POCKET} to mean it."
        )
    if cfg.aqn.schedule != "off" and "aqn.stages" in words and cfg.aqn.stages > cfg.steps:
        raise ConfigError(
            f"aqn.stages={cfg.aqn.stages} is more than steps={cfg.steps}; a stage is one step or more. "
            f"Type for example aqn.stages={cfg.steps}."
        )
    if "aqn.probe_prompts" in words and cfg.aqn.probe_prompts > cfg.completions_per_step:
        raise ConfigError(
            f"aqn.probe_prompts={cfg.aqn.probe_prompts} is more than the {cfg.completions_per_step} completions of a "
            f"step. Type for example aqn.probe_prompts={cfg.completions_per_step}."
        )


def refuse_of_sweeps(words: Mapping[str, str]) -> None:
    """Raise ConfigError for a word about the jobs of a sweep in the command of a single run."""
    for key in OF_SWEEPS:
        if key in words:
            raise ConfigError(f"{key}={words[key]} is of a sweep, and this command runs one job. Leave {key} out.")


def refuse_directory_of(lines: Sequence[str], key: str, what: str) -> None:
    """Raise ConfigError for a directory of the other kind of command, which would lie somewhere else unsaid."""
    for line in lines:
        if line.lstrip("+").startswith(key):
            raise ConfigError(
                f"{line} is of {what}. Leave it out; the directory of a run is run_dir=DIR, that of a sweep "
                "hydra.sweep.dir=DIR."
            )


def refuse_several_of_sweep(configs: Sequence[RunConfig]) -> None:
    """Raise ConfigError where the jobs of a sweep disagree on how it runs, or would take a server from each other."""
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


def check_all_act(jobs: Sequence[tuple[RunConfig, Mapping[str, str]]]) -> None:
    """Raise ConfigError for a word that acts in none of the jobs that share it.

    A word in which the jobs differ must act in each of them: else two jobs would be the same run under two names.
    """
    dead = [{key: rule for key, rule in _dead_keys(cfg).items() if key in words} for cfg, words in jobs]
    for number, (cfg, words) in enumerate(jobs):
        for key, rule in dead[number].items():
            is_shared = all(others.get(key) == words[key] for _, others in jobs)
            acts_somewhere = any(key not in of_job for of_job in dead)
            if not (is_shared and acts_somewhere):
                where = f"job {number}: " if len(jobs) > 1 else ""
                raise ConfigError(f"{where}{_inert(key, words[key], rule, cfg)}")


def _dead_keys(cfg: RunConfig) -> dict[str, ActsWith]:
    """Every key that does nothing in this configuration, with the reason. A file of the user's may read every key."""
    values = values_of(cfg)
    dead = {key: rule for rule in ACTS_WITH if not rule.acts(values[rule.decider]) for key in rule.keys}
    return {key: rule for key, rule in dead.items() if not (cfg.task.module and key.startswith("task."))}


def _inert(key: str, text: str, rule: ActsWith, cfg: RunConfig) -> str:
    value = values_of(cfg)[rule.decider]
    remedy = rule.arm if rule.arm and cfg.experiment != RunConfig().experiment else rule.remedy
    return (
        f"{key}={text} does nothing in a run with {rule.decider}={typed(value)}. "
        f"Leave {key} out, or type for example {remedy}."
    )


def notes(cfg: RunConfig, micro_batch_size: int, words: Collection[str]) -> list[str]:
    """Say before the start what was fitted (`micro_batch_size` is the composed one), what is cut, and which typed words
    hardly act."""
    said = []
    if cfg.updates_per_step == 1 and (clips := [key for key in CLIPS if key in words]):
        said.append(
            f"{', '.join(clips)}: with one update per rollout every probability ratio is 1, but for dropout and "
            "rollout.importance_correction=in_ratio, and nothing is clipped"
        )
    if "eval.every" in words and cfg.eval.every > cfg.steps:
        said.append(f"eval.every={cfg.eval.every} in {cfg.steps} steps: it asks before the first step alone")
    if cfg.optim.micro_batch_size != micro_batch_size:
        said.append(
            f"optim.micro_batch_size={cfg.optim.micro_batch_size} instead of {micro_batch_size}: it must divide the "
            f"{cfg.completions_per_gpu // cfg.algorithm.updates_per_rollout} completions of an update"
        )
    if cfg.aqn.schedule != "off" and cfg.steps < cfg.aqn.stages:
        said.append(f"aqn.stages={cfg.aqn.stages} in {cfg.steps} steps: some stages are skipped")
    return said
