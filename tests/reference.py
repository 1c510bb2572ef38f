"""Which records a file holds, byte by byte: what the tests compare the readers with.

What is in a record, the tests take from the explainers of deepfm/records, which are as obvious.
"""

import struct
import zlib
from typing import List, Optional, Tuple

from deepfm.records import tfrecord, wire

BLANKS = b" \t\r\v\f"


def records_of_text(text: bytes) -> List[Tuple[int, bytes]]:
    """(number from 1, line without comment) of each line that holds a record."""
    text = text[3:] if text.startswith(b"\xef\xbb\xbf") else text  # a byte order mark
    lines = [line.split(b"#", 1)[0] for line in text.split(b"\n")]
    return [(i, line) for i, line in enumerate(lines, start=1) if line.strip(BLANKS)]


def field(number: int, payload: bytes) -> bytes:
    """A field of a protocol buffer that holds bytes."""
    return wire.tag(number, len(payload)) + payload


def header(length: int) -> bytes:
    """The header of a frame."""
    return struct.pack("<Q", length) + tfrecord.checksum(struct.pack("<Q", length))


def frames(data: bytes) -> List[Tuple[int, Optional[bytes]]]:
    """(byte, payload) of the records of a file, the payload None where a record is damaged.

    After a damaged payload the next record follows; after a damaged header, the next place that
    begins with a whole one. A file that ends inside a record ends with a damaged one.
    """
    found, at = [], 0
    while at < len(data):
        length = length_at(data, at)
        payload = data[at + 12 : at + 12 + length] if length is not None else b""
        end = at + 16 + length if length is not None else None
        good = end is not None and data[at:end] == tfrecord.framed(payload)
        found.append((at, payload if good else None))
        if end is None:
            end = at + 1
            while end < len(data) and length_at(data, end) is None:
                end += 1
        at = end
    return found


def length_at(data: bytes, at: int) -> Optional[int]:
    """The length that a whole header says, or None."""
    head = data[at : at + 12]
    return struct.unpack("<Q", head[:8])[0] if tfrecord.is_header(head) else None


def gunzip(data: bytes) -> Optional[bytes]:
    """The content of a gzip file; None if it is damaged, cut or has several members."""
    unpack = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        text = unpack.decompress(data)
    except zlib.error:
        return None
    return text if unpack.eof and not unpack.unused_data else None
