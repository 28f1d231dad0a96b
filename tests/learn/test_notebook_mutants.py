"""Putting any of the four defects back into the corrected code turns a page red: the notebooks test the package.

Each test copies the package, puts one defect back by editing the copy, and validates a page against the committed
outputs, as `make test` does. The page must fail, and it must be an assertion or an output that says so.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWNED = "x.slot_mapping >= 0"
DEFECTS = {  # name: (page, file, [(corrected line, line with the defect)])
    "query norm": (
        "00_start_here",
        "norm_rope/reference.py",
        [
            (
                "x.q_out.copy_(rms_norm(x.q, x.q_weight, x.eps))",
                f"x.q_out[{OWNED}] = rms_norm(x.q, x.q_weight, x.eps)[{OWNED}].to(x.q_out)",
            )
        ],
    ),
    "combine routing": (
        "00_start_here",
        "combine/reference.py",
        [
            ("    out, lse = partial(manager.query_gather(q, decode_only))\n", "    out, lse = partial(q)\n"),
            ("    return manager.combine(out, lse, decode_only)\n", "    return out.float()\n"),
        ],
    ),
    "K rows": (
        "00_start_here",
        "norm_rope/reference.py",
        [
            ("x.kv_out.copy_(latent)", f"x.kv_out[{OWNED}] = latent[{OWNED}].to(x.kv_out)"),
            ("x.kpe_out.copy_(key)", f"x.kpe_out[{OWNED}] = key[{OWNED}].to(x.kpe_out)"),
        ],
    ),
    "workspace": (
        "06_workspace",
        "workspace.py",
        [("rows, splits if splits > 1 else 0, ranks", "rows, 1 + splits, ranks")],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_put_back_turns_a_page_red(defect, tmp_path):
    page, file, edits = DEFECTS[defect]
    folder = copy_of_the_package(tmp_path)
    source = (folder / "dcp_fix" / file).read_text()
    for corrected, broken in edits:
        assert source.count(corrected) == 1, f"{file} has changed: {corrected!r}"
        source = source.replace(corrected, broken)
    (folder / "dcp_fix" / file).write_text(source)
    run = nbval(folder, page)
    assert run.returncode == 1, run.stdout
    assert "AssertionError" in run.stdout or "Cell outputs differ" in run.stdout, run.stdout


def copy_of_the_package(folder: Path) -> Path:
    """The package and the notebooks in a folder of their own; the weights are linked."""
    shutil.copytree(ROOT / "dcp_fix", folder / "dcp_fix", ignore=shutil.ignore_patterns("checkpoint", "__pycache__"))
    (folder / "dcp_fix" / "tiny" / "checkpoint").symlink_to(ROOT / "dcp_fix" / "tiny" / "checkpoint")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    return folder


def nbval(folder: Path, page: str) -> subprocess.CompletedProcess:
    """Validate a page of that folder with that folder's package, up to the first cell that fails."""
    options = ["--nbval", "--nbval-current-env", "--nbval-sanitize-with=notebooks/sanitize.cfg"]
    flags = ["-q", "-x", "--color=no", "--rootdir=.", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command = [sys.executable, "-m", "pytest", *flags, *options, f"notebooks/{page}.ipynb"]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
