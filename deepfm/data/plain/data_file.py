"""What is known of a file of a data set, by which suffix its format, and what was sampled."""

from typing import NamedTuple, Optional

TFRECORD = (".tfrecords", ".tfrecord", ".tfrecords.gz", ".tfrecord.gz")  # the first is written
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
