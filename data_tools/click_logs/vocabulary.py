"""Counts how often each category of each field occurs, and merges the counts.

The counts of a field are {key: count}, without missing cells; see row_parser. Of a scaled field
and one of ids, only the smallest and the largest key are there. Merging is exact: the counts of
several processes, in any order, add up to those of one.
"""

import collections
import itertools
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence

import numpy as np

from data_tools.click_logs.column_kinds import RANGED, Column
from data_tools.click_logs.row_parser import LONG, MISSING, Key
from data_tools.tables.blocks import numpy_of
from deepfm.errors import BadInput

Counts = Dict[Key, int]


class Room(NamedTuple):
    """The memory that a vocabulary may take; its checks raise BadInput before that is full.

    The bytes of a value were measured at the peak, with 1,000,000 to 4,000,000 values in one field
    and spread over several.

    Attributes:
        bytes: how many there are.
        num_workers: processes beside this one.
        advice: how to get more.
    """

    bytes: int
    num_workers: int
    advice: str

    def check_counting(self, values: int, letters: int):
        """Checks what counting takes: the distinct values of all fields, and their letters."""
        needed = 150 * values + letters
        if needed > self.bytes:
            raise BadInput(
                f"{values:,} distinct values so far need {self._of(needed)}; {self.advice}. "
                "--min_count drops values only when all are counted."
            )

    def check_ids(self, counts: Sequence[Counts], min_count: int):
        """Checks what the fields' ids and feature_map.json take, once all is counted."""
        numbers = (np.fromiter(field.values(), np.int64, len(field)) for field in counts)
        often = [int(np.count_nonzero(found >= min_count)) for found in numbers]
        needed = 110 * sum(map(len, counts))
        needed += sum(len(key) for field in counts for key in field if type(key) is bytes)
        # A process that looks up texts gets copies of them: that changes their reference counts.
        needed += 160 * sum(often) * (1 + self.num_workers) + 250 * max(often)
        if needed > self.bytes:
            raise BadInput(
                f"ids for {sum(often):,} distinct values need {self._of(needed)}; raise "
                f"--min_count={min_count}, so that fewer values get ids, or {self.advice}."
            )

    def _of(self, needed):
        there = self.bytes / 1e9
        return f"{needed / 1e9:.2f} GB, but the vocabulary may take {there:.2f} GB here"


def _letters(counts):
    """The bytes of the texts that are keys; `count` puts these first."""
    return sum(map(len, itertools.takewhile(lambda key: isinstance(key, bytes), counts)))


def count(kind: str, keys: np.ndarray, long: Sequence[bytes]) -> Counts:
    """Counts the cells of a field, given their keys, uint64 [n], and the texts of LONG ones."""
    import pyarrow as pa  # it hashes, np.unique sorts

    if kind in RANGED:
        keys = keys[keys != MISSING]
        return _extremes(keys[[keys.argmin(), keys.argmax()]].tolist() if len(keys) else ())
    keys, counts = pa.array(keys).value_counts().flatten()
    found = dict(collections.Counter(long))
    found.update(zip(numpy_of(keys, np.uint64).tolist(), numpy_of(counts, np.int64).tolist()))
    found.pop(MISSING, None)
    found.pop(LONG, None)
    return found


def _extremes(keys):
    return dict.fromkeys((min(keys), max(keys)), 1) if keys else {}


def add_up(
    columns: Sequence[Column], parts: Iterable[Sequence[Counts]], room: Optional[Room] = None
) -> List[Counts]:
    """The Counts of each field over all parts; a part has Counts for all fields, or is empty.

    Raises:
        BadInput: they take more than the room.
    """
    total = [{} for _ in columns]
    letters = number = 0  # bytes of the long texts of all parts, and values of these
    for part in parts:
        for i, (column, counts) in enumerate(zip(columns, part)):
            if column.kind in RANGED:
                total[i] = _extremes([*total[i], *counts])
            else:
                known = total[i].get
                total[i].update({key: n + known(key, 0) for key, n in counts.items()})
        if room and part:
            number += sum(map(len, part))
            letters += sum(map(_letters, part))
            values = sum(map(len, total))
            room.check_counting(values, values * letters // max(number, 1))
    return total
