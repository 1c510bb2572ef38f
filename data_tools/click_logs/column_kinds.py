"""The columns of rows: those of the public click logs, and of any table that a file describes.

To add a data set, add an entry to DATASETS. To add a kind of raw cells, add an entry to KINDS;
feature_map.py encodes a cell of it, row_parser.py and field_tables.py a block.

Criteo: https://www.kaggle.com/c/criteo-display-ad-challenge/data
Avazu: https://www.kaggle.com/c/avazu-ctr-prediction/data

A table is described by a JSON file that names its columns in the order of their cells:

    {"name": "shop", "columns": [
      {"name": "clicked", "kind": "label"}, {"name": "age", "kind": "buckets"},
      {"name": "article", "kind": "category"}, {"name": "shop", "kind": "id", "offset": 2},
      {"name": "session", "kind": "ignored"}]}

Without "name", the table is called as its file.
"""

import difflib
import json
import os
from typing import Collection, Dict, Iterable, NamedTuple, Optional, Tuple, Union

from deepfm.errors import BadInput
from deepfm.records.storage import places

LABEL, IGNORED, WEIGHT = "label", "ignored", "weight"
CATEGORY = "category"
HOUR = "hour"
INTEGER = "integer"
BUCKETS = "buckets"
SCALED = "scaled"
ID, VALUE, IDS, VALUES, COUNTS = "id", "value", "ids", "values", "counts"

# What the cells of each kind are; those of the first three become no field.
KINDS = {
    LABEL: "0 or 1; for libsvm_to_tfrecord also -1 and +1",
    IGNORED: "anything",
    WEIGHT: "the weight of the example",
    CATEGORY: "any text",
    HOUR: "YYMMDDHH; only HH is the category, because dates never repeat",
    INTEGER: "an integer, which --integers makes buckets or scaled",
    BUCKETS: "an integer, which becomes a category",
    SCALED: "an integer, which becomes a value in [0, 1]",
    ID: 'the id of a field, to which "offset" is added; prepare gives each field ids of its own',
    VALUE: 'the value of the id in column "id", or of the id that "id" is',
    IDS: "a list, the ids of all fields",
    VALUES: "a list, their values",
    COUNTS: "a list, how many ids each field has",
}
RAW = (CATEGORY, HOUR, INTEGER, BUCKETS, SCALED)  # which need a vocabulary or a range
LISTS = (IDS, VALUES, COUNTS)
KEPT = (WEIGHT, VALUE, *LISTS)  # which stay as they are, beside ids that do
RANGED = (SCALED, ID)  # of which a feature map has the smallest and the largest integer
_MAX_ID = 2**31 - 2


class Column(NamedTuple):
    """A column: its name, the kind of its cells, and of those that are ids "id" and "offset"."""

    name: str
    kind: str
    id: Optional[Union[int, str]] = None
    offset: Optional[int] = None


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
    found = (c for c in columns if c.kind not in (LABEL, IGNORED, WEIGHT))
    return tuple(c._replace(kind=integers) if c.kind == INTEGER else c for c in found)


def load(path: str, unfit: Collection[str], why: str) -> Table:
    """Reads the JSON file of --columns; raises BadInput, which names it, if it is invalid.

    Args:
        path: the file.
        unfit: the kinds of columns that the program does not take.
        why: what the sentence says of such a column.
    """
    try:
        table = _read(path)
        for column in table.columns:
            if column.kind in unfit:
                raise ValueError(f'column {column.name} is of kind "{column.kind}", {why}')
        return table
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)[:300]
        raise BadInput(f"--columns: {path}: {reason}.") from error


def _read(path):
    table = json.loads(places.of(path).content(path).decode())
    if not isinstance(table, dict) or not isinstance(table.get("columns"), list):
        raise ValueError('it has no list "columns", such as [{"name": "x", "kind": "category"}]')
    unknown = sorted(set(table) - {"name", "columns"})
    if unknown:
        raise ValueError(f'"{unknown[0]}" is not known; leave it out')
    name = table.get("name", os.path.splitext(os.path.basename(path))[0])
    if not isinstance(name, str) or not name or name in DATASETS:
        raise ValueError(f'"name" {name!r} cannot be given; try "name": "my_{name}"')
    columns = tuple(_column(*pair) for pair in enumerate(table["columns"], 1))
    check(columns)
    return Table(name, columns)


def _column(number, entry):
    """The Column that an entry of the file is."""
    text = lambda key: isinstance(entry, dict) and isinstance(entry.get(key), str)
    if not text("name") or not entry["name"].strip() or entry["name"] != entry["name"].strip():
        raise ValueError(f'column {number} has no name; try {{"name": "x", "kind": "{CATEGORY}"}}')
    name, kind = entry["name"], entry.get("kind")
    if not text("kind") or kind not in KINDS:
        near = difflib.get_close_matches(str(kind), KINDS, 1) or [CATEGORY]
        raise ValueError(
            f"column {name} is of kind {json.dumps(kind)}, not one of {', '.join(KINDS)}; try "
            f'"kind": "{near[0]}"'
        )
    unknown = sorted(set(entry) - set(Column._fields))
    if unknown:
        raise ValueError(f'column {name} has "{unknown[0]}", which is not known; leave it out')
    for key, owner in (("id", VALUE), ("offset", ID)):
        if key in entry and kind != owner:
            raise ValueError(f'column {name} of kind "{kind}" has "{key}"; leave it out')
    if kind == VALUE and "id" not in entry:
        raise ValueError(
            f'column {name} is of kind "value", but of which id? Add "id": 1, an id for all rows, '
            'or "id": "x", the column of the ids'
        )
    of = entry.get("id", entry.get("offset", 0))
    if not (isinstance(of, str) and kind == VALUE or type(of) is int and 0 <= of <= _MAX_ID):
        raise ValueError(f"column {name} has {of!r}, which is no id; try 1")
    return Column(**entry)


def check(columns: Tuple[Column, ...]):
    """Refuses (ValueError) columns without one label, a field and names that differ."""
    of_kind = lambda kind: [column.name for column in columns if column.kind == kind]
    for kind in (LABEL, WEIGHT, *LISTS):
        if len(of_kind(kind)) > 1:
            one, other = of_kind(kind)[:2]
            raise ValueError(
                f'one column must be of kind "{kind}", but {one} and {other} are; give {other} '
                'kind "ignored"'
            )
    if not of_kind(LABEL):
        raise ValueError(
            'one column must be of kind "label", but none is; add it where its cells are'
        )
    if not fields(columns, BUCKETS):
        raise ValueError('no column becomes a field; give one kind "category"')
    seen = {}
    for number, column in enumerate(columns, 1):
        first = seen.setdefault(column.name.lower(), number)
        if first != number:
            raise ValueError(
                f"columns {first} and {number} are both called {column.name} (upper and lower case "
                f'are the same); try "{column.name}_{number}"'
            )
    if any(map(of_kind, LISTS)) and (any(map(of_kind, (ID, VALUE, *RAW))) or not of_kind(IDS)):
        raise ValueError(
            'ids are either in one column of lists, of kind "ids" (with "values" and "counts"), or '
            'in a column of kind "id" for each field; give the columns of one of the two'
        )
    values = {}
    for name, kind, of, _ in columns:
        if kind == VALUE and isinstance(of, str):
            if of not in of_kind(ID):
                raise ValueError(f'column {name} has "id": "{of}", which is no column of kind "id"')
            if of in values:
                raise ValueError(f"columns {values[of]} and {name} both hold the values of {of}")
            values[of] = name
