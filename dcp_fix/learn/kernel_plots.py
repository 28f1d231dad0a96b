"""The figures of page 09: time over the DCP size, the roofline, bytes a second, packing in real vLLM.

Black is ours and brown upstream's, as `plots.meanings` says; shape and filling of the marker say which of the ways, so
that nothing hangs on the colour alone. Times are microseconds, as records have them.

It does not: read a record or compute what it draws. Needs matplotlib (extra `lab`).
"""

from statistics import median

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, StrMethodFormatter

from dcp_fix.learn import plots

LOOKS = {  # contender: how its points and line look
    "here": {"color": plots.OURS, "marker": "o"},
    "here with flashmla": {"color": plots.OURS, "marker": "D", "markerfacecolor": "white", "linestyle": "--"},
    "upstream as fed": {"color": plots.UPSTREAM, "marker": "s"},
    "upstream packed and cut": {"color": plots.UPSTREAM, "marker": "^", "markerfacecolor": "white", "linestyle": "--"},
}
LIMIT = "#999999"  # what cannot be passed


def scaling(ax: Axes, series: dict[str, dict[int, float]]) -> None:
    """Times {contender: {D: us}} over D, and the ideal: upstream's D=1 divided by D."""
    for name, times in series.items():
        ax.plot(list(times), list(times.values()), label=name, **LOOKS[name])
    sizes = list(series["upstream as fed"])
    ideal = [series["upstream as fed"][1] / dcp for dcp in sizes]
    ax.plot(sizes, ideal, ":", color=LIMIT, label="upstream's D = 1, divided by D")
    ax.set(xscale="log", yscale="log", xlabel="DCP size D", ylabel="time (us)")
    ax.set_xticks(sizes, sizes)
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def roofline(ax: Axes, lines: dict[tuple[str, int], list[tuple[float, float]]], bytes_a_second, flops) -> None:
    """Lines {(contender, heads): [(operations per byte, operations per second) for each D]} below the roof."""
    x = [20, flops / bytes_a_second, 4000]
    ax.plot(x, [min(flops, at * bytes_a_second) / 1e12 for at in x], color=LIMIT, linewidth=2)
    for (name, heads), points in lines.items():
        intensity, speed = zip(*points, strict=True)
        ax.plot(intensity, [each / 1e12 for each in speed], linewidth=0.8, markersize=2 + heads / 11, **LOOKS[name])
    ax.set(xscale="log", yscale="log", xlabel="operations per byte", xlim=(x[0], x[-1]), ylim=(0.3, 1500))
    ax.text(x[1] * 1.2, flops / 1e12 * 1.12, f"products: {flops / 1e12:.0f}", fontsize=8)
    ax.text(x[0] * 1.1, x[0] * bytes_a_second / 1e12 * 2.5, f"memory:\n{bytes_a_second / 1e12:.1f} TB/s", fontsize=8)


def key(ax: Axes, names, limit: str) -> None:
    """A key above the figure: the contenders, and what the grey line is."""
    lines = [Line2D([], [], label=name, **LOOKS[name]) for name in names]
    lines.append(Line2D([], [], color=LIMIT, linewidth=2, label=limit))
    ax.figure.legend(handles=lines, loc="outside upper center", frameon=False, ncols=3)


def speeds(ax: Axes, bars: dict[str, dict[str, float]], ceiling: float) -> None:
    """Bytes a second {size: {"here": ..., "upstream": ...}} as pairs of bars, below the memory's."""
    for side, (name, colour) in enumerate((("here", plots.OURS), ("upstream", plots.UPSTREAM))):
        heights = [pair.get(name, 0) / 1e12 for pair in bars.values()]
        places = [place + 0.4 * side - 0.2 for place in range(len(bars))]
        drawn = ax.bar(places, heights, 0.38, color=colour, label=name)
        ax.bar_label(drawn, [f"{height:.1f}" if height else "" for height in heights], fontsize=8)
    ax.axhline(ceiling / 1e12, color=LIMIT, linewidth=2, label=f"memory: {ceiling / 1e12:.1f}")
    ax.set_xticks(range(len(bars)), list(bars), fontsize=8)
    ax.set(ylabel="TB/s")


def beside(ax: Axes, runs: dict[str, list[float]], ylabel: str = "time (ms)") -> None:
    """Runs {name: times}, upstream's first: a bar up to the median, a ring for each run."""
    for place, (times, colour) in enumerate(zip(runs.values(), (plots.UPSTREAM, plots.OURS), strict=True)):
        bar = ax.bar(place, median(times), 0.6, color=colour)
        ax.bar_label(bar, [f"{median(times):.3g}"], label_type="center", color="white")
        ax.plot([place + 0.04 * (i - 2) for i in range(len(times))], times, "o", color="white", markeredgecolor="black")
    ax.set_xticks(range(len(runs)), list(runs))
    ax.set(ylabel=ylabel, ylim=(0, 1.12 * max(map(max, runs.values()))))
