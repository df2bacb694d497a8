"""What a run imports is imported without the garbage collector, which is back after it."""

import gc
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from qerl_lab.config.option import ConfigError
from qerl_lab.record.directory import RunDirectory
from qerl_lab.system import terminal
from qerl_lab.system.exits import USAGE
from qerl_lab.train import __main__ as process
from qerl_lab.train.stop import Stop


def test_the_collector_waits_and_is_back_also_after_an_error() -> None:
    gc.unfreeze()
    with terminal.quiet_imports():
        assert not gc.isenabled()
        assert not gc.get_freeze_count()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 1000
    with pytest.raises(ImportError), terminal.quiet_imports():
        raise ImportError
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    with terminal.quiet_imports():
        pass
    assert not gc.isenabled()


def test_a_run_is_imported_so(tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen where third parties are made quiet, which imports some; what is refused there ends it."""
    seen: list[bool] = []

    def refused() -> None:
        seen.append(gc.isenabled())
        raise ConfigError("enough")

    monkeypatch.setattr(terminal, "quiet_third_parties", refused)
    monkeypatch.setattr(process.Stop, "on_signals", lambda _: Stop())
    (tmp_path / "resolved.yaml").write_text(yaml.safe_dump(asdict(tiny(run_dir=str(tmp_path)))))
    assert process.main(RunDirectory(tmp_path), 1) == USAGE
    assert RunDirectory(tmp_path).reason == "ConfigError: enough"
    assert seen == [False]
    assert gc.isenabled()
