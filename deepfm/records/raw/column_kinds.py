"""The columns of rows: those of the public click logs, and of any table that a file describes.

To add a data set, add an entry to DATASETS. To add a kind of raw cells, name it in RAW;
feature_map.py encodes a cell of it, data_tools/click_logs a block. docs/data.md says what the cells
of each kind are.

Criteo: https://www.kaggle.com/c/criteo-display-ad-challenge/data
Avazu: https://www.kaggle.com/c/avazu-ctr-prediction/data

A table is described by a JSON file that names its columns in the order of their cells:

    {"name": "shop", "columns": [
      {"name": "clicked", "kind": "label"}, {"name": "age", "kind": "buckets"},
      {"name": "article", "kind": "category"}, {"name": "shop", "kind": "id", "offset": 2},
      {"name": "price", "kind": "number", "scale": "standard"},
      {"name": "genres", "kind": "list", "separator": "|"},
      {"name": "session", "kind": "ignored"}]}

Without "name", the table is called as its file. "separator" is that of its cells, "header" whether
its files begin with one, "missing" the texts that stand for a missing cell; prepare writes them.
"""

import contextlib
import difflib
import json
import os
from typing import Any, Collection, Dict, Iterable, NamedTuple, Optional, Tuple, Union

from deepfm.errors import BadInput
from deepfm.records.raw import cells
from deepfm.records.storage import places

LABEL, IGNORED, WEIGHT, KEY = "label", "ignored", "weight", "key"
CATEGORY, HASH, NUMBER, LIST = "category", "hash", "number", "list"
HOUR, WEEKDAY, DATE = "hour", "weekday", "date"
INTEGER = "integer"
BUCKETS = "buckets"
SCALED = "scaled"
ID, VALUE, IDS, VALUES, COUNTS = "id", "value", "ids", "values", "counts"

MOMENTS = (HOUR, WEEKDAY, DATE)
RAW = (CATEGORY, HASH, NUMBER, LIST, *MOMENTS, INTEGER, BUCKETS, SCALED)
LISTS = (IDS, VALUES, COUNTS)
KINDS = (LABEL, IGNORED, KEY, WEIGHT, *RAW, ID, VALUE, *LISTS)  # the first four become no field
KEPT = (VALUE, *LISTS)  # which stay as they are, beside ids that do
RANGED = (SCALED, ID)  # of which a feature map has the smallest and the largest integer
COUNTED = (CATEGORY, LIST, *MOMENTS, BUCKETS)  # which have a vocabulary
SCALES = ("standard", "minmax", "robust", "log")
QUANTILES = 32  # buckets of a number
_MAX_ID = 2**31 - 2


class Column(NamedTuple):
    """A column: its name, the kind of its cells, and what OPTIONS says that a kind may have."""

    name: str
    kind: str
    id: Optional[Union[int, str]] = None
    offset: Optional[int] = None
    positive: Optional[Tuple[str, ...]] = None
    buckets: Optional[int] = None
    bounds: Optional[Tuple[float, ...]] = None
    scale: Optional[str] = None
    separator: Optional[str] = None
    length: Optional[int] = None
    weights: Optional[str] = None
    format: Optional[str] = None
    timezone: Optional[str] = None
    min_count: Optional[int] = None

    def described(self) -> Dict[str, Any]:
        """The entry of a file of --columns."""
        return {key: x for key, x in self._asdict().items() if x is not None}


_text = lambda x: isinstance(x, str) and 0 < len(x) <= 100 and "\n" not in x and "\0" not in x
is_marker = lambda x: _text(x) and len(x.encode()) <= 8
_of = lambda values: lambda x: x in values
_from = lambda least: lambda x: type(x) is int and least <= x <= _MAX_ID


def _is_list(good):
    return lambda x: isinstance(x, list) and bool(x) and all(map(good, x))


def _is_zone(text):
    with contextlib.suppress(ValueError, TypeError):
        return cells.offset(text) is not None
    return False


def _are_bounds(x):
    return _is_list(lambda y: type(y) in (int, float) and abs(y) < 1e300)(x) and x == sorted(set(x))


_OF_VALUE = '1, an id for all rows, or "x", the column of the ids'
# {option of a column: (the kinds that have it, whether a value is good, one that is)}
OPTIONS = {
    "id": ((VALUE,), lambda x: isinstance(x, str) or _from(0)(x), _OF_VALUE),
    "offset": ((ID,), _from(0), "1"),
    "positive": ((LABEL,), _is_list(_text), '["yes"]'),
    "buckets": ((NUMBER, HASH), _from(2), "100"),
    "bounds": ((NUMBER,), _are_bounds, "[0, 9.5]"),
    "scale": ((NUMBER,), _of(SCALES), '"standard"'),
    "separator": ((LIST,), _text, '"|"'),
    "length": ((LIST,), _from(1), "50"),
    "weights": ((LIST,), _text, '":"'),
    "format": (MOMENTS, _of(cells.FORMATS), " or ".join(f'"{x}"' for x in cells.FORMATS)),
    "timezone": (MOMENTS, _is_zone, '"+01:00"'),
    "min_count": ((CATEGORY, LIST, *MOMENTS), _from(1), "10"),
}
# {kind: an option that it must have}
_NEEDED = {
    HASH: "buckets", LIST: "separator", WEEKDAY: "format", DATE: "format", VALUE: "id"
}  # fmt: skip
# {what a file says beside its columns: (whether a value is good, one that is)}
_ABOUT = {
    "separator": (lambda x: isinstance(x, str) and len(x) == 1 and x not in '"\r\n\0', '";"'),
    "header": (lambda x: isinstance(x, bool), "true"),
    "missing": (lambda x: x == [] or _is_list(is_marker)(x), '["NA"], texts of up to 8 bytes'),
}

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
    """What a file of --columns says.

    Attributes:
        name: the table's, in feature_map.json.
        columns: in the order of the cells.
        separator: of the cells; None: as the first line looks.
        header: whether files begin with one; None: as the first line looks.
        missing: what stands for a missing cell, beside an empty one; None: not said.
    """

    name: str
    columns: Tuple[Column, ...]
    separator: Optional[str] = None
    header: Optional[bool] = None
    missing: Optional[Tuple[str, ...]] = None


def fields(columns: Iterable[Column], integers: str) -> Tuple[Column, ...]:
    """The columns that become fields, in the order of the records.

    Args:
        columns: all columns, as an entry of DATASETS.
        integers: what integers become, BUCKETS or SCALED.
    """
    found = (c for c in columns if c.kind not in (LABEL, IGNORED, KEY, WEIGHT))
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
    unknown = sorted(set(table) - set(Table._fields))
    if unknown:
        raise ValueError(f'"{unknown[0]}" is not known; leave it out')
    about = {key: x for key, x in table.items() if key in _ABOUT}
    for key, x in about.items():
        good, example = _ABOUT[key]
        if not good(x):
            raise ValueError(f'"{key}" is {json.dumps(x)}; try "{key}": {example}')
        about[key] = tuple(x) if key == "missing" else x
    name = table.get("name", os.path.splitext(os.path.basename(path))[0])
    if not isinstance(name, str) or not name or name in DATASETS:
        raise ValueError(f'"name" {name!r} cannot be given; try "name": "my_{name}"')
    columns = tuple(_column(*pair) for pair in enumerate(table["columns"], 1))
    check(columns)
    return Table(name, columns, **about)


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
    for key, value in entry.items():
        kinds, good, example = OPTIONS.get(key, ((kind,), bool, ""))
        if kind not in kinds:
            raise ValueError(f'column {name} of kind "{kind}" has "{key}"; leave it out')
        if not good(value):
            raise ValueError(f'column {name} has "{key}": {json.dumps(value)}; try {example}')
    needed = _NEEDED.get(kind)
    if needed and needed not in entry:
        raise ValueError(f'column {name} of kind "{kind}" needs "{needed}": {OPTIONS[needed][2]}')
    both = [key for key in ("buckets", "bounds", "scale") if key in entry]
    if len(both) > 1:
        raise ValueError(f'column {name} has "{both[0]}" and "{both[1]}"; leave one out')
    return of_json(entry)


def of_json(entry: Dict[str, Any]) -> Column:
    """The Column of an entry that is known to be one."""
    lists = {key: tuple(x) for key, x in entry.items() if isinstance(x, list)}
    return Column(**{**entry, **lists})


def check(columns: Tuple[Column, ...]):
    """Refuses (ValueError) columns without one label, a field and names that differ."""
    of_kind = lambda kind: [column.name for column in columns if column.kind == kind]
    for kind in (LABEL, KEY, WEIGHT, *LISTS):
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
    for name, kind, of, *_ in columns:
        if kind == VALUE and isinstance(of, str):
            if of not in of_kind(ID):
                raise ValueError(f'column {name} has "id": "{of}", which is no column of kind "id"')
            if of in values:
                raise ValueError(f"columns {values[of]} and {name} both hold the values of {of}")
            values[of] = name
