"""Encodes whole blocks by the fields of a feature map; makes the fields from counts.

feature_map.py explains the ids, and encodes a single row the same way. The fields here are Fields
whose vocabulary is {key: id}; see row_parser.
"""

import itertools
import json
from typing import Iterator, List, Sequence, Tuple

import numpy as np

from data_tools.click_logs import feature_map, row_parser
from data_tools.click_logs.column_kinds import BUCKETS, ID, RANGED, SCALED, Column
from data_tools.click_logs.feature_map import Field, end_of
from data_tools.click_logs.row_parser import MISSING, Rows
from data_tools.click_logs.vocabulary import Counts
from data_tools.tables.blocks import numpy_of
from deepfm.errors import BadInput
from deepfm.records.schema import MAX_NUMBER


def from_counts(columns: Sequence[Column], counts: Sequence[Counts], min_count: int) -> List[Field]:
    """The Fields, from the counts of their training rows.

    Ids are in order of falling frequency, ties in order of the text, so that the same rows give the
    same ids.

    Args:
        columns: the Column of each field.
        counts: the Counts of each field.
        min_count: a category that occurs less often is rare.
    """
    fields, first_id = [], 1
    for (name, kind, *_), counted in zip(columns, counts):
        often, low, high = [], 0, 0
        if kind not in RANGED:
            keys, numbers, long = counted.frequent(min_count)
            number_of = {**dict(zip(keys.tolist(), numbers.tolist())), **long}
            often = sorted(number_of, key=None if kind == BUCKETS else row_parser.bytes_of)
            often.sort(key=number_of.get, reverse=True)
        elif len(counted.keys):
            low, high = row_parser.integers_of(counted.keys[[0, -1]]).tolist()
        vocabulary = {key: first_id + i for i, key in enumerate(often, 2)}
        field = Field(name, kind, first_id, vocabulary, low, high)
        if end_of(field) > MAX_NUMBER:
            raise BadInput(
                f"column {name}: its ids, {low} to {high}, are too far apart; give it kind "
                '"category".'
            )
        fields.append(field)
        first_id = end_of(field)
    return fields


def from_texts(field: Field) -> Field:
    """A field of a FeatureMap, by the keys of its texts."""
    kind, texts = field.kind, field.vocabulary.items()
    return field._replace(vocabulary={row_parser.key_of(kind, x): i for x, i in texts})


def by_texts(field: Field) -> Field:
    """A field as a FeatureMap has it."""
    texts = row_parser.texts_of(field.kind, field.vocabulary)
    return field._replace(vocabulary=dict(zip(texts, field.vocabulary.values())))


def encode(rows: Rows, fields: Sequence[Field]) -> Tuple[np.ndarray, np.ndarray]:
    """(ids int64 [B, F], values float32 [B, F]) of the rows of a block."""
    ids = np.empty(rows.keys.shape, np.int64)
    values = np.ones(rows.keys.shape, np.float32)
    for i, (field, keys) in enumerate(zip(fields, rows.keys)):
        if field.kind == SCALED:
            ids[i], values[i] = _scaled(field, keys)
        elif field.kind == ID:
            x = row_parser.integers_of(keys)
            inside = (x >= field.low) & (x <= field.high)
            ids[i] = field.first_id + (keys != MISSING) + inside * (1 + x - field.low)
        else:
            ids[i] = _ids(field, keys, *rows.long.get(i, ((), ())))
    return np.ascontiguousarray(ids.T), np.ascontiguousarray(values.T)


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


def _scaled(field, keys):
    """(ids, values float32) of integers from their keys, uint64 [B], as feature_map.scaled."""
    x = np.clip(row_parser.integers_of(keys), field.low, field.high)
    values = np.log1p(x - field.low) / np.log1p(max(field.high - field.low, 1))
    values = np.rint(feature_map.STEPS * values) / feature_map.STEPS
    there = keys != MISSING
    return field.first_id + there, np.where(there, values, 1).astype(np.float32)


def unknown(rows: Rows, fields: Sequence[Field], ids: np.ndarray) -> np.ndarray:
    """Whether a cell is there and the map does not know it. bool [B, F].

    Such a cell is rare or new, or outside the range of a scaled field.
    """
    are_unknown = ids == np.array([field.first_id + 1 for field in fields])
    for i, field in enumerate(fields):
        if field.kind == SCALED:
            x = row_parser.integers_of(rows.keys[i])
            are_unknown[:, i] &= (x < field.low) | (x > field.high)
    return are_unknown


def json_lines(
    fields: Sequence[Field],
    dataset: str,
    integers: str,
    min_count: int,
    columns: Sequence[Column] = (),
) -> Iterator[str]:
    """Yields feature_map.json field by field, because a map may be large; see FeatureMap."""
    about = {
        "format_version": feature_map.FORMAT_VERSION,
        "dataset": dataset,
        "integers": integers,
        "min_count": min_count,
        "field_size": len(fields),
        "feature_size": end_of(fields[-1]),
    }
    if columns:
        about["columns"] = [
            {k: x for k, x in column._asdict().items() if x is not None} for column in columns
        ]
    yield json.dumps(about)[:-1] + ', "fields": [\n'
    for field in fields:
        yield json.dumps(_described(by_texts(field)), ensure_ascii=False)
        yield "\n]}\n" if field is fields[-1] else ",\n"


def _described(field):
    name, kind, first_id, vocabulary, low, high = field
    about = {"name": name, "kind": kind, "first_id": first_id, "missing_id": first_id}
    if kind in RANGED:
        second = "rare_id" if kind == ID else "value_id"
        return dict(about, **{second: first_id + 1}, low=low, high=high)
    return dict(about, rare_id=first_id + 1, vocabulary=vocabulary)
