"""The files of conf/ and sweeps/: all of them compose, say what they are, and state only what they change.

docs/configuration.md ends with their tables and those of the schema.
"""

import itertools
import json
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_lab.cli.compose import make_plan
from qerl_lab.cli.manual import describe_option
from qerl_lab.cli.overrides import GROUPS
from qerl_lab.config import __main__ as tables
from qerl_lab.config.arm import as_recorded, config_hash, flatten, leaves, settings_of_arm, values_of
from qerl_lab.config.conf_folder import choices_of, package_data
from qerl_lab.config.schema import ModelConfig, RunConfig
from qerl_lab.config.task import PAPER_INSTRUCTION

ARMS, SCALES = choices_of("experiment"), choices_of("scale")
FILES = [path for folder in ("conf", "sweeps") for path in sorted(package_data(folder).rglob("*.yaml"))]
OPTIONS = [path for path in FILES if path.parent.name not in ("conf", "sweeps")]
DEFAULTS = {name: value for name, _, value in leaves(RunConfig())}
GOLDEN = runpy.run_path(str(Path(__file__).parents[2] / "golden" / "resolved_configs.py"))
PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_every_folder_of_conf_is_a_group() -> None:
    folders = {path.name for path in package_data("conf").iterdir() if path.is_dir()}
    assert folders | {"sweeps"} == set(GROUPS)


@pytest.fixture(scope="module")
def composed() -> dict[tuple[str, str], RunConfig]:
    return GOLDEN["compose"]()


def body(path: Path) -> dict[str, Any]:
    """Map the dotted keys that an option sets to their values."""

    values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    values.pop("defaults", None)
    is_global = "@package _global_" in path.read_text(encoding="utf-8")
    return dict(flatten(values, "" if is_global else f"{path.parent.name}."))


def differing(a: RunConfig, b: RunConfig) -> set[str]:
    return {name for (name, _, x), (_, _, y) in zip(leaves(a), leaves(b), strict=True) if x != y}


def check_arms(composed: dict[tuple[str, str], RunConfig], scale: str) -> None:
    """Check that each arm differs from bf16 in declared keys only; at scale pocket in all of them."""
    for arm in ARMS:
        declared = set(composed[arm, scale].differs_in)
        found = differing(composed[arm, scale], composed["bf16", scale]) - {"experiment", "differs_in"}
        assert found <= declared, f"{arm} at {scale}"
        assert scale != "pocket" or found == declared, arm
    assert len({config_hash(composed[arm, scale]) for arm in ARMS}) == len(ARMS), "two are the same run"


def test_arms_differ_as_declared_and_in_nothing_else(composed):
    check_arms(composed, "pocket")


@pytest.mark.slow
def test_arms_differ_as_declared_at_every_scale():
    plan = make_plan([f"+experiment={','.join(ARMS)}", f"scale={','.join(SCALES)}"], multirun=True)
    composed = {(job.config.experiment, job.config.scale): job.config for job in plan.jobs}
    assert set(composed) == set(itertools.product(ARMS, SCALES))
    for scale in SCALES:
        check_arms(composed, scale)


def test_an_option_states_only_what_differs_from_the_schema():
    labels = {"experiment", "scale", "differs_in"}  # a scale and an arm always say their own name
    for path in OPTIONS:
        for key, value in body(path).items():
            assert key in DEFAULTS, path
            assert key in labels or DEFAULTS[key] != value, f"{path}: {key}: {value} is the schema's default already"
            assert not (value is False and isinstance(DEFAULTS[key], str)), f'{path}: {key}: "off" lacks its quotes'


def test_a_scale_sets_no_key_that_an_option_of_a_group_sets():
    """A scale chooses options (override /lora: rank16), so that a group on the command line wins over it."""
    by_groups = {key for path in OPTIONS if path.parent.name not in ("experiment", "scale") for key in body(path)}
    for scale in SCALES:
        assert not by_groups & set(body(package_data("conf") / "scale" / f"{scale}.yaml")), scale


def test_the_command_line_wins_over_the_scale():
    line = ["model=qwen2_5_0_5b", "task=gsm8k", "lora=rank64", "optim=adamw", "steps=3", "scale=paper_bigmath_32b"]
    cfg = make_plan(line, multirun=False).jobs[0].config
    assert (cfg.model.name, cfg.task.name, cfg.task.instruction) == ("qwen2_5_0_5b", "gsm8k", PAPER_INSTRUCTION)
    assert (cfg.lora.rank, cfg.optim.name, cfg.steps, cfg.scale) == (64, "adamw", 3, "paper_bigmath_32b")


def test_the_paper_scales_hold_table_4(composed):
    gsm8k, bigmath = composed["nvfp4_aqn", "paper_gsm8k_7b"], composed["nvfp4_aqn", "paper_bigmath_14b"]
    for cfg in (gsm8k, bigmath):
        assert (cfg.optim.name, cfg.optim.learning_rate, cfg.lora.rank) == ("adamw_8bit", 1e-5, 32)
        assert (cfg.aqn.sigma_start, cfg.aqn.sigma_end, cfg.aqn.stages) == (1e-2, 5e-4, 10)
        assert (cfg.algorithm.epsilon_low, cfg.algorithm.epsilon_high, cfg.algorithm.beta) == (0.2, 0.28, 0.0)
        assert (cfg.rollout.temperature, cfg.completions_per_step) == (1.0, 128)
    assert (gsm8k.rollout.group_size, gsm8k.rollout.max_completion_tokens) == (8, 4096)
    assert (bigmath.rollout.group_size, bigmath.rollout.max_completion_tokens) == (16, 8192)
    assert (gsm8k.algorithm.updates_per_rollout, bigmath.algorithm.updates_per_rollout) == (4, 1)
    assert (gsm8k.model.path, gsm8k.task.name, gsm8k.steps) == ("Qwen/Qwen2.5-7B-Instruct", "gsm8k", 600)
    assert (bigmath.model.path, bigmath.task.name) == ("Qwen/Qwen2.5-14B-Instruct", "bigmath")


def test_every_file_says_in_its_first_comment_what_it_is():
    for path in FILES:
        assert 0 < len(describe_option(path)) <= 120, path


def test_the_jobs_of_a_sweep_are_named_by_their_arms_and_seeds():
    narrow = make_plan(["+sweeps=weight_formats", "seed=7", "+experiment=nf4", "lora.rank=4"], multirun=False).jobs
    assert [(job.config.experiment, job.config.seed, job.config.lora.rank) for job in narrow] == [("nf4", 7, 4)]
    plan = make_plan(["+sweeps=weight_formats", "experiment=nf4,nvfp4_aqn", "seed=0,1"], multirun=False)
    names = ["0-nf4-seed0", "1-nf4-seed1", "2-nvfp4_aqn-seed0", "3-nvfp4_aqn-seed1"]
    assert [job.run_dir.relative_to(plan.directory) for job in plan.jobs] == [Path(name) for name in names]
    assert plan.directory.parts[-4:-1] == ("runs", "sweeps", "weight_formats")
    assert len({config_hash(job.config) for job in plan.jobs}) == 2  # the seeds of an arm share one


@pytest.mark.parametrize(("name", "arms"), [
    ("weight_formats", 8), ("algorithms", 5), ("aqn_schedules", 7), ("lora_rank", 4), ("learning_rate", 12),
    ("quantization_methods", 4), ("exploration_controls", 6), ("paper_table1", 10), ("paper_table2", 9),
    ("released_code", 4),
])  # fmt: skip
def test_a_sweep_composes_into_as_many_arms_as_it_says_with_five_seeds_each(name: str, arms: int):
    """Compose the arms with one seed. With all five seeds it would take a minute."""
    file = (package_data("sweeps") / f"{name}.yaml").read_text()
    assert "\n      seed: 0,1,2,3,4\n" in file
    jobs = make_plan([f"+sweeps={name}", "dry_run=true", "seed=3"], multirun=False).jobs
    assert len({config_hash(job.config) for job in jobs}) == len(jobs) == arms
    assert {job.config.seed for job in jobs} == {3}
    comments = file.partition("hydra:")[0]
    assert f"{5 * arms} runs" in comments.splitlines()[0]
    assert "Cost" in comments


def test_a_run_takes_the_rounding_rule_of_its_checkpoint_unless_one_is_typed(tmp_path: Path):
    """One grid can then have checkpoints with different rules. A checkpoint without a recorded rule changes nothing."""
    for folder, noted in (("max", "max"), ("both", "four_over_six"), ("theirs", None)):
        (tmp_path / folder).mkdir()
        if noted:
            about = {"format": "nvfp4", "options": {"scale_rule": noted}}
            (tmp_path / folder / "quality.json").write_text(json.dumps(about))
    paths = ",".join(str(tmp_path / folder) for folder in ("max", "both", "theirs"))

    def rules(*words: str) -> list[str]:
        jobs = make_plan([f"model.path={paths}", "scale=custom", *words], multirun=True).jobs
        return [job.config.format.scale_rule for job in jobs]

    assert rules("+experiment=nvfp4") == ["max", "four_over_six", "max"]
    assert rules("+experiment=nvfp4", "format.scale_rule=max") == ["max", "max", "max"]
    assert rules("+experiment=bf16") == ["max", "max", "max"]


@cache
def hash_of(*words: str) -> str:
    return config_hash(make_plan(list(words), multirun=False).jobs[0].config)


@pytest.mark.parametrize("words", [
    ["+experiment=nvfp4_aqn", "seed=3", "run_dir=elsewhere", "checkpoint.every=1", "tracking.experiment=mine"],
    ["+experiment=nvfp4_aqn", "device=cpu", "cpu_threads=1", "model.name=another", "eval.samples_before=2"],
    ["format=nvfp4", "aqn=exponential"],
], ids=["the run", "the machine and a label", "another way to type it"])  # fmt: skip
def test_what_does_not_make_another_arm_leaves_its_hash(words: list[str]):
    assert hash_of(*words) == hash_of("+experiment=nvfp4_aqn")


@pytest.mark.parametrize("word", ["aqn.reading=equation", "eval.questions=128", "rollout.batch_size=8"])
def test_what_makes_another_arm_changes_its_hash(word: str):
    assert hash_of("+experiment=nvfp4_aqn", word) != hash_of("+experiment=nvfp4_aqn")


def test_keys_of_vllm_in_this_process_make_no_arm_of_a_server():
    words = ["+experiment=nvfp4", "scale=smollm2"]
    served, here = [*words, "rollout=vllm_server"], [*words, "rollout=vllm"]
    assert hash_of(*here, "rollout.vllm.dense_rows=64") != hash_of(*here)
    cfg = make_plan(served, multirun=False).jobs[0].config
    before = config_hash(cfg)
    cfg.rollout.vllm.dense_rows, cfg.rollout.vllm.dense_dtype, cfg.rollout.vllm.share_base = 64, "fp8", True
    assert config_hash(cfg) == before
    server = cfg.rollout.vllm_server
    server.url, server.adapter_dir, server.patience_seconds, server.tensor_parallel = "http://a", "/a", 9.0, 2
    assert config_hash(cfg) == before, "where it runs"
    cfg.rollout.vllm.kv_cache_dtype = "fp8"
    assert config_hash(cfg) != before


@pytest.mark.parametrize("content", [None, "0" * 12])
def test_a_record_in_text_names_the_same_arm(content: str | None) -> None:
    cfg = RunConfig(model=ModelConfig(path="org/name", hash=content))
    cfg.rollout.engine, cfg.rollout.vllm_server.overlap = "vllm_server", True
    arm = settings_of_arm(values_of(cfg))
    assert settings_of_arm(as_recorded(cfg)) == {name: str(value) for name, value in arm.items()}
    assert [key for key in arm if key in ("model.path", "model.hash")] == ["model.hash" if content else "model.path"]


def test_resolved_configurations_are_as_recorded(composed):
    """A change of a default shows in review; rewrite the record with `python tests/golden/resolved_configs.py`."""
    recorded = yaml.safe_load(GOLDEN["RECORD"].read_text(encoding="utf-8"))
    assert GOLDEN["differences"](composed) == recorded, "if meant, type python tests/golden/resolved_configs.py"


@pytest.mark.parametrize("activations", ["auto", "fp8"])
def test_an_option_of_fp8_alone_defines_an_arm_only_if_it_is_used(activations: str) -> None:
    """Otherwise FP8 would differ from other formats in two keys, and no claim could compare them."""
    fp8, other = (make_plan([f"format={name}"], multirun=False).jobs[0].config for name in ("fp8", "bf16"))
    fp8.format.activations = activations
    arms = (settings_of_arm(values_of(cfg)) for cfg in (fp8, other))
    differing = {
        key for key, _ in set.symmetric_difference(*({(key, str(value)) for key, value in arm.items()} for arm in arms))
    }
    assert differing == {"format.name"} | ({"format.activations"} if activations == "fp8" else set())


def test_the_page_is_what_the_command_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["tables"]) == 0
    printed, found = capsys.readouterr().out, PAGE.read_text(encoding="utf-8").split(tables.MARK)[1]
    assert found == printed, "type python -m qerl_lab.config tables page=docs/configuration.md"


def test_the_end_of_a_page_is_written_anew(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"prose\n{tables.MARK}old")
    assert tables.main(["tables", f"page={page}"]) == 0
    assert page.read_text() == f"prose\n{tables.MARK}{tables.format_tables()}"
