"""Which row of a model is whose when another feature map takes the place of the model's.

Rows go by name: those of categories by their texts, all others by what they stand for in their
column.
"""

import itertools
import operator
from typing import NamedTuple

import numpy as np

from deepfm.errors import BadInput
from deepfm.records.raw import feature_map as maps
from deepfm.records.raw.column_kinds import COUNTED, ID
from deepfm.records.raw.feature_map import FeatureMap, Field


class Move(NamedTuple):
    """Where the rows of a model go. N: ids of the new map.

    Attributes:
        source: int64 [N], the old row that each row is a copy of.
        new: bool [N], whether the old map lacks what the row stands for: it is then a copy of the
            row for the rare categories of its column.
        columns: number of columns with new rows.
        gone: number of old rows that no new one has taken.
    """

    source: np.ndarray
    new: np.ndarray
    columns: int
    gone: int


def join(old: FeatureMap, new: FeatureMap) -> Move:
    """The Move from one map to another; raises BadInput if these have other columns."""
    source = np.full(new.feature_size, -1, np.int64)
    source[0], rare, columns = 0, np.zeros(new.feature_size, np.int64), 0  # id 0 is for padding
    for was, now in itertools.zip_longest(old.fields, new.fields):
        if not (was and now and was[:2] == now[:2]):
            name, other = (f"{x.name} ({x.kind})" if x else "no column" for x in (now, was))
            raise BadInput(
                f"The data's feature map has {name} where the model's has {other}, so that no row "
                "can be moved; give another --model_dir."
            )
        ids = slice(now.first_id, maps.end_of(now))
        source[ids] = _old_ids(was, now)
        rare[ids] = was.first_id + 1
        columns += bool((source[ids] < 0).any())
    is_new = source < 0
    gone = old.feature_size - int(np.count_nonzero(~is_new))
    return Move(np.where(is_new, rare, source), is_new, columns, gone)


def _old_ids(was: Field, now: Field) -> np.ndarray:
    """The old id of each id of a field, in order; -1 without one. int64."""
    reserved = [was.first_id, was.first_id + 1]
    if (
        now.kind in COUNTED
        and len(was.vocabulary) <= len(now.vocabulary)
        and all(map(operator.eq, was.vocabulary, now.vocabulary))
    ):  # it grew, which saves 10 million look-ups 3 s
        ids = np.arange(len(now.vocabulary)) + was.first_id + 2
        ids[len(was.vocabulary) :] = -1
    elif now.kind in COUNTED:
        known = map(was.vocabulary.get, now.vocabulary, itertools.repeat(-1))
        ids = np.fromiter(known, np.int64, len(now.vocabulary))
    elif now.kind == ID:
        x = np.arange(now.low, now.high + 1)
        inside = (was.low <= x) & (x <= was.high)
        ids = np.where(inside, was.first_id + 2 + x - was.low, -1)
    else:
        ids = np.arange(was.first_id + 2, maps.end_of(was))
        if len(ids) != maps.end_of(now) - now.first_id - 2:
            raise BadInput(
                f"Column {now.name} has another number of buckets in the data's feature map, so "
                "that its rows cannot be moved; give another --model_dir."
            )
    return np.concatenate([reserved, ids])
