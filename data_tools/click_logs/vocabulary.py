"""How often each category of each field occurs: counted in blocks, merged exactly, kept in files.

Counts of several processes or hosts, put together in any order, are those of one.
"""

import collections
import json
import zipfile
from typing import Dict, List, NamedTuple

import numpy as np

from data_tools.click_logs.raw_columns import SCALED
from data_tools.click_logs.raw_rows import LONG, MISSING
from deepfm.errors import BadInput

FORMAT_VERSION = 1
MERGE_AT = 1 << 16  # keys that wait before they are merged, at least


class Counts(NamedTuple):
    """What was counted of a field, missing cells apart.

    Attributes:
        keys: uint64 [n], ascending; see raw_rows.
        counts: int64 [n].
        long: {text of over 8 bytes: count}.
    """

    keys: np.ndarray
    counts: np.ndarray
    long: Dict[bytes, int]


def count(keys: np.ndarray, long: List[bytes]) -> Counts:
    """Counts the cells of a field: uint64 [n] keys, and the texts of those that are LONG."""
    keys = keys[(keys != MISSING) & (keys != LONG)]
    return Counts(*np.unique(keys, return_counts=True), collections.Counter(long))


def _merge(keys, counts):
    """Sorts keys and adds the counts of equal ones."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    first = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
    return keys[first], np.add.reduceat(counts[order], first) if len(first) else counts


class Tally:
    """The counts of all blocks of a field.

    Args:
        kind: of the field; of a scaled one only the smallest and the largest integer are kept.
    """

    def __init__(self, kind):
        self._kind = kind
        self._merged = np.zeros(0, np.uint64), np.zeros(0, np.int64)
        self._waiting, self._size = [], 0
        self._long = collections.Counter()

    def add(self, counts: Counts):
        self._long.update(counts.long)
        self._waiting.append(counts[:2])
        self._size += len(counts.keys)
        if self._size > max(MERGE_AT, len(self._merged[0])):
            self._put_together()

    def result(self) -> Counts:
        """All that was added."""
        self._put_together()
        return Counts(*self._merged, dict(self._long))

    def _put_together(self):
        keys, counts = zip(self._merged, *self._waiting)
        keys, counts = _merge(np.concatenate(keys), np.concatenate(counts))
        if self._kind == SCALED and len(keys) > 2:
            keys, counts = keys[[0, -1]], counts[[0, -1]]
        self._merged = keys, counts
        self._waiting, self._size = [], 0


def save(path: str, about: dict, counts: List[Counts]):
    """Writes a file of counts; `about` says what they are of."""
    arrays = {"about": _bytes(json.dumps(dict(about, format_version=FORMAT_VERSION)).encode())}
    for i, field in enumerate(counts):
        texts = sorted(field.long)
        arrays[f"keys-{i}"], arrays[f"counts-{i}"] = field.keys, field.counts
        arrays[f"long-{i}"] = _bytes(b"\n".join(texts))  # no text holds a newline
        arrays[f"long_counts-{i}"] = np.array([field.long[t] for t in texts], np.int64)
    with open(path, "wb") as f:
        np.savez(f, **arrays)


def _bytes(text):
    return np.frombuffer(text, np.uint8)


def load(path: str, field_size: int):
    """(about, [Counts] of each field) of a file of counts; BadInput where it is broken."""
    try:
        with np.load(path) as found:
            about = json.loads(found["about"].tobytes().decode())
            if about["format_version"] != FORMAT_VERSION:
                raise ValueError(f"format_version {about['format_version']}, not {FORMAT_VERSION}")
            return about, [_field(found, i) for i in range(field_size)]
    except (OSError, ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        raise BadInput(f"{path}: is no file of counts ({reason}); make it again.") from error


def _field(found, i):
    keys, counts = found[f"keys-{i}"], found[f"counts-{i}"]
    texts, long_counts = found[f"long-{i}"].tobytes(), found[f"long_counts-{i}"]
    texts = texts.split(b"\n") if texts else []
    if len(keys) != len(counts) or len(texts) != len(long_counts):
        raise ValueError(f"field {i} has {len(keys)} keys and {len(counts)} counts")
    return Counts(keys, counts, dict(zip(texts, long_counts.tolist())))
