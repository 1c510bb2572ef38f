"""The columns of raw rows: those of the public click logs, and of any table that a file describes.

To add a data set, add an entry to DATASETS. To add a kind, add an entry to KINDS; feature_map.py
encodes a cell of it, row_parser.py and field_tables.py a block.

Criteo: https://www.kaggle.com/c/criteo-display-ad-challenge/data
Avazu: https://www.kaggle.com/c/avazu-ctr-prediction/data

A table is described by a JSON file that names its columns in the order of their cells:

    {"name": "shop", "columns": [
      {"name": "clicked", "kind": "label"}, {"name": "age", "kind": "buckets"},
      {"name": "article", "kind": "category"}, {"name": "session", "kind": "ignored"}]}

Without "name", the table is called as its file.
"""

import contextlib
import difflib
import json
import os
from typing import Callable, Collection, Dict, Iterable, List, NamedTuple, Tuple

LABEL = "label"
IGNORED = "ignored"
CATEGORY = "category"
HOUR = "hour"
INTEGER = "integer"
BUCKETS = "buckets"
SCALED = "scaled"

# What the cells of each kind are; those of the first two become no field.
KINDS = {
    LABEL: "0 or 1; files without labels do not have this column",
    IGNORED: "anything",
    CATEGORY: "any text",
    HOUR: "YYMMDDHH; only HH is the category, because dates never repeat",
    INTEGER: "an integer, which --integers makes buckets or scaled",
    BUCKETS: "an integer, which becomes a category",
    SCALED: "an integer, which becomes a value in [0, 1]",
}


class Column(NamedTuple):
    """A column of a raw file: its name, and the kind of its cells."""

    name: str
    kind: str


_AVAZU = (
    "C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain",
    "app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type",
)  # fmt: skip
DATASETS: Dict[str, Tuple[Column, ...]] = {
    "criteo": (
        Column("label", LABEL),
        *(Column(f"I{i}", INTEGER) for i in range(1, 14)),
        *(Column(f"C{i}", CATEGORY) for i in range(1, 27)),
    ),
    "avazu": (
        Column("id", IGNORED),
        Column("click", LABEL),
        Column("hour", HOUR),
        *(Column(name, CATEGORY) for name in _AVAZU),
        *(Column(f"C{i}", CATEGORY) for i in range(14, 22)),
    ),
}


class Table(NamedTuple):
    """The columns of a table in the order of their cells, and its name in feature_map.json."""

    name: str
    columns: Tuple[Column, ...]


def fields(columns: Iterable[Column], integers: str) -> Tuple[Column, ...]:
    """The columns that become fields, in the order of the records.

    Args:
        columns: all columns, as an entry of DATASETS.
        integers: what integers become, BUCKETS or SCALED.
    """
    found = (c for c in columns if c.kind not in (LABEL, IGNORED))
    return tuple(c._replace(kind=integers) if c.kind == INTEGER else c for c in found)


def load(path: str, content: Callable[[str], bytes]) -> Table:
    """Reads the JSON file that describes a table; raises ValueError, which names it, if invalid.

    Args:
        path: the file.
        content: reads it.
    """
    with naming(path):
        name, found = entries(path, content, KINDS, CATEGORY)
        columns = tuple(Column(entry["name"], entry["kind"]) for entry in found)
        check(columns)
        return Table(name, columns)


@contextlib.contextmanager
def naming(path: str):
    """Raises a ValueError that begins with the path for what the body finds wrong with a file."""
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)[:300]
        raise ValueError(f"{path}: {reason}.") from error


def entries(
    path: str,
    content: Callable[[str], bytes],
    kinds: Collection[str],
    usual: str,
    optional: Collection[str] = (),
) -> Tuple[str, List[dict]]:
    """The name of the table that a JSON file describes, and the entries of its columns.

    Args:
        path: the file.
        content: reads it.
        kinds: what the kind of a column may be.
        usual: the kind to advise where another makes no sense.
        optional: keys that an entry may have beside name and kind.

    Raises:
        ValueError: it is no such file, or an entry has no name, an unknown kind or another key.
    """
    table = json.loads(content(path).decode())
    if not isinstance(table, dict) or not isinstance(table.get("columns"), list):
        raise ValueError(f'it has no list "columns", such as [{{"name": "x", "kind": "{usual}"}}]')
    unknown = sorted(set(table) - {"name", "columns"})
    if unknown:
        raise ValueError(f'"{unknown[0]}" is not known; leave it out')
    name = table.get("name", os.path.splitext(os.path.basename(path))[0])
    if not isinstance(name, str) or not name or name in DATASETS:
        raise ValueError(f'"name" {name!r} cannot be given; try "name": "my_{name}"')
    for number, entry in enumerate(table["columns"], 1):
        _check_entry(number, entry, kinds, usual, optional)
    return name, table["columns"]


def _check_entry(number, entry, kinds, usual, optional):
    text = lambda key: isinstance(entry, dict) and isinstance(entry.get(key), str)
    if not text("name") or not entry["name"].strip() or entry["name"] != entry["name"].strip():
        raise ValueError(f'column {number} has no name; try {{"name": "x", "kind": "{usual}"}}')
    name, kind = entry["name"], entry.get("kind")
    if not text("kind") or kind not in kinds:
        near = difflib.get_close_matches(str(kind), kinds, 1) or [usual]
        raise ValueError(
            f"column {name} is of kind {json.dumps(kind)}, not one of {', '.join(kinds)}; try "
            f'"kind": "{near[0]}"'
        )
    unknown = sorted(set(entry) - {"name", "kind", *optional})
    if unknown:
        raise ValueError(f'column {name} has "{unknown[0]}", which is not known; leave it out')


def check(columns: Tuple[Column, ...]):
    """Refuses (ValueError) columns without one label, a field and names that differ."""
    labels = [column.name for column in columns if column.kind == LABEL]
    if len(labels) != 1:
        found = " and ".join(labels[:2]) + " are" if labels else "none is"
        work = f'give {labels[1]} kind "ignored"' if labels else "add it where its cells are"
        raise ValueError(f'one column must be of kind "label", but {found}; {work}')
    if not fields(columns, BUCKETS):
        raise ValueError('no column becomes a field; give one kind "category"')
    check_names([column.name for column in columns])


def check_names(names: Iterable[str]):
    """Refuses (ValueError) names of columns that do not differ."""
    seen = {}
    for number, name in enumerate(names, 1):
        first = seen.setdefault(name.lower(), number)
        if first != number:
            raise ValueError(
                f"columns {first} and {number} are both called {name} (upper and lower case "
                f'are the same); try "{name}_{number}"'
            )
