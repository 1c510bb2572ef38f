"""From the cells of rows to the numbers of records, a block at a time; what is wrong with a row.

B: rows of a block. F: fields. M: the most ids of a row. n: ids of all rows.
"""

from typing import Any, Dict, Optional, Union

import numpy as np

from data_tools.tables import blocks
from data_tools.tables.layouts import Layout, columns
from deepfm.records.codec import Batch, in_rows
from deepfm.records.raw import cells as rules
from deepfm.records.schema import NO_WEIGHT, Schema, explain_id, explain_width, is_weight, normal


def batch(block, layout: Layout, schema: Schema) -> Batch:
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


def cells_of(block, row: int, layout: Layout) -> Union[str, Dict[str, Any]]:
    """{column: cell} of a row of a block, or what is wrong with the row if it has no cells."""
    cells, shown = block.row(row)
    return shown if cells is None else dict(zip([name for name, _ in columns(layout)], cells))


def explain(block, row: int, layout: Layout, schema: Schema) -> Optional[str]:
    """What is wrong with a row of a block, and what was expected; None if nothing is."""
    cells = cells_of(block, row, layout)
    if isinstance(cells, str):
        return cells
    reasons = (f(cells, layout, schema) for f in (_explain_label, _explain_fields, _explain_lists))
    return next(filter(None, reasons), None)


def _explain_label(cells, layout, schema):
    label, weight = layout.label, layout.weight
    if number(cells[label]) not in (-1, 0, 1):
        return f"column {label}: {_shown(cells[label])} is not 0, 1, -1 or +1"
    if weight and not is_weight(number(cells[weight])):
        return f"column {weight}: {_shown(cells[weight])} {NO_WEIGHT}"
    return None


def _explain_fields(cells, layout, schema):
    for field in layout.fields:
        if field.id:
            reason = _explain_id(cells[field.id], field.offset, schema)
        else:
            reason = explain_id(field.offset + schema.id_offset, schema)
        if reason:
            return f"column {field.id or field.value}: {reason}"
        if field.value and not np.isfinite(number(cells[field.value])):
            return f"column {field.value}: {_shown(cells[field.value])} is not a finite number"
    return None


def _explain_id(cell, offset, schema):
    number = rules.integer(_text(cell)) if isinstance(cell, bytes) else cell
    if number is None:
        return f"{_shown(cell)} {rules.NO_INTEGER} (data_tools.prepare encodes raw cells)"
    return explain_id(number + (offset + schema.id_offset if number >= 0 else 0), schema)


def _explain_lists(cells, layout, schema):
    if not layout.ids:
        return None
    ids = cells[layout.ids]
    for name in filter(None, (layout.ids, layout.values, layout.counts)):
        if cells[name] is None:
            return f"column {name}: null is not a list"
    reason = next(filter(None, (_explain_id(x, 0, schema) for x in ids)), None)
    if reason:
        return f"column {layout.ids}: {reason}"
    if layout.values:
        values = cells[layout.values]
        if len(values) != len(ids):
            return f"columns {layout.ids} and {layout.values}: {len(ids)} ids, {len(values)} values"
        bad = [x for x in values if not np.isfinite(number(x))]
        if bad:
            return f"column {layout.values}: {_shown(bad[0])} is not a finite number"
    if layout.counts:
        return _explain_counts(cells[layout.counts], len(ids), layout, schema)
    reason = explain_width(len(ids), schema, "ids", _shown(ids))
    return reason and f"column {layout.ids}: {reason}"


def _explain_counts(counts, ids, layout, schema):
    reason = explain_width(len(counts), schema, "counts", _shown(counts))
    if reason:
        return f"column {layout.counts}: {reason}"
    bad = [x for x in counts if x is None or x < 0]
    if bad:
        return f"column {layout.counts}: {_shown(bad[0])} is not at least 0"
    if sum(counts) != ids:
        return f"columns {layout.ids} and {layout.counts}: {ids} ids, the counts say {sum(counts)}"
    return None


def number(cell) -> np.float32:
    """The number in a cell, NaN if there is none."""
    found = rules.number(_text(cell)) if isinstance(cell, bytes) else cell
    return normal(np.nan if found is None else found)


def _text(cell):
    return cell.decode("utf-8", "replace")


def _shown(cell, limit=60):
    text = "null" if cell is None else repr(_text(cell) if isinstance(cell, bytes) else cell)
    return text if len(text) <= limit else text[: limit - 4] + " ..."
