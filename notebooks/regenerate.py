"""Runs the notebooks anew, in place, so that a run which prints the same leaves the same bytes.

    python notebooks/regenerate.py                    every notebook, and the student copies of the exercises
    python notebooks/regenerate.py notebooks/02*.ipynb

What differs from run to run or machine to machine is left out of the file: cell timings, random cell ids, the exact
Python version. What a cell prints is never touched: a cell that prints a time or a path is a fault of that cell.

It does not: compare anything (nbval does, in `make test`) or write a notebook whose cell fails.
"""

import base64
import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
FIRST, PICTURE = "00_start_here.ipynb", FOLDER / "dcp1_beside_dcp4.png"  # of the README
EXERCISES = "9"  # what the names of pages with exercises begin with
CELL_TIMEOUT_S = 180
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
CELL_METADATA = ("tags", "slideshow")
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
STUB = "raise NotImplementedError  # your lines instead of this one"


def main(paths: list[Path]) -> None:
    """Run every notebook of `paths` and write it back; exercises also as the student copy."""
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    for path in paths:
        print(path.name, flush=True)
        notebook = nbformat.read(path, as_version=4)
        execute(notebook)
        write(notebook, path)
        if path.name == FIRST:
            PICTURE.write_bytes(first_picture(notebook))
        if path.name.startswith(EXERCISES):
            write(student_copy(notebook), student_path(path))


def first_picture(notebook: nbformat.NotebookNode) -> bytes:
    """The first figure that the notebook drew, as PNG."""
    drawn = [output.data for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    return base64.b64decode(next(data["image/png"] for data in drawn if "image/png" in data))


def notebooks() -> list[Path]:
    """The notebooks that are run, in order: all but the student copies, whose cells are there to be filled in."""
    return [path for path in sorted(FOLDER.glob("*.ipynb")) if not path.stem.endswith("_student")]


def student_path(path: Path) -> Path:
    """Where the student copy of a page with exercises lies."""
    return path.with_name(f"{path.stem}_student.ipynb")


def execute(notebook: nbformat.NotebookNode) -> None:
    """Run all cells in one fresh kernel, in the notebooks' folder. Raises CellExecutionError where one fails."""
    client = NotebookClient(
        notebook, timeout=CELL_TIMEOUT_S, kernel_name=KERNEL["name"], coalesce_streams=True,
        record_timing=False, resources={"metadata": {"path": str(FOLDER)}},
    )  # fmt: skip
    client.execute()


def write(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Write the notebook with nothing in it that changes by itself."""
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNEL, "language_info": {"name": "python"}})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number:02d}"
        kept = {name: cell.metadata[name] for name in CELL_METADATA if name in cell.metadata}
        cell.metadata = nbformat.from_dict(kept)
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def student_copy(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The same notebook with a stub in the place of every solution, and no outputs."""
    copy = nbformat.from_dict(notebook)
    for cell in copy.cells:
        if cell.cell_type == "code":
            cell.source = without_solution(cell.source)
            cell.outputs, cell.execution_count = [], None
    return copy


def without_solution(source: str) -> str:
    """Cell source with a stub in the place of each marked solution. Raises ValueError if the marks do not match."""
    if source.count(BEGIN) != source.count(END):
        raise ValueError(f"{BEGIN!r} and {END!r} must come in pairs:\n{source}")
    lines, hidden = [], False
    for line in source.splitlines():
        if line.strip() == BEGIN:
            lines.append(line.replace(BEGIN, STUB))
            hidden = True
        elif line.strip() == END:
            hidden = False
        elif not hidden:
            lines.append(line)
    return "\n".join(lines)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or notebooks())
