"""Markdown tables, and plots as PNG files."""

import io
from typing import Sequence, Tuple


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
