"""Writes what benchmark.py has measured into README and docs, from docs/figures.json.

That holds for each measure {date, commit, processor, rounds, command, pairs}, and for each pair
{row, column, other_name, ours, other, ratios, cpu}, or {row, column, aucs}, a list for each seed.
Comments in a page say where figures go:

    <!-- figures: training -->       a table, in place of all lines up to
    <!-- end of figures -->
"""

import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
from typing import Any, Dict, List, Sequence

from programs import ROOT
from tables_and_plots import markdown

FIGURES = ROOT / "docs" / "figures.json"
_TABLE = re.compile(
    r"(<!-- figures: ([\w, ]+?)(; brief)? -->\n)(.*?)(<!-- end of figures -->)", re.S
)
# measures whose table has a column for each of their columns
_GRID = "modes", "article", "accuracy"


def pages() -> List:
    """The paths of all pages."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def load() -> Dict[str, Any]:
    """What docs/figures.json holds."""
    return json.loads(FIGURES.read_text()) if FIGURES.exists() else {}


def figures_of(pairs: Sequence[dict], rounds: int, words: Sequence[str]) -> Dict[str, Any]:
    """The figures of a measure, which these words of a command have made just now."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "date": datetime.date.today().isoformat(),
        "commit": git.stdout.strip() or "unknown",
        "processor": _processor(),
        "rounds": rounds,
        "command": " ".join((".venv/bin/python scripts/benchmark.py", *words)),
        "pairs": pairs,
    }


def keep(what: str, measured: Dict[str, Any]):
    """Replaces the figures of a measure in all pages."""
    kept = "row", "column", "other_name", "ours", "other", "ratios", "cpu", "aucs"
    pairs = json.dumps([{x: pair[x] for x in kept if x in pair} for pair in measured["pairs"]])
    of_6_digits = json.loads(pairs, parse_float=lambda text: float(f"{float(text):.6g}"))
    figures = {**load(), what: {**measured, "pairs": of_6_digits}}
    FIGURES.write_text(json.dumps(dict(sorted(figures.items())), indent=1) + "\n")
    for path in pages():
        path.write_text(rendered(path.read_text(), figures))


def _processor():
    """The cores, and the widest vectors that they have: clouds hide what a processor is called."""
    text = pathlib.Path("/proc/cpuinfo").read_text()
    found = re.search(r"model name\s*: (.*)", text)
    name = found.group(1) if found else "a processor"
    vectors = "AVX-512" if " avx512f " in text else "AVX2" if " avx2 " in text else "no AVX2"
    return f"{len(os.sched_getaffinity(0))} cores of {name} ({vectors})"


def rendered(text: str, figures: Dict[str, Any]) -> str:
    """A page with the figures that its comments ask for; what was not measured yet stays."""

    def asked(found):
        names = found.group(2).split(", ")
        if not set(names) <= set(figures):
            return found.group(0)
        lines = table({name: figures[name] for name in names}, bool(found.group(3)))
        return found.group(1) + lines + found.group(5)

    return _TABLE.sub(asked, text)


def table(figures: Dict[str, Any], brief: bool = False) -> str:
    """The Markdown table of some measures, and how they were made."""
    make = _grid if set(figures) & set(_GRID) else _brief if brief else _whole
    return f"{make(figures)}\n\n{' '.join(map(_source, figures, figures.values()))}\n"


def _ratio(pair):
    """The median of the rounds' ratios, and their range."""
    digits = lambda x: f"{x:,.0f}" if x >= 10 else f"{x:.2f}"
    ratios = pair["ratios"]
    if not all(x == x for x in ratios):
        return "failed"
    ends = f" ({digits(min(ratios))} to {digits(max(ratios))})" if len(ratios) > 1 else ""
    return digits(statistics.median(ratios)) + ends


def _source(what, about):
    return (
        f"*{what}: {about['date']}, commit {about['commit']}, {about['processor']}, rounds in "
        f"turn: {about['rounds']}, by `{about['command']}`.*"
    )


def _whole(figures):
    titles = "", "against", "ours", "theirs", "ratio", "CPU-seconds per million, ours / theirs"
    rows = [
        (
            pair["column"], pair["row"], f"{pair['ours']:,.0f}/s", f"{pair['other']:,.0f}/s",
            _ratio(pair), " / ".join(f"{x:,.1f}" for x in pair["cpu"]),
        )
        for measure in figures.values() for pair in measure["pairs"]
    ]  # fmt: skip
    return markdown(titles, rows)


def _grid(figures):
    """A table of speeds and ratios, or of AUCs: the mean over seeds for each epoch."""
    (measure,) = figures.values()
    mean = lambda epoch: f"{statistics.mean(epoch):.4f}"[1:]
    aucs = lambda x: " ".join(map(mean, zip(*x["aucs"])))
    speed = lambda x: f"{x['ours']:,.0f}/s, {_ratio(x)}"
    return _pivot(measure["pairs"], lambda x: aucs(x) if "aucs" in x else speed(x))


def _brief(figures):
    """A row for what each measure does in a second, and for its ratio to each other's program."""
    cells = []
    for what, measure in figures.items():
        for pair in (x for x in measure["pairs"] if x["other_name"] != "ours"):
            speed = f"{what}, per second", pair["column"], f"{pair['ours']:,.0f}"
            cells += [speed] * (speed[:2] not in [x[:2] for x in cells])
            cells.append((f"{what}, times {pair['row']}", pair["column"], _ratio(pair)))
    rows = [dict(zip(("row", "column", "text"), cell)) for cell in cells]
    return _pivot(rows, lambda x: x["text"])


def _pivot(pairs, text):
    """A table with a line for each row and a column for each column that pairs have."""
    names = lambda key: list(dict.fromkeys(pair[key] for pair in pairs))
    found = {(pair["row"], pair["column"]): text(pair) for pair in pairs}
    lines = [
        [row, *(found.get((row, column), "") for column in names("column"))] for row in names("row")
    ]
    return markdown(["", *names("column")], lines)
