"""A local model counts by its content: it decides the arm, and another model in its place is refused."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_files import write_gguf
from qerl_lab.cli.compose import make_plan
from qerl_lab.config.arm import config_hash, settings_of_run
from qerl_lab.config.model_hash import model_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import with_absolute_paths
from qerl_lab.config.schema import RunConfig
from qerl_lab.evaluate import subject
from qerl_lab.evaluate.evaluate_options import AccuracyOptions
from qerl_lab.model.on_disk import ASSETS, check_content
from qerl_lab.preflight import check
from qerl_lab.record.directory import RunDirectory
from qerl_lab.train.run import build_session
from qerl_lab.train.stop import Stop
from run_directories import claimed

OTHER = r"was the model of model\.hash=\w{12} when the run was composed, and is now the model of \w{12}\. Put it back"
GONE = r"was the model of model\.hash=\w{12} when the run was composed, and is gone\. Put that model there; a link"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return shutil.copytree(ASSETS, tmp_path / "model")


def train(folder: Path) -> None:
    """Make another model of the same size, as a warm-up with another seed does."""
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def composed(*words: str) -> RunConfig:
    return make_plan(["scale=custom", *words], False).jobs[0].config


def test_the_arm_depends_on_the_content_of_a_model_and_not_on_its_path(model: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    before, elsewhere = composed(f"model.path={model}"), composed(f"model.path={copy}")
    assert before.model.hash == elsewhere.model.hash == model_hash(model)
    assert settings_of_run(before) == settings_of_run(elsewhere)
    train(model)
    after = composed(f"model.path={model}")
    assert config_hash(before) == config_hash(elsewhere) != config_hash(after)
    assert "model.path" not in settings_of_run(before)


def test_a_model_without_a_hash_counts_by_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    hub, pocket = composed("model.path=org/name"), composed()
    assert hub.model.hash is pocket.model.hash is None
    assert (settings_of_run(hub)["model.path"], settings_of_run(pocket)["model.path"]) == ("org/name", "pocket")
    assert config_hash(hub) != config_hash(composed("model.path=org/other"))
    assert config_hash(hub) != config_hash(composed("model.path=org/name", "model.revision=a1b2c3d"))


def test_a_gguf_file_has_a_hash(tmp_path: Path) -> None:
    write_gguf(tmp_path / "a.gguf", seed=0)
    before = composed(f"model.path={tmp_path}/a.gguf")
    write_gguf(tmp_path / "a.gguf", seed=1)
    assert None is not before.model.hash != composed(f"model.path={tmp_path}/a.gguf").model.hash
    with pytest.raises(ConfigError, match=OTHER):
        check(before, tmp_path / "run")


@pytest.fixture
def run(tiny: Callable[..., RunConfig], model: Path, tmp_path: Path) -> RunDirectory:
    """Claim a run. It has no adapter, and the commands here ask for none."""
    return claimed(tmp_path / "run", with_absolute_paths(tiny(model__path=str(model))))


def evaluate(run: RunDirectory) -> subject.Subject:
    return subject.resolve_subject(AccuracyOptions(run=str(run.path), adapter=False, device="cpu"))


def begin(run: RunDirectory) -> object:
    return check(run.config(), run.path)


def go_on(run: RunDirectory) -> object:
    return build_session(run.config(), run, Stop())


@pytest.mark.parametrize("command", [begin, go_on, evaluate])
def test_every_command_on_a_run_refuses_another_model_in_its_place(
    run: RunDirectory, model: Path, command: Callable[[RunDirectory], object]
) -> None:
    """tests/unit/tools/test_export.py tests the export."""
    (model / "warmup.json").write_text("{}")  # is not hashed
    check_content(run.config())
    train(model)
    with pytest.raises(ConfigError, match=OTHER):
        command(run)
    shutil.rmtree(model)
    with pytest.raises(ConfigError, match=GONE):
        command(run)


def test_a_link_to_a_moved_model_is_accepted(run: RunDirectory, model: Path, tmp_path: Path) -> None:
    model.symlink_to(model.rename(tmp_path / "elsewhere"))
    assert begin(run) == []
    assert evaluate(run)


def test_a_base_that_is_dequantized_for_an_evaluation_has_no_hash(run: RunDirectory) -> None:
    found = evaluate(run)
    with subject.dequantized_subject(found) as common:
        check_content(common.cfg)
        assert re.fullmatch(r"\w{12}", str(found.cfg.model.hash))
