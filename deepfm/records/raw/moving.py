"""Which row of a model is whose when another feature map takes the place of the model's.

Rows go by name: those of categories by their texts, all others by what they stand for in their
column. prepare knows that when it makes a map of a line of days, and writes it beside the map, into
feature_map.moves.npz; joining two maps by name takes ten times as long. There are `feature_map`,
the fingerprint of the map, `first`, the first id of each field and the number of ids, int64
[F + 1], and for the last maps of the line FINGERPRINT, the id there of each id, int64 [N], -1 for
none, and FINGERPRINT.first.
"""

import contextlib
import io
import itertools
import operator
import zipfile
from typing import Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from deepfm.errors import BadInput
from deepfm.records.raw import feature_map as maps
from deepfm.records.raw.column_kinds import COUNTED, ID
from deepfm.records.raw.feature_map import FeatureMap, Field
from deepfm.records.storage import places

FILE = "feature_map.moves.npz"
_DAYS = 7  # from whose maps moves are kept


class Move(NamedTuple):
    """Where the rows of a model go. N: ids of the new map.

    Attributes:
        source: int64 [N], the old row that each row is a copy of.
        new: bool [N], whether the old map lacks what the row stands for: it is then a copy of the
            row for the rare categories of its column.
        columns: number of columns with new rows.
        gone: number of old rows that no new one has taken.
        added: number of fresh rows that follow these N.
    """

    source: np.ndarray
    new: np.ndarray
    columns: int
    gone: int
    added: int = 0


def join(old: FeatureMap, new: FeatureMap) -> Move:
    """The Move from one map to another; raises BadInput if these have other columns."""
    source = [[0]]  # id 0 is for padding
    for was, now in itertools.zip_longest(old.fields, new.fields):
        if not (was and now and was.column[:2] == now.column[:2]):
            name, other = (f"{x.name} ({x.kind})" if x else "no column" for x in (now, was))
            raise BadInput(
                f"The data's feature map has {name} where the model's has {other}, so that no row "
                "can be moved; give another --model_dir."
            )
        source.append(old_ids(was, now))
    return _move(np.concatenate(source), first_ids(old.fields), first_ids(new.fields))


def first_ids(fields: Sequence[Field]) -> np.ndarray:
    """The first id of each field, and the number of all ids: int64 [F + 1]."""
    return np.array([*(field.first_id for field in fields), maps.end_of(fields[-1])], np.int64)


def _move(source, was, now):
    """The Move of old ids, -1 for a new one, between maps of such `first_ids`."""
    is_new = source < 0
    field = np.searchsorted(now, np.arange(len(source)), side="right") - 1
    rare = was[np.maximum(field, 0)] + 1
    gone = int(was[-1] - np.count_nonzero(~is_new))
    return Move(np.where(is_new, rare, source), is_new, len(np.unique(field[is_new])), gone)


def old_ids(was: Field, now: Field) -> np.ndarray:
    """The old id of each id of a field, in order; -1 without one. int64."""
    reserved = [was.first_id, was.first_id + 1]
    ranges = [(x.bounds, x.low, x.high, x.center, x.spread) for x in (was, now)]
    if now.kind != ID and ranges[0] != ranges[1]:  # another bucket, or the value of another scale
        size = maps.end_of(now) - now.first_id
        return np.array([was.first_id, was.first_id + 1 if size > 2 else -1] + [-1] * (size - 2))
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


def save(path: str, **arrays):
    """Writes arrays into a new file, which says if it is damaged."""
    with places.of(path).create(path) as f, io.BytesIO() as made:
        np.savez(made, **arrays)
        f.write(made.getbuffer())


@contextlib.contextmanager
def kept(path: str):
    """What `save` has written: {name: array}; BadInput if it is damaged."""
    try:
        with np.load(io.BytesIO(places.of(path).content(path))) as arrays:
            yield arrays
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise BadInput(
            f"{path} is damaged ({type(error).__name__}: {error}); make it again with the feature "
            "map beside it, or delete it."
        ) from error


def write(
    path: str, fingerprint: str, now: np.ndarray, moves: Dict[str, Tuple[np.ndarray, np.ndarray]]
):
    """Writes feature_map.moves.npz.

    Args:
        fingerprint: of the map.
        now: its `first_ids`.
        moves: {fingerprint of another map: (the old id of each id, its first_ids)}.
    """
    arrays = {old: source for old, (source, _) in moves.items()}
    arrays.update((f"{old}.first", first) for old, (_, first) in moves.items())
    save(path, feature_map=fingerprint, first=now, **arrays)


def earlier(path: str, fingerprint: str, source: np.ndarray) -> Dict[str, Tuple]:
    """The `moves` from before a map, by way of it, as far as its feature_map.moves.npz has them.

    Args:
        path, fingerprint: of the file and of that map.
        source: the ids of that map of the new one's.
    """
    if not places.of(path).exists(path):
        return {}
    with kept(path) as arrays:
        if str(arrays["feature_map"]) != fingerprint:
            return {}
        names = [name[: -len(".first")] for name in arrays if name.endswith(".first")]
        there = lambda old: np.where(source < 0, -1, arrays[old][source])
        return {old: (there(old), arrays[f"{old}.first"]) for old in names[: _DAYS - 1]}


def read(path: str, old: str, new: str) -> Optional[Move]:
    """The Move between two maps, of these fingerprints, if feature_map.moves.npz has it."""
    if not places.of(path).exists(path):
        return None
    with kept(path) as arrays:
        if str(arrays["feature_map"]) != new or old not in arrays:
            return None
        return _move(arrays[old], arrays[f"{old}.first"], arrays["first"])
