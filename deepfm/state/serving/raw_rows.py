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
    CATEGORY,
    DATE,
    HASH,
    ID,
    LIST,
    MOMENTS,
    NUMBER,
    SCALED,
)
from deepfm.runtime.tf import tf
from deepfm.state.serving import cells

v1, v2 = tf.compat.v1, tf.compat.v2

_PLAIN = (CATEGORY, HASH)  # the kinds whose texts are taken as they are
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
            field.name: _vocabulary(field, os.path.join(folder, f"vocabulary_{i}.txt"))
            for i, field in enumerate(known.fields)
        }
        found = [x for x in map(rules.number, known.missing) if x is not None]
        self._missing_numbers = [x for x in found if feature_map.text_of_json(x) in known.missing]
        markers = tf.constant(sorted({"", *known.missing}))
        none = tf.lookup.KeyValueTensorInitializer(markers, tf.zeros_like(markers, tf.bool))
        self._is_text = tf.lookup.StaticHashTable(none, True).lookup

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
        columns = [(x, given[key]) for key, x in self._fields.items() if key in given]
        lists = [x for x in columns if x[0].kind == LIST]
        others = [x for x in columns if x[0].kind != LIST]
        parts, good = {}, []
        if others:
            ids, values, good = self._of_cells(others)
            if not counted:
                return {"feat_ids": ids, "feat_vals": values}, good
            one = tf.ones_like(good, tf.int64)
            apart = (tf.split(x, len(others), axis=1) for x in (ids, values))  # [B, 1] each
            for (field, _), id, value in zip(others, *apart):
                parts[field.name] = id, value, one
            good = [good]
        for field, cell in lists:
            cell = v2.where(self._is_there(cell), cell, "")
            parts[field.name] = self._of_list(field, cell)
            good.append(tf.reduce_all(tf.math.is_finite(parts[field.name][1]), axis=1))
        ids, values, counts = zip(*(parts[field.name] for field, _ in columns))
        filled = [tf.sequence_mask(n, tf.shape(x)[1]) for n, x in zip(counts, ids)]
        there = tf.concat(filled, axis=1)
        packed = lambda parts: tf.ragged.boolean_mask(tf.concat(parts, axis=1), there).to_tensor()
        found = {"feat_ids": packed(ids), "feat_vals": packed(values)}
        found["feat_counts"] = tf.cast(tf.stack(counts, axis=1), tf.int32)
        return found, tf.reduce_all(good, axis=0)

    def _is_there(self, cell):
        """Whether cells are not missing: string or float64 -> bool."""
        if cell.dtype == tf.string:
            return self._is_text(cell)
        there = ~tf.math.is_nan(cell)
        for x in self._missing_numbers:
            there &= tf.not_equal(cell, x)
        return there

    def _of_cells(self, columns):
        """(ids int64 [B, n], values float32 [B, n], bool [B]: no cell is bad) of n columns."""
        alike = {}
        for i, (field, cell) in enumerate(columns):
            x = field.column
            how = cell.dtype, field.kind, bool(x.scale), x.format, x.timezone
            alike.setdefault(how, []).append(i)
        found = [self._of_alike(*zip(*(columns[i] for i in places))) for places in alike.values()]
        ids, values, good = zip(*found)
        whole = lambda parts: tf.transpose(tf.dynamic_stitch(list(alike.values()), parts))
        good = [x for x in good if x is not None] or [tf.ones_like(ids[0], tf.bool)]
        return whole(ids), whole(values), tf.reduce_all(tf.concat(good, axis=0), axis=0)

    def _of_alike(self, fields, columns):
        """(ids int64, values float32, bool or None: which cells are not bad) of columns that are
        read alike, each [C, B]."""
        cell = tf.stack(columns)
        there, said, good = self._is_there(cell), columns, None
        if fields[0].kind not in _PLAIN:
            said = _said(cell, there, fields[0])
            none = {tf.string: "", tf.int64: cells.NONE}.get(said.dtype)
            fine = tf.math.is_finite(said) if none is None else tf.not_equal(said, none)
            good = fine | ~there
        place, value = self._places(fields, said)
        # The first id of a field is for a missing cell, the second for a rare one.
        ids = v2.where(there, place, -2) + (2 + _of_each(fields, "first_id"))
        if value is None:
            return ids, tf.ones_like(ids, tf.float32), good
        value = tf.cast(v2.where(there & fine, value, 1.0), tf.float32)
        return ids, value, good & tf.math.is_finite(value)

    def _places(self, fields, x):
        """(which category of its field a cell is, int64 [C, B]; its value, float64, or None: 1).

        -1 is a rare category, and the only one of fields that have a value.

        Args:
            x: what the cells say, [C, B]; texts that are taken as they are, [B] each.
        """
        kind, low, high = fields[0].kind, _of_each(fields, "low"), _of_each(fields, "high")
        only = tf.constant(-1, tf.int64)
        if kind == SCALED or fields[0].column.scale:
            x = tf.clip_by_value(x, low, high)
            logs, spreads = (np.array([of]).T for of in zip(*map(feature_map.scale_of, fields)))
            if logs.any():
                of_log = tf.math.log1p(tf.cast(x - low, tf.float64))
                x = v2.where(logs, of_log, tf.cast(x, tf.float64))
            return only, _rounded((x - _of_each(fields, "center")) / spreads)
        if kind == NUMBER:
            most = max(len(field.bounds) for field in fields)
            bounds = [[*x.bounds, *[math.inf] * (most - len(x.bounds))] for x in fields]
            bounds = tf.constant(bounds, tf.float64, [len(fields), most])
            x = v2.where(tf.math.is_finite(x), x, 0.0)
            return tf.raw_ops.UpperBound(sorted_inputs=bounds, values=x, out_type=tf.int64), None
        if kind == ID:
            return v2.where((x >= low) & (x <= high), x - low, -1), None
        x = _bucket(x) if kind == BUCKETS else x
        x = x if kind in _PLAIN else tf.unstack(x, len(fields))
        return tf.stack([*map(self._place, fields, x)]), None

    def _place(self, field, x):
        """As `_places`, of texts or codes of a field, int64 [...]."""
        if field.kind == HASH:
            return tf.strings.to_hash_bucket_fast(x, field.column.buckets)
        return self._vocabularies[field.name](x)

    def _of_list(self, field, text):
        """(ids int64 [B, L], values float32 [B, L], how many a list has, int64 [B]); the value of a
        category whose weight is no number is NaN."""
        size = tf.size(text, out_type=tf.int64)
        row, place, text, weight = cells.members(text, field.column)
        number = 2 + self._place(field, text)
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


def _vocabulary(field, path):
    """A function: texts, or codes of buckets -> which categories of a field they are, -1 for a rare
    one. It asks a table that is filled when the exported model is loaded, from a file written here.
    """
    if not field.vocabulary:  # a table cannot be filled by an empty file
        return lambda x: -tf.ones_like(x, tf.int64)
    convert = {DATE: cells.ordinal, BUCKETS: feature_map.bucket_code}.get(field.kind, str)
    dtype = tf.int64 if field.kind == BUCKETS else tf.string
    odd = any("\n" in line or "\r" in line for line in field.vocabulary)
    with open(path, "w", encoding="utf-8", newline="") as f:
        for line in map(convert, field.vocabulary):
            f.write(f"{_in_one_line(line, str.replace) if odd else line}\n")
    whole_line, number = tf.lookup.TextFileIndex.WHOLE_LINE, tf.lookup.TextFileIndex.LINE_NUMBER
    filling = tf.lookup.TextFileInitializer(path, dtype, whole_line, tf.int64, number)
    places = tf.lookup.StaticHashTable(filling, -1).lookup
    return (lambda x: places(_in_one_line(x, tf.strings.regex_replace))) if odd else places


def _in_one_line(text, replace):
    for character, code in _LINE_ENDS:
        text = replace(text, character, code)
    return text


def _said(cell, there, field):
    """What cells say that are read as a field's; none where they are bad."""
    kind, column = field.kind, field.column
    if cell.dtype != tf.string:
        return cell if kind == NUMBER else cells.whole(cell)
    if kind in MOMENTS:
        return cells.moment(cell, kind, column.format, column.timezone)
    return (cells.number if kind == NUMBER else cells.integer)(cell, there)


def _of_each(fields, name):
    return np.array([[getattr(field, name)] for field in fields])  # [C, 1]


def _rounded(x):
    return tf.math.rint(feature_map.STEPS * x) / feature_map.STEPS


def _bucket(x):
    """As feature_map.bucket: int64 -> int64."""
    log = tf.math.log(tf.cast(tf.maximum(x, 3), tf.float64))
    return v2.where(x > 2, tf.cast(tf.floor(log * log), tf.int64), x - 3)
