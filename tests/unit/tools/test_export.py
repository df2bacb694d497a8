"""An export gives the logits of the run in a process without the lab. Its card describes it."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import load_elsewhere
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import with_absolute_paths
from qerl_lab.config.records import EXPORT
from qerl_lab.config.schema import RunConfig
from qerl_lab.model import policy, weight_files
from qerl_lab.model.dense import dense_tensors
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.model.policy import Policy
from qerl_lab.quantize import __main__ as quantize
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand
from qerl_lab.tools.export import ExportOptions, export, model_card, requested_run
from vllm_engines import NEEDS_VLLM

CPU = torch.device("cpu")
RESULT = {
    "reward_first": 0.1, "reward_last": 0.7, "entropy_first": 0.4, "entropy_last": 0.3, "seconds": 12.0,
    "questions": 8, "accuracy_before": 0.5, "accuracy_after": 0.75, "accuracy_gain": 0.25,
    "accuracy_gain_interval": [0.1, 0.4],
}  # fmt: skip
Build = Callable[[RunConfig], Policy]
Runs = dict[str, tuple[Path, Policy]]


def finished(folder: Path, cfg: RunConfig, build_policy: Build) -> Policy:
    """Write the directory of a finished run with an adapter; return its policy."""
    directory, learner = RunDirectory(folder), build_policy(cfg)
    directory.claim(cfg, TypedCommand("python -m qerl_lab +experiment=mine"))
    directory.begin()
    directory.write_environment({"training_questions": 64, "training_sha256": "ab" * 32})
    policy.save_adapter(learner.model, directory.adapter)
    directory.finish(RESULT)
    return learner


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., RunConfig], build_policy: Build) -> Runs:
    """Make a finished run on a packed base, and one on a dense base."""
    top, found = tmp_path_factory.mktemp("runs"), {}
    for name in ("nvfp4", "bf16"):
        cfg = tiny(format__name=name, lora__rank=4, lora__alpha=6.0, experiment=name)
        found[name] = (top / name, finished(top / name, cfg, build_policy))
    return found


def exported(folder: Path, run: Path, **changes: Any) -> Path:
    options = ExportOptions(run=str(run), out=str(folder), **changes)
    requested_run(options)
    export(options)
    return folder


def own_logprobs(learner: Policy, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = learner.model.eval()(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def elsewhere(kind: str, ids: list[int], models: list[tuple[Path, Path | None]], scratch: Path) -> list[torch.Tensor]:
    named = [[str(base), str(adapter) if adapter else None] for base, adapter in models]
    (scratch / "job.json").write_text(json.dumps({"prompts": [ids], "models": named}))
    line = [sys.executable, load_elsewhere.__file__, kind, str(scratch / "job.json"), str(scratch / "out.json")]
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(line, check=True, cwd=scratch, env=outside, timeout=300)
    return [torch.tensor(rows[0]) for rows in json.loads((scratch / "out.json").read_text())]


def prompt(learner: Policy) -> list[int]:
    text = "Ann has 7 pens. Ann buys 5 more. <think>7+5=12</think><answer>12</answer>"
    return learner.tokenizer(text)["input_ids"]


def test_an_adapter_on_a_model_of_the_hub_names_the_model_and_its_revision(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT loads this revision. The newest one may have other weights."""
    run = shutil.copytree(runs["bf16"][0], tmp_path / "run")
    values = yaml.safe_load((run / "resolved.yaml").read_text())
    values["model"] |= {"path": "org/name", "revision": "abc"}
    (run / "resolved.yaml").write_text(yaml.safe_dump(values))
    monkeypatch.setattr(weight_files, "local_folder", lambda *_: ASSETS)
    settings = json.loads((exported(tmp_path / "out", run) / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["revision"]) == ("org/name", "abc")


def test_peft_and_transformers_give_the_logits_of_the_run(runs: Runs, tmp_path: Path) -> None:
    ids = prompt(runs["bf16"][1])
    models: list[tuple[str, Path, Path | None, float]] = []
    for name, (folder, _) in runs.items():
        made = exported(tmp_path / f"{name}-merged", folder, merged=True, dtype="float32")
        models.append((name, made, None, 1e-4))
    alone = exported(tmp_path / "bf16-adapter", runs["bf16"][0])
    models.append(("bf16", ASSETS, alone, 1e-4))
    beside = exported(tmp_path / "nvfp4-adapter", runs["nvfp4"][0], base=True, dtype="float32")
    models.append(("nvfp4", beside / "base", beside, 1e-4))
    rounded = exported(tmp_path / "nvfp4-bf16", runs["nvfp4"][0], merged=True)
    models.append(("nvfp4", rounded, None, 0.1))
    named = [json.loads((at / "adapter_config.json").read_text())["base_model_name_or_path"] for at in (alone, beside)]
    assert named == [str(ASSETS), str(beside / "base")]
    found = elsewhere("transformers", ids, [(base, adapter) for _, base, adapter, _ in models], tmp_path)
    for (name, base, _, tolerance), theirs in zip(models, found, strict=True):
        assert (own_logprobs(runs[name][1], ids) - theirs).abs().max() < tolerance, base
    assert {tensor.dtype for tensor in load_file(rounded / "model.safetensors").values()} == {torch.bfloat16}
    with runs["nvfp4"][1].model.disable_adapter():  # otherwise agreement would not show that the adapter acts
        assert (own_logprobs(runs["nvfp4"][1], ids) - found[0]).abs().max() > 0.1


@NEEDS_VLLM
def test_plain_vllm_gives_the_logits_of_the_run(runs: Runs, tmp_path: Path) -> None:
    folder, learner = runs["nvfp4"]
    ids = prompt(learner)
    beside = exported(tmp_path / "adapter", folder, base=True, dtype="float32")
    merged = exported(tmp_path / "merged", folder, merged=True, dtype="float32")
    for base, adapter in ((beside / "base", beside), (merged, None)):
        (found,) = elsewhere("vllm", ids, [(base, adapter)], tmp_path)
        assert (own_logprobs(learner, ids) - found).abs().max() < 1e-3


@pytest.mark.parametrize("format_name", ["nvfp4", "bf16"])
def test_a_merge_says_how_much_of_the_adapter_rounding_loses(
    format_name: str, tiny: Callable[..., RunConfig], build_policy: Build
) -> None:
    learner = build_policy(tiny(format__name=format_name, lora__rank=4, lora__alpha=6.0))
    name = "model.layers.0.self_attn.q_proj.weight"
    (base, none), (exact, _) = (dense_tensors(learner, torch.float32, merged=merged) for merged in (False, True))
    rounded, share = dense_tensors(learner, torch.bfloat16, merged=True)
    layers = [key for key in base if not torch.equal(base[key], exact[key])]
    assert name in layers
    lost, moved = (torch.cat([(a[key].double() - b[key]).flatten() for key in layers]).norm()
                   for a, b in ((rounded, exact), (exact, base)))  # fmt: skip
    assert share == pytest.approx(float(lost / moved), rel=1e-3)
    assert none == 0
    for key, parameter in learner.model.named_parameters():
        if "lora_B" in key:
            parameter.data *= 1e-9
    assert dense_tensors(learner, torch.bfloat16, merged=True)[1] > 0.99


def test_a_rounded_merge_prints_its_loss(runs: Runs, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs["bf16"][0]
    exported(tmp_path / "rounded", run, merged=True)
    assert "note: rounding to bfloat16 moved the weights " in capsys.readouterr().err
    exported(tmp_path / "exact", run, merged=True, dtype="float32")
    exported(tmp_path / "adapter", run)
    assert "rounding" not in capsys.readouterr().err


def test_the_card_has_the_settings_and_results_of_the_run(runs: Runs, tmp_path: Path) -> None:
    made = exported(tmp_path / "mine", runs["nvfp4"][0])
    _, head, body = (made / "README.md").read_text().split("---\n", 2)
    assert body.endswith(".\n")
    assert not body.endswith("\n\n")
    assert yaml.safe_load(head)["library_name"] == "peft"
    for said in (
        "pocket in nvfp4, GRPO on arithmetic", "+0.250 [+0.100, +0.400]", "0.100, 0.700", "rank 4, alpha 6", "ab" * 32,
        "--max-lora-rank 8", "- command: `", "Reply as <think>", "base=true holds them",
    ):  # fmt: skip
        assert said in body, said
    record = json.loads((made / EXPORT).read_text())
    assert set(record["sha256"]) == {"README.md", "adapter_config.json", "adapter_model.safetensors", "run.yaml"}
    assert yaml.safe_load((made / "run.yaml").read_text())["lora"]["rank"] == 4
    adapted = json.loads((made / "adapter_config.json").read_text())["target_modules"]
    assert adapted == sorted(adapted), "two exports of a run are the same bytes"
    merged = exported(tmp_path / "whole", runs["bf16"][0], merged=True)
    assert yaml.safe_load((merged / "README.md").read_text().split("---\n")[1])["library_name"] == "transformers"
    assert not (merged / "recipe.json").exists()  # it describes the files of the base
    for file in (made / "adapter_model.safetensors", merged / "model.safetensors"):
        assert file.stat().st_mode == (file.parent / "README.md").stat().st_mode  # other users can read it too


def test_the_card_of_one_step_has_one_reward(runs: Runs, tiny: Callable[..., RunConfig]) -> None:
    said = model_card(ExportOptions(out="mine"), tiny(steps=1), RunDirectory(runs["bf16"][0]))
    assert "\n- reward: 0.700\n- policy entropy in nats: 0.300\n- held-out accuracy before" in said


def test_the_card_of_an_adapter_on_a_model_of_the_hub_names_it(
    runs: Runs, tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """If all questions have equal gains there is no interval. vLLM takes rank 8 as it is."""
    copy = RunDirectory(shutil.copytree(runs["bf16"][0], tmp_path / "run"))
    copy.finish(RESULT | {"accuracy_gain_interval": [0.25, 0.25]})
    cfg = tiny(format__name="bf16", model__path="org/name", model__revision="abc", lora__rank=8)
    _, head, body = model_card(ExportOptions(out="mine"), cfg, copy).split("---\n", 2)
    assert yaml.safe_load(head)["base_model"] == "org/name"
    assert "`org/name` at revision abc." in body
    assert "+0.250 [no spread]" in body
    assert "--max-lora-rank 8 " in body


def test_the_command_on_the_card_makes_the_base_of_the_run(
    runs: Runs, tiny: Callable[..., RunConfig], tmp_path: Path
) -> None:
    """The command has the rule and the layers of the run. For a base that is packed already there is none."""
    own, packed = shutil.copytree(ASSETS, tmp_path / "own"), tmp_path / "packed"
    words = [f"model={own}", "format=nvfp4", "scale_rule=four_over_six", "ignore=[lm_head,down_proj]"]
    assert quantize.main([*words, "device=cpu", f"out={packed}"]) == 0
    how = {"format__name": "nvfp4", "format__scale_rule": "four_over_six", "format__ignore": ["lm_head", "down_proj"]}
    record = RunDirectory(runs["nvfp4"][0])
    said = model_card(ExportOptions(out="mine"), tiny(model__path=str(own), **how), record)
    line = next(line for line in said.splitlines() if "qerl_lab.quantize" in line)
    assert set(words) <= set(shlex.split(line.split("`")[-2]))
    said = model_card(ExportOptions(out="mine"), tiny(model__path=str(packed), **how), record)
    assert f"`BASE` is `{packed}`." in said
    assert "qerl_lab.quantize" not in said
    own_task = model_card(ExportOptions(out="mine"), tiny(task__module="/mine/riddles.py", **how), record)
    assert "GRPO on riddles" in own_task
    for name, with_base in ((str(packed), False), (str(packed), True)):
        said = model_card(ExportOptions(out="mine", base=with_base), tiny(model__path=name, **how), record)
        assert ("dequantize=True" in said) != with_base, "the base of the export is dense"


def test_the_code_on_the_card_loads_the_adapter_on_the_packed_base(
    tiny: Callable[..., RunConfig], build_policy: Build, tmp_path: Path
) -> None:
    """PEFT cannot adapt layers that compressed-tensors keeps packed, so the code dequantizes them."""
    own, packed = shutil.copytree(ASSETS, tmp_path / "own"), tmp_path / "packed"
    words = [f"model={own}", "format=mxfp4", "device=cpu", f"out={packed}"]
    assert quantize.main(words) == 0
    learner = finished(tmp_path / "run", tiny(format__name="mxfp4", model__path=str(own)), build_policy)
    made = exported(tmp_path / "mine", tmp_path / "run")
    code = (made / "README.md").read_text().split("## Load it")[1].split("vLLM:")[0]
    code = "\n".join(line.strip() for line in code.splitlines() if line.startswith("    "))
    ids = prompt(learner)
    names: dict[str, Any] = {}
    exec(code.replace('"DIR"', repr(str(made))).replace('"BASE"', repr(str(packed))), names)
    with torch.no_grad():
        logprobs = names["model"].eval()(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    found = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert (own_logprobs(learner, ids) - found).abs().max() < 0.2  # bfloat16
    with learner.model.disable_adapter():
        assert (own_logprobs(learner, ids) - found).abs().max() > 0.3


def test_records_of_the_base_are_in_export_json_and_not_copied(
    tiny: Callable[..., RunConfig], build_policy: Build, tmp_path: Path
) -> None:
    base = shutil.copytree(ASSETS, tmp_path / "base")
    (base / "recipe.json").unlink()
    for name in ("warmup.json", "export.json"):
        (base / name).write_text(json.dumps({"of": name}))
    finished(tmp_path / "run", tiny(format__name="bf16", model__path=str(base)), build_policy)
    beside = exported(tmp_path / "beside", tmp_path / "run", base=True)
    assert not {"warmup.json", "export.json"} & {file.name for file in (beside / "base").iterdir()}
    origin = json.loads((beside / EXPORT).read_text())["began_from"]
    assert [origin[name] for name in ("warmup.json", "export.json")] == [{"of": "warmup.json"}, {"of": "export.json"}]


def test_a_run_with_flash_attention_is_exported_without_its_package(
    tiny: Callable[..., RunConfig], build_policy: Build, tmp_path: Path
) -> None:
    finished(tmp_path / "run", tiny(format__name="bf16"), build_policy)
    resolved = tmp_path / "run" / "resolved.yaml"
    text = resolved.read_text()
    text = text.replace("attention: sdpa", "attention: flash_attention_2")
    resolved.write_text(text.replace("device: cpu", "device: cuda").replace("dtype: float32", "dtype: bfloat16"))
    assert RunDirectory(tmp_path / "run").config().model.attention == "flash_attention_2"
    merged = exported(tmp_path / "merged", tmp_path / "run", merged=True)
    assert (merged / "model.safetensors").is_file()


def test_runs_that_cannot_be_exported_are_refused(runs: Runs, tmp_path: Path) -> None:
    run = str(runs["bf16"][0])
    options = ExportOptions(run=run, out=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="nowhere is no directory"):
        requested_run(replace(options, run="nowhere"))
    with pytest.raises(ConfigError, match="Type another out"):
        requested_run(replace(options, out=run))
    with pytest.raises(ConfigError, match="was not made by this command"):
        requested_run(replace(options, out=run, overwrite=True))
    copy = shutil.copytree(runs["bf16"][0], tmp_path / "a copy")
    (copy / "adapter" / "adapter_model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"has no adapter/adapter_model\.safetensors\. .* move DONE out .* resume='.*/a copy'\."
    ):
        requested_run(replace(options, run=str(copy)))
    text = (copy / "resolved.yaml").read_text()
    (copy / "resolved.yaml").write_text(text.replace("\n  rank: 4\n", "\n  rank: 0\n"))
    with pytest.raises(
        ConfigError, match=r"trained all weights; allowed: a run with an adapter\. Copy .*/a copy/model:"
    ):
        requested_run(replace(options, run=str(copy)))


def test_an_export_with_a_replaced_base_is_refused(
    tiny: Callable[..., RunConfig], build_policy: Build, tmp_path: Path
) -> None:
    base = shutil.copytree(ASSETS, tmp_path / "base")
    cfg = with_absolute_paths(tiny(format__name="bf16", model__path=str(base)))
    finished(tmp_path / "run", cfg, build_policy)
    (base / "tokenizer.json").write_text((base / "tokenizer.json").read_text() + "\n")
    with pytest.raises(ConfigError, match=r"and is now the model of .*\. Put it back as it was, or start a new run\."):
        exported(tmp_path / "out", tmp_path / "run", merged=True)


@pytest.mark.parametrize("merged", [False, True])
def test_the_export_of_a_damaged_adapter_is_refused(runs: Runs, tmp_path: Path, merged: bool) -> None:
    copy = shutil.copytree(runs["bf16"][0], tmp_path / "run")
    (copy / "adapter" / "adapter_model.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors cannot be read .* Put the file back as it was"):
        exported(tmp_path / "out", copy, merged=merged)
    assert not (tmp_path / "out").exists()


def test_an_unfinished_run_is_refused_and_an_old_export_is_overwritten(
    tiny: Callable[..., RunConfig], build_policy: Build, tmp_path: Path
) -> None:
    finished(tmp_path / "run", tiny(format__name="bf16"), build_policy)
    made = exported(tmp_path / "out", tmp_path / "run")
    (made / "mark").touch()
    exported(tmp_path / "out", tmp_path / "run", overwrite=True)
    assert not (made / "mark").exists()
    (tmp_path / "run" / "DONE").unlink()
    unfinished = (tmp_path / "run").rename(tmp_path / "a run")
    with pytest.raises(ConfigError, match="is interrupted, or still running; allowed: a finished run") as told:
        requested_run(ExportOptions(run=str(unfinished), out=str(tmp_path / "other")))
    assert f"Type python -m qerl_lab resume='{unfinished}' first." in str(told.value)
