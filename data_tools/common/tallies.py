"""Counts how often each of very many keys occurs: block by block, merged exactly."""

from typing import Tuple

import numpy as np

MERGE_AT = 1 << 16  # merge only once this many keys wait


class Tally:
    """The counts of all blocks, whose keys are of a dtype."""

    def __init__(self, dtype=np.int64):
        self._merged = np.zeros(0, dtype), np.zeros(0, np.int64)
        self._waiting, self._size = [], 0

    def add(self, keys: np.ndarray, counts: np.ndarray):
        """Adds distinct keys [n] and their counts, int64 [n]."""
        self._waiting.append((keys, counts))
        self._size += len(keys)
        if self._size > max(MERGE_AT, len(self._merged[0])):
            self.result()

    def __len__(self):
        """The keys of everything added so far; those that wait to be merged may count twice."""
        return len(self._merged[0]) + self._size

    def result(self) -> Tuple[np.ndarray, np.ndarray]:
        """(keys [n], ascending; counts int64 [n]) of everything added so far."""
        keys, counts = map(np.concatenate, zip(self._merged, *self._waiting))
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
        if len(first):
            keys, counts = keys[first], np.add.reduceat(counts[order], first)
        self._merged, self._waiting, self._size = (keys, counts), [], 0
        return self._merged
