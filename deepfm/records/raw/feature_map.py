"""feature_map.json: which feature id each raw cell has, for code that encodes one row at a time.

    {"format_version": 1, "dataset": "criteo", "integers": "buckets", "min_count": 10,
     "field_size": 39, "feature_size": 2005, "fields": [
      {"name": "I1", "kind": "buckets", "first_id": 1, "missing_id": 1, "rare_id": 2,
       "vocabulary": {"SP1": 3, "SP0": 4, "2": 5}},
      {"name": "I2", "kind": "scaled", "first_id": 6, "missing_id": 6, "value_id": 7,
       "low": -2, "high": 18522}, ...]}

For a table that a file described (prepare --columns), "dataset" is its name, and all columns
of its rows are there: "columns": [{"name": "clicked", "kind": "label"}, ...].

The ids of the fields follow one another, and id 0 is for padding. A record has one id per field:

- category, hour: the id of the cell's text (for an hour YYMMDDHH, of its HH). A text that is not in
  the vocabulary gets rare_id, an empty cell missing_id. The value is 1.
- buckets: an integer x > 2 becomes the text floor(ln(x)^2), a smaller one SPx, then a category.
  From the winners of Criteo's challenge ("3 Idiots", https://github.com/ycjuan/kaggle-2014-criteo).
- id: an integer x becomes rare_id + 1 + x - low, or rare_id if it is not in [low, high], those of
  the training rows; an empty cell missing_id. The value is 1.
- scaled: value_id, and the value ln(1 + x - low) / ln(1 + high - low) to 4 decimals, x clipped to
  [low, high], the extremes of the training rows. An empty cell gets missing_id, value 1.
  Public DeepFM examples also scale by minimum and maximum, but clip at the 95 % quantile instead of
  taking the logarithm (https://github.com/PaddlePaddle/models, deep_fm/preprocess.py).
- hash: first_id + 2 + FarmHash's fingerprint modulo "buckets"; an empty cell missing_id.
- number: first_id + 2 + how many "bounds" are at most x, with value 1; or, with a "scale",
  value_id, and the value (x - center) / spread to 4 decimals, x clipped to [low, high], the
  extremes of the training rows, and before that replaced by ln(1 + x - low) if the scale is log. A
  missing cell gets missing_id, value 1.
- list: the ids of its categories, each with its weight or 1 as the value; an empty one missing_id.
- weekday, date: as hour, of 1 to 7 or YYYYMMDD.

A map of a line of days (prepare --day) has the "day" that it was made for, its "fingerprint", and
in "grew_from" those of the maps that it grew from, the newest first.

A cell whose text is one of "missing" counts as empty. "format_version" is 2 where a map has any of
the last four kinds, or "missing".

The `fingerprint` of a map is in the dataset.json of the records that it encoded, and in the models
trained on them.

This module needs nothing but Python, so a server can use it as it is.
"""

import bisect
import contextlib
import hashlib
import json
import math
import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from deepfm.records.raw import cells, column_kinds
from deepfm.records.raw.column_kinds import (
    BUCKETS,
    DATASETS,
    HASH,
    HOUR,
    ID,
    LIST,
    MOMENTS,
    NUMBER,
    RANGED,
    SCALED,
    WEEKDAY,
    Column,
)
from deepfm.records.raw.fingerprint import fingerprint64
from deepfm.records.storage import places

FILE = "feature_map.json"
FORMAT_VERSION = 2
STEPS = 10000  # scaled values are multiples of 1 / STEPS
_ANY = ' (kind "category" takes any text)'
_HEADER = 1 << 20  # bytes, in which the first line of a map ends
HOURS = re.compile(r"[0-9]{8}")


class Field(NamedTuple):
    """A field of a map; the module's docstring explains its ids.

    Attributes:
        column: the raw Column, of a kind of column_kinds.RAW except integer, or id.
        first_id: the smallest of its ids, which is the one for a missing cell.
        vocabulary: {text: id}; empty for a kind that has none.
        low: the smallest number of the training rows, of kinds scaled and id and of a number.
        high: the largest.
        bounds: between a number's buckets.
        center, spread: of a number that is a value.
    """

    column: Column
    first_id: int
    vocabulary: Dict[str, int]
    low: float = 0
    high: float = 0
    bounds: Tuple[float, ...] = ()
    center: float = 0.0
    spread: float = 1.0

    @property
    def name(self) -> str:
        """The name of its column."""
        return self.column.name

    @property
    def kind(self) -> str:
        """The kind of its column."""
        return self.column.kind


class FeatureMap(NamedTuple):
    """The content of a feature_map.json; `columns` are all of a row, () for those of DATASETS.

    `grew_from` are the fingerprints of the maps that this one grew from, the newest first.
    """

    dataset: str
    integers: str
    min_count: int
    feature_size: int
    fields: List[Field]
    columns: Tuple[Column, ...] = ()
    missing: Tuple[str, ...] = ()
    grew_from: Tuple[str, ...] = ()
    day: str = ""

    def fingerprint(self) -> str:
        """The `fingerprint` of its fields."""
        return fingerprint(self.fields, self.missing)


def end_of(field: Field) -> int:
    """One past the last id of a field."""
    ids = len(field.vocabulary)
    if field.kind == ID:
        ids = field.high - field.low + 1
    elif field.kind == HASH:
        ids = field.column.buckets
    elif field.kind == NUMBER and not field.column.scale:
        ids = len(field.bounds) + 1
    return field.first_id + 2 + ids


def name_of(field: Field, feature_id: int) -> str:
    """What a feature id stands for: a category, an interval of numbers, a missing cell."""
    number, kind = feature_id - field.first_id - 2, field.kind
    if not -2 <= number < end_of(field) - field.first_id - 2:
        return str(feature_id)  # of another field
    if number < 0:
        has_value = kind == SCALED or kind == NUMBER and field.column.scale
        return "missing" if number == -2 else "a number" if has_value else "rare"
    if kind == NUMBER:
        low, high = [-math.inf, *field.bounds, math.inf][number : number + 2]
        to = "" if high == math.inf else f" to {high:.10g}"
        return f"below {high:.10g}" if low == -math.inf else f"from {low:.10g}{to}"
    if kind in (HASH, ID):
        return f"bucket {number}" if kind == HASH else str(field.low + number)
    return list(field.vocabulary)[number]


def encode_row(feature_map: FeatureMap, cells: Sequence[Any]) -> Tuple[List[int], List[float]]:
    """Encodes a raw row as (ids, values), F of each; `encode_fields` if a field is a list.

    Args:
        feature_map: from `load`.
        cells: the row's fields, in their order, without label and ignored columns: texts, or what
            JSON has (numbers, true, false, null), which stand for the texts that Parquet gives.

    Raises:
        ValueError: the row has the wrong number of cells, one is malformed or is a list or an
            object, or a field is of kind list.
    """
    lists = [field.name for field in feature_map.fields if field.kind == LIST]
    if lists:
        raise ValueError(f"{lists[0]} is a list, so that rows have several ids; use encode_fields")
    pairs = [pair for (pair,) in encode_fields(feature_map, cells)]
    return [i for i, _ in pairs], [value for _, value in pairs]


def encode_fields(feature_map: FeatureMap, cells: Sequence[Any]) -> List[List[Tuple[int, float]]]:
    """The (id, value) pairs of each field of a raw row, F lists; as `encode_row`."""
    if len(cells) != len(feature_map.fields):
        raise ValueError(f"expected {len(feature_map.fields)} cells, found {len(cells)}")
    texts = [cell if isinstance(cell, str) else text_of_json(cell) for cell in cells]
    texts = ["" if text in feature_map.missing else text for text in texts]
    return [_encode_cell(field, text) for field, text in zip(feature_map.fields, texts)]


def text_of_json(cell):
    """The text that a cell other than a string stands for, as parquet_blocks reads it."""
    if cell is None or cell != cell:  # null, NaN
        return ""
    if not isinstance(cell, (int, float)):
        raise ValueError(f"{cell!r:.100} is neither a text nor a number, true, false or null")
    return str(cell if cell % 1 or abs(cell) >= 1e18 else int(cell))


def _encode_cell(field, cell):
    """[(id, value)] of a text."""
    first, kind = field.first_id, field.kind
    if not cell:
        return [(first, 1.0)]
    reason = explain_cell(field.column, cell)
    if reason:
        raise ValueError(f"{field.name} {reason}")
    known = lambda text: field.vocabulary.get(text, first + 1)
    if kind == LIST:
        return [(known(text), x) for text, x in members(field.column, cell)] or [(first, 1.0)]
    if kind == HASH:
        return [(first + 2 + fingerprint64(cell.encode()) % field.column.buckets, 1.0)]
    if kind not in (NUMBER, *RANGED):
        return [(known(text_of(field.column, cell)), 1.0)]
    x = cells.number(cell) if kind == NUMBER else cells.integer(cell)
    if kind == ID:
        return [(first + 1 + (field.low <= x <= field.high) * (1 + x - field.low), 1.0)]
    if kind == NUMBER and not field.column.scale:
        return [(first + 2 + bisect.bisect_right(field.bounds, x), 1.0)]
    return [(first + 1, scaled(field, x))]


def scale_of(field: Field) -> Tuple[bool, float]:
    """(whether a field that holds a value takes the logarithm of numbers, by what it divides)."""
    if field.kind == SCALED:
        return True, math.log1p(max(field.high - field.low, 1))
    return field.column.scale == "log", field.spread


def scaled(field: Field, x: float) -> float:
    """The value of a number in a field that holds one."""
    has_log, spread = scale_of(field)
    x = min(max(x, field.low), field.high)
    x = math.log1p(x - field.low) if has_log else x
    return round(STEPS * ((x - field.center) / spread)) / STEPS


def members(column: Column, cell: str) -> List[Tuple[str, float]]:
    """The (category, weight) pairs of a list; the weight of one that has no number is NaN."""
    texts = (text.strip() for text in cell.split(column.separator))
    texts = [text for text in texts if text][: column.length]
    if not column.weights:
        return [(text, 1.0) for text in texts]
    parts = (text.rpartition(column.weights) for text in texts)
    return [
        (text, _weight(x) if text else math.nan) if mark else (x, 1.0) for text, mark, x in parts
    ]


def _weight(text):
    """The weight that a text says; NaN if it is none, or beyond what a float32 holds."""
    found = cells.number(text)
    return math.nan if found is None or abs(found) > cells.LARGEST_WEIGHT else found


def explain_cell(column: Column, cell: str) -> Optional[str]:
    """What is wrong with a cell that is not empty; None if nothing is."""
    kind = column.kind
    if kind in (BUCKETS, *RANGED) and cells.integer(cell) is None:
        return f"{cell!r:.100} {cells.NO_INTEGER}"
    if kind == NUMBER and cells.number(cell) is None:
        return f"{cell!r:.100} {cells.NO_NUMBER}{_ANY}"
    if kind == HOUR and not column.format and not HOURS.fullmatch(cell):
        return f"{cell!r:.100} is not an hour YYMMDDHH"
    if kind in MOMENTS and column.format and not _local(column, cell):
        return f"{cell!r:.100} is not a time ({cells.FORMATS[column.format]}){_ANY}"
    if kind == LIST and not all(x == x for _, x in members(column, cell)):
        return f"{cell!r:.100} holds a weight that {cells.NO_NUMBER}"
    return None


def text_of(column: Column, cell: str) -> str:
    """The text that represents a cell in the vocabulary."""
    kind = column.kind
    if kind == BUCKETS:
        return bucket_text(bucket(cells.integer(cell)))
    if kind not in MOMENTS:
        return cell
    if not column.format:
        return cell[-2:]
    at = _local(column, cell)
    if kind == WEEKDAY:
        return str(at.isoweekday())
    return at.strftime("%H") if kind == HOUR else f"{at.year:04d}{at.month:02d}{at.day:02d}"


def _local(column, cell):
    """The moment that a cell says, in its column's time zone; None if the calendar has none."""
    at = cells.moment(cell, column.format)
    with contextlib.suppress(OverflowError):  # beyond the years 1 to 9999
        return at and at + cells.offset(column.timezone or "Z")
    return None


def bucket(x: int) -> int:
    """The code of an integer: floor(ln(x)^2) if x > 2, else x - 3, which is negative."""
    if x <= 2:
        return x - 3
    log = math.log(x)
    return math.floor(log * log)


def bucket_text(code: int) -> str:
    """The text of a code from `bucket`, as the winners wrote it."""
    return str(code) if code > 0 else f"SP{code + 3}"


def bucket_code(text: str) -> int:
    """The code that a text stands for; raises ValueError if there is none."""
    return int(text[2:]) - 3 if text.startswith("SP") else int(text)


def fingerprint(fields: Iterable[Field], missing: Sequence[str] = ()) -> str:
    """A hash of everything that decides ids and values, however the map's file is written."""
    digest = hashlib.sha1(json.dumps(missing).encode() if missing else b"")
    for field in fields:
        content = [field.name, field.kind, field.first_id, list(field.vocabulary)]
        content += [field.low, field.high]
        options = field.column.described()
        if len(options) > 2 or field.kind == NUMBER:  # beside name and kind
            content += [field.bounds, field.center, field.spread, options]
        digest.update(json.dumps(content).encode())
    return digest.hexdigest()[:16]


def said(path: str) -> Dict[str, Any]:
    """What the first line of a map says before its fields; {} of one that is not written by us."""
    with places.of(path).open_file(path) as f:
        line, fields, _ = f.read(_HEADER).partition(b', "fields": [\n')
    with contextlib.suppress(ValueError):
        return json.loads(line.decode() + "}") if fields else {}
    return {}


def load(path: str) -> FeatureMap:
    """Reads a feature_map.json; raises ValueError, which names the file, if it is invalid."""
    try:
        parsed = json.loads(places.of(path).content(path).decode())
        if parsed["format_version"] not in range(1, FORMAT_VERSION + 1):
            version = str(parsed["format_version"])[:40]
            raise ValueError(f"format_version is {version}, this program reads {FORMAT_VERSION}")
        feature_map = FeatureMap(*(parsed[name] for name in FeatureMap._fields[:5]))
        feature_map = feature_map._replace(
            columns=tuple(map(column_kinds.of_json, parsed.get("columns", ()))),
            missing=tuple(parsed.get("missing", ())),
            grew_from=tuple(parsed.get("grew_from", ())),
            day=str(parsed.get("day", "")),
        )
        return _checked(feature_map)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{path}: is not a feature map ({reason}).") from error


def _checked(feature_map):
    """The map with Fields; refuses (ValueError) one whose fields or ids do not fit together."""
    columns = feature_map.columns or DATASETS.get(feature_map.dataset)
    if not columns or feature_map.integers not in (BUCKETS, SCALED):
        raise ValueError("unknown dataset or integers")
    column_kinds.check(columns)
    expected = column_kinds.fields(columns, feature_map.integers)
    if [(f["name"], f["kind"]) for f in feature_map.fields] != [x[:2] for x in expected]:
        raise ValueError(f"the fields are not those of {feature_map.dataset}")
    next_id, fields = 1, []
    for column, entry in zip(expected, feature_map.fields):
        known = {key: x for key, x in entry.items() if key in Field._fields}
        field = Field(**{"vocabulary": {}, **known, "column": column})
        field = field._replace(bounds=tuple(field.bounds))
        ids = list(field.vocabulary.values())
        if field.first_id != next_id or ids != list(range(next_id + 2, next_id + 2 + len(ids))):
            raise ValueError(f"the ids of {field.name} are not consecutive")
        if field.kind == BUCKETS:
            for text in field.vocabulary:
                bucket_code(text)
        limit = 1e308 if field.kind == NUMBER else 10**18
        if not -limit < field.low <= field.high < limit or not field.spread > 0:
            raise ValueError(f"low and high of {field.name} are not a range")
        if list(field.bounds) != sorted(set(map(float, field.bounds))):
            raise ValueError(f"the bounds of {field.name} do not ascend")
        next_id = end_of(field)
        fields.append(field)
    if feature_map.feature_size != next_id:
        raise ValueError(f"feature_size is {feature_map.feature_size}, its ids need {next_id}")
    return feature_map._replace(fields=fields)
