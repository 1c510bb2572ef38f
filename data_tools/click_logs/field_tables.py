"""Encodes whole blocks by the fields of a feature map; makes the fields from counts.

feature_map.py explains the ids, and encodes a single row the same way. The fields here are Fields
whose vocabulary is {key: id}; see row_parser.
"""

import itertools
import json
import math
from typing import Iterator, List, Sequence, Tuple

import numpy as np

from data_tools.click_logs import row_parser
from data_tools.click_logs.row_parser import MISSING, Rows
from data_tools.click_logs.vocabulary import Counts
from data_tools.tables.blocks import numpy_of
from deepfm.errors import BadInput
from deepfm.records.codec import Batch, in_rows
from deepfm.records.raw import feature_map
from deepfm.records.raw.column_kinds import (
    BUCKETS,
    COUNTED,
    DATASETS,
    HASH,
    ID,
    LIST,
    NUMBER,
    QUANTILES,
    RANGED,
    Column,
    Table,
)
from deepfm.records.raw.feature_map import Field, end_of
from deepfm.records.schema import MAX_NUMBER

_MOST = 1e150  # of a number, so that its square is one


def from_counts(columns: Sequence[Column], counts: Sequence[Counts], min_count: int) -> List[Field]:
    """The Fields, from the counts of their training rows.

    Ids are in order of falling frequency, ties in order of the text, so that the same rows give the
    same ids.

    Args:
        columns: the Column of each field.
        counts: the Counts of each field.
        min_count: a category that occurs less often is rare, where its column does not say another.
    """
    fields, first_id = [], 1
    for column, counted in zip(columns, counts):
        field = Field(column, first_id, {})
        if field.kind in COUNTED:
            often = _often(column, counted, min_count)
            field = field._replace(vocabulary=dict(zip(often, itertools.count(first_id + 2))))
        else:
            field = fitted(field, counted)
        if end_of(field) > MAX_NUMBER:
            raise BadInput(
                f"column {field.name}: its ids, {field.low} to {field.high}, are too far apart; "
                'give it kind "category".'
            )
        fields.append(field)
        first_id = end_of(field)
    return fields


def fitted(field: Field, counted: Counts) -> Field:
    """The Field of a number with the bounds, the range and the scale of some Counts."""
    if field.kind == NUMBER:
        return _number(field, counted)
    if field.kind in RANGED and len(counted.keys):
        low, high = row_parser.integers_of(counted.keys[[0, -1]]).tolist()
        return field._replace(low=low, high=high)
    return field


def _often(column, counted, min_count):
    """The keys of the categories that are not rare, in the order of their ids."""
    keys, numbers, long = counted.frequent(column.min_count or min_count)
    number_of = {**dict(zip(keys.tolist(), numbers.tolist())), **long}
    often = sorted(number_of, key=None if column.kind == BUCKETS else row_parser.bytes_of)
    often.sort(key=number_of.get, reverse=True)
    return often


def _number(field, counted):
    """The Field of a number: its buckets' bounds, or what scales it."""
    column = field.column
    if column.bounds:
        return field._replace(bounds=tuple(map(float, column.bounds)))
    if not len(counted.keys):
        return field
    x = np.clip(row_parser.numbers_of(counted.keys), -_MOST, _MOST)
    low, high = x[[0, -1]].tolist()
    there = counted.counts > 0
    x, counts = x[there], counted.counts[there]
    shares = np.cumsum(counts) / counts.sum()
    quantile = lambda share: x[np.searchsorted(shares, share)]
    if not column.scale:
        n = column.buckets or QUANTILES
        bounds = quantile(np.arange(1, n) / n)
        return field._replace(bounds=tuple(np.unique(bounds[bounds > x[0]]).tolist()))
    if column.scale == "standard":
        mean = math.fsum(x * counts) / int(counts.sum())
        spread = math.sqrt(math.fsum((x - mean) ** 2 * counts) / int(counts.sum()))
    elif column.scale == "robust":
        first, mean, third = quantile(np.array([0.25, 0.5, 0.75])).tolist()
        spread = third - first
    elif column.scale == "minmax":
        mean, spread = low, high - low
    else:
        mean, spread = 0.0, math.log1p(high - low)
    return field._replace(low=low, high=high, center=mean, spread=spread or 1.0)


def from_texts(field: Field) -> Field:
    """A field of a FeatureMap, by the keys of its texts."""
    kind, texts = field.kind, field.vocabulary.items()
    return field._replace(vocabulary={row_parser.key_of(kind, x): i for x, i in texts})


def by_texts(field: Field) -> Field:
    """A field as a FeatureMap has it."""
    texts = row_parser.texts_of(field.kind, field.vocabulary)
    return field._replace(vocabulary=dict(zip(texts, field.vocabulary.values())))


def encode(rows: Rows, fields: Sequence[Field]) -> Tuple[Batch, np.ndarray]:
    """The rows of a block by the fields, and which of their cells the map does not know.

    Returns:
        (their Batch, with counts if a field is a list; bool [B, F], whether a cell is there and is
        rare or new (of a list, one of its categories is), or outside the range of a number that is
        a value).
    """
    shape = len(fields), rows.keys.shape[1]
    ids, values, unknown = (
        np.empty(shape, np.int64),
        np.ones(shape, np.float32),
        np.zeros(shape, bool),
    )
    lists = {}
    for i, (field, keys) in enumerate(zip(fields, rows.keys)):
        there, first = keys != MISSING, field.first_id
        if field.kind == LIST:
            lengths, keys, long, weights = rows.lists[i]
            members = _ids(field, keys, *long)
            lists[i] = lengths, members, weights
            ids[i] = first
            unknown[i, np.repeat(np.arange(shape[1]), lengths)[members == first + 1]] = True
        elif field.kind == HASH:
            ids[i] = first + there + keys.view(np.int64)
        elif field.kind == NUMBER and not field.column.scale:
            x = row_parser.numbers_of(np.where(there, keys, row_parser.ZERO))
            bounds = np.array(field.bounds, np.float64)
            ids[i] = first + there * (2 + np.searchsorted(bounds, x, side="right"))
        elif field.kind in (NUMBER, *RANGED):
            number = row_parser.numbers_of if field.kind == NUMBER else row_parser.integers_of
            x = number(np.where(there, keys, row_parser.ZERO))
            inside = (x >= field.low) & (x <= field.high)
            unknown[i] = there & ~inside
            if field.kind == ID:
                ids[i] = first + there + inside * there * (1 + x - field.low)
            else:
                ids[i], values[i] = first + there, np.where(there, _scaled(field, x), 1)
        else:
            ids[i] = _ids(field, keys, *rows.long.get(i, ((), ())))
            unknown[i] = ids[i] == first + 1
    ids, values = np.ascontiguousarray(ids.T), np.ascontiguousarray(values.T)
    batch = Batch(rows.labels, ids, values, None, rows.weights)
    return _with_lists(batch, lists) if lists else batch, unknown.T


def _with_lists(batch, lists):
    """The Batch where {field: (lengths, ids, values)} of lists replace the id of a missing cell."""
    counts = np.ones(batch.ids.shape, np.int64)
    for i, (lengths, *_) in lists.items():
        counts[:, i] = np.maximum(lengths, 1)
    first = (np.cumsum(counts) - counts.ravel()).reshape(counts.shape)
    ids, values = np.empty(counts.sum(), np.int64), np.empty(counts.sum(), np.float32)
    ids[first], values[first] = batch.ids, batch.values
    for i, (lengths, *of_field) in lists.items():
        place = np.repeat(first[:, i] - (np.cumsum(lengths) - lengths), lengths)
        place += np.arange(len(place))
        ids[place], values[place] = of_field
    lengths = counts.sum(axis=1)
    ids, values = in_rows(lengths, lengths.max(initial=0), ids, values)
    return batch._replace(ids=ids, values=values, counts=counts)


def _scaled(field, x):
    """The values of numbers, as feature_map.scaled."""
    has_log, spread = feature_map.scale_of(field)
    x = np.clip(x, field.low, field.high)
    x = np.log1p(x - field.low) if has_log else x
    return np.rint(feature_map.STEPS * ((x - field.center) / spread)) / feature_map.STEPS


def _ids(field, keys, long_rows, long_texts):
    """The ids of cells, from their keys, uint64 [B], and the rows and texts of the LONG ones."""
    import pyarrow as pa

    cells = pa.array(keys).dictionary_encode()
    keys = numpy_of(cells.dictionary, np.uint64)  # those that differ
    known, rare = field.vocabulary.get, field.first_id + 1
    ids = np.fromiter(map(known, keys.tolist(), itertools.repeat(rare)), np.int64, len(keys))
    ids = np.where(keys == MISSING, field.first_id, ids)[numpy_of(cells.indices, np.int32)]
    if len(long_rows):
        ids[long_rows] = [known(text, rare) for text in long_texts]
    return ids


def json_lines(
    fields: Sequence[Field], table: Table, integers: str, min_count: int, **line
) -> Iterator[str]:
    """Yields feature_map.json field by field, because a map may be large; see FeatureMap."""
    new = any(len(f.column.described()) > 2 or f.kind == NUMBER for f in fields)
    about = {
        "format_version": 2 if new or table.missing else 1,
        "dataset": table.name,
        "integers": integers,
        "min_count": min_count,
        "field_size": len(fields),
        "feature_size": end_of(fields[-1]),
    }
    if table.name not in DATASETS:
        about["columns"] = [column.described() for column in table.columns]
    about.update({"missing": table.missing} if table.missing else {}, **line)
    yield json.dumps(about)[:-1] + ', "fields": [\n'
    for field in fields:
        yield json.dumps(_described(by_texts(field)), ensure_ascii=False)
        yield "\n]}\n" if field is fields[-1] else ",\n"


def _described(field):
    first, kind = field.first_id, field.kind
    about = {"name": field.name, "kind": kind, "first_id": first, "missing_id": first}
    if kind == HASH or kind == NUMBER and not field.column.scale:
        return dict(about, **({} if kind == HASH else {"bounds": field.bounds}))
    if kind == NUMBER:
        more = {"center": field.center, "spread": field.spread}
        return dict(about, value_id=first + 1, low=field.low, high=field.high, **more)
    if kind in RANGED:
        second = "rare_id" if kind == ID else "value_id"
        return dict(about, **{second: first + 1}, low=field.low, high=field.high)
    return dict(about, rare_id=first + 1, vocabulary=field.vocabulary)
