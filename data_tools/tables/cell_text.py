"""Pieces of a text as numbers, with numpy alone."""

import re
from typing import Tuple

import numpy as np

from deepfm.records.libsvm_text import are_numbers, number_of

_DOT, _MINUS, _PLUS = b".-+"
_INTEGERS = re.compile(rb"(?:[0-9]{1,18} )*")
_ONES, _HIGH = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_DOTS = np.uint64(_DOT) * _ONES
_FLAGS = np.array([1 << 8 * i + 7 for i in range(8)], np.uint64)  # of each byte of a word


def eight(words: np.ndarray, shift: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """The numbers that are in words, and whether they are numbers.

    https://johnnylee-sde.github.io/Fast-numeric-string-to-int/: one multiplication each joins the
    bytes of a word, then pairs, then groups of four.

    Args:
        words: uint64, digits as text, the last in the highest byte, zeros below the first.
        shift: uint64, the bits below the first digit.

    Returns:
        (int64, bool), with the shape of words.
    """
    x = words ^ (np.uint64(0x3030303030303030) << shift)
    good = (((x + np.uint64(0x7676767676767676)) | x) & np.uint64(0x8080808080808080)) == 0
    x = (x * np.uint64(2561)) >> np.uint64(8) & np.uint64(0x00FF00FF00FF00FF)
    x = (x * np.uint64(6553601)) >> np.uint64(16) & np.uint64(0x0000FFFF0000FFFF)
    return ((x * np.uint64(42949672960001)) >> np.uint64(32)).view(np.int64), good


class BadText(Exception):
    """A line is bad, or holds no integer where one must be."""


class Text:
    """A block of text, of which pieces are read as numbers."""

    def __init__(self, text):
        self.text = text
        self.padded = np.frombuffer(text + bytes(8), np.uint8)
        # A view of every 8 bytes as a number; only indexing it makes a copy.
        self._words = np.ndarray([len(text) + 1], "<u8", self.padded, 0, [1])

    def pieces(self, starts, ends):
        return [self.text[a:b] for a, b in zip(starts.tolist(), ends.tolist())]

    def integers(self, starts, ends):
        """The integers, not negative, in text[start:end]. int64."""
        lengths = ends - starts
        short = lengths <= 8
        shift = ((8 - np.clip(lengths, 1, 8)) * 8).astype(np.uint64)
        ids, good = eight(self._words[starts] << shift, shift)
        if (lengths == 0).any() or not good[short].all():
            raise BadText
        if not short.all():
            pieces = self.pieces(starts[~short], ends[~short])
            if not _INTEGERS.fullmatch(b" ".join([*pieces, b""])):
                pieces = [piece.lstrip(b"0") or b"0" for piece in pieces]
                if not all(piece.isdigit() and len(piece) <= 18 for piece in pieces):
                    raise BadText
            ids[~short] = np.array(pieces).astype(np.int64)
        return ids

    def numbers(self, starts, ends):
        """The numbers in text[start:end], NaN where there is none. float32."""
        first = self.padded[starts]
        signed = (first == _MINUS) | (first == _PLUS)
        begins = starts + signed
        lengths = np.clip(ends - begins, 1, 8)
        words = self._words[begins] << ((8 - lengths) * 8).astype(np.uint64)
        # The lowest byte of a word that is a dot, as the flag of that byte; 0 without a dot.
        x = words ^ _DOTS
        flags = (x - _ONES) & ~x & _HIGH
        flag = flags & (~flags + np.uint64(1))
        dotted = flag != 0
        before = np.where(dotted, (flag >> np.uint64(7)) - np.uint64(1), np.uint64(0))
        behind = ~np.where(dotted, (flag << np.uint64(1)) - np.uint64(1), np.uint64(0))
        words = words & behind | (words & before) << np.uint64(8)
        size = lengths - dotted  # digits
        decimals = np.where(dotted, 7 - np.searchsorted(_FLAGS, flag), 0)
        shift = ((8 - np.clip(size, 1, 8)) * 8).astype(np.uint64)
        whole, good = eight(words, shift)
        doubles = whole / 10.0**decimals  # both exact, so the quotient is rounded once
        doubles = np.where(first == _MINUS, -doubles, doubles)
        good &= (ends - begins == lengths) & (size > 0) & ~_half_way(doubles)
        values = doubles.astype(np.float32)
        if not good.all():
            pieces = self.pieces(starts[~good], ends[~good])
            values[~good] = _slow_numbers(pieces)
        return values


def _half_way(doubles):
    """Whether a float64 may be rounded to either of two float32; see libsvm_text."""
    return doubles.view(np.int64) & (1 << 29) - 1 == 1 << 28


def _slow_numbers(pieces):
    """The numbers in texts of any form. float32."""
    if not are_numbers(pieces):
        return np.array([number_of(piece) for piece in pieces], np.float32)
    doubles = np.array(pieces).astype(np.float64)
    with np.errstate(over="ignore"):
        numbers = doubles.astype(np.float32)
    doubtful = _half_way(doubles) | (np.abs(doubles) < np.finfo(np.float32).tiny)
    for i in np.flatnonzero(doubtful).tolist():
        numbers[i] = number_of(pieces[i])
    return numbers
