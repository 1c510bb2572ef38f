"""Reads TFRecord files and LibSVM text as checked blocks of raw records, without TensorFlow."""

import functools
from typing import Iterator, NamedTuple, Optional, Union

import numpy as np

from deepfm.records import codec, data_file, frames, libsvm_text, text_blocks, wire
from deepfm.records.schema import BadRecord, Schema, sifted
from deepfm.records.text_blocks import LineRange

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

    Ends after skip + 1 bad ones. Raises BadInput if a gzip file is damaged, or has several members.
    """
    bad, ratio = 0, _PACKED if path.endswith(".gz") else 1
    decode = functools.partial(_decode, schema=schema)
    explain = lambda block, i: wire.explain(block.payload(i), schema)
    for block in frames.frames_of_file(path):
        is_bad = isinstance(block, BadRecord)
        for part in [block] if is_bad else sifted(block, decode, explain, wire.UNEXPLAINED):
            if isinstance(part, BadRecord):
                yield part._replace(few=True)  # however many are bad, they may be skipped
                bad += 1
            else:
                yield part._replace(read=int(block.ends[-1] - block.starts[0]) // ratio)
            if bad > skip:
                return
    if not bad:
        data_file.check_gzip(path)


def _decode(block, schema):
    """The RecordBlock of Frames; None if one breaks the schema."""
    data, starts, ends = block.data, block.starts, block.ends
    batch = codec.decode(data, starts + frames.HEADER, ends - 4, schema)
    return batch and RecordBlock(data, starts, ends, batch.labels > 0, batch)


def read_lines(
    lines: LineRange, weighted: bool, field_size: Optional[int] = None
) -> Iterator[Union[RecordBlock, BadRecord]]:
    """As `read`, of LibSVM lines with `field_size` pairs; None: any number, which a Batch has as
    counts."""

    def decode(block):
        text, schema = block.text, Schema(field_size or 1, weighted=weighted)
        if not field_size:
            # A field may have several values, so that id 0 is allowed though rows are padded.
            longest = text_blocks.most_fields(text)
            schema = schema._replace(field_size=max(longest, 1), pad=True, multi_valued=True)
        batch = codec.decode_lines(text, schema)
        return batch and RecordBlock(text, *block.where[:2], batch.labels > 0, batch)

    def explain(block, i):
        line = block.line(i)
        size = field_size or len(text_blocks.without_comment(line).split()) - 1
        return libsvm_text.explain_line(line, Schema(size, weighted=weighted))

    for size, block in text_blocks.read(lines):
        for part in sifted(block, decode, explain, libsvm_text.UNEXPLAINED):
            yield part if isinstance(part, BadRecord) else part._replace(read=size)
