"""
Figures that can be read on a phone, on light and on dark pages: white cards with round corners, the finding on top.

A phone shows a card at half of its 720 pixels. The text's 8 points are 10 pixels there, the smallest's 7.2 are 9.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


WIDTH, DPI = 4.0, 180  # in inches, and pixels per inch
TEXT, SMALL = 8.0, 7.2  # in points
# Dark enough to be read as text on white: grey, light grey, blue, green, orange, pink
GREY, LIGHT_GREY, BLUE, GREEN, ORANGE, PINK = "#333333", "#767676", "#0068a8", "#00795a", "#b84e00", "#a8457c"


@contextmanager
def card(file: str | Path, height: float, title: str) -> Iterator[Any]:
    """A figure of this height in inches, which is saved in the end."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch

    spines = {f"axes.spines.{side}": False for side in ("top", "right")}
    sizes = {"font.size": TEXT, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "lines.markersize": 4}
    with matplotlib.rc_context({**spines, **sizes, "axes.titlesize": TEXT}):
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained", facecolor="none")
        figure.get_layout_engine().set(w_pad=0.09, h_pad=0.09, wspace=0.02, hspace=0.02)
        figure.suptitle(title, x=0.12 / WIDTH, ha="left", size=9, weight="bold")
        paper = FancyBboxPatch(
            (0.01, 0.01),
            WIDTH - 0.02,
            height - 0.02,
            boxstyle="round,pad=0,rounding_size=0.1",
            transform=figure.dpi_scale_trans,
            facecolor="white",
            edgecolor="#d0d7de",
            linewidth=0.8,
            zorder=-1,
        )
        paper.set_in_layout(False)
        figure.add_artist(paper)
        yield figure
        # Without a date or version, so that the same results give the same file
        figure.savefig(file, metadata={"Software": None})


def spread_out(values: list[float], gap: float) -> list[float]:
    """
    Places for labels of points at `values`, in the same order: at least `gap` apart, each group of those that would
    overlap around its own mean.
    """
    order = sorted(range(len(values)), key=values.__getitem__)
    groups: list[list[int]] = []

    def middle(group: list[int]) -> float:
        return sum(values[i] for i in group) / len(group)

    for index in order:
        groups.append([index])
        while len(groups) > 1:
            lower, upper = groups[-2:]
            if middle(upper) - middle(lower) >= gap * (len(lower) + len(upper)) / 2:
                break
            groups[-2:] = [lower + upper]
    places = [0.0] * len(values)
    for group in groups:
        for rank, index in enumerate(group):
            places[index] = middle(group) + gap * (rank - (len(group) - 1) / 2)
    return places


def name_ends(axis: Any, ends: list[tuple[float, float, str, str]], gap: float) -> None:
    """
    Names of lines at their ends, in one column on the right, in place of a legend.

    Args:
        axis: whose limits are as they stay.
        ends: where each line ends, its name and its colour.
        gap: between two names, as a share of the axis.
    """
    from matplotlib.transforms import ScaledTranslation

    bottom, top = axis.get_ylim()
    heights = spread_out([y for _, y, _, _ in ends], gap * (top - bottom))
    right = max(x for x, _, _, _ in ends)
    beside = axis.transData + ScaledTranslation(6 / 72, 0, axis.figure.dpi_scale_trans)
    for (x, y, name, color), height in zip(ends, heights, strict=True):
        leader = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "alpha": 0.5}
        axis.annotate(
            name,
            (x, y),
            xytext=(right, height),
            textcoords=beside,
            color=color,
            va="center",
            annotation_clip=False,
            arrowprops=leader if x < right else None,
        )
