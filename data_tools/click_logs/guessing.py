"""Guesses what the columns of a table are, from a sample of its rows.

The same sample, in any order of its rows, gives the same kinds.
"""

import json
import os
import re
from typing import NamedTuple, Optional, Sequence, Tuple

import numpy as np
from absl import logging

from data_tools.tables import sampling
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
POSITIVE = ({"yes": "no", "y": "n", "t": "f", "1": "-1", "+1": "-1", "click": "no click"},)
_FIT = 0.99  # of the cells that are there; others are bad rows
_FEW = 10  # different numbers, which are categories
_HOLDING = 0.1  # of cells that hold a separator of lists
_TRIED = 1000  # different cells that are read as moments
_YEARS = range(1990, 2101)
_NAMED_ID = re.compile(r"(?i)(^|.*[ _.-])(id|ids|key|uuid|guid|index)$|.*[a-z](Id|ID|Key)$")
_NAMED_CODE = re.compile(r"(?i).*(code|zip|postal|type|class|category|version|model|phone|\bip\b)")
_NAMED_TIME = re.compile(r"(?i).*(time|date|stamp|day|_at$|_ts$|^ts$|created|updated)")
_INDEX = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
_SEPARATORS = "|;, "  # of lists
_HEX = re.compile(r"[0-9a-f]{8}")


class Guess(NamedTuple):
    """A column, and what the table that is printed says of it.

    Attributes:
        column: the Column.
        examples: its most frequent texts.
        distinct: different texts in the sample.
        missing: the share of cells that are missing.
        why: why it is of its kind.
    """

    column: Column
    examples: Sequence[str]
    distinct: int
    missing: float
    why: str


def guess(files: Sequence, options) -> Tuple[Optional[Table], Optional[str], int]:
    """Guesses what the columns of files are, and logs it.

    Args:
        files: DataFiles.
        options: options.PrepareOptions.

    Returns:
        (the Table or None, the data set or None, about how many rows the files have).

    Raises:
        BadInput: no column is the label, or none can become a field.
    """
    missing = missing_of(options)
    path = files[0].path
    head, found, total = sampling.sample(files, options, set(LABELS), missing)
    if not found:
        raise BadInput(f"--input={options.input}: the files hold no rows.")
    known = None if options.label else _known(head, found)
    if known:
        logging.info("%s has the columns of --dataset=%s.", path, known)
        return None, known, total
    label = _label(path, found, options)
    told = [label, *(_guess(name, x) for name, x in found.items() if name != label.column.name)]
    told = sorted(told, key=lambda each: head.names.index(each.column.name))
    _log(told, found[label.column.name].rows)
    columns = tuple(x.column for x in told)
    table = Table(_name(path), columns, head.separator, head.header, missing)
    try:
        column_kinds.check(table.columns)
    except ValueError as error:
        raise BadInput(f"{path}: {error}; write --columns by hand (docs/data.md).") from error
    return table, None, total


def write(table: Table, folder: str, overwrite: bool) -> str:
    """Writes columns.json into a folder; refuses (BadInput) to replace another one."""
    path = os.path.join(folder, FILE)
    about = {key: x for key, x in table._asdict().items() if x is not None and key != "columns"}
    entries = ",\n".join(
        f"  {json.dumps(x.described(), ensure_ascii=False)}" for x in table.columns
    )
    text = json.dumps(about, ensure_ascii=False)[:-1] + f', "columns": [\n{entries}\n]}}\n'
    there = places.of(path)
    if there.exists(path) and there.content(path).decode() != text and not overwrite:
        raise BadInput(
            f"{path} says other columns; --columns={path} uses it, --overwrite replaces it."
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


def _name(path):
    name = os.path.basename(path).partition(".")[0] or "table"
    return f"my_{name}" if name in DATASETS else name


def _known(head, found):
    """The entry of DATASETS whose rows these are; None if there is none."""
    names, lower = head.names, [name.lower() for name in head.names]
    for dataset, columns in DATASETS.items():
        if head.header and lower == [column.name.lower() for column in columns]:
            return dataset
    columns = DATASETS["criteo"]
    if head.header or len(names) != len(columns):
        return None
    kinds = [column.kind for column in columns]
    cells = [found[name].texts[:100].to_pylist() for name in names]
    is_integer = lambda text: rules.integer(text) is not None
    good = {LABEL: lambda text: text in "01", CATEGORY: _HEX.fullmatch}
    fits = (all(map(good.get(kind, is_integer), some)) for kind, some in zip(kinds, cells))
    return "criteo" if all(fits) else None


def _label(path, found, options) -> Guess:
    """The Guess of the label's column."""
    lower = {}
    for name in found:
        lower.setdefault(name.lower(), name)
    wanted = [options.label.lower()] if options.label else LABELS
    name = next((lower[x] for x in wanted if x in lower), None)
    if name is None:
        what = f"no column {options.label}" if options.label else "no column named as a label"
        same = [f"--dataset={x}" for x in DATASETS if len(DATASETS[x]) == len(found)]
        others = "".join(f", or {flag}" for flag in same)
        names = listed(list(found), 20)
        raise BadInput(f"{path}: has {what}; give --label=NAME of its columns {names}{others}.")
    cells = found[name]
    texts, some = cells.texts.to_pylist(), listed(cells.texts[:20].to_pylist(), 10)
    positive, why = _words(options.positive), "--positive"
    numbers = {rules.number(x) for x in texts}
    if positive and not any(x in texts or rules.number(x) in numbers - {None} for x in positive):
        raise BadInput(f"--positive={options.positive}: {path} has label {name} {some}; name one.")
    if not positive and not numbers <= {0, 1}:
        pairs = [(a, b) for pair in POSITIVE for a, b in pair.items()]
        low = {x.lower(): x for x in texts}
        positive = next(((low[a],) for a, b in pairs if set(low) == {a, b}), ())
        why = "one of two usual labels"
        if not positive:
            raise BadInput(
                f"{path}: label {name} is not 0 or 1, but {some}; say which count as clicks, such "
                f"as --positive={cells.texts[0]}."
            )
    why = f"{'--label' if options.label else 'its name'}" + (f"; {why}" if positive else "")
    return _told(Column(name, LABEL, positive=positive or None), cells, why)


def _told(column, cells, why):
    missing = 1 - cells.counts.sum() / cells.rows
    return Guess(column, cells.texts[:3].to_pylist(), len(cells.texts), missing, why)


def _guess(name, cells: Cells) -> Guess:
    """The Guess of a column other than the label."""
    told = lambda why, kind, **options: _told(Column(name, kind, **options), cells, why)
    n = len(cells.texts)
    if _INDEX.fullmatch(name):
        return told("the index that pandas writes", IGNORED)
    if n <= 1:
        return told("constant" if n else "always missing", IGNORED)
    moment = _moment(name, cells)
    if moment:
        return told(*moment[:2], format=moment[2])
    is_number = cells.match(f"{rules.NUMBER}|{'|'.join(rules.WORDS)}")
    numeric = cells.share(is_number) >= _FIT
    whole = numeric and cells.share(cells.match(r"[+-]?[0-9]+(\.0*)?")) >= _FIT
    alone = n == cells.rows and (whole or not numeric)
    if alone and _NAMED_ID.fullmatch(name):
        return told("different in each row, and named as a key", KEY)
    if numeric:
        why = _no_number(name, cells, n, whole)
        return told(why, CATEGORY) if why else told("numbers", NUMBER, buckets=_buckets(cells))
    separator = _separator(cells)
    if separator:
        return told("lists of what other rows have, too", LIST, separator=separator)
    return told("texts", CATEGORY)


def _moment(name, cells):
    """(why, kind, format) of a column of moments; None if it is none."""
    some = np.unique(np.linspace(0, len(cells.texts) - 1, _TRIED).astype(int))
    texts = cells.texts.take(some).to_pylist()
    for how in rules.FORMATS:
        if how.startswith("unix") and not _NAMED_TIME.fullmatch(name):
            continue
        found = [rules.moment(text, how) for text in texts]
        good = [at for at in found if at and at.year in _YEARS]
        if len(good) >= _FIT * len(found):
            kind = HOUR if len({at.hour for at in good}) > 1 else WEEKDAY
            return rules.FORMATS[how], kind, how
    return None


def _no_number(name, cells, n, whole):
    """Why numbers are categories; None if they are not."""
    if n <= _FEW:
        return "few different numbers"
    if cells.share(cells.match("0[0-9]+")) > 1 - _FIT:
        return "codes with leading zeros"
    if whole and _NAMED_ID.fullmatch(name):
        return "integers, named as ids"
    return "integers, named as codes" if whole and _NAMED_CODE.match(name) else None


def _buckets(cells):
    return int(np.clip(cells.rows // 100, 8, QUANTILES))


def _separator(cells):
    """What separates the members of lists; None if cells are no lists."""
    import pyarrow.compute as pc

    n = len(cells.texts)
    for separator in _SEPARATORS:
        holding = np.array(pc.match_substring(cells.texts, separator))
        if cells.share(holding) < _HOLDING:
            continue
        members = pc.utf8_trim_whitespace(pc.split_pattern(cells.texts, separator).flatten())
        different = len(pc.unique(members))
        if 2 * different <= n and 3 * different <= len(members):
            return separator
    return None


def _log(told, rows):
    """Prints a line for each column."""
    lines = [("column", "kind", "different", "missing", "why", "examples")]
    for column, examples, distinct, missing, why in told:
        more = {k: x for k, x in column.described().items() if k not in ("name", "kind")}
        kind = " ".join([column.kind, *(f"{k}={x}" for k, x in more.items())])
        texts = ", ".join(x if len(x) <= 20 else x[:17] + "..." for x in examples)
        lines.append((column.name, kind, f"{distinct:,}", f"{missing:.1%}", why, texts))
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    logging.info("Of %d rows that were read, the columns are:", rows)
    for line in lines:
        logging.info("  ".join([*(x.ljust(n) for x, n in zip(line, widths)), line[-1]]).rstrip())
