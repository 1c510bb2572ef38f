"""CRC-32C of many byte strings at once, as TFRecord files have it: masked.

With the package google-crc32c, which uses the processor's instruction, or else with numpy: 8 bytes
of every string at a time, by tables for 2 bytes each (slicing, Kounavis and Berry, ISCC 2005,
https://doi.org/10.1109/ISCC.2005.18).
https://www.tensorflow.org/tutorials/load_data/tfrecord describes the mask.
"""

import functools
from typing import Union

import numpy as np

try:
    import google_crc32c
except ImportError:
    google_crc32c = None

Bytes = Union[bytes, bytearray, np.ndarray]
_POLYNOMIAL = np.uint32(0x82F63B78)  # reversed
_ALL = np.uint64(0xFFFFFFFF)
_ROWS = 1 << 12  # strings at once: their state stays in the processor's cache


def table(bits: int) -> np.ndarray:
    """The checksum's change by each number of `bits` bits. uint32 [2^bits]."""
    found = np.arange(1 << bits, dtype=np.uint32)
    for _ in range(bits):
        found = np.where(found & 1, (found >> 1) ^ _POLYNOMIAL, found >> 1)
    return found.astype(np.uint32)


@functools.lru_cache(maxsize=1)
def _tables():
    """The checksum's change by each 2 bytes of 8, with those behind them. uint64 [4, 65536]."""
    last = table(16)
    found = [last]
    for _ in range(3):
        found.insert(0, last[found[0] & 0xFFFF] ^ (found[0] >> 16))
    return np.array(found, np.uint64)


def masked(data: Bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The masked checksums of data[start:end]. uint32 [n].

    Args:
        data: the bytes.
        starts, ends: int64 [n].
    """
    if google_crc32c is not None:
        view = memoryview(data)
        value = google_crc32c.value
        found = [value(bytes(view[a:b])) for a, b in zip(starts.tolist(), ends.tolist())]
        return mask(np.array(found, np.uint32))
    return mask(with_numpy(data, starts, ends))


def mask(crc: np.ndarray) -> np.ndarray:
    """What a file holds in place of a checksum. uint32 -> uint32."""
    return ((crc >> np.uint32(15)) | (crc << np.uint32(17))) + np.uint32(0xA282EAD8)


def with_numpy(data: Bytes, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """The checksums of data[start:end], by numpy alone. uint32 [n]."""
    padded = np.concatenate([np.zeros(8, np.uint8), np.frombuffer(data, np.uint8)])
    # A view of every 8 bytes as a number; only indexing it makes a copy. words[i] ends at data[i].
    words = np.ndarray([len(padded) - 7], "<u8", padded, 0, [1])
    order = np.argsort(starts - ends, kind="stable")  # the longest first
    sums = np.empty(len(starts), np.uint32)
    for first in range(0, len(order), _ROWS):
        some = order[first : first + _ROWS]
        sums[some] = _of_words(words, ends[some], (ends - starts)[some])
    return sums


def _of_words(words, ends, lengths):
    """The checksums of strings, the longest first.

    The checksum begins with all ones, which is as if the first 4 bytes were inverted and it began
    with 0. Then bytes of 0 before a string change nothing, so that whole words can be taken.
    """
    sizes = (lengths + 7) // 8  # words
    tables = _tables()
    crc = np.zeros(len(ends), np.uint64)
    # Strings begin with word k of the loop, where k is their size; active[k] have begun.
    active = np.searchsorted(-sizes, -np.arange(sizes[0] + 1), side="right").tolist()
    begun = 0
    for k in range(int(sizes[0]), 0, -1):
        n = active[k]
        word = words[ends[:n] - 8 * (k - 1)]
        over = None
        if n > begun:
            before = (8 * k - lengths[begun:n]).astype(np.uint64) * np.uint64(8)  # bits, < 64
            word[begun:] = (word[begun:] >> before ^ _ALL) << before
            over = _ALL >> (np.uint64(64) - before)
            over[before == 0] = 0
        word ^= crc[:n]
        parts = word.view(np.uint16).reshape(n, 4)
        new = tables[0][parts[:, 0]]
        for i in range(1, 4):
            new ^= tables[i][parts[:, i]]
        if over is not None:
            new[begun:] ^= over
            begun = n
        crc[:n] = new
    crc[begun:] = _ALL  # empty strings
    return ~crc.astype(np.uint32)
