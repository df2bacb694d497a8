"""A built wheel works from any directory: configuration, sweeps and the embedded policy travel inside it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import qerl_lab
from qerl_lab.report import claims, reference
from qerl_lab.report.paper_curves import FIGURES

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and return a directory with the wheel unpacked and nothing else of this package."""
    made, site = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(made), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = made.glob("qerl_lab-*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def python(site: Path, elsewhere: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "MLFLOW_TRACKING_URI": f"sqlite:///{elsewhere}/mlflow.db"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=300)


def test_the_package_is_imported_from_the_wheel(site: Path, tmp_path: Path) -> None:
    shown = python(
        site, tmp_path, "-c", "import qerl_lab.config.conf_folder as c; print(c.__file__, c.package_data('conf'))"
    )
    assert shown.stdout.split() == [str(site / "qerl_lab/config/conf_folder.py"), str(site / "qerl_lab/conf")]
    (entries,) = site.glob("qerl_lab-*.dist-info/entry_points.txt")
    assert "qerl-lab = qerl_lab.__main__:command" in entries.read_text()
    script = "import sys; from qerl_lab.__main__ import command; sys.exit(command())"  # as pip writes it
    assert python(site, tmp_path, "-c", script, "--version").stdout == f"qerl-lab {qerl_lab.__version__}\n"
    for name in ("tools/model_card.md.j2", "report/report.html.j2", "report/report.mplstyle"):
        assert (site / "qerl_lab" / name).is_file()


def test_the_wheel_lists_experiments_and_sweeps(site: Path, tmp_path: Path) -> None:
    assert "nvfp4_aqn" in python(site, tmp_path, "-m", "qerl_lab").stdout
    planned = python(site, tmp_path, "-m", "qerl_lab", "+sweeps=weight_formats", "seed=0", "dry_run=true")
    assert planned.returncode == 0, planned.stderr
    assert "mxfp4_aqn" in planned.stdout


def test_the_wheel_has_the_papers_numbers(site: Path, tmp_path: Path) -> None:
    ask = "from qerl_lab.report import claims, reference; from qerl_lab.report.paper_curves import FIGURES\n"
    ask += "print(len(reference.paper_numbers()), len(reference.digitized(FIGURES[0].file)), len(claims.of_paper()))"
    shown = python(site, tmp_path, "-c", ask)
    here = len(reference.paper_numbers()), len(reference.digitized(FIGURES[0].file)), len(claims.of_paper())
    assert tuple(map(int, shown.stdout.split())) == here, shown.stderr


def test_the_wheel_trains(site: Path, tmp_path: Path) -> None:
    small = ["steps=1", "rollout.prompts_per_step=2", "optim.micro_batch_size=16", "eval.questions=4", "run_dir=run"]
    ran = python(site, tmp_path, "-m", "qerl_lab", "+experiment=nvfp4_aqn", *small)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (tmp_path / "run/DONE").exists()
    assert (tmp_path / "run/curves.png").exists()
