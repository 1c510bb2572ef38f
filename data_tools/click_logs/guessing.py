"""Guesses what the columns of a table are, from a sample of its rows.

The same sample, in any order of its rows, gives the same kinds.
"""

import json
import os
import re
from typing import Sequence, Tuple

import numpy as np
from absl import logging

from data_tools.tables import layouts, sampling
from data_tools.tables.sampling import Cells
from deepfm.errors import BadInput, listed
from deepfm.records import atomic_files
from deepfm.records.raw import cells as rules
from deepfm.records.raw import column_kinds
from deepfm.records.raw.column_kinds import (
    CATEGORY,
    DATASETS,
    HOUR,
    IGNORED,
    KEY,
    LABEL,
    LIST,
    NUMBER,
    QUANTILES,
    WEEKDAY,
    Column,
    Table,
)
from deepfm.records.storage import places

FILE = "columns.json"
LABELS = (
    "label", "click", "clicked", "is_click", "is_clicked", "target", "y", "converted",
    "conversion", "is_conversion", "purchase", "purchased", "response",
)  # fmt: skip
_POSITIVE = {"yes": "no", "y": "n", "t": "f", "1": "-1", "+1": "-1", "click": "no click"}
_FIT = 0.99  # of the cells that are there; others are bad rows
_FEW = 10  # different numbers, which are categories
_HOLDING = 0.1  # of cells that hold a separator of lists
_TRIED = 1000  # different cells that are read as moments
_YEARS = range(1990, 2101)
_NAMED_ID = re.compile(r"(?i)(^|.*[ _.-])(id|ids|key|uuid|guid|index)$|.*[a-z](Id|ID|Key)$")
_NAMED_CODE = re.compile(r"(?i).*(code|zip|postal|type|class|category|version|model|phone|\bip\b)")
_NAMED_TIME = re.compile(r"(?i).*(time|date|stamp|day|_at$|_ts$|^ts$|created|updated)")
_SEPARATORS = "|;, "  # of lists


def guess(files: Sequence, options) -> Tuple[Table, int]:
    """Guesses what the columns of files are, and logs it.

    Args:
        files: DataFiles.
        options: options.PrepareOptions.

    Returns:
        (the Table, perhaps of one of DATASETS, about how many rows the files have).

    Raises:
        BadInput: no column is the label, or none can become a field.
    """
    path, missing = files[0].path, missing_of(options)
    head, found, total = sampling.sample(files, options, set(LABELS), missing)
    if not found:
        raise BadInput(f"--input={options.input}: the files hold no rows.")
    known = None if options.label else _known(head, found)
    if known:
        logging.info("%s has the columns of --dataset=%s.", path, known)
        return Table(known, DATASETS[known], missing=()), total
    label = _label(path, found, options)
    told = [label if x == label[0].name else _guess(x, cells) for x, cells in found.items()]
    _log(told, found)
    name = os.path.basename(path).partition(".")[0] or "table"
    name = f"my_{name}" if name in DATASETS else name
    delimiter = head.delimiter and head.delimiter.decode()
    table = Table(name, tuple(column for column, _ in told), delimiter, head.header, missing)
    try:
        column_kinds.check(table.columns)
    except ValueError as error:
        raise BadInput(f"{path}: {error}; write --columns by hand (docs/data.md).") from error
    return table, total


def write(table: Table, folder: str) -> str:
    """Writes columns.json into a folder; refuses (BadInput) to replace another, perhaps edited."""
    path = os.path.join(folder, FILE)
    about = {key: x for key, x in table._asdict().items() if x is not None and key != "columns"}
    entries = ",\n".join(
        f"  {json.dumps(x.described(), ensure_ascii=False)}" for x in table.columns
    )
    text = json.dumps(about, ensure_ascii=False)[:-1] + f', "columns": [\n{entries}\n]}}\n'
    there = places.of(path)
    if there.exists(path) and there.content(path).decode() != text:
        raise BadInput(
            f"{path} says other columns; --columns={path} uses them; delete it to guess anew."
        )
    if places.is_remote(path):
        with there.create(path) as f:
            f.write(text.encode())
    else:
        there.make_dir(folder)
        atomic_files.write_whole(path, text)
    return path


def _words(text):
    return tuple(filter(None, (text or "").split(",")))


def missing_of(options) -> Tuple[str, ...]:
    """The texts of missing cells that --missing says, or else those of pandas and Hive."""
    found = rules.MISSING if options.missing is None else _words(options.missing)
    long = next((text for text in found if not column_kinds.is_marker(text)), None)
    if long:
        raise BadInput(f"--missing: '{long}' has more than 8 bytes; leave it out.")
    return found


def min_count(rows: int) -> int:
    """How often a category must occur in a table of about so many rows to get its own id."""
    return 2 if rows < 20000 else 5 if rows < 200000 else 10


def _known(head, found):
    """The entry of DATASETS whose rows these are; None if there is none."""
    names = [name.lower() for name in found]
    if head.header:
        same = (x for x, of in DATASETS.items() if names == [column.name.lower() for column in of])
        return next(same, None)
    pairs = [*zip(DATASETS["criteo"], found.values())]
    fits = len(found) == len(DATASETS["criteo"]) and all(
        cells.match("[0-9a-f]{8}").all() for column, cells in pairs if column.kind == CATEGORY
    )
    return "criteo" if fits else None


def _label(path, found, options) -> Tuple[Column, str]:
    """(the Column of the label, why it is that)."""
    lower = {name.lower(): name for name in found}
    wanted = [options.label.lower()] if options.label else LABELS
    name = next((lower[x] for x in wanted if x in lower), None)
    if name is None:
        what = f"no column {options.label}" if options.label else "no column named as a label"
        same = [f", or --dataset={x}" for x in DATASETS if len(DATASETS[x]) == len(found)]
        names = listed(list(found), 20)
        raise BadInput(
            f"{path}: has {what}; give --label=NAME of its columns {names}{''.join(same)}."
        )
    texts = found[name].texts.to_pylist()
    numbers, some = set(map(rules.number, texts)), listed(texts[:20], 10)
    positive, why = _words(options.positive), "; --positive" * bool(options.positive)
    if positive and not any(x in texts or rules.number(x) in numbers - {None} for x in positive):
        raise BadInput(f"--positive={options.positive}: {path} has label {name} {some}; name one.")
    if not positive and not numbers <= {0, 1}:
        low, why = {x.lower(): x for x in texts}, "; one of two usual labels"
        positive = tuple(low[a] for a, b in _POSITIVE.items() if set(low) == {a, b})
        if not positive:
            raise BadInput(
                f"{path}: label {name} is not 0 or 1, but {some}; say which count as clicks, such "
                f"as --positive={texts[0]}."
            )
    why = f"{'--label' if options.label else 'its name'}{why}"
    return Column(name, LABEL, positive=positive or None), why


def _guess(name, cells: Cells) -> Tuple[Column, str]:
    """(the Column that a column other than the label is, why)."""
    n = len(cells.texts)
    if layouts.INDEX.fullmatch(name):
        return Column(name, IGNORED), "the index that pandas writes"
    if n <= 1:
        return Column(name, IGNORED), "constant" if n else "always missing"
    moment = _moment(name, cells)
    if moment:
        return moment
    numeric = cells.share(cells.match("|".join([rules.NUMBER, *rules.WORDS]))) >= _FIT
    whole = numeric and cells.share(cells.match(r"[+-]?[0-9]+(\.0*)?")) >= _FIT
    is_id = _NAMED_ID.fullmatch(name)
    if is_id and n == cells.rows and (whole or not numeric):
        return Column(name, KEY), "different in each row, and named as a key"
    separator = None if numeric else _separator(cells)
    if separator:
        return Column(name, LIST, separator=separator), "lists of what other rows have, too"
    codes = (
        (not numeric, "texts"),
        (n <= _FEW, "few different numbers"),
        (cells.share(cells.match("0[0-9]+")) > 1 - _FIT, "codes with leading zeros"),
        (whole and is_id, "integers, named as ids"),
        (whole and _NAMED_CODE.match(name), "integers, named as codes"),
    )
    why = next((why for holds, why in codes if holds), None)
    if why:
        return Column(name, CATEGORY), why
    buckets = min(max(cells.rows // 100, 8), QUANTILES)
    return Column(name, NUMBER, buckets=buckets), "numbers"


def _moment(name, cells):
    """(the Column of moments, why); None if it is none."""
    some = np.unique(np.linspace(0, len(cells.texts) - 1, _TRIED).astype(int))
    texts = cells.texts.take(some).to_pylist()
    for how, what in rules.FORMATS.items():
        if how.startswith("unix") and not _NAMED_TIME.fullmatch(name):
            continue
        found = [rules.moment(text, how) for text in texts]
        good = [at for at in found if at and at.year in _YEARS]
        if len(good) >= _FIT * len(found):
            kind = HOUR if len({at.hour for at in good}) > 1 else WEEKDAY
            return Column(name, kind, format=how), what
    return None


def _separator(cells):
    """What separates the members of lists; None if cells are no lists."""
    import pyarrow.compute as pc

    for separator in _SEPARATORS:
        holding = np.array(pc.match_substring(cells.texts, separator))
        if cells.share(holding) >= _HOLDING:
            members = pc.utf8_trim_whitespace(pc.split_pattern(cells.texts, separator).flatten())
            different = len(pc.unique(members))
            if 2 * different <= len(cells.texts) and 3 * different <= len(members):
                return separator
    return None


def _log(told, found):
    """Logs a line for each column."""
    lines = [("column", "kind", "different", "missing", "why", "examples")]
    for (column, why), (texts, counts, rows) in zip(told, found.values()):
        _, _, *more = column.described().items()
        kind = " ".join([column.kind, *(f"{key}={x}" for key, x in more)])
        some = (x if len(x) <= 20 else x[:17] + "..." for x in texts[:3].to_pylist())
        missing = f"{1 - counts.sum() / rows:.1%}"
        lines.append((column.name, kind, f"{len(texts):,}", missing, why, ", ".join(some)))
    widths = [max(map(len, column)) for column in zip(*lines)]
    logging.info("Of %d rows that were read, the columns are:", rows)
    for line in lines:
        logging.info("  ".join(x.ljust(n) for x, n in zip(line, widths)).rstrip())
