"""The drawings that explain: an attention layer under DCP, the latent of MLA, the tree of exact mode.

`layer` is the map of all pages: each later page draws it again with the box that it is about. Colours are those of
plots.py. Who owns a class of positions comes from ownership.py.

It does not: measure anything. Needs matplotlib (extra `lab`).
"""

from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

from dcp_fix import ownership
from dcp_fix.learn import plots

BOXES = {  # name: (left, bottom, width, text)
    "project": (0, 21, 13, "project\nq, kv, k_pe\nof new tokens"),
    "norm_rope": (19, 21, 15, "norm and RoPE\none fused kernel"),
    "dense": (57, 21, 16, "dense prefill\nown heads,\nall rows"),
    "o_proj": (89, 21, 11, "project\nthe heads\nback"),
    "select": (40, 10.5, 13, "select\nbest index_topk\nof all keys"),
    "gather": (57, 10.5, 12, "gather\nthe queries\nof all heads"),
    "sparse": (73, 10.5, 12, "attend\nall heads,\nown rows"),
    "combine": (89, 10.5, 11, "combine\nby lse"),
    "index_cache": (40, 0, 13, "indexer cache\nown rows,\n132 bytes each"),
    "latent_cache": (73, 0, 12, "latent cache\nown rows,\n656 bytes each"),
}
HEIGHT = 7
TALKS = {"select": "1", "gather": "2", "combine": "3"}  # where the ranks of a DCP group exchange something
STEPS = [  # (from, to, side it leaves and side it enters)
    ("project", "norm_rope", "right left"), ("norm_rope", "dense", "right left"), ("dense", "o_proj", "right left"),
    ("select", "gather", "right left"), ("gather", "sparse", "right left"), ("sparse", "combine", "right left"),
    ("combine", "o_proj", "top bottom"), ("index_cache", "select", "top bottom"),
    ("latent_cache", "sparse", "top bottom"),
]  # fmt: skip


def layer(ax: Axes, here: tuple[str, ...] = ()) -> None:
    """One attention layer under DCP, from left to right; the boxes named in `here` have a thick vermillion frame."""
    for name, (x, y, width, text) in BOXES.items():
        box(ax, x, y, width, text, cached=name.endswith("cache"), here=name in here)
        if name in TALKS:
            ax.text(x + width, y + HEIGHT, TALKS[name], ha="center", va="center", color="white", fontsize=9,
                    bbox={"boxstyle": "circle", "facecolor": "black", "linewidth": 0})  # fmt: skip
    for start, end, sides in STEPS:
        leaves_at, enters_at = sides.split()
        arrow(ax, side(start, leaves_at), side(end, enters_at))
    turn(ax, [(26.5, 21), (26.5, 14), (40, 14)])
    turn(ax, [(23, 21), (23, -2), (46.5, -2), (46.5, 0)], dashed=True)
    turn(ax, [(46.5, -2), (79, -2), (79, 0)], dashed=True)
    ax.text(45.5, 25, "up to index_topk keys:\nquery and K rows,\nevery token, every rank", ha="center", fontsize=8)
    ax.text(27, 17.5, "else, and in decode:\nquery rows of every\ntoken, every rank", fontsize=8)
    ax.text(24, -1.3, "cache rows, only\nwhere the slot is >= 0", fontsize=8)
    key = "black number: ranks talk\ngrey: cached, each rank its own\nframe: what the page is about"
    ax.text(-0.5, 5, key if here else key.rpartition("\n")[0], fontsize=8.5, va="center")
    ax.set(xlim=(-1, 102), ylim=(-3, 30))
    ax.axis("off")


def side(name: str, at: str) -> tuple[float, float]:
    """The middle of one side of a box."""
    x, y, width, _ = BOXES[name]
    return {
        "left": (x, y + HEIGHT / 2), "right": (x + width, y + HEIGHT / 2), "top": (x + width / 2, y + HEIGHT),
        "bottom": (x + width / 2, y),
    }[at]  # fmt: skip


def box(ax: Axes, x: float, y: float, width: float, text: str, cached: bool = False, here: bool = False) -> None:
    """A box with text; grey if it outlives the step, framed if the page is about it."""
    frame = {"edgecolor": plots.BROKEN, "linewidth": 3.5} if here else {"edgecolor": "black", "linewidth": 1}
    face = "#DDDDDD" if cached else "white"
    ax.add_patch(FancyBboxPatch((x, y), width, HEIGHT, boxstyle="round,pad=0,rounding_size=1", facecolor=face, **frame))
    ax.text(x + width / 2, y + HEIGHT / 2, text, ha="center", va="center", fontsize=8.5)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], dashed: bool = False) -> None:
    """An arrow between two points."""
    look = {"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 0, "linestyle": "--" if dashed else "-"}
    ax.annotate("", end, start, arrowprops=look)


def turn(ax: Axes, points: list[tuple[float, float]], dashed: bool = False) -> None:
    """An arrow round corners."""
    for start, end in zip(points, points[1:-1], strict=False):
        ax.plot(*zip(start, end, strict=True), color="black", linewidth=1, linestyle="--" if dashed else "-")
    arrow(ax, points[-2], points[-1], dashed)


def latent(ax: Axes, plain: int, cached: int) -> None:
    """What a token costs in the cache: keys and values of every head in bf16, or one latent row and what it holds."""
    ax.barh([0, 1], [plain, cached], color=["#BBBBBB", plots.WRITTEN], height=0.5)
    for y, size, text in ((0, plain, "keys and values of every head"), (1, cached, "one latent row for all heads")):
        ax.text(size, y, f"  {size} bytes", va="center")
        ax.text(0, y - 0.38, text, va="center")
    parts = {"512 numbers of the latent, fp8": 512, "scales": 16, "rotated key, 64 x bf16": 128}
    left, scale = 0, plain / cached
    for (text, width), shade in zip(parts.items(), ("#EEEEEE", "#888888", "#CCCCCC"), strict=True):
        ax.add_patch(Rectangle((left * scale, 2.2), width * scale, 0.5, facecolor=shade, edgecolor="black"))
        ax.text((left + width / 2) * scale, 2.45 if width > 16 else 2.95, text, ha="center", va="center", fontsize=9)
        left += width
    ax.text(0, 2.0, f"the same row enlarged: 512 + 16 + 128 = {cached} bytes", va="center")
    ax.plot([0, 0], [1.25, 2.2], color="grey", linewidth=0.8), ax.plot([cached, plain], [1.25, 2.2], "grey", lw=0.8)
    ax.set(xlim=(0, plain * 1.15), ylim=(3.2, -0.6))
    ax.axis("off")


def tree(ax: Axes, dcp: int, classes: int = 8) -> None:
    """The tree of exact mode: leaves are classes of positions, each node in the colour of the rank that computes it.

    White nodes are merged after the exchange, where the heads are wanted.
    """
    order, height = leaves(classes), classes.bit_length() - 1
    at = {(c, classes): (float(x), 0) for x, c in enumerate(order)}
    for level in range(1, height + 1):
        step = classes >> level
        for r in range(step):
            (x, _), (z, _) = at[r, 2 * step], at[r + step, 2 * step]
            at[r, step] = (x + z) / 2, level
            for child in (at[r, 2 * step], at[r + step, 2 * step]):
                ax.plot([child[0], at[r, step][0]], [child[1], level], color="grey", zorder=0)
    for (r, step), (x, level) in at.items():
        owned = step >= dcp
        colour = plots.RANKS[ownership.owner(r, dcp)] if owned else "white"
        word = str(r) if step == classes else ""
        ax.text(x, level, word or "+", ha="center", va="center", color=plots.ink(colour), fontsize=9,
                bbox={"boxstyle": "circle,pad=0.35", "facecolor": colour, "edgecolor": "black"})  # fmt: skip
    ax.set(xlim=(-0.7, classes - 0.3), ylim=(-0.6, height + 0.6), title=f"DCP{dcp}")
    ax.axis("off")


def leaves(classes: int) -> list[int]:
    """The order of the leaves from left to right, so that the tree has no crossing branches.

    >>> leaves(8)
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    bits = classes.bit_length() - 1
    return sorted(range(classes), key=lambda leaf: f"{leaf:0{bits}b}"[::-1])


def two_hops(ax: Axes, theirs: list[tuple[str, ...]], ours: list[tuple[str, ...]], place: str) -> list[str]:
    """How a reader of two texts goes astray: from `place` along their lines, reading ours. Returns the words it says.

    Both texts are lists of (place, colour, room), line by line, with the same keys in the same order.
    """
    first = [line[0] for line in theirs].index(place)
    second = [line[1] for line in theirs].index(ours[first][1])
    asked = [line[0] for line in ours].index(place)
    lines = {"the line that was asked for": asked, f'theirs says "{place}" here': first}
    lines[f'theirs says "{ours[first][1]}" here'] = second
    text = [[*theirs[line], "", *ours[line]] for line in lines.values()]
    hue = [[plots.PALE] * 3 + ["white"] + [plots.PALE] * 3 for _ in range(3)]
    hue[0][4:] = [plots.HEALTHY] * 3
    hue[1][5] = hue[2][6] = plots.BROKEN
    plots.boxes(ax, hue, text, list(lines))
    low, high = 0.28, -0.28  # arrows pass below the words
    hops = [((4, low), (0, 1 + high)), ((0, 1 + low), (5, 1 + low))]
    hops += [((5, 1 + low), (1, 2 + high)), ((1, 2 + low), (6, 2 + low))]
    for number, (start, end) in enumerate(hops, 1):
        arrow(ax, start, end)
        middle = [(a + b) / 2 for a, b in zip(start, end, strict=True)]
        ax.text(*middle, str(number), ha="center", va="center", color="white", fontsize=8,
                bbox={"boxstyle": "circle,pad=0.2", "facecolor": "black", "linewidth": 0})  # fmt: skip
    ax.set_xticks([1, 5], ["their text: place, colour, room", "our text: place, colour, room"])
    ax.xaxis.tick_top()
    return [place, ours[first][1], ours[second][2]]
