"""Text whose pairs name their fields: LibFFM's `label field:id:value ...`, or LibSVM with a map.

TensorFlow only decodes `label id:value ...`. So the fields of a LibFFM line are blanked out, in a
whole block of text at once, and kept as numbers beside it. String ids are taken out of the text in
the same way, to be hashed.
"""

import re
from typing import List, Optional, Sequence, Tuple

import numpy as np

_COLON, _ZERO, _NINE, _BLANK = (ord(x) for x in ":09 ")
_DIGITS = 6  # at most, in the number of a field


def take(
    text: bytes, with_fields: bool, with_ids: bool
) -> Optional[Tuple[bytes, Sequence[int], List[bytes]]]:
    """Takes fields, string ids, or both out of lines `label [field:]id:value ...`.

    Args:
        text: whole lines.
        with_fields: whether pairs begin with a field.
        with_ids: whether ids are strings.

    Returns:
        (the rest, which TensorFlow can decode; the field of each pair, int32 [n], empty without
        fields; n ids, empty if ids are numbers, which stay in the text), or None if a pair is
        malformed.
    """
    if not (with_fields or with_ids):
        return text, [], []
    text = re.sub(rb"#[^\n]*", b"", text) if b"#" in text else text
    characters = np.frombuffer(text, np.uint8).copy()
    parts = 2 if with_fields else 1  # colons in a pair
    marks = np.flatnonzero((characters <= _BLANK) | (characters == _COLON))
    colons = np.flatnonzero(characters[marks] == _COLON)  # among the marks
    if len(colons) % parts or (len(colons) and not colons[0]):
        return None
    colons = colons.reshape(-1, parts)
    # The colons of a pair follow each other, with a blank before them and the next pair.
    if (np.diff(colons) != 1).any() or (np.diff(colons[:, 0]) <= parts).any():
        return None
    starts, colons = marks[colons[:, 0] - 1] + 1, marks[colons]  # in the text
    fields, ids = [], []
    if with_fields:
        fields = _numbers(characters, starts, colons[:, 0])
        if fields is None:
            return None
        starts = colons[:, 0] + 1
    if with_ids:
        ends = colons[:, -1]
        if (starts == ends).any():
            return None
        ids = [text[a:b] for a, b in zip(starts.tolist(), ends.tolist())]
        _blank(characters, starts, ends)
        characters[ends - 1] = _ZERO
    return characters.tobytes(), fields, ids


def _numbers(characters, starts, ends):
    """Blanks out characters[start : end + 1]; returns the numbers in [start:end], None if bad."""
    lengths = ends - starts
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= _DIGITS:
        return None
    numbers = np.zeros(len(starts), np.int32)
    for i in range(lengths.max() if len(lengths) else 0):
        inside = lengths > i
        where = starts if inside.all() else starts[inside]
        digits = characters[where + i]
        if (digits < _ZERO).any() or (digits > _NINE).any():
            return None
        numbers[inside] = numbers[inside] * 10 + (digits - _ZERO)
    _blank(characters, starts, ends + 1)
    return numbers


def _blank(characters, starts, ends):
    """Overwrites each characters[start:end] with blanks."""
    lengths = ends - starts
    for i in range(lengths.max() if len(lengths) else 0):
        characters[starts[lengths > i] + i] = _BLANK


def num_fields(text: bytes) -> int:
    """The largest field in a block of LibFFM text + 1; malformed lines do not count."""
    taken = take(text, with_fields=True, with_ids=False)
    if taken is not None:
        return int(taken[1].max(initial=-1)) + 1
    # A line is bad; look at the lines one by one.
    return max(
        (num_fields(line + b"\n") for line in text.splitlines() if text != line + b"\n"), default=0
    )
