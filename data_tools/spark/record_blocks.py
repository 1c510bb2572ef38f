"""Reads TFRecord files as checked blocks of raw records, without TensorFlow.

dataset.json describes the files, so a record with the layout of our own writer is trusted, as
data_tools.rebalancing.record_blocks does: its frame is checked, and its label read.
"""

import gzip
import zlib
from typing import Iterator, NamedTuple, Union

import numpy as np

from deepfm.data.plain import frames
from deepfm.data.plain.bad_record import BadRecord
from deepfm.errors import BadInput

_LABEL = b"\n\x05label\x12\x08\x12\x06\n\x04"  # and then the label, a float of 0 or 1


class RecordBlock(NamedTuple):
    """n consecutive records of a file.

    Attributes:
        data: the bytes of the records.
        starts, ends: int64 [n], where in `data` each record begins and ends.
        positive: bool [n], whether the label is 1.
    """

    data: bytes
    starts: np.ndarray
    ends: np.ndarray
    positive: np.ndarray


def read(path: str, skip: int) -> Iterator[Union[RecordBlock, BadRecord]]:
    """Yields the good records of a file in RecordBlocks, the bad ones as BadRecords.

    Ends after skip + 1 bad ones.

    Raises:
        BadInput: a gzip file is damaged.
    """
    bad = 0
    with open(path, "rb") as raw:
        packed = path.endswith(".gz")
        stream = gzip.GzipFile(fileobj=raw) if packed else raw
        try:
            for block in frames.read(stream, path):
                for part in [block] if isinstance(block, BadRecord) else _blocks(block, path):
                    yield part
                    bad += isinstance(part, BadRecord)
                    if bad > skip:
                        return
        except (OSError, EOFError, zlib.error) as error:
            if packed and not getattr(error, "filename", None):
                raise BadInput(f"{path}: is a truncated or damaged gzip file ({error}).") from error
            raise


def _blocks(block, path):
    """A RecordBlock of the frames with a label, and a BadRecord for each other one."""
    data, find = block.data, block.data.find
    pairs = zip(block.starts.tolist(), block.ends.tolist())
    places = [find(_LABEL, start, end) for start, end in pairs]
    places = np.array(places) + len(_LABEL)
    labels = np.frombuffer(data, np.uint8)[places[:, np.newaxis] + np.arange(4)]
    labels = np.ascontiguousarray(labels).view("<f4")[:, 0]
    good = (places >= len(_LABEL)) & ((labels == 0) | (labels == 1))
    for i in np.flatnonzero(~good).tolist():
        place = f": record {block.first + i} at byte {block.offset + int(block.starts[i])}"
        yield BadRecord(path, place, "is not as the converters write it; use data_tools.rebalance")
    if good.all():
        yield RecordBlock(data, block.starts, block.ends, labels == 1)
    elif good.any():
        yield RecordBlock(data, block.starts[good], block.ends[good], labels[good] == 1)
