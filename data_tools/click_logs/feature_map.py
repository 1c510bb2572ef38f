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

The `fingerprint` of a map is in the dataset.json of the records that it encoded, and in the models
trained on them.

This module needs nothing but Python, so a server can use it as it is.
"""

import hashlib
import json
import math
import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from data_tools.click_logs import column_kinds
from data_tools.click_logs.column_kinds import BUCKETS, DATASETS, HOUR, ID, RANGED, SCALED, Column
from deepfm.records.storage import places

FILE = "feature_map.json"
FORMAT_VERSION = 1
STEPS = 10000  # scaled values are multiples of 1 / STEPS
INTEGER = re.compile(r"-?[0-9]{1,18}")
HOURS = re.compile(r"[0-9]{8}")


class Field(NamedTuple):
    """A field of a map; the module's docstring explains its ids.

    Attributes:
        name: the name of the raw column.
        kind: category, hour, buckets, id or scaled.
        first_id: the smallest of its ids, which is the one for a missing cell.
        vocabulary: {text: id}; empty for a scaled field, or one of ids.
        low: the smallest integer of these.
        high: the largest.
    """

    name: str
    kind: str
    first_id: int
    vocabulary: Dict[str, int]
    low: int = 0
    high: int = 0


class FeatureMap(NamedTuple):
    """The content of a feature_map.json; `columns` are all of a row, () for those of DATASETS."""

    dataset: str
    integers: str
    min_count: int
    feature_size: int
    fields: List[Field]
    columns: Tuple[Column, ...] = ()


def end_of(field: Field) -> int:
    """One past the last id of a field."""
    ids = field.high - field.low + 1 if field.kind == ID else len(field.vocabulary)
    return field.first_id + 2 + ids


def encode_row(feature_map: FeatureMap, cells: Sequence[Any]) -> Tuple[List[int], List[float]]:
    """Encodes a raw row as (ids, values), F of each.

    Args:
        feature_map: from `load`.
        cells: the row's fields, in their order, without label and ignored columns: texts, or what
            JSON has (numbers, true, false, null), which stand for the texts that Parquet gives.

    Raises:
        ValueError: the row has the wrong number of cells, an integer or hour is malformed, or a
            cell is a list or an object.
    """
    if len(cells) != len(feature_map.fields):
        raise ValueError(f"expected {len(feature_map.fields)} cells, found {len(cells)}")
    texts = [cell if isinstance(cell, str) else _text_of_json(cell) for cell in cells]
    pairs = [_encode_cell(field, text) for field, text in zip(feature_map.fields, texts)]
    return [i for i, _ in pairs], [value for _, value in pairs]


def _text_of_json(cell):
    """The text that a cell other than a string stands for, as parquet_blocks reads it."""
    if cell is None or cell != cell:  # null, NaN
        return ""
    if not isinstance(cell, (int, float)):
        raise ValueError(f"{cell!r:.100} is neither a text nor a number, true, false or null")
    return str(cell if cell % 1 or abs(cell) >= 1e18 else int(cell))


def _encode_cell(field, cell):
    if not cell:
        return field.first_id, 1.0
    reason = explain_cell(field.kind, cell)
    if reason:
        raise ValueError(f"{field.name} {reason}")
    if field.kind == SCALED:
        return field.first_id + 1, scaled(int(cell), field.low, field.high)
    if field.kind == ID:
        inside = field.low <= int(cell) <= field.high
        return field.first_id + 1 + inside * (1 + int(cell) - field.low), 1.0
    return field.vocabulary.get(text_of(field.kind, cell), field.first_id + 1), 1.0


def explain_cell(kind: str, cell: str) -> Optional[str]:
    """What is wrong with a cell that is not empty; None if nothing is."""
    if kind in (BUCKETS, *RANGED) and not INTEGER.fullmatch(cell):
        return f"{cell!r} is not an integer of at most 18 digits"
    if kind == HOUR and not HOURS.fullmatch(cell):
        return f"{cell!r} is not an hour YYMMDDHH"
    return None


def text_of(kind: str, cell: str) -> str:
    """The text that represents a cell in the vocabulary."""
    if kind == BUCKETS:
        return bucket_text(bucket(int(cell)))
    return cell[-2:] if kind == HOUR else cell


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


def scaled(x: int, low: int, high: int) -> float:
    """Scales an integer to a value in [0, 1]."""
    x = min(max(x, low), high)
    return round(STEPS * math.log1p(x - low) / math.log1p(max(high - low, 1))) / STEPS


def fingerprint(fields: Iterable[Field]) -> str:
    """A hash of everything that decides ids and values, however the map's file is written."""
    digest = hashlib.sha1()
    for field in fields:
        content = field._replace(vocabulary=list(field.vocabulary))
        digest.update(json.dumps(content).encode())
    return digest.hexdigest()[:16]


def load(path: str) -> FeatureMap:
    """Reads a feature_map.json; raises ValueError, which names the file, if it is invalid."""
    try:
        parsed = json.loads(places.of(path).content(path).decode())
        if parsed["format_version"] != FORMAT_VERSION:
            version = str(parsed["format_version"])[:40]
            raise ValueError(f"format_version is {version}, this program reads {FORMAT_VERSION}")
        feature_map = FeatureMap(*(parsed[name] for name in FeatureMap._fields[:-1]))
        columns = tuple(Column(**column) for column in parsed.get("columns", ()))
        feature_map = feature_map._replace(columns=columns)
        known = [{k: v for k, v in f.items() if k in Field._fields} for f in feature_map.fields]
        feature_map = feature_map._replace(fields=[Field(**{"vocabulary": {}, **f}) for f in known])
        _check(feature_map)
        return feature_map
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise ValueError(f"{path}: is not a feature map ({reason}).") from error


def _check(feature_map):
    """Refuses (ValueError) a map whose fields or ids do not fit together."""
    columns = feature_map.columns or DATASETS.get(feature_map.dataset)
    if not columns or feature_map.integers not in (BUCKETS, SCALED):
        raise ValueError("unknown dataset or integers")
    column_kinds.check(columns)
    expected = column_kinds.fields(columns, feature_map.integers)
    if [(f.name, f.kind) for f in feature_map.fields] != [column[:2] for column in expected]:
        raise ValueError(f"the fields are not those of {feature_map.dataset}")
    next_id = 1
    for field in feature_map.fields:
        ids = list(field.vocabulary.values())
        if field.first_id != next_id or ids != list(range(next_id + 2, next_id + 2 + len(ids))):
            raise ValueError(f"the ids of {field.name} are not consecutive")
        if field.kind == BUCKETS:
            for text in field.vocabulary:
                bucket_code(text)
        if not -(10**18) < field.low <= field.high < 10**18:
            raise ValueError(f"low and high of {field.name} are not a range")
        next_id = end_of(field)
    if feature_map.feature_size != next_id:
        raise ValueError(f"feature_size is {feature_map.feature_size}, its ids need {next_id}")
