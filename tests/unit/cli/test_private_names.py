"""The private names of Hydra that are left: which they are, and that they still do what we take them for."""

import re
from collections import Counter
from pathlib import Path

import hydra.types
import pytest
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.utils import get_args_parser

from qerl_lab.cli.compose import make_plan

SOURCE = Path(__file__).parents[3] / "src" / "qerl_lab"


def test_they_are_two_and_each_says_why() -> None:
    lines = [line for path in SOURCE.rglob("*.py") for line in re.findall(r"^.*hydra\._.*$", path.read_text(), re.M)]
    assert sorted(line.partition("  #")[0].split()[-1] for line in lines) == ["Callbacks", "get_args_parser"]
    assert all("  # " in line for line in lines)


def test_a_context_takes_callbacks_of_a_configuration() -> None:
    callbacks = Callbacks(None)
    hydra.types.HydraContext(config_loader=None, callbacks=callbacks)  # type: ignore[arg-type]
    for call in ("on_run_start", "on_run_end", "on_multirun_start", "on_multirun_end"):
        assert callable(getattr(callbacks, call))


def test_the_parser_knows_hydra_s_flags() -> None:
    args = get_args_parser().parse_args(["-m", "--cfg", "job", "--config-dir", "x", "seed=1"])
    assert (args.multirun, args.cfg, args.config_dir, args.overrides) == (True, "job", "x", ["seed=1"])
    for flag in ("help", "hydra_help", "shell_completion", "info", "config_path", "config_name", "experimental_rerun"):
        assert not getattr(args, flag)


def test_the_loader_reads_through_its_repository_and_an_option_is_read_once_for_all_jobs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No job's values are left in what the next one gets."""
    read, load = Counter[str](), ConfigRepository.load_config

    def counted(repository: ConfigRepository, config_path: str) -> object:
        read[config_path] += 1
        return load(repository, config_path)

    monkeypatch.setattr(ConfigRepository, "load_config", counted)
    plan = make_plan(["+experiment=bf16_temperature,bf16", "lora=rank64", "seed=0,1"], multirun=True)
    assert {"config", "schema", "lora/rank64", "experiment/bf16", "experiment/bf16_temperature"} <= set(read)
    assert set(read.values()) == {1}
    assert [job.config.rollout.temperature for job in plan.jobs] == [1.01, 1.01, 1.0, 1.0]
