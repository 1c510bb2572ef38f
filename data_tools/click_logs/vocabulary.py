"""Counts how often each category of each field occurs, and merges the counts.

Merging is exact: the counts of several processes, in any order, add up to those of one.
"""

import collections
from typing import Dict, Iterable, List, NamedTuple, Optional, Sequence

import numpy as np

from data_tools.click_logs.column_kinds import SCALED, Column
from data_tools.click_logs.row_parser import LONG, MISSING
from data_tools.common import tallies
from data_tools.tables.blocks import numpy_of
from deepfm.errors import BadInput


class Counts(NamedTuple):
    """The counts of a field, without missing cells.

    Attributes:
        keys: uint64 [n], ascending; see row_parser.
        counts: int64 [n].
        long: {text of over 8 bytes: count}.
    """

    keys: np.ndarray
    counts: np.ndarray
    long: Dict[bytes, int]


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

    def check_counting(self, short: Sequence[int], long: Sequence[int], letters: int):
        """Checks what counting takes; each field has `short` and `long` values, of `letters` bytes.

        Merging copies the values of a field, so the largest one counts more.
        """
        needed = 32 * sum(short) + 80 * max(short) + 150 * sum(long) + letters
        found = sum(short) + sum(long)
        if needed > self.bytes:
            raise BadInput(
                f"{found:,} distinct values so far need {self._of(needed)}; {self.advice}. "
                "--min_count drops values only when all are counted."
            )

    def check_ids(self, counts: Sequence[Counts], min_count: int):
        """Checks what the tables of ids and feature_map.json take, once all is counted."""
        short = [int((field.counts >= min_count).sum()) for field in counts]
        long = [sum(n >= min_count for n in field.long.values()) for field in counts]
        letters = sum(len(text) for field in counts for text in field.long)
        needed = 16 * sum(len(field.keys) for field in counts)
        needed += 110 * sum(len(field.long) for field in counts) + letters
        # A process that looks up texts gets copies of them: that changes their reference counts.
        needed += 40 * sum(short) + 160 * sum(long) * (1 + self.num_workers)
        needed += 250 * max(a + b for a, b in zip(short, long))
        found = sum(short) + sum(long)
        if needed > self.bytes:
            raise BadInput(
                f"ids for {found:,} distinct values need {self._of(needed)}; raise --min_count="
                f"{min_count}, so that fewer values get ids, or {self.advice}."
            )

    def _of(self, needed):
        there = self.bytes / 1e9
        return f"{needed / 1e9:.2f} GB, but the vocabulary may take {there:.2f} GB here"


def count(keys: np.ndarray, long: List[bytes]) -> Counts:
    """Counts the cells of a field, given their keys, uint64 [n], and the texts of LONG ones."""
    import pyarrow as pa  # it hashes, np.unique sorts

    keys, counts = pa.array(keys[(keys != MISSING) & (keys != LONG)]).value_counts().flatten()
    keys, counts = numpy_of(keys, np.uint64), numpy_of(counts, np.int64)
    order = np.argsort(keys)
    return Counts(keys[order], counts[order], collections.Counter(long))


def add_up(
    columns: Sequence[Column], parts: Iterable[Sequence[Counts]], room: Optional[Room] = None
) -> List[Counts]:
    """The Counts of each field over all parts; a part has Counts for all fields, or is empty.

    For a scaled field, only the smallest and the largest integer are kept.

    Raises:
        BadInput: they take more than the room.
    """
    short = [tallies.Tally(np.uint64, only_extremes=c.kind == SCALED) for c in columns]
    long = [collections.Counter() for _ in columns]
    letters = number = 0  # bytes of the long texts of all parts, and their number
    for part in parts:
        for tally, texts, counts in zip(short, long, part):
            tally.add(counts.keys, counts.counts)
            texts.update(counts.long)
            letters, number = letters + sum(map(len, counts.long)), number + len(counts.long)
        if room and part:
            _check_room(room, short, long, letters / max(number, 1))
    return [Counts(*tally.result(), dict(texts)) for tally, texts in zip(short, long)]


def _check_room(room, short, long, mean_letters):
    """Checks the room for Tallies and Counters; merges what waits before it says there is none."""
    of_long = list(map(len, long))
    check = lambda sizes: room.check_counting(sizes, of_long, int(mean_letters * sum(of_long)))
    try:
        check([sum(tally.sizes) for tally in short])
    except BadInput:
        check([len(tally.result()[0]) for tally in short])
