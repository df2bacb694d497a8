"""Typed paths, relative or with ~ or umlauts, become the absolute paths that a run records."""

from pathlib import Path

import pytest

from qerl_lab.cli.compose import make_plan
from qerl_lab.config.arm import config_hash
from qerl_lab.config.option import ConfigError
from qerl_lab.config.paths import sha256, with_absolute_paths
from qerl_lab.config.schema import LoraConfig, ModelConfig, RunConfig, TaskConfig, TrackingConfig


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = tmp_path / "home"
    for name in ("work/mödel", "work/org/name", "work/pocket", "home"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("pocket", "pocket"),  # the embedded policy, whatever lies here
        ("org/name", "HERE/org/name"),
        ("Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-7B"),
        ("~/model", "HOME/model"),
        ("mödel/", "HERE/mödel"),
    ],
)
def test_local_paths_become_absolute_and_hub_ids_stay(here: Path, given: str, kept: str) -> None:
    kept = kept.replace("HERE", str(here)).replace("HOME", str(here.parent / "home"))
    found = with_absolute_paths(RunConfig(model=ModelConfig(path=given), task=TaskConfig(path=given)))
    assert (found.model.path, found.task.path) == (kept, kept)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (None, None),
        ("sqlite:///mlflow.db", "sqlite:///HERE/mlflow.db"),
        ("sqlite:///~/mlflow.db", "sqlite:///HOME/mlflow.db"),
        ("sqlite:///a b/ö#.db", "sqlite:///HERE/a b/ö#.db"),
        ("sqlite:///mlflow.db?timeout=9", "sqlite:///mlflow.db?timeout=9"),
        ("https://host/mlflow", "https://host/mlflow"),
    ],
)
def test_the_file_of_an_sqlite_store_becomes_absolute(here: Path, given: str | None, kept: str | None) -> None:
    kept = kept and kept.replace("HERE", str(here)).replace("HOME", str(here.parent / "home"))
    assert with_absolute_paths(RunConfig(tracking=TrackingConfig(uri=given))).tracking.uri == kept


def plan(line: str, multirun: bool = False):
    return make_plan(line.split(), multirun)


def test_a_plan_has_them_as_the_run_will(here: Path) -> None:
    home = here.parent / "home"
    (job,) = plan("scale=custom model.path=mödel task=gsm8k task.path=~/dätä run_dir=~/rün").jobs
    assert (job.config.model.path, job.config.model.name) == (f"{here}/mödel", "mödel")
    assert (job.config.task.path, job.run_dir) == (f"{home}/dätä", home / "rün")
    assert plan("scale=custom model.path=.").jobs[0].config.model.name == "work"
    (here / "q4.gguf").touch()
    assert plan("scale=custom model.path=q4.gguf").jobs[0].config.model.name == "q4"
    sweep = plan("scale=custom model.path='mödel',org/name hydra.sweep.dir=~/swëep", multirun=True)
    assert [job.config.model.path for job in sweep.jobs] == [f"{here}/mödel", f"{here}/org/name"]
    assert sweep.directory == home / "swëep"


@pytest.mark.parametrize(("key", "name"), [
    ("model.hash", "mödel"), ("lora.start_hash", "adapter/adapter_model.safetensors"), ("task.module_hash", "mine.py"),
])  # fmt: skip
def test_a_file_that_is_not_of_the_hash_in_the_configuration_is_refused(here: Path, key: str, name: str) -> None:
    """A run goes on with the files that it began with."""
    (here / "mödel" / "model.safetensors").touch()
    (here / "adapter").mkdir()
    for file in ("adapter/adapter_model.safetensors", "mine.py"):
        (here / file).touch()
    section = {"model.hash": ModelConfig(path="mödel"), "lora.start_hash": LoraConfig(start_from="adapter"),
               "task.module_hash": TaskConfig(module="mine.py")}[key]  # fmt: skip
    group, leaf = key.split(".")
    cfg = with_absolute_paths(RunConfig(**{group: section}))
    assert with_absolute_paths(cfg) == cfg
    setattr(getattr(cfg, group), leaf, "0" * 12)
    with pytest.raises(ConfigError, match=f"^{key}=0{{12}} does not match {here}/{name}, which has .* Leave {key} out"):
        with_absolute_paths(cfg)


def test_a_run_records_the_hash_of_the_claims_that_it_is_to_test(here: Path) -> None:
    (here / "claims.yaml").write_text("claims: []")
    kept = with_absolute_paths(RunConfig(preregistration="claims.yaml"))
    assert kept.preregistration == str(here / "claims.yaml")
    assert kept.preregistration_sha256 == sha256(here / "claims.yaml")
    assert with_absolute_paths(kept) == kept
    assert config_hash(kept) == config_hash(with_absolute_paths(RunConfig()))  # it makes no other arm
    (here / "claims.yaml").write_text("claims: [another]")
    with pytest.raises(ConfigError, match=r"preregistration_sha256=.* does not match"):
        with_absolute_paths(kept)
    with pytest.raises(ConfigError, match=r"preregistration=none\.yaml is no file"):
        with_absolute_paths(RunConfig(preregistration="none.yaml"))
