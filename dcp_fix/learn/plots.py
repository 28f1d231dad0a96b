"""The figures that several notebooks share: boxes by rank, rows written and unwritten, tokens against DCP1's.

Colours are Okabe and Ito's, which people with any common colour blindness can tell apart, and never the only sign:
boxes carry numbers, lines carry markers, unwritten rows are hatched. Size and resolution are fixed by `style`.

It does not: compute what it draws. Notebooks assert the arrays that they hand over, since nobody compares pixels.
Needs matplotlib (extra `lab`); nothing else of dcp_fix imports this module.
"""

from itertools import groupby

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch, Rectangle

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
SKY, VERMILLION, YELLOW, BLACK = "#56B4E9", "#D55E00", "#F0E442", "#000000"
RANKS = (BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION, YELLOW, BLACK)  # colour of rank r
HEALTHY, BROKEN = BLUE, VERMILLION
PALE = "#F2F2F2"  # nothing here
DARK = (BLUE, GREEN, VERMILLION, BLACK)  # white letters stand out on these


def style() -> None:
    """Fixed size, resolution and fonts for every figure of a notebook: call it once, in the first cell."""
    plt.rcParams.update(
        {"figure.figsize": (9, 3), "figure.dpi": 100, "savefig.dpi": 100, "figure.constrained_layout.use": True,
         "font.family": "DejaVu Sans", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
         "lines.markersize": 5}
    )  # fmt: skip


def boxes(ax: Axes, colours: list[list[str]], text: list[list], row_labels: list[str], size: float = 9) -> None:
    """A grid of coloured boxes with something written in each; rows may differ in length, first row on top."""
    for y, (row, words) in enumerate(zip(colours, text, strict=True)):
        for x, (colour, word) in enumerate(zip(row, words, strict=True)):
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
            ink = "white" if colour in DARK else "black"
            ax.text(x, y, str(word), ha="center", va="center", color=ink, fontsize=size)
    longest = max(map(len, colours))
    ax.set(xlim=(-0.5, longest - 0.5), ylim=(len(colours) - 0.5, -0.5), xticks=[])
    ax.set_yticks(range(len(row_labels)), row_labels)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def by_rank(owners: list[int]) -> list[str]:
    """The colour of each owner; pale where it is -1."""
    return [RANKS[owner] if owner >= 0 else PALE for owner in owners]


def tokens(ax: Axes, answers: dict[str, list[str]], width: int = 10) -> None:
    """Answers word by word, `width` to a line: blue where a word is that of the first answer, vermillion elsewhere."""
    reference, colours, text, labels = next(iter(answers.values())), [], [], []
    for name, words in answers.items():
        hue = [HEALTHY if words[: i + 1] == reference[: i + 1] else BROKEN for i in range(len(words))]
        for first in range(0, len(words), width):
            colours.append(hue[first : first + width])
            text.append(words[first : first + width])
            labels.append("" if first else name)
    boxes(ax, colours, text, labels)


def rows(ax: Axes, written, row_labels: list[str], xlabel: str = "row (token)") -> None:
    """Which rows of a buffer were written, bool [buffers, rows]: dark where written, hatched where not."""
    written = [[bool(cell) for cell in buffer] for buffer in written]
    ax.imshow(written, cmap=ListedColormap(["#FFFFFF", BLUE]), vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    for y, buffer in enumerate(written):
        for first, length in unwritten_runs(buffer):
            ax.add_patch(Rectangle((first - 0.5, y - 0.5), length, 1, fill=False, hatch="////", ec=ORANGE, linewidth=0))
    ax.set_yticks(range(len(row_labels)), row_labels)
    ax.set_yticks([y - 0.5 for y in range(1, len(row_labels))], minor=True)
    ax.grid(axis="y", which="minor", color="white", linewidth=3)
    ax.tick_params(which="both", left=False)
    ax.set_xlabel(xlabel)
    ax.spines[:].set_visible(False)
    keys = [
        Patch(facecolor=BLUE, label="written"),
        Patch(facecolor="white", edgecolor=ORANGE, hatch="////", label="not"),
    ]
    ax.figure.legend(handles=keys, loc="outside right upper", frameon=False)


def unwritten_runs(buffer: list[bool]) -> list[tuple[int, int]]:
    """Where a buffer has unwritten rows: (first, length) of each run.

    >>> unwritten_runs([True, False, False, True, False])
    [(1, 2), (4, 1)]
    """
    runs, first = [], 0
    for cell, group in groupby(buffer):
        length = len(list(group))
        if not cell:
            runs.append((first, length))
        first += length
    return runs
