"""What is known of a file of a data set, what tells its format, and what was sampled."""

import itertools
from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple

from deepfm.records.wire import HEADER, is_header

TFRECORD = (".tfrecords", ".tfrecord", ".tfrecords.gz", ".tfrecord.gz")  # the first is written
CSV = tuple(x + y for x in (".csv", ".tsv") for y in ("", ".gz"))
PARQUET = (".parquet", ".pq")
LIBSVM = tuple(x + y for x in (".libsvm", ".svm", ".txt", ".libffm", ".ffm") for y in ("", ".gz"))


class DataFile(NamedTuple):
    """A file of a data set. Without a dataset.json, rows and positives are None; identity, an
    identity.Identity, is None until the file has been identified."""

    path: str
    bytes: int
    rows: Optional[int] = None
    positives: Optional[int] = None
    identity: Optional[tuple] = None


class SamplingRates(NamedTuple):
    """Records kept per original record of each label; above 1 if they were repeated."""

    negative: float = 1.0
    positive: float = 1.0


class Kind(NamedTuple):
    """What tells a format from the others; a formats.Format has the same, and reads it."""

    name: str
    title: str
    suffixes: Tuple[str, ...]
    begins: Callable[[bytes], bool]


KINDS = {
    "tfrecord": Kind(
        "tfrecord", "TFRecord", TFRECORD, lambda head: is_header(head[:HEADER])
    ),
    "libsvm": Kind("libsvm", "LibSVM", LIBSVM, lambda head: True),
}  # fmt: skip


def is_named(path: str, kinds: Dict[str, Any]) -> bool:
    """Whether a file's name tells which of the kinds it has."""
    return any(path.endswith(kind.suffixes) for kind in kinds.values())


def kind_of(path: str, head: bytes, kinds: Dict[str, Any]):
    """The first of the kinds that a file has by its name, or else by its first 12 bytes."""
    by_name = (kind for kind in kinds.values() if path.endswith(kind.suffixes))
    by_bytes = (kind for kind in kinds.values() if kind.begins(head))
    return next(itertools.chain(by_name, by_bytes))
