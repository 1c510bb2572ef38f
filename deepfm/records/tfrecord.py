"""A frame of a TFRecord file in plain Python: a length, its checksum, the payload and its checksum.

The checksum is CRC-32C, masked (https://www.tensorflow.org/tutorials/load_data/tfrecord).
"""

import struct
from typing import Tuple

import numpy as np

FRAME = 16  # bytes that a record takes in its file beside its payload
HEADER = 12  # bytes of a frame before the payload; 4 follow it
LONGEST_RECORD = 1 << 30  # bytes; a longer one may make TensorFlow's reader crash the program
CUT_OFF, CORRUPT, ABSURD_LENGTH = range(3)  # why a frame is none
_CRC_OF_BYTE = list(range(256))
for _ in range(8):
    _CRC_OF_BYTE = [x >> 1 ^ (0x82F63B78 if x & 1 else 0) for x in _CRC_OF_BYTE]


def checksum(data: bytes) -> bytes:
    """The checksum of some bytes, as a file holds it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_OF_BYTE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (crc >> 15 | crc << 17) + 0xA282EAD8 & 0xFFFFFFFF)


def framed(payload: bytes) -> bytes:
    """The frame of a payload."""
    length = struct.pack("<Q", len(payload))
    return length + checksum(length) + payload + checksum(payload)


def is_header(head: bytes) -> bool:
    """Whether 12 bytes are a frame's header: a length and its checksum."""
    return len(head) == HEADER and checksum(head[:8]) == head[8:]


def scan(data: bytes) -> Tuple[np.ndarray, np.ndarray, int]:
    """As codec.scan."""
    cuts, why = [0], CUT_OFF
    while len(data) - cuts[-1] >= HEADER:
        at = cuts[-1]
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + FRAME + length
        if length > LONGEST_RECORD or not is_header(data[at : at + HEADER]):
            why = ABSURD_LENGTH if length > LONGEST_RECORD else CORRUPT
            break
        if end > len(data):
            break
        if checksum(data[at + HEADER : end - 4]) != data[end - 4 : end]:
            why = CORRUPT
            break
        cuts.append(end)
    return np.array(cuts[:-1], np.int64), np.array(cuts[1:], np.int64), why
