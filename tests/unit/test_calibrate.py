"""The calibration of sigma, refused where it would measure nothing."""

from pathlib import Path

import pytest

from qerl_lab import calibrate, quantize


def test_a_packed_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert quantize.main(["model=pocket", "quality=weights", "device=cpu", f"out={tmp_path / 'packed'}"]) == 0
    for model, message in (
        (tmp_path / "packed", "is packed; allowed: the dense model"),
        (tmp_path / "no", "no directory"),
    ):
        monkeypatch.setattr("sys.argv", ["calibrate", "--model", str(model)])
        with pytest.raises(SystemExit) as stopped:
            calibrate.main()
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
