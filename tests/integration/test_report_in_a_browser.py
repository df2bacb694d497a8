"""report.html and the site in a real browser, as wide as a phone and a desktop: nothing is missing or too wide.

Needs the extra `browser` and a Chromium (in the path, or by `playwright install chromium`). The site needs the extra
`docs`. Without them these tests are skipped.
"""

import functools
import http.server
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from qerl_lab.report.__main__ import main
from run_directories import make_run

pytestmark = [pytest.mark.integration, pytest.mark.browser]
ROOT = Path(__file__).parents[2]
playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'qerl-lab[browser]'")
TOO_WIDE = """() => [...document.querySelectorAll('body *')]
  .filter(one => !one.closest('.scroll, .unseen') && one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser() -> Iterator["playwright.Browser"]:
    with playwright.sync_playwright() as running:
        installed = shutil.which("chromium") or shutil.which("google-chrome") or running.chromium.executable_path
        if not Path(installed).exists():
            pytest.skip("no Chromium: type playwright install chromium")
        started = running.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a report with labels and a failure reason that are hard to wrap."""
    folder, draw = tmp_path_factory.mktemp("pages"), np.random.default_rng(0)
    for seed in range(3):
        for arm, changes in (("bf16", {}), ("nvfp4_aqn", {}), ("nvfp4_aqn", {"optim__learning_rate": 3e-05})):
            make_run(folder / "runs" / f"{arm}-{len(changes)}-{seed}", arm, seed, **changes,
                     before=[0.25] * 8, after=list(draw.integers(0, 5, 8) / 4))  # fmt: skip
    make_run(folder / "runs" / "failed", "nvfp4_aqn", 3, failed=f"OSError: /{'a_folder_without_a_space_' * 12}")
    bench = ROOT / "results" / "bench"
    assert main([str(folder / "runs"), f"out={folder / 'full'}", f"bench={bench}"]) == 0
    return folder / "full" / "report.html"


@pytest.mark.parametrize("width", [380, 1400])
def test_a_report_fits_its_window_without_errors_or_requests(
    browser: "playwright.Browser", full: Path, width: int
) -> None:
    page, complaints, asked = browser.new_page(viewport={"width": width, "height": 900}), [], []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(full.as_uri())
    for details in page.query_selector_all("summary"):
        details.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(TOO_WIDE) == []
    assert page.evaluate("[...document.images].filter(one => one.complete && one.naturalWidth > 300).length") == 20
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert complaints == []
    page.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """Build and serve the site; yield its folder and address. The search of its pages needs a server."""
    pytest.importorskip("mkdocs", reason="pip install 'qerl-lab[docs]'")
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", folder], cwd=ROOT, check=True)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("width", [380, 1400])
def test_every_page_of_the_site_fits_its_window_without_errors_or_outside_requests(
    browser: "playwright.Browser", site: tuple[Path, str], width: int
) -> None:
    folder, address = site
    page, complaints, asked = browser.new_page(viewport={"width": width, "height": 900}), [], []
    page.on("console", lambda message: complaints.append((page.url, message.text)))
    page.on("pageerror", lambda error: complaints.append((page.url, str(error))))
    page.on("request", lambda request: asked.append(request.url))
    names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*.html"))]
    assert {"index.html", "docs/results.html", "docs/reports.html", "docs/api/formats.html"} <= {*names}
    for name in names:
        page.goto(address + name)
        if page.evaluate("document.documentElement.scrollWidth") > width:
            complaints.append((name, "too wide"))
    assert [url for url in asked if not url.startswith((address, "data:", "blob:"))] == []
    assert complaints == []
    page.close()
