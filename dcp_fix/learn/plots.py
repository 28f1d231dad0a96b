"""The figures that several notebooks share: boxes by rank, rows written and unwritten, tokens against DCP1's.

A colour has one meaning on every page, and `meanings` draws the list: a rank, healthy or broken, written or not, whose
kernel. The colours are Okabe and Ito's, Paul Tol's and Cynthia Brewer's, which people with any common colour blindness
can tell apart, and never the only sign: boxes carry words or numbers, lines carry markers, unwritten rows are hatched.
Size and resolution are fixed by `style`.

It does not: compute what it draws. Notebooks assert the arrays that they hand over, since nobody compares pixels.
Needs matplotlib (extra `lab`).
"""

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

HEALTHY, BROKEN = "#0072B2", "#D55E00"  # blue, vermillion: as DCP1 has it, or not
RANKS = ("#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#F0E442", "#882255", "#999933", "#332288")  # colour of rank r
WRITTEN, UNWRITTEN = "#4D4D4D", "#B3B3B3"  # grey: this call wrote the row; hatched: it did not
OURS, UPSTREAM = "#000000", "#A6611A"  # black, brown: whose kernel was timed
PALE = "#F2F2F2"  # nothing here
DARK = (HEALTHY, BROKEN, WRITTEN, OURS, UPSTREAM, "#009E73", "#882255", "#332288")  # white letters stand out on these


def style() -> None:
    """Fixed size, resolution and fonts for every figure of a notebook: call it once, in the first cell."""
    plt.rcParams.update(
        {"figure.figsize": (9, 3), "figure.dpi": 100, "savefig.dpi": 100, "figure.constrained_layout.use": True,
         "font.family": "DejaVu Sans", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False,
         "lines.markersize": 5}
    )  # fmt: skip


def meanings(ax: Axes) -> None:
    """The colours of all pages and what each one means."""
    ranks = [f"rank {rank}" for rank in range(4)]
    colours = [[HEALTHY, BROKEN], list(RANKS[:4]), [WRITTEN], [OURS, UPSTREAM]]
    boxes(ax, colours, [["healthy", "broken"], ranks, ["written"], ["here", "upstream"]], [""] * 4)
    ax.add_patch(Rectangle((0.5, 1.5), 1, 1, facecolor="white", edgecolor=UNWRITTEN, hatch="////"))
    ax.text(1, 2, "not written", ha="center", va="center", fontsize=9, bbox={"facecolor": "white", "linewidth": 0})
    ax.set_yticks(range(4), ["as DCP1, or not", "who owns it", "this call's rows", "whose kernel"])


def boxes(ax: Axes, colours: list[list[str]], text: list[list], row_labels: list[str], size: float = 9) -> None:
    """A grid of coloured boxes with something written in each; rows may differ in length, first row on top."""
    for y, (row, words) in enumerate(zip(colours, text, strict=True)):
        for x, (colour, word) in enumerate(zip(row, words, strict=True)):
            ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=1.5))
            ax.text(x, y, str(word), ha="center", va="center", color=ink(colour), fontsize=fitting(str(word), size))
    longest = max(map(len, colours))
    ax.set(xlim=(-0.5, longest - 0.5), ylim=(len(colours) - 0.5, -0.5), xticks=[])
    ax.set_yticks(range(len(row_labels)), row_labels)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)


def fitting(word: str, size: float) -> float:
    """A font size at which the longest line of a word stays in its box."""
    return size * min(1.0, 9 / max(1, *(len(line) for line in word.split("\n"))))


def ink(colour: str) -> str:
    """The colour of letters on a box."""
    return "white" if colour in DARK else "black"


def by_rank(owners: list[int]) -> list[str]:
    """The colour of each owner; pale where it is -1."""
    return [RANKS[owner] if owner >= 0 else PALE for owner in owners]


def legend(ax: Axes, colours: dict[str, str]) -> None:
    """A key on the right of the figure: what each colour stands for."""
    keys = [Patch(facecolor=colour, label=label) for label, colour in colours.items()]
    ax.figure.legend(handles=keys, loc="outside right upper", frameon=False)


def rank_legend(ax: Axes, ranks: int) -> None:
    """The key of the ranks' colours."""
    legend(ax, {f"rank {rank}": RANKS[rank] for rank in range(ranks)})


def tokens(ax: Axes, answers: dict[str, list[str]], width: int = 10, key: bool = True) -> None:
    """Answers word by word, `width` to a line: blue as far as a text is that of the first answer, vermillion after."""
    first = next(iter(answers))
    colours, text, labels = [], [], []
    for name, words in answers.items():
        hue = [HEALTHY if words[: i + 1] == answers[first][: i + 1] else BROKEN for i in range(len(words))]
        for start in range(0, len(words), width):
            colours.append(hue[start : start + width])
            text.append(words[start : start + width])
            labels.append("" if start else name)
    boxes(ax, colours, text, labels)
    if key:
        legend(ax, {f"as {first}": HEALTHY, "from the first\nother word on": BROKEN})


def rows(ax: Axes, written: list[list[bool]], row_labels: list[str], xlabel: str = "row (token)") -> None:
    """Which rows of some buffers were written: dark where written, hatched where not.

    The buffers may have different lengths: what lies beyond a buffer's last row stays white.
    """
    looks = ({"facecolor": "white", "edgecolor": UNWRITTEN, "hatch": "////"}, {"facecolor": WRITTEN})
    for y, buffer in enumerate(written):
        for x, wrote in enumerate(buffer):
            ax.add_patch(Rectangle((x - 0.5, y - 0.42), 1, 0.84, linewidth=0, **looks[bool(wrote)]))
    ax.set(xlim=(-0.5, max(map(len, written)) - 0.5), ylim=(len(written) - 0.5, -0.5), xlabel=xlabel)
    ax.set_yticks(range(len(row_labels)), row_labels)
    ax.tick_params(axis="y", left=False)
    ax.spines[:].set_visible(False)
    keys = [Patch(label=label, **look) for label, look in zip(("not written", "written"), looks, strict=True)]
    ax.figure.legend(handles=keys[::-1], loc="outside right upper", frameon=False)
