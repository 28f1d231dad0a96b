"""A new user's first minutes, in a real browser: JupyterLab opens 00_start_here, "Run All Cells" ends without an error.

Needs Chromium (on Debian: apt-get install chromium). Without one the tests are skipped, with the reason in the report.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tests import browser

ROOT = Path(__file__).resolve().parents[2]
FIRST = "00_start_here.ipynb"
CHROMIUM = browser.find()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no browser here: none of {', '.join(browser.NAMES)} is installed"),
]


@pytest.fixture
def page(tmp_path):
    with browser.Browser(CHROMIUM, tmp_path / "profile") as opened:
        yield opened


@pytest.fixture
def lab(tmp_path):
    """JupyterLab on a copy of the notebooks, with nobody's settings: its address and the copy's folder."""
    folder = tmp_path / "notebooks"
    shutil.copytree(ROOT / "notebooks", folder)
    settings = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    environment = {**os.environ, **settings, "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
    options = ["--no-browser", "--expose-app-in-browser", "--ServerApp.port=0", "--IdentityProvider.token="]
    options += [f"--ServerApp.root_dir={folder}", "--ServerApp.allow_root=True", "--LabApp.news_url=None"]
    with open(tmp_path / "lab.log", "w") as log:
        command = [sys.executable, "-m", "jupyterlab", *options]
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        found = browser.wait_for(
            lambda: re.search(r"http://(?:localhost|127\.0\.0\.1):\d+/", (tmp_path / "lab.log").read_text()),
            60,
            "JupyterLab's address",
        )
        yield found[0], folder
    finally:
        process.terminate()
        process.wait(30)


PANEL = "[...(window.jupyterapp?.shell?.widgets('main') ?? [])][0]"
CODE = f"{PANEL}?.content?.widgets?.filter(cell => cell.model.type === 'code')"


def test_run_all_in_jupyterlab_ends_without_error_and_prints_what_is_committed(page, lab):
    address, folder = lab
    page.open(f"{address}lab/tree/{FIRST}")
    page.until(f"{CODE}?.length > 5", 60)
    page.until("document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status === 'idle'", 60)

    page.click(".lm-TabBar-tabLabel", FIRST)
    page.click(".lm-MenuBar-itemLabel", "Run")
    page.click(".lm-Menu-itemLabel", "Run All Cells")
    page.until(f"{CODE}.some(cell => cell.model.executionState === 'running')", 30)
    page.until(f"{CODE}.every(cell => cell.model.executionState === 'idle')", 150)
    page.click(".lm-MenuBar-itemLabel", "File")
    page.click(".lm-Menu-itemLabel", "Save Notebook")
    page.until(f"{PANEL}.context.model.dirty === false", 30)

    committed, ran = (nbformat.read(where / FIRST, as_version=4) for where in (ROOT / "notebooks", folder))
    assert counts(ran) == list(range(1, len(counts(committed)) + 1))
    assert printed(ran) == printed(committed)
    assert page.js("[...document.querySelectorAll('.jp-Notebook img')].some(image => image.naturalWidth > 100)")


def counts(notebook) -> list:
    return [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook) -> list[str]:
    """The text that each code cell but the first printed; an error would be an output of another type."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"][1:]
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]
    return ["".join(out.get("text", "") for out in cell.outputs) for cell in cells]


def test_slides_open_from_a_file_without_a_network(page, tmp_path):
    subprocess.run([sys.executable, ROOT / "notebooks" / "slides.py", tmp_path / "slides"], check=True)
    page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
    page.open((tmp_path / "slides" / FIRST.replace(".ipynb", ".slides.html")).as_uri())
    page.until("window.Reveal?.isReady()", 30)
    assert page.js("Reveal.getTotalSlides()") > 5
    assert page.js("Reveal.hasPlugin('notes')") and page.js("document.querySelectorAll('aside.notes').length") >= 1
    assert not page.failed, page.failed
