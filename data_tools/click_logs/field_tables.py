"""A feature map as arrays, which encodes whole blocks; made from counts or a feature_map.json.

feature_map.py explains the ids, and encodes a single row the same way.
"""

import json
from typing import Iterator, List, Optional, Sequence, Tuple

import numpy as np

from data_tools.click_logs import feature_map, row_parser
from data_tools.click_logs.column_kinds import SCALED, Column
from data_tools.click_logs.feature_map import FeatureMap, Field
from data_tools.click_logs.row_parser import LONG, MISSING, Rows
from data_tools.click_logs.vocabulary import Counts
from data_tools.tables.blocks import numpy_of


class FieldTable:
    """The ids of a field.

    Args:
        column: the field's Column.
        first_id: its smallest id.
        keys: uint64 [n], the keys of the vocabulary in the order of the ids; LONG for long texts.
        long: the texts of the keys that are LONG, in their order.
        low, high: the range of a scaled field.
    """

    def __init__(self, column, first_id, keys, long=(), low=0, high=0):
        self.column, self.first_id, self.keys = column, first_id, keys
        self.low, self.high = low, high
        ids = np.arange(first_id + 2, first_id + 2 + len(keys))
        self.long = dict(zip(long, ids[keys == LONG].tolist()))
        known = np.append(keys[keys != LONG], np.uint64(MISSING))
        order = np.argsort(known)
        self._keys, self._ids = known[order], np.append(ids[keys != LONG], first_id)[order]

    @property
    def end(self) -> int:
        """One past its last id."""
        return self.first_id + 2 + len(self.keys)

    def ids(self, keys: np.ndarray, long: Optional[Tuple[np.ndarray, List[bytes]]]) -> np.ndarray:
        """The ids of cells, from their keys, uint64 [B], and (rows, texts) of the LONG ones."""
        import pyarrow as pa

        rare, cells = self.first_id + 1, pa.array(keys).dictionary_encode()
        keys = numpy_of(cells.dictionary, np.uint64)  # those that differ
        places = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        ids = np.where(self._keys[places] == keys, self._ids[places], rare)
        ids = ids[numpy_of(cells.indices, np.int32)]
        if long is not None:
            rows, texts = long
            ids[rows] = [self.long.get(text, rare) for text in texts]
        return ids

    def scaled(self, keys: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """(ids, values float32) of integers from their keys, uint64 [B], as feature_map.scaled."""
        x = np.clip(row_parser.integers_of(keys), self.low, self.high)
        values = np.log1p(x - self.low) / np.log1p(max(self.high - self.low, 1))
        values = np.rint(feature_map.STEPS * values) / feature_map.STEPS
        there = keys != MISSING
        return self.first_id + there, np.where(there, values, 1).astype(np.float32)


def from_counts(
    columns: Sequence[Column], counts: Sequence[Counts], min_count: int
) -> List[FieldTable]:
    """A FieldTable for each field, from the counts of its training rows.

    Ids are in order of falling frequency, ties in order of the text, so that the same rows give the
    same ids.

    Args:
        columns: the Column of each field.
        counts: the Counts of each field.
        min_count: a category that occurs less often is rare.
    """
    tables, first_id = [], 1
    for column, counted in zip(columns, counts):
        if column.kind == SCALED:
            low, high = 0, 0
            if len(counted.keys):
                low, high = row_parser.integers_of(counted.keys[[0, -1]]).tolist()
            table = FieldTable(column, first_id, np.zeros(0, np.uint64), (), low, high)
        else:
            table = FieldTable(column, first_id, *_ranked(counted, min_count))
        tables.append(table)
        first_id = table.end
    return tables


def _ranked(counted, min_count):
    """(keys, long texts) of the categories that are not rare, in the order of the ids."""
    often = counted.counts >= min_count
    keys, counts = counted.keys[often], counted.counts[often]
    long = sorted(text for text, count in counted.long.items() if count >= min_count)
    if not long:
        return keys[np.lexsort((keys, -counts))], []
    texts = np.concatenate([keys.astype(">u8").view("S8"), np.array(long)])
    counts = np.concatenate([counts, [counted.long[text] for text in long]])
    keys = np.concatenate([keys, np.full(len(long), LONG, np.uint64)])
    order = np.lexsort((texts, -counts))
    keys, texts = keys[order], texts[order]
    return keys, texts[keys == LONG].tolist()


def from_map(known: FeatureMap) -> List[FieldTable]:
    """A FieldTable for each field of a map."""
    tables = []
    for field in known.fields:
        texts = [text.encode() for text in field.vocabulary]
        keys = np.array([row_parser.key_of(field.kind, text) for text in texts], np.uint64)
        long = [text for text, key in zip(texts, keys) if key == LONG]
        column = Column(field.name, field.kind)
        tables.append(FieldTable(column, field.first_id, keys, long, field.low, field.high))
    return tables


def encode(rows: Rows, tables: Sequence[FieldTable]) -> Tuple[np.ndarray, np.ndarray]:
    """(ids int64 [B, F], values float32 [B, F]) of the rows of a block."""
    ids = np.empty(rows.keys.shape, np.int64)
    values = np.ones(rows.keys.shape, np.float32)
    for i, (table, keys) in enumerate(zip(tables, rows.keys)):
        if table.column.kind == SCALED:
            ids[i], values[i] = table.scaled(keys)
        else:
            ids[i] = table.ids(keys, rows.long.get(i))
    return np.ascontiguousarray(ids.T), np.ascontiguousarray(values.T)


def unknown(rows: Rows, tables: Sequence[FieldTable], ids: np.ndarray) -> np.ndarray:
    """Whether a cell is there and the map does not know it. bool [B, F].

    Such a cell is rare or new, or outside the range of a scaled field.
    """
    are_unknown = ids == np.array([table.first_id + 1 for table in tables])
    for i, table in enumerate(tables):
        if table.column.kind == SCALED:
            x = row_parser.integers_of(rows.keys[i])
            are_unknown[:, i] &= (x < table.low) | (x > table.high)
    return are_unknown


def json_lines(
    tables: Sequence[FieldTable],
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
        "field_size": len(tables),
        "feature_size": tables[-1].end,
    }
    if columns:
        about["columns"] = [column._asdict() for column in columns]
    yield json.dumps(about)[:-1] + ', "fields": [\n'
    for table in tables:
        yield json.dumps(_described(field_of(table)), ensure_ascii=False)
        yield "\n]}\n" if table is tables[-1] else ",\n"


def field_of(table: FieldTable) -> Field:
    """The table as a Field of a FeatureMap."""
    (name, kind), first_id = table.column, table.first_id
    if kind == SCALED:
        return Field(name, kind, first_id, {}, table.low, table.high)
    texts = np.empty(len(table.keys), object)
    short = table.keys != LONG
    texts[short] = row_parser.texts_of(kind, table.keys[short])
    texts[~short] = [text.decode() for text in table.long]
    vocabulary = dict(zip(texts.tolist(), range(first_id + 2, table.end)))
    return Field(name, kind, first_id, vocabulary)


def _described(field):
    name, kind, first_id, vocabulary, low, high = field
    about = {"name": name, "kind": kind, "first_id": first_id, "missing_id": first_id}
    if kind == SCALED:
        return dict(about, value_id=first_id + 1, low=low, high=high)
    return dict(about, rare_id=first_id + 1, vocabulary=vocabulary)
