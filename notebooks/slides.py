"""Turns the committed notebooks into HTML slides that need no network: `make slides`, then open slides/index.html.

Each notebook becomes one deck. The cells' `slideshow` metadata says where a slide begins. The speaker's notes stand in
FACILITATOR.md, so that no reader of a page meets an answer too early: below a page's name, each note names the heading
that it belongs to, and is shown in the speaker's window only (press S). reveal.js comes from slides_assets/.

It does not: run any cell. The outputs are those that the notebooks hold.
"""

import html
import re
import shutil
import sys
from pathlib import Path

import nbformat
from nbconvert.exporters import SlidesExporter

FOLDER = Path(__file__).resolve().parent
ASSETS = FOLDER / "slides_assets"
NOTES = FOLDER / "FACILITATOR.md"
EXPLORER = FOLDER / "dcp_explorer.html"


def main(target: Path) -> None:
    """Write every deck, reveal.js and an index page into the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ASSETS / "reveal", target / "reveal", dirs_exist_ok=True)
    exporter = SlidesExporter(
        template_name="offline", extra_template_basedirs=[str(ASSETS)], reveal_url_prefix="reveal",
        reveal_theme="white", reveal_width="1280", reveal_height="800", exclude_input_prompt=True,
        exclude_output_prompt=True,
    )  # fmt: skip
    shutil.copy(EXPLORER, target)
    decks = [write_deck(exporter, path, target) for path in notebooks()]
    (target / "index.html").write_text(index_page(decks), encoding="utf-8")
    print(f"{len(decks)} decks: open {target / 'index.html'}")


def notebooks() -> list[Path]:
    """The notebooks, in order, without the student copies."""
    return [path for path in sorted(FOLDER.glob("*.ipynb")) if not path.stem.endswith("_student")]


def write_deck(exporter: SlidesExporter, path: Path, target: Path) -> str:
    """Write one notebook's deck; returns its file name."""
    notebook = nbformat.read(path, as_version=4)
    page, _ = exporter.from_notebook_node(with_notes(notebook, speaker_notes(NOTES.read_text()).get(path.stem, {})))
    name = f"{path.stem}.slides.html"
    (target / name).write_text(page, encoding="utf-8")
    return name


def speaker_notes(text: str) -> dict[str, dict[str, str]]:
    """The notes of each page, by heading: what stands below `### PAGE` as `- **Heading**: note`."""
    notes, page = {}, None
    for line in text.splitlines():
        if line.startswith("#"):
            page = line.removeprefix("### ") if line.startswith("### ") else None
        elif page and (found := re.fullmatch(r"- \*\*(.+?)\*\*: (.+)", line)):
            notes.setdefault(page, {})[found[1]] = found[2]
    return notes


def with_notes(notebook: nbformat.NotebookNode, notes: dict[str, str]) -> nbformat.NotebookNode:
    """The notebook with each note after the cell that holds its heading. Raises KeyError for a heading that is gone."""
    cells, left = [], dict(notes)
    for cell in notebook.cells:
        cells.append(cell)
        lines = cell.source.splitlines() if cell.cell_type == "markdown" else []
        for heading in [line.lstrip("# ") for line in lines if line.startswith("#")]:
            if heading in left:
                note = nbformat.v4.new_markdown_cell(left.pop(heading))
                note.metadata["slideshow"] = {"slide_type": "notes"}
                cells.append(note)
    if left:
        raise KeyError(f"speaker notes for headings that no cell has: {', '.join(left)}")
    return nbformat.from_dict({**notebook, "cells": cells})


def index_page(decks: list[str]) -> str:
    """A page that links to every deck."""
    links = "\n".join(f'<li><a href="{html.escape(name)}">{html.escape(name.split(".")[0])}</a></li>' for name in decks)
    links += f'\n<li><a href="{EXPLORER.name}">DCP explorer</a></li>'
    note = "Arrow keys move, S opens the speaker notes, F is full screen, O is the overview."
    return (
        f'<!DOCTYPE html>\n<meta charset="utf-8">\n<title>dcp_fix slides</title>\n<ul>\n{links}\n</ul>\n<p>{note}</p>\n'
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
