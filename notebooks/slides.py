"""Turns the committed notebooks into HTML slides that need no network: `make slides`, then open slides/index.html.

Each notebook becomes one deck. The cells' `slideshow` metadata says where a slide begins; cells of type `notes` are
shown in the speaker's window only (press S). reveal.js comes from slides_assets/.

It does not: run any cell. The outputs are those that the notebooks hold.
"""

import html
import shutil
import sys
from pathlib import Path

from nbconvert.exporters import SlidesExporter

FOLDER = Path(__file__).resolve().parent
ASSETS = FOLDER / "slides_assets"


def main(target: Path) -> None:
    """Write every deck, reveal.js and an index page into the folder `target`."""
    target.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ASSETS / "reveal", target / "reveal", dirs_exist_ok=True)
    exporter = SlidesExporter(
        template_name="offline", extra_template_basedirs=[str(ASSETS)], reveal_url_prefix="reveal",
        reveal_theme="white", reveal_width="1280", reveal_height="800", exclude_input_prompt=True,
        exclude_output_prompt=True,
    )  # fmt: skip
    decks = [write_deck(exporter, path, target) for path in notebooks()]
    (target / "index.html").write_text(index_page(decks), encoding="utf-8")
    print(f"{len(decks)} decks: open {target / 'index.html'}")


def notebooks() -> list[Path]:
    """The notebooks, in order, without the student copy."""
    return [path for path in sorted(FOLDER.glob("*.ipynb")) if not path.stem.endswith("_student")]


def write_deck(exporter: SlidesExporter, path: Path, target: Path) -> str:
    """Write one notebook's deck; returns its file name."""
    page, _ = exporter.from_filename(str(path))
    name = f"{path.stem}.slides.html"
    (target / name).write_text(page, encoding="utf-8")
    return name


def index_page(decks: list[str]) -> str:
    """A page that links to every deck."""
    links = "\n".join(f'<li><a href="{html.escape(name)}">{html.escape(name.split(".")[0])}</a></li>' for name in decks)
    note = "Arrow keys move, S opens the speaker notes, F is full screen, O is the overview."
    return (
        f'<!DOCTYPE html>\n<meta charset="utf-8">\n<title>dcp_fix slides</title>\n<ul>\n{links}\n</ul>\n<p>{note}</p>\n'
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
