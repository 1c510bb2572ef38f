"""Reads TFRecord files and LibSVM text as checked blocks of raw records, without TensorFlow.

Of a file that dataset.json describes, records with the layout of our own writer are trusted: their
frames are checked and their labels read. All others are decoded.
"""

import contextlib
from typing import Iterator, NamedTuple, Union

import numpy as np

from data_tools.common import line_blocks
from data_tools.common.line_blocks import LineRange
from deepfm.records import codec, frames, text_blocks, wire
from deepfm.records.bad_record import BadRecord, find_refused
from deepfm.records.schema import Schema, Shape

_LABEL = b"\n\x05label\x12\x08\x12\x06\n\x04"  # and then the label, a float of 0 or 1


class RecordBlock(NamedTuple):
    """n consecutive records of a file.

    Attributes:
        data: the bytes of the records, perhaps with others in between.
        starts, ends: int64 [n], where in `data` each record begins and ends.
        positive: bool [n], whether the label is 1.
        max_id: the largest feature id that was decoded, negative if none was.
        read: bytes of the file on disk that were read for the block, where that is known.
    """

    data: bytes
    starts: np.ndarray
    ends: np.ndarray
    positive: np.ndarray
    max_id: int
    read: int = 0


def read(
    path: str, schema: Schema, described: bool, skip: int
) -> Iterator[Union[RecordBlock, BadRecord]]:
    """Yields the good records of a file in RecordBlocks, the bad ones as BadRecords.

    Ends after skip + 1 bad ones.

    Args:
        path: the file, plain or .gz.
        schema: what its records must look like.
        described: whether dataset.json describes it.
        skip: bad records to pass over.

    Raises:
        BadInput: a gzip file is damaged.
    """
    bad = 0
    for block in frames.of_file(path):
        checked = [block]
        if not isinstance(block, BadRecord):
            trusted = _trusted(block) if described and not schema.multi_valued else None
            checked = [trusted] if trusted else _decoded(block, path, schema)
        for part in checked:
            yield part
            bad += isinstance(part, BadRecord)
            if bad > skip:
                return


def read_lines(lines: LineRange, weighted: bool) -> Iterator[Union[RecordBlock, BadRecord]]:
    """Yields the good records of LibSVM lines in RecordBlocks, the bad ones as BadRecords.

    Args:
        lines: the lines, whose numbers of pairs may differ.
        weighted: whether labels may have a weight.
    """

    def decode(text):
        # A field may have several values, so that id 0 is allowed though rows are padded.
        longest = text_blocks.longest_record(text, text_blocks.record_starts(text), weighted)
        schema = Schema(max(longest, 1), pad=True, multi_valued=True, weighted=weighted)
        return codec.decode_lines(text, schema)

    for block in line_blocks.decoded(lines, decode, weighted=weighted):
        if isinstance(block, BadRecord):
            yield block
            continue
        text, starts, ends, batch, _ = block
        yield RecordBlock(text, starts, ends, batch.labels > 0, int(batch.ids.max(initial=-1)))


def first_shape(path: str) -> Shape:
    """The Shape of a file's first record."""
    with contextlib.closing(frames.of_file(path)) as found:
        block = next(found, None)
    if not isinstance(block, frames.Frames):
        return Shape()
    return wire.shape(next(block.records())[1])


def _trusted(block):
    """The RecordBlock of frames that hold a label as our own writer does; None if one does not."""
    find, last = block.data.find, len(_LABEL)
    pairs = zip(block.starts.tolist(), block.ends.tolist())
    places = np.array([find(_LABEL, start, end - 4) for start, end in pairs])
    if (places < 0).any():
        return None
    labels = np.frombuffer(block.data, np.uint8)[places[:, np.newaxis] + last + np.arange(4)]
    labels = np.ascontiguousarray(labels).view("<f4")[:, 0]
    if not np.isin(labels, (0, 1)).all():
        return None
    return RecordBlock(block.data, block.starts, block.ends, labels == 1, -1)


def _decoded(block, path, schema):
    """Yields the BadRecords among frames, and the RecordBlock of the others."""
    data, starts, ends = block.data, block.starts, block.ends
    batch = codec.decode(data, starts + frames.HEADER, ends - 4, schema)
    if batch is None:
        places, payloads = zip(*block.records())
        kept = np.ones(len(payloads), bool)
        explain = lambda payload: wire.explain(payload, schema)
        accepts = lambda some: codec.accepts(some, schema)
        for i, reason in find_refused(accepts, payloads, explain, wire.UNEXPLAINED):
            kept[i] = False
            yield BadRecord(path, places[i], reason)
        starts, ends = starts[kept], ends[kept]
        if not len(starts):
            return
        batch = codec.decode(data, starts + frames.HEADER, ends - 4, schema)
    yield RecordBlock(data, starts, ends, batch.labels > 0, int(batch.ids.max(initial=-1)))
