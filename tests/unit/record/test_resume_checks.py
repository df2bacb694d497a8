"""Refusals to resume a run: each message names the file, what is wrong with it, and what to do."""

import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from qerl_lab.cli import launch
from qerl_lab.config.arm import ADDED, OF_SWEEPS, PREREGISTRATION, REMOVED, leaves, settings_of_arm, settings_of_run
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import sha256
from qerl_lab.config.schema import RunConfig
from qerl_lab.model.on_disk import ASSETS
from qerl_lab.record import checkpoint
from qerl_lab.record.directory import RunDirectory
from qerl_lab.record.environment import TypedCommand, git_state
from qerl_lab.system.exits import INTERRUPTED

RECORD = Path(__file__).parents[2] / "data" / "record"


def save(run_dir: Path, step: int, cfg: RunConfig) -> Path:
    state = {"step": step, "prompts_seen": step, "config": settings_of_run(cfg)}
    return checkpoint.save(run_dir / "checkpoints", state, lambda folder: (folder / "a").touch(), keep=9)


def log(run_dir: Path, *steps: int) -> None:
    text = "".join(f'{{"step": {step}, "time": 1, "metrics": {{"reward/mean": 0}}}}\n' for step in steps)
    (run_dir / "metrics.jsonl").write_text(text)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 12 steps that was killed after its second checkpoint."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    cfg = RunConfig(steps=12, run_dir=str(run_dir))
    (run_dir / "resolved.yaml").write_text(yaml.safe_dump(asdict(cfg), sort_keys=False))
    log(run_dir, 1, 2, 3, 4)
    RunDirectory(run_dir).note_mirror()
    RunDirectory(run_dir).begin_session(1.0)
    for step in (2, 4):
        save(run_dir, step, cfg)
    (run_dir / "notes").symlink_to("nowhere")  # a file of the user's, which the run never writes
    return run_dir


def edit(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> RunConfig:
    """Change resolved.yaml; return the configuration that a run then reads."""
    path = run_dir / "resolved.yaml"
    values = yaml.safe_load(path.read_text())
    change(values)
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    return RunDirectory(run_dir).config()


def without(values: dict[str, Any], *keys: str) -> None:
    for key in keys:
        *above, last = key.split(".")
        inside = values
        for part in above:
            inside = inside[part]
        del inside[last]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("role", ["training", "heldout"])
def test_other_questions_than_a_run_began_with_are_refused(run_dir: Path, role: str) -> None:
    data = {"training_questions": 9, "training_sha256": "a" * 64, "heldout_questions": 4, "heldout_sha256": "b" * 64}
    run = RunDirectory(run_dir)
    run.refuse_other_data(data)  # a record of an older version says nothing of them
    run.write_environment(data)
    run.refuse_other_data(data)
    changed = data | {f"{role}_questions": 3, f"{role}_sha256": "c" * 64}
    with pytest.raises(
        ConfigError, match=f"the {role} questions have changed since the run began: now 3 with SHA-256 c"
    ):
        run.refuse_other_data(changed)
    (run_dir / "env.json").write_text(json.dumps(run.environment() | {"git_sha": "c0ffee0123456789"}))
    with pytest.raises(ConfigError, match=r"a new run\. Commit c0ffee01 of the lab began the run: with it the"):
        run.refuse_other_data(changed)
    for sha in (None, "unknown", git_state()[0]):  # unknown: a package without a repository
        (run_dir / "env.json").write_text(json.dumps(run.environment() | {"git_sha": sha}))
        with pytest.raises(ConfigError, match=r"Put the data back as it was, or start a new run\.$"):
            run.refuse_other_data(changed)


def test_a_model_that_changed_on_the_hub_is_refused(run_dir: Path, tmp_path: Path) -> None:
    """A run without model.revision asks the hub for the newest, also when it is resumed, evaluated or exported."""
    folder, run = Path(shutil.copytree(ASSETS, tmp_path / "snapshots" / "c0ffee")), RunDirectory(run_dir)
    run.write_environment({})
    run.refuse_other_model(folder)  # a record of an older version names no model
    run.write_environment({}, downloaded=folder)
    (run_dir / "env.2.json").replace(run_dir / "env.json")
    run.refuse_other_model(Path(shutil.copytree(folder, tmp_path / "copy")))
    with open(folder / "chat_template.jinja", "a") as template:
        template.write("Be brief.")
    with pytest.raises(
        ConfigError, match=r"the run began with the model of \w{12} in .*/c0ffee: it changed on the hub"
    ):
        run.refuse_other_model(folder)


@pytest.mark.parametrize("line", [1, 8, 22])  # below a node, between two nodes, before a value
def test_a_configuration_that_was_cut_off_is_refused_at_any_line(run_dir: Path, line: int) -> None:
    path = run_dir / "resolved.yaml"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:line]))
    with pytest.raises(ConfigError, match=r"resolved\.yaml(:| lacks| cannot be read)"):
        RunDirectory(run_dir).config()


def test_a_run_from_before_a_key_was_added_or_deleted_resumes_in_the_same_arm(run_dir: Path) -> None:
    """The old record and checkpoint lack keys added since, which then have their defaults, and have a deleted key."""
    known = {name: value for name, _, value in leaves(RunConfig(steps=12))}
    assert {name: known[name] for name in ADDED} == dict(ADDED)

    def age(values: dict[str, Any]) -> None:
        without(values, *ADDED, *OF_SWEEPS, *PREREGISTRATION, "model.hash", "tracking.wandb")
        values["task"]["code_io"]["tests"] = 8  # deleted since, as in REMOVED
        values["rollout"]["vllm"]["sleep"] = False  # likewise, and every run of that time has it

    cfg, younger = edit(run_dir, age), RunDirectory(run_dir)
    then = {name: value for name, value in settings_of_run(cfg).items() if name not in ADDED} | {REMOVED[-1]: 8}
    state = {"step": 4, "prompts_seen": 4, "config": then}
    checkpoint.save(run_dir / "checkpoints", state, lambda folder: (folder / "a").touch(), keep=9)
    assert younger.starting_point().step == 4
    assert settings_of_arm(younger.settings()) == settings_of_arm({name: str(value) for name, value in known.items()})
    edit(run_dir, lambda values: values["rollout"]["vllm"].update(share_base=True))
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.share_base=true \(was false\)"):
        younger.starting_point()


@pytest.mark.parametrize("record", sorted(path.name for path in RECORD.iterdir()))
def test_a_configuration_that_was_recorded_on_23_november_can_be_read(record: str) -> None:
    """A key added since must be in `ADDED`, else all older runs are refused."""
    assert RunDirectory(RECORD / record).config().steps == 50


@pytest.mark.parametrize("change", [
    lambda values: values.pop("seed"), lambda values: values.update(later_key=1),
])  # fmt: skip
def test_a_configuration_of_another_version_is_refused_with_the_commit_that_began_the_run(
    run_dir: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    (run_dir / "env.json").write_text(json.dumps({"git_sha": "c0ffee0123456789"}))
    with pytest.raises(ConfigError, match=r"or start a new run\. Commit c0ffee01 of the lab began the run"):
        edit(run_dir, change)


@pytest.mark.parametrize("known", ["a" * 12, None])
def test_a_model_may_be_moved_and_not_replaced(run_dir: Path, known: str | None) -> None:
    """A run from before `model.hash` is compared by its path."""
    run = RunDirectory(run_dir)
    save(run_dir, 4, edit(run_dir, lambda values: values["model"].update(path="/there", hash=known)))
    assert run.starting_point()
    edit(run_dir, lambda values: values["model"].update(path="/elsewhere"))
    if known:
        assert run.starting_point()
        edit(run_dir, lambda values: values["model"].update(hash="b" * 12))
    said = r"model\.hash=b{12} \(was a{12}\)\. Put it back" if known else r"model\.path=/elsewhere \(was /there\)"
    with pytest.raises(ConfigError, match=said):
        run.starting_point()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no configuration"),
        ("a: [", "cannot be read"),
        ("\0\0", "cannot be read"),
        ("steps: many\n", "resolved.yaml: steps=many is not allowed"),
        (
            "format: {name: int4}\n",
            "mxfp4, nf4, nvfp4. It was edited, or another version",
        ),
    ],
)
def test_a_configuration_of_garbage_is_one_sentence(run_dir: Path, text: str, words: str) -> None:
    (run_dir / "resolved.yaml").write_text(text)
    with pytest.raises(ConfigError) as refusal:
        RunDirectory(run_dir).config()
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_checkpoint_of_before_a_run_was_extended_is_gone_on_from(run_dir: Path) -> None:
    """Extended at step 4 and at step 8, it was stopped before step 12 and lost its later checkpoints."""
    save(run_dir, 4, edit(run_dir, lambda values: values.update(steps=8, extended=[4])))
    edit(run_dir, lambda values: values.update(steps=12, extended=[4, 8]))
    assert RunDirectory(run_dir).starting_point()
    edit(run_dir, lambda values: values.update(extended=[8]))
    with pytest.raises(ConfigError, match=r"extended=\[\] \(was \[4\]\)"):
        RunDirectory(run_dir).starting_point()
    save(run_dir, 4, edit(run_dir, lambda values: values.update(extended=[4, 8])))  # one of after both
    assert RunDirectory(run_dir).starting_point()


def test_another_device_is_refused(run_dir: Path) -> None:
    run = RunDirectory(run_dir)
    run.check()
    run.refuse_other_device("cuda")  # it has not begun
    (run_dir / "env.json").write_text('{"gpus": []}')
    run.refuse_other_device("cpu")
    with pytest.raises(ConfigError, match="began on cpu, and here it would continue on cuda: one record would"):
        run.refuse_other_device("cuda")
    (run_dir / "env.json").write_text('{"gpus": [{"name": "NVIDIA H200"}]}')
    run.refuse_other_device("cuda")
    edit(run_dir, lambda values: values.update(device="cpu"))  # it left the GPU of that machine alone
    run.refuse_other_device("cpu")


def test_a_file_of_code_without_a_hash_in_the_record_is_not_run(run_dir: Path) -> None:
    """Otherwise anybody who can write the record could make any file run."""
    with pytest.raises(ConfigError, match=r"has task\.module=/mine\.py without task\.module_hash, and every run"):
        edit(run_dir, lambda values: values["task"].update(module="/mine.py"))


@pytest.mark.parametrize(
    ("steps", "wrong"),
    [
        ((1, 2, 3), "lacks 1 of 4 steps, the first of them 4"),
        ((1, 3, 4, 5), "lacks 1 of 4 steps, the first of them 2"),
        ((), "lacks 4 of 4 steps, the first of them 1"),
        ((1, 2, 2, 3, 4), "has 1 step more than once, the first of them 2"),
    ],
)
def test_a_checkpoint_of_a_step_that_the_record_lacks_is_refused(
    run_dir: Path, steps: tuple[int, ...], wrong: str
) -> None:
    run = RunDirectory(run_dir)
    log(run_dir, 1, 2, 3, 4, 5, 5, 7)  # those after the checkpoint are trained again
    assert run.starting_point().step == 4
    log(run_dir, *steps)
    before = files(run_dir)
    with pytest.raises(ConfigError, match=rf"metrics\.jsonl {wrong}, and step-000004 .* remove the checkpoints of"):
        run.starting_point()
    assert files(run_dir) == before


def test_the_command_leaves_the_weights_to_the_process_that_reads_them(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hashing the weights twice takes minutes for a large model. A step that the record lacks is still named first."""
    hashed = list[str]()
    monkeypatch.setattr(checkpoint, "sha256", lambda path: hashed.append(path.name) or sha256(path))
    monkeypatch.setattr(launch, "child_command", lambda run_dir: ["sh", "-c", "exit 130"])
    run = RunDirectory(run_dir)
    assert launch.start(run, TypedCommand("resume")) == INTERRUPTED
    assert hashed == [checkpoint.STATE]
    hashed.clear()
    run.starting_point()
    assert sorted(hashed) == ["a", checkpoint.STATE]
    log(run_dir, 1, 2)
    monkeypatch.setattr(launch, "child_command", lambda run_dir: pytest.fail("it was started"))
    with pytest.raises(ConfigError, match="lacks 2 of 4 steps"):
        launch.start(run, TypedCommand("resume"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("name", ["", "metrics.jsonl", "checkpoints"])
def test_what_cannot_be_written_is_refused(run_dir: Path, name: str) -> None:
    (run_dir / name).chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        with pytest.raises(ConfigError, match=f"{run_dir / name} cannot be written"):
            RunDirectory(run_dir).check()
    finally:
        (run_dir / name).chmod(stat.S_IRWXU)
