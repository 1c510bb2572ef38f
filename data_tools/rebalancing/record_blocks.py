"""Reads TFRecord files and LibSVM text as checked blocks of raw records, without TensorFlow."""

import contextlib
from typing import Iterator, NamedTuple, Optional, Union

import numpy as np

from deepfm.records import codec, data_file, frames, libsvm_text, text_blocks, wire
from deepfm.records.bad_record import BadRecord, find_refused, sift
from deepfm.records.schema import Schema, Shape
from deepfm.records.text_blocks import LineRange

_NEWLINE = ord("\n")
_PACKED = 4  # approximate bytes of records per byte of a compressed file


class RecordBlock(NamedTuple):
    """n consecutive records of a file.

    Attributes:
        data: the bytes of the records, perhaps with others in between.
        starts, ends: int64 [n], where in `data` each record begins and ends.
        positive: bool [n], whether the label is 1.
        batch: the Batch of the records.
        read: bytes of the file on disk that were read for the block, about.
    """

    data: bytes
    starts: np.ndarray
    ends: np.ndarray
    positive: np.ndarray
    batch: codec.Batch
    read: int = 0


def read(path: str, schema: Schema, skip: int) -> Iterator[Union[RecordBlock, BadRecord]]:
    """Yields the good records of a file in RecordBlocks, the bad ones as BadRecords.

    Ends after skip + 1 bad ones.

    Args:
        path: the file, plain or .gz.
        schema: what its records must look like.
        skip: bad records to pass over.

    Raises:
        BadInput: a gzip file is damaged, or has several members.
    """
    bad, ratio = 0, _PACKED if path.endswith(".gz") else 1
    for block in frames.frames_of_file(path):
        is_bad = isinstance(block, BadRecord)
        for part in [block] if is_bad else _decoded(block, path, schema):
            if isinstance(part, BadRecord):
                yield part
                bad += 1
            else:
                yield part._replace(read=int(block.ends[-1] - block.starts[0]) // ratio)
            if bad > skip:
                return
    if not bad:
        data_file.check_gzip(path)


def read_lines(
    lines: LineRange, weighted: bool, field_size: Optional[int] = None
) -> Iterator[Union[RecordBlock, BadRecord]]:
    """Yields the good records of LibSVM lines in RecordBlocks, the bad ones as BadRecords.

    Args:
        lines: the lines.
        weighted: whether labels may have a weight.
        field_size: pairs of a line; None: any number, which a Batch has as counts.
    """

    def decode(text):
        if field_size:
            return codec.decode_lines(text, Schema(field_size, weighted=weighted))
        # A field may have several values, so that id 0 is allowed though rows are padded.
        longest = text_blocks.longest_record(text, text_blocks.record_starts(text), weighted)
        schema = Schema(max(longest, 1), pad=True, multi_valued=True, weighted=weighted)
        return codec.decode_lines(text, schema)

    accepts = lambda text: decode(text) is not None
    explain = lambda line: libsvm_text.explain_line(
        line, Schema(field_size or len(line.split()) - 1, weighted=weighted)
    )
    first, lines_before = text_blocks.numbering(lines), 0
    for _, text, size in text_blocks.blocks(*lines):
        starts = text_blocks.record_starts(text)
        newlines = np.flatnonzero(np.frombuffer(text, np.uint8) == _NEWLINE)
        line = np.searchsorted(newlines, starts)  # the index of each record's line
        batch = decode(text)
        if batch is None:
            number = first() + lines_before
            good = yield from sift(lines.path, text, number, accepts, explain)
            kept = np.isin(line, list(good))
            starts, line, batch = starts[kept], line[kept], decode(b"\n".join(good.values()))
        yield RecordBlock(text, starts, newlines[line] + 1, batch.labels > 0, batch, size)
        lines_before += len(newlines)


def first_shape(path: str) -> Shape:
    """The Shape of a file's first record."""
    with contextlib.closing(frames.frames_of_file(path)) as found:
        block = next(found, None)
    if not isinstance(block, frames.Frames):
        return Shape()
    return wire.shape(next(block.records())[1])


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
    yield RecordBlock(data, starts, ends, batch.labels > 0, batch)
