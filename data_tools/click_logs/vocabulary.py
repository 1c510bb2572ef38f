"""Counts how often each category of each field occurs, and merges the counts.

Merging is exact: the counts of several processes, in any order, add up to those of one.
"""

import collections
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence

import numpy as np

from data_tools.click_logs.row_parser import LONG, MISSING, TIME
from data_tools.common.tallies import Tally
from data_tools.tables.blocks import numpy_of
from deepfm.errors import BadInput
from deepfm.records.raw.column_kinds import HASH, NUMBER, RANGED, Column

_HALF = np.uint64(1 << 35)  # of the last bit of a float64 that is counted
_COUNTED = np.uint64(2**64 - 2**36)
_TO_SECONDS = np.uint64(2**64 - 2**16)  # of a time in this century to 16 ms or better


class Counts(NamedTuple):
    """The counts of a field, without missing cells.

    Of a scaled field and one of ids, only the ends of a range are there, perhaps of several parts;
    of hashes as well. Numbers are counted as the nearest that a mantissa of 16 bits can say: there
    are 65,536 from any one to its double, and integers up to 131,072 stay as they are. An end of
    their range, perhaps of several parts, that this rounds is there as well, counted 0 times: the
    keys span all numbers.

    Attributes:
        keys: uint64 [n], ascending; see row_parser.
        counts: int64 [n].
        long: {text of over 8 bytes: count}.
    """

    keys: np.ndarray
    counts: np.ndarray
    long: Dict[bytes, int]

    def distinct(self) -> int:
        """How many distinct values there are."""
        return len(self.keys) + len(self.long)

    def frequent(self, min_count: int) -> "Counts":
        """Those that occur at least so often."""
        often = self.counts >= min_count
        long = {text: n for text, n in self.long.items() if n >= min_count}
        return Counts(self.keys[often], self.counts[often], long)


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

    def check_counting(self, short: Sequence[int], long: int, letters: int):
        """Checks what counting takes: each field's short values, and the long ones of all.

        Merging copies the values of a field, so the largest one counts more.
        """
        needed = 32 * sum(short) + 80 * max(short) + 150 * long + letters
        if needed > self.bytes:
            raise BadInput(
                f"{sum(short) + long:,} distinct values so far need {self._of(needed)}; "
                f"{self.advice}. --min_count drops values only when all are counted."
            )

    def check_ids(self, counts: Sequence[Counts], min_count: int):
        """Checks what the fields' ids and feature_map.json take, once all is counted."""
        often = [field.frequent(min_count).distinct() for field in counts]
        needed = 16 * sum(len(field.keys) for field in counts)
        needed += sum(110 + len(text) for field in counts for text in field.long)
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


def count(kind: str, keys: np.ndarray, long: Sequence[bytes]) -> Counts:
    """Counts the cells of a field, given their keys, uint64 [n], and the texts of LONG ones."""
    import pyarrow as pa  # it hashes, np.unique sorts

    keys = keys[(keys != MISSING) & (keys != LONG)]
    if kind in (*RANGED, HASH) and len(keys):
        keys = keys[[keys.argmin(), keys.argmax()]]
    if kind == TIME:
        keys = keys & _TO_SECONDS
    ends = np.zeros(0, np.uint64)
    if kind == NUMBER and len(keys):
        ends = np.unique(keys[[keys.argmin(), keys.argmax()]])
        keys = (keys + _HALF) & _COUNTED
        ends = ends[ends & _COUNTED != ends]  # of the others, the keys are there
    keys, counts = pa.array(keys).value_counts().flatten()
    keys, counts = numpy_of(keys, np.uint64), numpy_of(counts, np.int64)
    if len(ends):
        keys, counts = np.append(keys, ends), np.append(counts, np.zeros(len(ends), np.int64))
    order = np.argsort(keys)
    return Counts(keys[order], counts[order], collections.Counter(long))


def add_up(
    columns: Sequence[Column], parts: Iterable[Sequence[Counts]], room: Optional[Room] = None
) -> List[Counts]:
    """The Counts of each field over all parts; a part has Counts for all fields, or is empty.

    Raises:
        BadInput: they take more than the room.
    """
    short, long = [Tally(np.uint64) for _ in columns], [collections.Counter() for _ in columns]
    letters = number = 0  # bytes of the long texts of all parts, and their number
    for part in parts:
        for tally, texts, counts in zip(short, long, part):
            tally.add(counts.keys, counts.counts)
            texts.update(counts.long)
            letters, number = letters + sum(map(len, counts.long)), number + len(counts.long)
        if room and part:
            _check_room(room, short, sum(map(len, long)), letters / max(number, 1))
    return [Counts(*tally.result(), dict(texts)) for tally, texts in zip(short, long)]


def _check_room(room, short, long, mean_letters):
    """Checks the room for Tallies and texts; merges what waits before it says there is none."""
    check = lambda sizes: room.check_counting(sizes, long, int(mean_letters * long))
    try:
        check([sum(map(len, short))])
    except BadInput:
        check([len(tally.result()[0]) for tally in short])
