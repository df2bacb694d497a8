"""report.html and the files beside it: complete, the same without the run directories, open about bad runs."""

import base64
import html
import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from qerl_lab.report import comparison, palette
from qerl_lab.report.__main__ import main
from qerl_lab.report.claims import of_paper
from qerl_lab.report.page import MOST_GROUPS, breakable, draw_all
from qerl_lab.report.speed_tables import WITHOUT
from run_directories import make_run

BENCH = Path(__file__).parents[3] / "results" / "bench"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a report of two arms on two versions and machines, and of a failed, a damaged and a repeated run."""
    folder, draw = tmp_path_factory.mktemp("made"), np.random.default_rng(0)
    for seed in range(3):
        for arm in ("bf16", "nvfp4_aqn"):
            about = {"git_sha": "c0ffee0", "command": "python -m qerl_lab -m seed=0,1,2", "cpus_usable": 2, "cpu": "A"}
            about |= {"packages": {"torch": "2.13.0"}}
            changed = {"git_sha": "0ddba11", "cpu": "B", "packages": {"torch": "2.11.0"}} if seed == 2 else {}
            make_run(folder / "runs" / f"{arm}-{seed}", arm, seed, after=list(draw.integers(0, 5, 8) / 4),
                     before=[0.25] * 8, task__name="gsm8k", began=about | changed)  # fmt: skip
    make_run(folder / "runs" / "old", "bf16", 1, ended=1e9, task__name="gsm8k")
    why = "ValueError: <script>alert('x')</script> & more"
    make_run(folder / "runs" / "failed", "nvfp4_aqn", 3, task__name="gsm8k", failed=why)
    (make_run(folder / "runs" / "damaged", "bf16", 4) / "eval.parquet").unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(["runs", "out=results/mine"]) == 0
    return folder


@pytest.fixture
def page(made: Path) -> str:
    return (made / "results/mine/report.html").read_text(encoding="utf-8")


def test_the_page_is_complete_and_needs_no_network(made: Path, page: str) -> None:
    assert not re.search(r"<script|<link(?! rel=\"icon\" href=\"data:,\")|@import|url\(|https?://", page)
    images = re.findall(r'<img src="([^"]{30})', page)
    figures = sorted(path.name for path in (made / "results/mine/figures").iterdir())
    assert len(images) == len(figures) == 15 + 4  # the paper's Figures 4 (two), 8 and 5
    assert all(image.startswith("data:image/png;base64,") for image in images)
    assert {"reward-by-step.png", "reward-by-time.png", "entropy-by-step.png", "sampler_entropy-by-step.png",
            "throughput-by-step.png", "sigma-by-time.png", "paper_fig05_entropy_7b.png"} <= set(figures)  # fmt: skip
    for section in ("verdicts", "tables", "curves", "speed", "runs"):
        assert page.count(f'id="{section}"') == page.count(f'href="#{section}"') == 1


def test_a_figure_of_several_panels_has_the_width_of_the_page(made: Path, page: str) -> None:
    """On a phone it is wider than the screen by a part of a panel: a reader sees that more panels follow."""
    pattern = r'<figure(?: class="wide" style="--columns: (\d)")?><img src="data:image/png;base64,([^"]+)'
    found = re.findall(pattern, page)
    assert {bool(columns) for columns, _ in found} == {True, False}
    for columns, png in found:
        width = Image.open(io.BytesIO(base64.b64decode(png))).width
        assert width == int(columns or 1) * palette.PANEL_PIXELS
    assert "min-width: calc(320px * var(--columns))" in page


def test_the_page_begins_with_bad_runs_and_differences_between_runs(page: str) -> None:
    top = html.unescape(page[: page.index('id="verdicts"')])
    for said in (
        "<b>7</b> runs finished", "<b>1</b> of these repeated", "<b>1</b> run failed", "<b>1</b> run damaged",
        "Means exclude unfinished runs: 1 of 4 of nvfp4_aqn.",
        "The runs ran on 2 kinds of machines: 2 CPUs: A; 2 CPUs: B.",
        "The runs ran on 2 versions of torch: 2.11.0; 2.13.0.", "2 versions of the code: 0ddba11, c0ffee0",
    ):  # fmt: skip
        assert said in top, said


def test_the_page_has_verdicts_tables_and_the_commands_of_the_runs(page: str) -> None:
    text = html.unescape(page)
    measured = [claim for claim in of_paper() if claim.name in ("final_accuracy", "growth_area")]
    assert all(f"<b>{claim.says}</b>" in text for claim in measured)
    assert len(re.findall(r'class="verdict (supported|too small to matter|excluded|reversed|undecided)"', page)) >= 2
    assert "+0.076 (Table 1 3B, " in text
    assert re.search(r"<p>In \d+ of 41 contrasts an arm has no runs: 3 of initial_entropy, ", text)
    assert "python -m qerl_lab +sweeps=lora_rank" in text
    for said in ("QeRL +AQN, NVFP4",
                 "python -m qerl_lab -m seed=0,1,2", "c0ffee0  (", "runs/old: repeated by runs/bf16-1",
                 "python -m qerl_lab.report results/mine out=results/mine"):  # fmt: skip
        assert said in text, said
    assert re.search(r"<td>0\.\d{3} \[-?\d\.\d{3}, \d\.\d{3}\] \(3\)</td>", page)


@pytest.mark.usefixtures("unrendered")
def test_the_page_has_differences_from_the_baseline_or_says_why_not(
    page: str, here: Path, printed: Callable[..., str]
) -> None:
    assert '<th scope="col">after - bf16</th>' in page
    for arm in ("nvfp4", "nvfp4_aqn"):
        make_run(here / "runs" / arm, arm, 0)
    printed("runs", "out=results/mine")
    alone = Path("results/mine/report.html").read_text()
    assert "No arm is bf16: for differences type for example baseline=nvfp4." in alone
    assert "after - " not in alone


@pytest.mark.usefixtures("unrendered")
def test_the_page_says_when_its_runs_ran_which_arms_have_none_and_which_command_makes_it_again(
    here: Path, printed: Callable[..., str]
) -> None:
    for seed, hour in enumerate((12, 10, 11)):
        began = {"time": f"2026-01-01T{hour}:00:00+0000", "git_sha": "c0ffee0", "dirty": False}
        began |= {"cpu": "A", "cpus_usable": 2} if seed else {}  # older records name no machine
        make_run(here / "runs" / str(seed), "nvfp4", seed, began=began, ended=1767225600 + 3600 * (hour + 2))
    make_run(here / "runs" / "failed", "nvfp4_aqn", 0, failed="ValueError: x")
    printed("runs", "out=results/mine", "baseline=nvfp4")
    text = html.unescape(Path("results/mine/report.html").read_text())
    assert "The first began 2026-01-01 10:00 UTC, the last ended 2026-01-01 14:00 UTC." in text
    assert "Arms without a finished run: nvfp4_aqn." in text
    assert "kinds of machines" not in text
    assert "python -m qerl_lab.report results/mine out=results/mine baseline=nvfp4" in text


def test_a_long_key_may_wrap_between_its_parts_and_stays_escaped() -> None:
    assert breakable("bf16 (optim.learning_rate=0.5, x<y)") == "bf16 (optim.<wbr>learning_rate=<wbr>0.5, x&lt;y)"
    assert breakable("nvfp4 lora=dense & 0.83x") == "nvfp4 lora=dense &amp; 0.83x"  # short words stay whole


def test_the_papers_curves_stand_after_ours_and_name_model_and_task(page: str) -> None:
    text = html.unescape(page)
    ours, theirs, entropy = (
        text.index(f'alt="{alt}') for alt in ("Reward", "The paper's Figure 4", "Entropy of the t")
    )
    caption = "<figcaption>The paper's Figure 5: Qwen2.5-7B, GSM8K, read to +-0.004. Ours above: model pocket, gsm8k, "
    assert ours < theirs < entropy < text.index(caption)
    assert text.count("<figcaption>The paper") == 4
    assert "BigMath" not in text[text.index('id="curves"') :]  # these runs have another task
    assert "Below ours are the paper's figures" in text


@pytest.mark.usefixtures("unrendered")
def test_bench_adds_results_of_benchmarks_and_the_command_on_the_page_repeats_it(
    made: Path, here: Path, printed: Callable[..., str]
) -> None:
    shutil.copytree(made / "results", "results")
    assert f'<p class="soft">{WITHOUT}</p>' in html.unescape(Path("results/mine/report.html").read_text())
    shutil.copy(BENCH / "train_step_7b.json", "steps.json")
    Path("cut.json").write_text((BENCH / "train_step_7b.json").read_text()[:900])
    assert main(["results/mine", "out=results/mine", "bench=steps.json,cut.json"]) == 0
    page = html.unescape(Path("results/mine/report.html").read_text())
    assert page.index("<h3>Memory, as in") < page.index("about comparing them</h3>") < page.index("<li>steps.json: ")
    assert "steps.json: train_step, 2026-11-21, NVIDIA H200, torch 2.11.0, commit a753c81." in page
    assert "cut.json: left out, no complete result of python -m qerl_lab.bench (JSONDecodeError" in page
    row = "<td>qwen2.5-7b, nvfp4</td><td>nvfp4</td><td>train_step</td><td>5.9</td><td>0.38</td><td>5.9</td>"
    assert row in page
    line = "python -m qerl_lab.report results/mine out=results/mine bench=steps.json,cut.json"
    assert f"<pre>{line}</pre>" in page
    said = "bench=steps.json does nothing without out. Type for example out=results/NAME"
    assert said in printed("results/mine", "bench=steps.json", code=2)
    assert "bench=no.json is not there" in printed("results/mine", "out=results/other", "bench=no.json", code=2)
    assert not list(Path("results").glob("other/*"))


def test_text_that_a_run_wrote_is_escaped(page: str) -> None:
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt; &amp; more" in page


def test_a_report_of_stored_results_has_the_same_files_as_a_report_of_the_runs(made: Path, here: Path) -> None:
    shutil.copytree(made / "results", "results")
    before = {path: path.read_bytes() for path in sorted(Path("results/mine").rglob("*.*"))}
    for path in before:
        if path.suffix != ".parquet":
            path.unlink()
    assert main(["results/mine", "out=results/mine"]) == 0
    assert {path: path.read_bytes() for path in sorted(Path("results/mine").rglob("*.*"))} == before
    assert len(before) == 25
    arms = pd.read_csv("results/mine/arms.csv")
    assert arms["arm"].tolist() == ["bf16", "nvfp4_aqn"]
    assert arms.loc[1, "difference_low"] < arms.loc[1, "difference"] < arms.loc[1, "difference_high"]


@pytest.mark.usefixtures("unrendered")
def test_a_report_deletes_figures_of_an_earlier_report_that_it_lacks(here: Path) -> None:
    for arm in ("bf16", "nvfp4"):
        make_run(here / "runs" / arm, arm, 0)
    figures = here / "out" / "figures"
    assert main(["runs", "out=out"]) == 0
    assert (figures / "formats-by-step.png").exists()
    (figures / "mine.png").touch()
    shutil.rmtree(here / "runs" / "nvfp4")
    assert main(["runs", "out=out"]) == 0
    assert not (figures / "formats-by-step.png").exists()
    assert (figures / "mine.png").exists()


@pytest.mark.usefixtures("unrendered")
def test_times_and_speeds_of_runs_that_shared_a_card_are_not_drawn(tmp_path: Path) -> None:
    for arm in ("bf16", "nvfp4"):
        began = {"command": f"python -m qerl_lab {'jobs=2 jobs_per_gpu=2' if arm == 'nvfp4' else ''}"}
        make_run(tmp_path / arm, arm, 0, began=began)
    make_run(tmp_path / "alone", "nvfp4", 1)  # one run that shared its card is enough
    found = comparison.read([tmp_path])
    timed = {"reward-by-time", "throughput-by-step", "throughput-by-time"}
    alone = comparison.compare([record for record in found.runs if record.experiment == "bf16"], {})
    shared = comparison.compare([record for record in found.runs if record.experiment == "nvfp4"], {})
    names = [{figure.name for pair in draw_all(one, None).values() for figure in pair} for one in (alone, shared)]
    assert timed <= names[0]
    assert {name for name in names[1] if "time" in name or "throughput" in name} == set()
    assert "reward-by-step" in names[1]
    assert list(found.alone) == ["bf16"]


@pytest.mark.usefixtures("unrendered")
def test_a_page_shows_the_first_few_figures_of_formats(tmp_path: Path) -> None:
    for number in range(MOST_GROUPS + 1):
        for arm in ("bf16", "nvfp4"):
            make_run(tmp_path / f"{arm}{number}", arm, 0, optim__learning_rate=1e-4 * (number + 1))
    names = [figure.name for figure in draw_all(comparison.read([tmp_path]), None)["Weight formats"]]
    assert names == ["formats-by-step", *(f"formats-{number}-by-step" for number in range(2, MOST_GROUPS + 1))]
