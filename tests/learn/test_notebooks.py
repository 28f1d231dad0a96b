"""The committed notebooks are fresh, readable and comparable: what nbval takes on trust is checked here.

nbval compares a cell with its committed output. A notebook stripped of outputs would pass without comparing anything,
and a sanitize rule that matches too much would hide a difference; neither can happen unseen.
"""

import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbval.plugin import get_sanitize_patterns

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
sys.path.insert(0, str(FOLDER))

import regenerate  # noqa: E402
import slides  # noqa: E402

NAMES = [
    "00_start_here", "01_dcp_in_pictures", "02_locklocklock", "02b_the_layer", "03_query_norm", "04_combine_routing",
    "05_k_rows", "06_workspace", "07_byte_identical", "07b_debugging", "08_real_vllm", "09_kernels",
    "90_exercises", "91_kernels_and_cases",
]  # fmt: skip
EXERCISES = {"90_exercises": 8, "91_kernels_and_cases": 5}  # how many
PRESENT = [path.stem for path in regenerate.notebooks()]  # a missing one is one red test, not twenty


def read(name: str):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code_cells(notebook) -> list:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def student(name: str) -> Path:
    return regenerate.student_path(FOLDER / f"{name}.ipynb")


def printed(cell) -> str:
    """The text of a code cell's outputs, pictures left out."""
    parts = [out.get("text", "") + "".join(out.get("data", {}).get("text/plain", "")) for out in cell.outputs]
    return "\n".join(parts)


def test_every_notebook_is_there_and_no_other():
    assert [path.stem for path in regenerate.notebooks()] == NAMES
    assert slides.notebooks() == regenerate.notebooks() and all(student(name).exists() for name in EXERCISES)


@pytest.fixture(params=PRESENT)
def notebook(request):
    return read(request.param)


# --- freshness --------------------------------------------------------------------------------------------------------


def test_cells_ran_once_in_order_and_kept_their_outputs(notebook):
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) / 2, "outputs were stripped"
    assert not [out for cell in cells for out in cell.outputs if out.output_type == "error"]


@pytest.mark.parametrize("name", PRESENT)
def test_nothing_in_the_file_changes_by_itself(name, tmp_path):
    regenerate.write(read(name), tmp_path / "again.ipynb")
    stored = (FOLDER / f"{name}.ipynb").read_bytes()
    assert (tmp_path / "again.ipynb").read_bytes() == stored, "write it with `make notebooks`"


NOT_A_FACT = {
    "a path": re.compile(r"(?<![\w/.:~$}-])/(?:home|root|tmp|usr|opt|work|mnt|Users|var)/"),
    "an address": re.compile(r"0x[0-9a-f]{8,}"),
    "a time": re.compile(r"\b\d+\.\d+ ?(?:s|ms|seconds)\b"),
    "a version": re.compile(r"(?i)\b(?:python|torch|triton|cuda) v?\d+\.\d+"),
    "a raw float": re.compile(r"\d\.\d{6,}|\d\.?\d*e[-+]\d+"),
    "a warning": re.compile(r"Warning:"),
}


def test_outputs_are_compared_and_hold_facts_only(notebook):
    """But for the first cell, which says where it runs."""
    tags = [cell.metadata.get("tags", []) for cell in code_cells(notebook)]
    assert tags[0] == ["nbval-ignore-output"] and not any(tags[1:])
    said = [(cell.source[:40], printed(cell)) for cell in code_cells(notebook)[1:]]
    found = [(what, source) for source, text in said for what, fact in NOT_A_FACT.items() if fact.search(text)]
    assert not found


# --- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESENT)
def test_every_cell_has_its_place_in_the_slides_and_only_the_speaker_has_notes(name):
    kinds = [cell.metadata.get("slideshow", {}).get("slide_type") for cell in read(name).cells]
    assert kinds[0] == "slide" and set(kinds) <= {"slide", "subslide", "fragment", "skip", "notes", "-"}
    notes = slides.speaker_notes((FOLDER / "FACILITATOR.md").read_text())
    assert "notes" not in kinds and name in notes
    assert set(notes) <= set(NAMES)


def test_a_note_follows_its_heading_and_a_heading_that_is_gone_is_named():
    cells = [nbformat.v4.new_markdown_cell(text) for text in ("# Page", "text\n\n## Step 1. Predict it\nmore", "end")]
    page = nbformat.v4.new_notebook(cells=cells)
    notes = slides.speaker_notes("### page\n\n- **Step 1. Predict it**: ask\n\n## Other\n\n- **Not a note**: no\n")
    assert notes == {"page": {"Step 1. Predict it": "ask"}}
    cells = slides.with_notes(page, notes["page"]).cells
    assert [cell.source for cell in cells][1:3] == ["text\n\n## Step 1. Predict it\nmore", "ask"]
    assert cells[2].metadata.slideshow.slide_type == "notes" and len(page.cells) == 3
    with pytest.raises(KeyError, match="Step 2"):
        slides.with_notes(page, {"Step 2": "gone"})


def test_links_between_the_pages_lead_somewhere(notebook):
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    targets = [target for target in re.findall(r"\]\(([^)]+)\)", text) if "://" not in target]
    assert not [target for target in targets if not (FOLDER / target.partition("#")[0]).exists()]


# --- what nbval does with them ----------------------------------------------------------------------------------------

SLASH = "/"  # so that no path stands in this file
SANITIZED = {
    "<function f at 0x7f3a12bc4d90>": "<function f at ADDRESS>",
    "took 12.3 s": "took DURATION",
    "waited 45 ms": "waited DURATION",
    f"wrote {SLASH}home{SLASH}ada{SLASH}run.json": "wrote PATH",
    "torch 2.13.0+cu130": "torch VERSION",
}
KEPT = [
    "0.25 of the rows", "4 ranks, 128 rows, 83968 bytes", "share 0.5", "slots [28, -1, 29, -1]", "and/or", "3 shards",
]  # fmt: skip


def sanitized(text: str) -> str:
    for pattern, replacement in get_sanitize_patterns((FOLDER / "sanitize.cfg").read_text()):
        text = re.sub(pattern, replacement, text)
    return text


def test_each_sanitize_rule_matches_what_it_is_for_and_no_fact():
    assert len(get_sanitize_patterns((FOLDER / "sanitize.cfg").read_text())) == 4
    assert {text: sanitized(text) for text in SANITIZED} == SANITIZED
    assert [sanitized(text) for text in KEPT] == KEPT


# --- exercises --------------------------------------------------------------------------------------------------------


def run_cells(notebook) -> list[str | None]:
    """Execute the code cells here, each on what the others left: per cell the name of its exception, or None."""
    scope, outcomes = {}, []
    for cell in code_cells(notebook):
        try:
            exec(compile(cell.source, "cell", "exec"), scope)
            outcomes.append(None)
        except Exception as error:  # noqa: BLE001 - whatever a learner's cell raises is the result
            outcomes.append(type(error).__name__)
    return outcomes


@pytest.mark.parametrize("name", EXERCISES)
def test_every_stub_fails_its_check(name):
    copy = nbformat.read(student(name), as_version=4)
    outcomes = dict(zip([cell.source for cell in code_cells(copy)], run_cells(copy), strict=True))
    checks = [outcome for source, outcome in outcomes.items() if re.search(r"\.check(_\w+)?\(", source)]
    assert len(checks) == EXERCISES[name] and set(checks) <= {"NotImplementedError", "NameError", "AssertionError"}


@pytest.mark.parametrize("name", EXERCISES)
def test_the_student_copy_is_the_exercises_without_solutions(name, tmp_path):
    regenerate.write(regenerate.student_copy(read(name)), tmp_path / "copy.ipynb")
    assert (tmp_path / "copy.ipynb").read_bytes() == student(name).read_bytes(), "generate it with `make notebooks`"
    text = student(name).read_text()
    assert "SOLUTION" not in text and text.count("NotImplementedError") >= EXERCISES[name]


# --- slides -----------------------------------------------------------------------------------------------------------

FETCHED = re.compile(r"""<script[^>]*src="https?:|<link[^>]*href="https?:|@import|url\(["']?https?:|from 'https?:""")


def test_slides_carry_everything_they_need_and_the_notes(tmp_path):
    slides.main(tmp_path)
    for name in PRESENT:
        page = (tmp_path / f"{name}.slides.html").read_text()
        assert not FETCHED.findall(page) and '<aside class="notes">' in page
        for asset in re.findall(r'(?:src|href)="(reveal/[^"]+)"', page):
            assert (tmp_path / asset).stat().st_size > 1000
        assert name in (tmp_path / "index.html").read_text()
    assert (tmp_path / "dcp_explorer.html").read_bytes() == (FOLDER / "dcp_explorer.html").read_bytes()
    assert 'href="dcp_explorer.html"' in (tmp_path / "index.html").read_text()
    assert not FETCHED.findall("".join(path.read_text() for path in (tmp_path / "reveal").rglob("*.css")))


# --- what stands beside the pages -------------------------------------------------------------------------------------


def says(cell) -> str:
    """Everything that a reader sees of a cell, as one line."""
    return " ".join((cell.source + " " + (printed(cell) if cell.cell_type == "code" else "")).split())


def test_twelve_questions_are_answered_in_cells_that_exist():
    text = (FOLDER / "ANSWERS.md").read_text()
    questions = re.split(r"(?m)^## (\d+)\. ", text)[1:]
    assert questions[::2] == [str(n) for n in range(1, 13)]
    for answer in questions[1::2]:
        places = re.findall(r'(?m)^- \[(\w+)\]\(\1\.ipynb\), cell (\d+): "(.+)"$', answer)
        assert places, f"no cell is named for: {answer.splitlines()[0]}"
        for page, number, phrase in places:
            assert " ".join(phrase.split()) in says(read(page).cells[int(number)]), f"{page}, cell {number}: {phrase}"


def test_the_glossary_is_sorted_and_each_word_is_on_the_page_that_it_names():
    rows = re.findall(r"(?m)^\| (.+?) \| .+? \| \[\w+\]\((\w+)\.ipynb\) \|$", (FOLDER / "GLOSSARY.md").read_text())
    words = [word.strip("`") for word, _ in rows]
    assert len(rows) > 30 and words == sorted(words, key=str.lower)
    for word, page in rows:
        for part in word.strip("`").split(", "):
            part = part.removesuffix(" I")
            assert re.search(rf"(?i)\b{re.escape(part)}", " ".join(map(says, read(page).cells))), (
                f"{part}: not on {page}"
            )
