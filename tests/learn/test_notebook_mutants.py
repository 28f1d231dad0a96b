"""Putting any of the four defects back into the corrected code turns a page red: the notebooks test the package.

Each test copies the package, puts one defect back by editing the copy, and runs the cells of a page: one of its
assertions must fail.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OWNED = "x.slot_mapping >= 0"
DEFECTS = {  # name: (page, file, {corrected line: line with the defect})
    "query norm": (
        "01_dcp_in_pictures",
        "norm_rope/reference.py",
        {
            "x.q_out.copy_(rms_norm(x.q, x.q_weight, x.eps))": (
                f"x.q_out[{OWNED}] = rms_norm(x.q, x.q_weight, x.eps)[{OWNED}].to(x.q_out)"
            )
        },
    ),
    "combine routing": (
        "02b_the_layer",
        "combine/reference.py",
        {
            "    out, lse = partial(manager.query_gather(q, decode_only))\n": "    out, lse = partial(q)\n",
            "    return manager.combine(out, lse, decode_only)\n": "    return out.float()\n",
        },
    ),
    "K rows": (
        "01_dcp_in_pictures",
        "norm_rope/reference.py",
        {
            "x.kv_out.copy_(latent)": f"x.kv_out[{OWNED}] = latent[{OWNED}].to(x.kv_out)",
            "x.kpe_out.copy_(key)": f"x.kpe_out[{OWNED}] = key[{OWNED}].to(x.kpe_out)",
        },
    ),
    "workspace": (
        "06_workspace",
        "workspace.py",
        {"rows, splits if splits > 1 else 0, ranks": "rows, 1 + splits, ranks"},
    ),
}
RUN_CELLS = """
import json, sys
scope = {}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), scope)
"""


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_put_back_turns_a_page_red(defect, tmp_path):
    page, file, edits = DEFECTS[defect]
    folder = copy_of_the_package(tmp_path)
    source = (folder / "dcp_fix" / file).read_text()
    for corrected, broken in edits.items():
        assert source.count(corrected) == 1, f"{file} has changed: {corrected!r}"
        source = source.replace(corrected, broken)
    (folder / "dcp_fix" / file).write_text(source)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONWARNINGS": "ignore", "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", RUN_CELLS, f"{page}.ipynb"]
    run = subprocess.run(command, cwd=folder / "notebooks", env=environment, capture_output=True, text=True)
    assert run.returncode == 1 and "\nAssertionError" in run.stderr, run.stderr


def copy_of_the_package(folder: Path) -> Path:
    """The package and the notebooks in a folder of their own; the weights are linked."""
    shutil.copytree(ROOT / "dcp_fix", folder / "dcp_fix", ignore=shutil.ignore_patterns("checkpoint", "__pycache__"))
    (folder / "dcp_fix" / "tiny" / "checkpoint").symlink_to(ROOT / "dcp_fix" / "tiny" / "checkpoint")
    shutil.copytree(ROOT / "notebooks", folder / "notebooks")
    return folder
