"""Reads the rows of tables with encoded ids as the converter reads lines.

A block of rows becomes numbers of records at once; what is wrong with a row is said by its cells.
Needs neither TensorFlow nor absl, which Spark's executors lack.

B: rows of a block. F: fields. M: the most ids of a row. n: ids of all rows.
"""

import dataclasses
from typing import Any, Dict, Iterator, Optional, Union

import numpy as np

from data_tools.tables import blocks, reading
from data_tools.tables.layouts import Layout, columns
from data_tools.tables.reading import Part
from deepfm.records.codec import Batch, in_rows
from deepfm.records.raw import cells as rules
from deepfm.records.schema import NO_WEIGHT, Schema, explain_id, explain_width, is_weight, normal


@dataclasses.dataclass(frozen=True)
class RowReader:
    """Reads rows whose columns are a Layout; its methods do what those of pieces.LineReader do."""

    layout: Layout
    what = "id"

    def read(self, part: Part) -> Iterator:
        return reading.read(part)

    def count(self, part: Part, schema: Schema) -> Iterator:
        lists = schema.pad and self.layout.ids  # whose lengths are the rows' fields
        if hasattr(part, "groups") and not lists:  # the file says it
            rows = part.end - part.begin
            yield part.bytes * rows // part.rows, None, (rows, 0)
            return
        for size, block in reading.read(part):
            yield size, None, (len(block), block.longest(lists) if lists else 0)

    def records(self, block, schema: Schema) -> Iterator:
        batch = lambda some: _batch(some, self.layout, schema)
        return blocks.sifted(block, batch, lambda some, row: self.explain(some, row, schema))

    def explain(self, block, row: int, schema: Schema) -> Optional[str]:
        cells = self._cells(block, row)
        return cells if isinstance(cells, str) else next(_faults(cells, self.layout, schema), None)

    def fields(self, block, row: int) -> int:
        cells, lists = self._cells(block, row), self.layout.counts or self.layout.ids
        return 0 if isinstance(cells, str) else len(cells[lists] or ())

    def label(self, block, row: int) -> bytes:
        return b"%d" % int(_number(self._cells(block, row)[self.layout.label]))

    def _cells(self, block, row) -> Union[str, Dict[str, Any]]:
        """{column: cell} of a row, or what is wrong with it if it has no cells."""
        cells, shown = block.row(row)
        return shown if cells is None else dict(zip([x for x, _ in columns(self.layout)], cells))


def _batch(block, layout, schema) -> Batch:
    """The Batch of a block, its labels -1, 0 or 1; raises BadRows if a row is bad."""
    labels = normal(block.numbers(layout.label))
    _check(np.isin(labels, (-1, 0, 1)))
    weights = blocks.weights(block.numbers(layout.weight)) if layout.weight else None
    make = _of_lists if layout.ids else _of_fields
    return Batch(labels, *make(block, layout, schema), weights)


def _check(good):
    if not good.all():
        raise blocks.BadRows


def _ids(found, offset, schema):
    """The ids that are stored for those of a column. int64."""
    ids = found.astype(np.int64)
    _check(ids >= 0)  # before the offset could lift it; a large uint64 is negative, too
    ids = ids + np.int64(offset) if offset else ids
    _check((ids >= int(schema.pad)) & (ids < schema.limit))
    return ids


def _values(found):
    values = normal(found)
    _check(np.isfinite(values))
    return values


def _of_fields(block, layout, schema):
    """(ids int64 [B, F], values float32 [B, F], None) of fields that have columns of their own."""
    shape = len(block), len(layout.fields)
    ids, values = np.empty(shape, np.int64), np.ones(shape, np.float32)
    for i, field in enumerate(layout.fields):
        found = block.integers(field.id) if field.id else np.zeros(len(block), np.int64)
        ids[:, i] = _ids(found, field.offset + schema.id_offset, schema)
        if field.value:
            values[:, i] = _values(block.numbers(field.value))
    return ids, values, None


def _of_lists(block, layout, schema):
    """(ids int64 [B, M], values float32 [B, M], counts int64 [B, F] or None) of lists."""
    found, lengths = block.lists(layout.ids)  # [n], [B]
    ids, counts = _ids(found, schema.id_offset, schema), None
    values = np.ones(len(ids), np.float32)
    if layout.values:
        found, others = block.lists(layout.values)
        _check(others == lengths)
        values = _values(found)
    width = schema.field_size
    if layout.counts:
        found, others = block.lists(layout.counts)
        _check(others == width)
        counts = found.astype(np.int64).reshape(-1, width)
        _check((counts >= 0) & (counts <= lengths[:, np.newaxis]))  # or a sum might overflow
        _check(counts.sum(axis=1) == lengths)
        width = int(lengths.max(initial=0))
    elif not schema.pad:
        _check(lengths == width)
    _check(lengths <= width)
    return (*in_rows(lengths, width, ids, values), counts)


def _faults(cells, layout, schema) -> Iterator[str]:
    """Yields what is wrong with a row; where something is, what comes behind it has no meaning."""
    if _number(cells[layout.label]) not in (-1, 0, 1):
        yield f"column {layout.label}: {_shown(cells[layout.label])} is not 0, 1, -1 or +1"
    if layout.weight and not is_weight(_number(cells[layout.weight])):
        yield f"column {layout.weight}: {_shown(cells[layout.weight])} {NO_WEIGHT}"
    for field in layout.fields:
        cell = cells[field.id] if field.id else 0
        yield from _faults_of_ids(field.id or field.value, [cell], field.offset, schema)
        if field.value:
            yield from _faults_of_values(field.value, [cells[field.value]])
    if layout.ids:
        yield from _faults_of_lists(cells, layout, schema)


def _faults_of_ids(name, ids, offset, schema):
    for cell in ids:
        found = rules.integer(_text(cell)) if isinstance(cell, bytes) else cell
        if found is None:
            what = f"{_shown(cell)} {rules.NO_INTEGER} (data_tools.prepare encodes raw cells)"
        else:
            what = explain_id(found + (offset + schema.id_offset) * (found >= 0), schema)
        if what:
            yield f"column {name}: {what}"


def _faults_of_values(name, values):
    for cell in values:
        if not np.isfinite(_number(cell)):
            yield f"column {name}: {_shown(cell)} is not a finite number"


def _faults_of_lists(cells, layout, schema):
    for name in filter(None, (layout.ids, layout.values, layout.counts)):
        if cells[name] is None:
            yield f"column {name}: null is not a list"
    ids = cells[layout.ids]
    yield from _faults_of_ids(layout.ids, ids, 0, schema)
    if layout.values:
        values = cells[layout.values]
        if len(values) != len(ids):
            yield f"columns {layout.ids} and {layout.values}: {len(ids)} ids, {len(values)} values"
        yield from _faults_of_values(layout.values, values)
    name, what = (layout.counts, "counts") if layout.counts else (layout.ids, "ids")
    width = explain_width(len(cells[name]), schema, what, _shown(cells[name]))
    if width:
        yield f"column {name}: {width}"
    if layout.counts:
        counts = cells[layout.counts]
        for x in counts:
            if x is None or x < 0:
                yield f"column {layout.counts}: {_shown(x)} is not at least 0"
        if sum(counts) != len(ids):
            what = f"{len(ids)} ids, the counts say {sum(counts)}"
            yield f"columns {layout.ids} and {layout.counts}: {what}"


def _number(cell) -> np.float32:
    """The number in a cell, NaN if there is none."""
    found = rules.number(_text(cell)) if isinstance(cell, bytes) else cell
    return normal(np.nan if found is None else found)


def _text(cell):
    return cell.decode("utf-8", "replace")


def _shown(cell, limit=60):
    text = "null" if cell is None else repr(_text(cell) if isinstance(cell, bytes) else cell)
    return text if len(text) <= limit else text[: limit - 4] + " ..."
