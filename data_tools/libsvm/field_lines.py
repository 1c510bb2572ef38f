"""LibFFM text, whose pairs name their fields: `label field:id:value ...`."""

import re
from typing import Optional

import numpy as np

_COLON, _ZERO, _NINE, _BLANK = (ord(x) for x in ":09 ")
_DIGITS = 6  # at most, in the number of a field


def num_fields(text: bytes) -> int:
    """The largest field in a block of LibFFM text + 1; malformed lines do not count."""
    fields = _fields(re.sub(rb"#[^\n]*", b"", text) if b"#" in text else text)
    if fields is not None:
        return int(fields.max(initial=-1)) + 1
    # A line is bad; look at the lines one by one.
    return max(
        (num_fields(line + b"\n") for line in text.splitlines() if text != line + b"\n"), default=0
    )


def _fields(text) -> Optional[np.ndarray]:
    """The field of each pair, int32 [n]; None if a pair is malformed."""
    characters = np.frombuffer(text, np.uint8)
    marks = np.flatnonzero((characters <= _BLANK) | (characters == _COLON))
    colons = np.flatnonzero(characters[marks] == _COLON)  # among the marks
    if len(colons) % 2 or (len(colons) and not colons[0]):
        return None
    colons = colons.reshape(-1, 2)
    # The colons of a pair follow each other, with a blank before them and the next pair.
    if (np.diff(colons) != 1).any() or (np.diff(colons[:, 0]) <= 2).any():
        return None
    starts, ends = marks[colons[:, 0] - 1] + 1, marks[colons[:, 0]]
    lengths = ends - starts
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= _DIGITS:
        return None
    numbers = np.zeros(len(starts), np.int32)
    for i in range(lengths.max(initial=0)):
        inside = lengths > i
        digits = characters[starts[inside] + i]
        if (digits < _ZERO).any() or (digits > _NINE).any():
            return None
        numbers[inside] = numbers[inside] * 10 + (digits - _ZERO)
    return numbers
