"""Markdown tables, and plots as PNG files."""

import io
import statistics
from typing import List, Sequence, Tuple


def markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def axes_of(size: Tuple[float, float], **properties):
    """(a figure of `size` inches, its axes with these properties)."""
    from matplotlib.figure import Figure

    figure = Figure(size, dpi=110)
    axes = figure.subplots()
    axes.set(**properties)
    return figure, axes


def png(figure) -> bytes:
    """A figure as a PNG file."""
    with io.BytesIO() as out:
        figure.tight_layout()
        figure.savefig(out, format="png", metadata={"Software": None})
        return out.getvalue()


def bars(found: List[Tuple[str, List[float], str]], **properties):
    """(a figure, its axes), with a row for each (name, values, color), the first on top: a bar for
    the median and a dot for each value."""
    figure, axes = axes_of((10, 1.2 + 0.4 * len(found)), **properties)
    for i, (_, values, color) in enumerate(found):
        axes.barh(i, statistics.median(values), color=color)
        axes.plot(values, [i] * len(values), "k.", markersize=4)
    axes.set_yticks(range(len(found)))
    axes.set_yticklabels([name for name, _, _ in found], fontsize=7)
    axes.invert_yaxis()
    return figure, axes
