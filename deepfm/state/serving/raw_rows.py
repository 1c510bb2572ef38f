"""Raw rows in an exported model: their ids and values, as feature_map.encode_fields gives them.

Each vocabulary is a text file among the assets of the export, a category a line, in the order of
the ids. `cells` reads what is no category.

B: rows. C: columns that are read alike. L: the most categories of a list in the batch.
"""

import keyword
import math
import os
import re
from typing import Dict, List, Sequence, Tuple

import numpy as np

from deepfm.records.raw import cells as rules
from deepfm.records.raw import feature_map
from deepfm.records.raw.column_kinds import (
    BUCKETS,
    DATE,
    HASH,
    ID,
    INTEGER,
    LIST,
    MOMENTS,
    NUMBER,
    RANGED,
    SCALED,
)
from deepfm.runtime.tf import tf
from deepfm.state.serving import cells

v1, v2 = tf.compat.v1, tf.compat.v2

_NUMBERS = (NUMBER, BUCKETS, SCALED)  # the kinds that typed rows hold as numbers
_LINE_ENDS = ("%", "%25"), ("\n", "%0A"), ("\r", "%0D")


class RawRows:
    """Encodes raw rows with the ids of a feature map.

    Args:
        known: the FeatureMap.
        folder: a local one, for the files of the vocabularies until the model is saved.
        items: the numbers of the fields of items, where requests hold many items for a user.
    """

    def __init__(self, known: feature_map.FeatureMap, folder: str, items: Sequence[int] = ()):
        self.items = sorted(set(items))
        self._fields = dict(zip(inputs_of([x.name for x in known.fields]), known.fields))
        self._vocabularies = {
            field.name: _Vocabulary(field, os.path.join(folder, f"vocabulary_{i}.txt"))
            for i, field in enumerate(known.fields)
        }
        found = [x for x in map(rules.number, known.missing) if x is not None]
        self._missing_numbers = [x for x in found if feature_map.text_of_json(x) in known.missing]
        self._is_missing = lambda text: tf.equal(text, "")
        if known.missing:
            entries = tf.constant(known.missing), tf.ones([len(known.missing)], tf.int64)
            entries = tf.lookup.KeyValueTensorInitializer(*entries)
            markers = tf.lookup.StaticHashTable(entries, 0)
            self._is_missing = lambda text: tf.equal(text, "") | (markers.lookup(text) > 0)

    def inputs(self, typed: bool = False) -> Dict[str, tf.Tensor]:
        """{input: a placeholder of a column's cells}: their texts, string [B].

        Args:
            typed: whether columns of numbers are float64 [B] instead, NaN being a missing cell.
        """
        dtype = lambda field: tf.float64 if typed and field.kind in _NUMBERS else tf.string
        return {key: v1.placeholder(dtype(x), [None]) for key, x in self._fields.items()}

    def inputs_of_candidates(self) -> Tuple[Dict[str, tf.Tensor], Dict[str, tf.Tensor]]:
        """(the inputs of the user's columns, string [1]; those of the items', string [N])."""
        user, items = {}, {}
        for i, key in enumerate(self._fields):
            rows, inputs = (None, items) if i in self.items else (1, user)
            inputs[key] = v1.placeholder(tf.string, [rows])
        return user, items

    def encode(self, given: Dict[str, tf.Tensor], counted: bool) -> Tuple[dict, tf.Tensor]:
        """(the features of the model; bool [B], the rows without a bad cell).

        Args:
            given: {input: cells}, as `inputs`; of all fields, or of those that the features have.
            counted: whether the features shall have feat_counts.
        """
        read, parts, good = self._read(given), {}, []
        lists = [x for x in read if x[0].kind == LIST]
        others = [x for x in read if x[0].kind != LIST]
        if others:
            ids, values, good = self._of_cells(others)
            if not counted:
                return {"feat_ids": ids, "feat_vals": values}, good
            one = tf.ones_like(good, tf.int64)
            columns = (tf.split(x, len(others), axis=1) for x in (ids, values))  # [B, 1] each
            for (field, *_), id, value in zip(others, *columns):
                parts[field.name] = id, value, one
            good = [good]
        for field, _, _, cell in lists:
            parts[field.name] = self._of_list(field, cell)
            good.append(tf.reduce_all(tf.math.is_finite(parts[field.name][1]), axis=1))
        ids, values, counts = zip(*(parts[field.name] for field, *_ in read))
        filled = [tf.sequence_mask(n, tf.shape(x)[1]) for n, x in zip(counts, ids)]
        found = {"feat_ids": tf.concat(ids, axis=1), "feat_vals": tf.concat(values, axis=1)}
        found = _without_gaps(found, tf.concat(filled, axis=1))
        found["feat_counts"] = tf.cast(tf.stack(counts, axis=1), tf.int32)
        return found, tf.reduce_all(good, axis=0)

    def _read(self, given):
        """[(a Field, which cells are there, which are fine if so, what they say, each [B])]."""
        alike, fields = {}, {key: x for key, x in self._fields.items() if key in given}
        for key, field in fields.items():
            options = field.column.format, field.column.timezone
            alike.setdefault((given[key].dtype, _kind_to_read(field), *options), []).append(key)
        found = {}
        for (dtype, kind, how, timezone), columns in alike.items():
            cell = tf.stack([given[key] for key in columns])  # [C, B]
            if dtype == tf.string:
                there = ~self._is_missing(cell)
                cell = _said(v2.where(there, cell, ""), kind, how, timezone)
            else:
                there = ~tf.math.is_nan(cell)
                for x in self._missing_numbers:
                    there &= tf.not_equal(cell, x)
                cell = cells.whole(cell) if kind == INTEGER else cell
            none = {tf.string: "", tf.int64: cells.NONE}.get(cell.dtype)
            fine = tf.math.is_finite(cell) if none is None else tf.not_equal(cell, none)
            rows = zip(*(tf.unstack(x, len(columns)) for x in (there, fine, cell)))
            found.update(zip(columns, rows))
        return [(field, *found[key]) for key, field in fields.items()]

    def _of_cells(self, read):
        """(ids int64 [B, n], values float32 [B, n], bool [B]: no cell is bad) of n columns."""
        fields, there, fine, said = zip(*read)
        numbers, values = zip(*map(self._of_cell, fields, said))
        there, fine, number = (tf.stack(x, axis=1) for x in (there, fine, numbers))
        one = tf.ones_like(numbers[0], tf.float64)
        value = tf.stack([one if x is None else x for x in values], axis=1)
        value = tf.cast(v2.where(there & fine, value, 1.0), tf.float32)
        ids = v2.where(there, number, 0) + np.array([field.first_id for field in fields])
        return ids, value, tf.reduce_all((fine | ~there) & tf.math.is_finite(value), axis=1)

    def _of_cell(self, field, x):
        """(which of its field's ids a cell has, int64 [B]; its value, float64 [B], or None: 1)."""
        kind, column = field.kind, field.column
        if kind == SCALED:
            x = tf.cast(tf.clip_by_value(x, field.low, field.high) - field.low, tf.float64)
            return tf.ones_like(x, tf.int64), _rounded(
                tf.math.log1p(x) / math.log1p(max(field.high - field.low, 1))
            )
        if kind == NUMBER and column.scale:
            x = tf.clip_by_value(x, field.low, field.high)
            scaled = tf.math.log1p(x - field.low) if column.scale == "log" else x
            scaled = (scaled - field.center) / field.spread
            return tf.ones_like(x, tf.int64), _rounded(scaled)
        if kind == NUMBER:
            bounds = tf.constant([field.bounds], tf.float64, [1, len(field.bounds)])
            number = tf.raw_ops.UpperBound(
                sorted_inputs=bounds, values=x[tf.newaxis], out_type=tf.int64
            )
            return 2 + number[0], None
        if kind == ID:
            inside = (x >= field.low) & (x <= field.high)
            return v2.where(inside, 2 + x - field.low, 1), None
        if kind == HASH:
            return 2 + tf.strings.to_hash_bucket_fast(x, column.buckets), None
        x = _bucket(x) if kind == BUCKETS else x
        return self._vocabularies[field.name].numbers(x), None

    def _of_list(self, field, text):
        """(ids int64 [B, L], values float32 [B, L], how many a list has, int64 [B]); the value of a
        category whose weight is no number is NaN."""
        size = tf.size(text, out_type=tf.int64)
        row, place, text, weight = cells.members(text, field.column)
        number = self._vocabularies[field.name].numbers(text)
        longest = tf.reduce_max(tf.concat([place, [0]], axis=0)) + 1
        at, shape = tf.stack([row, place], axis=1), tf.stack([size, longest])
        number, weight = (tf.scatter_nd(at, x, shape) for x in (number, weight))
        count = tf.math.unsorted_segment_sum(tf.ones_like(row), row, size)
        value = tf.cast(v2.where(number > 0, weight, 1.0), tf.float32)
        return field.first_id + number, value, tf.maximum(count, 1)


def inputs_of(columns: Sequence[str]) -> List[str]:
    """The names of the inputs for some columns: theirs, changed where TensorFlow 2.x, in which they
    are arguments of a Python function, would refuse them."""
    found = []
    for name in columns:
        key = name if name.isidentifier() else re.sub("[^0-9A-Za-z_]", "_", name)
        key = key if key[0].isalpha() else f"column_{key.lstrip('_')}"
        key += "_" * (keyword.iskeyword(key) or key == "self")
        while key in found or key != name and key in columns:
            key += "_"
        found.append(key)
    return found


class _Vocabulary:
    """The categories of a field, in a table that is filled when the exported model is loaded.

    Args:
        field: the Field.
        path: of the file to write.
    """

    def __init__(self, field, path):
        self._table = None
        if not field.vocabulary:  # a table cannot be filled by an empty file
            return
        convert = {DATE: cells.ordinal, BUCKETS: feature_map.bucket_code}.get(field.kind, str)
        dtype = tf.int64 if field.kind == BUCKETS else tf.string
        self._odd = any("\n" in line or "\r" in line for line in field.vocabulary)
        with open(path, "w", encoding="utf-8", newline="") as f:
            for line in map(convert, field.vocabulary):
                f.write(f"{_in_one_line(line, str.replace) if self._odd else line}\n")
        whole_line, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
        filling = tf.lookup.TextFileInitializer(path, dtype, whole_line, tf.int64, number)
        self._table = tf.lookup.StaticHashTable(filling, -1)

    def numbers(self, text):
        """Which of its field's ids texts have, or codes of buckets; 1 is that of a rare one."""
        if not self._table:
            return tf.ones_like(text, tf.int64)
        return 2 + self._table.lookup(
            _in_one_line(text, tf.strings.regex_replace) if self._odd else text
        )


def _in_one_line(text, replace):
    for character, code in _LINE_ENDS:
        text = replace(text, character, code)
    return text


def _kind_to_read(field):
    if field.kind in (BUCKETS, *RANGED):
        return INTEGER
    return field.kind if field.kind in (NUMBER, *MOMENTS) else None


def _said(text, kind, how, timezone):
    """What the texts of cells say, which is none where they are bad."""
    if kind in MOMENTS:
        return cells.moment(text, kind, how, timezone)
    return {NUMBER: cells.number, INTEGER: cells.integer}.get(kind, tf.identity)(text)


def _rounded(x):
    return tf.math.rint(feature_map.STEPS * x) / feature_map.STEPS


def _bucket(x):
    """As feature_map.bucket: int64 -> int64."""
    log = tf.math.log(tf.cast(tf.maximum(x, 3), tf.float64))
    return v2.where(x > 2, tf.cast(tf.floor(log * log), tf.int64), x - 3)


def _without_gaps(features, there):
    """The features, each [B, n], with those that are there moved to the left: [B, M]."""
    lengths = tf.reduce_sum(tf.cast(there, tf.int64), axis=1)
    longest = tf.reduce_max(tf.concat([lengths, [0]], axis=0))
    at = tf.where(tf.sequence_mask(lengths, longest))
    shape = tf.stack([tf.size(lengths, out_type=tf.int64), longest])
    return {
        name: tf.scatter_nd(at, tf.boolean_mask(x, there), shape) for name, x in features.items()
    }
