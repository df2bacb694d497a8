"""A run that begins with the adapter of another: its weights, its arm, and adapters that do not fit."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file

from packed_layers import tiny_model
from qerl_lab.cli.compose import make_plan
from qerl_lab.config.arm import config_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import with_absolute_paths
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import adapter_files, policy
from qerl_lab.model.policy import Policy
from qerl_lab.preflight import check
from qerl_lab.train.run import build_session
from qerl_lab.train.stop import Stop
from run_directories import claimed

Tiny = Callable[..., RunConfig]


@pytest.fixture
def begun(tiny: Tiny) -> Tiny:
    """Return a function that composes a run that begins with the adapter in a folder."""
    return lambda start, **changes: with_absolute_paths(tiny(lora__start_from=str(start), **changes))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny, build_policy: Callable[[RunConfig], Policy]) -> Path:
    """Return the directory of a run with an adapter."""
    cfg = tiny(format__name="bf16")
    directory = claimed(tmp_path_factory.mktemp("runs") / "first", cfg)
    policy.save_adapter(build_policy(cfg).model, directory.adapter)
    return directory.path


def changed(run: Path, folder: Path, **settings: Any) -> Path:
    """Copy the run's adapter with other settings; return its folder."""
    folder.mkdir()
    shutil.copyfile(run / "adapter" / "adapter_model.safetensors", folder / "adapter_model.safetensors")
    config = json.loads((run / "adapter" / "adapter_config.json").read_text()) | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("of_run", "beta"), [(True, 0.0), (False, 0.1)])
def test_a_run_begins_with_the_adapter_weights_of_another(
    run: Path, tmp_path: Path, begun: Tiny, of_run: bool, beta: float
) -> None:
    start = run if of_run else changed(run, tmp_path / "adapter", base_model_name_or_path="me/another")
    cfg = begun(start, format__name="nvfp4", algorithm__beta=beta)
    check(cfg, tmp_path / "second")
    directory = claimed(tmp_path / "second", cfg)
    session = build_session(directory.config(), directory, Stop())
    held = load_file(run / "adapter" / "adapter_model.safetensors")
    own = get_peft_model_state_dict(session.policy.model)
    assert own.keys() == held.keys()
    assert all(torch.equal(own[name], held[name]) for name in held)
    (note,) = (note for note in session.notes if f"begins with the adapter of {start}" in note)
    assert ("the KL to the base without it" in note) is (beta > 0)
    made_on = adapter_files.base_of(run / "adapter") if of_run else "me/another"
    assert f") that was trained on {made_on}" in note, "no file tells whether an adapter fits the base"


def test_the_content_of_the_adapter_decides_the_arm(run: Path, tmp_path: Path) -> None:
    words = ["lora.rank=4", "format=bf16"]
    (fresh,) = make_plan(words, multirun=False).jobs
    (begun,) = make_plan([*words, f"lora.start_from={run}"], multirun=False).jobs
    copy = changed(run, tmp_path / "copy")
    (again,) = make_plan([*words, f"lora.start_from={copy}"], multirun=False).jobs
    assert len(begun.config.lora.start_hash or "") == 12
    assert config_hash(begun.config) == config_hash(again.config) != config_hash(fresh.config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 8, "lora_alpha": 8}, r"has lora\.rank=8, and this run has lora\.rank=4\. Type lora\.rank=8\.$"),
        ({"lora_alpha": 16}, r"and this run has lora\.alpha=null\. Type lora\.alpha=16\.0\.$"),
        (
            {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
            r"Type lora\.rank=8 lora\.alpha=16\.0 'lora\.target_modules=\[q_proj,v_proj\]'\.$",
        ),
        ({"r": None}, "is no LoRA adapter"),
        ({"target_modules": "all-linear"}, "is no LoRA adapter with a list of layers"),
        ({"use_dora": True}, "has use_dora=True; allowed: plain LoRA"),
        ({"init_lora_weights": "loftq"}, "has init_lora_weights=loftq; allowed: .* True, False, gaussian, "),
        ({"init_lora_weights": "lora_ga"}, "path_initial_model_for_weight_conversion"),
        ({"peft_type": "IA3"}, "is no LoRA adapter"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_a_run_starts(
    run: Path, tmp_path: Path, begun: Tiny, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(begun(changed(run, tmp_path / "other", **settings), format__name="bf16"), tmp_path / "run")


def test_an_adapter_config_that_is_no_json_object_is_refused(run: Path, tmp_path: Path, begun: Tiny) -> None:
    folder = changed(run, tmp_path / "other")
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no LoRA adapter with a list of layers"):
        check(begun(folder, format__name="bf16"), tmp_path / "run")


@pytest.mark.filterwarnings("ignore:.*(eva|EVA)")
@pytest.mark.parametrize(
    "init", [True, False, "gaussian", "orthogonal", "eva", "mica", "pissa", "pissa_niter_2", "olora", "OLoRA"]
)
def test_an_adapter_is_refused_if_its_initialization_changed_the_base(
    run: Path, tmp_path: Path, begun: Tiny, init: bool | str
) -> None:
    """CorDA and LoRA-GA also change the base, but need data first; LoftQ needs a GPU. They are not tried here."""
    base = tiny_model()
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    lora = LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj"], init_lora_weights=init)  # type: ignore[arg-type]
    after = get_peft_model(base, lora).unload().state_dict()
    is_changed = any(not torch.equal(after[name], weight) for name, weight in before.items())
    cfg = begun(changed(run, tmp_path / "adapter", init_lora_weights=init), format__name="bf16")
    with pytest.raises(ConfigError, match="has init_lora_weights=") if is_changed else nullcontext():
        adapter_files.check(cfg)


def test_a_missing_or_changed_adapter_is_refused(run: Path, tmp_path: Path, begun: Tiny) -> None:
    with pytest.raises(ConfigError, match="holds no adapter_model"):
        begun(tmp_path)
    cfg = begun(changed(run, tmp_path / "copy"), format__name="bf16")
    cfg.lora.start_hash = "0" * 12
    with pytest.raises(ConfigError, match="was another adapter when the run was composed"):
        adapter_files.check(cfg)
