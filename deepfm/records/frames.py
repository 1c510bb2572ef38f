"""Reads the frames of TFRecord files, past damage. n: frames of a block."""

import dataclasses
import gzip
import struct
import zlib
from typing import BinaryIO, Iterator, Optional, Sequence, Tuple, Union

import numpy as np

from deepfm.errors import BadInput
from deepfm.records import codec
from deepfm.records.schema import BadRecord, Shape
from deepfm.records.storage import places
from deepfm.records.tfrecord import ABSURD_LENGTH, CUT_OFF, FRAME, HEADER, is_header
from deepfm.records.wire import shape

TRUNCATED = "the file ends inside this record (truncated)"
_CORRUPT = "corrupt (corrupted record)"  # as TensorFlow's reader says it


@dataclasses.dataclass(frozen=True)
class Frames:
    """Consecutive good records of a file: a block for `schema.sifted`.

    Attributes:
        path: the file.
        data: their frames, perhaps with others in between.
        starts, ends: int64 [n], where in `data` each frame begins and ends; its payload is
            data[start + HEADER : end - 4].
        first: the number of the first record, from 0; the others follow it.
        offset: the byte of the file where `data` begins.
    """

    path: str
    data: bytes
    starts: np.ndarray
    ends: np.ndarray
    first: int
    offset: int

    def __len__(self):
        return len(self.starts)

    def take(self, index: Sequence[int]) -> "Frames":
        """A block of the records of these indices, which lose their places."""
        index = np.array(index, np.int64)
        return dataclasses.replace(self, starts=self.starts[index], ends=self.ends[index])

    def place(self, i: int) -> str:
        """The place of a record as in a BadRecord."""
        return f": record {self.first + i} at byte {self.offset + self.starts[i]}"

    def payload(self, i: int) -> bytes:
        """The payload of a record."""
        return self.data[self.starts[i] + HEADER : self.ends[i] - 4]


def frames_of(raw: BinaryIO, path: str, size: int = 1 << 20) -> Iterator[Union[Frames, BadRecord]]:
    """Yields the good records of a file in Frames, and a BadRecord for each that cannot be read.

    After a record with a wrong checksum comes the next one; if its length is damaged, the next
    valid header. The bytes in between count as one bad record. A gzip file, of which `raw` is
    the unpacked content, is read up to its first damage. `size` bytes are read at once.
    """
    data, offset, number, at_end = b"", 0, 0, False
    compressed = path.endswith(".gz")
    while True:
        starts, ends, used, reason = _scan(data)
        if len(starts):
            yield Frames(path, data, starts, ends, number, offset)
            number += len(starts)
        data, offset = data[used:], offset + used
        if not reason and not at_end:
            # Bytes of the next frame, as far as they are known.
            whole = FRAME + _length(data, 0) if len(data) >= HEADER else HEADER
            read = raw.read(max(size, whole - len(data)))
            data, at_end = data + read, not read
            continue
        if not reason:
            if data and not (compressed and len(data) < HEADER):
                yield _bad(path, number, offset, TRUNCATED)
            return
        yield _bad(path, number, offset, reason)
        if compressed:
            return
        number += 1
        skipped, data, at_end = _resume(data, raw, size)
        offset += skipped
        if not data:
            return


def frames_of_file(path: str) -> Iterator[Union[Frames, BadRecord]]:
    """`frames_of` a file at a path; raises BadInput if it is a damaged gzip file."""
    packed = path.endswith(".gz")
    with places.of(path).open_file(path) as raw:
        try:
            yield from frames_of(gzip.GzipFile(fileobj=raw) if packed else raw, path)
        except (OSError, EOFError, zlib.error) as error:
            if packed and not getattr(error, "filename", None):
                raise BadInput(f"{path}: is a truncated or damaged gzip file ({error}).") from error
            raise


def first_shape(path: str) -> Shape:
    """The Shape of a file's first record."""
    block = next(frames_of_file(path), None)
    return shape(block.payload(0)) if isinstance(block, Frames) else Shape()


def _bad(path, number, offset, reason):
    return BadRecord(path, f": record {number} at byte {offset}", reason)


def _length(data, at):
    return struct.unpack_from("<Q", data, at)[0]


def _scan(data) -> Tuple[np.ndarray, np.ndarray, int, Optional[str]]:
    """(starts, ends of the good frames at the beginning of data, their bytes, what is wrong with
    the next one: None if it is cut off, or nothing follows)."""
    starts, ends, why = codec.scan(data)
    used = int(ends[-1]) if len(ends) else 0
    if why == ABSURD_LENGTH:
        reason = f"corrupt (its header gives a length of {_length(data, used)} bytes)"
    else:
        reason = None if why == CUT_OFF else _CORRUPT
    return starts, ends, used, reason


def _resume(data, raw, size):
    """Goes on after the bad frame at the beginning of data.

    Returns:
        (bytes passed over, data from the next frame on, whether the file's end is reached).
    """
    if is_header(data[:HEADER]):
        passed = FRAME + _length(data, 0)
        left = passed  # bytes to pass over, perhaps more than there are
        while data and left >= len(data):
            left, data = left - len(data), raw.read(size)
        return passed, data[left:], not data
    passed, data = 1, data[1:]
    while True:
        hit = codec.next_header(data)
        if hit >= 0:
            return passed + hit, data[hit:], False
        kept = max(len(data) - HEADER + 1, 0)
        passed, data, read = passed + kept, data[kept:], raw.read(size)
        if not read:
            return passed + len(data), b"", True
        data += read
