"""Removes the quotes around cells of raw rows, as in CSV.

A cell that begins with a quote ends at the next one; two quotes in a row stand for one (RFC 4180,
section 2). In other cells a quote is an ordinary character. Every row is one line: a cell that
holds a newline or the delimiter is refused.
"""

import re
from typing import Optional, Tuple

import numpy as np

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_CELL = re.compile(rb'"([^"]*(?:""[^"]*)*)"')


def unquote(text: bytes, delimiter: bytes) -> Optional[bytes]:
    """Removes the quotes around cells, without looping over them.

    Args:
        text: whole lines.
        delimiter: the byte between two cells.

    Returns:
        The lines; None if a line is not that simple and needs `unquote_line`.
    """
    if b'"' not in text:
        return text
    characters = np.frombuffer(text, np.uint8)
    quotes = np.flatnonzero(characters == _QUOTE)
    is_cut = (characters == _NEWLINE) | (characters == delimiter[0])
    first = np.flatnonzero(is_cut[quotes - 1])  # index -1 is the last character, a newline
    if not len(first):
        return text
    if first[-1] + 1 == len(quotes):
        return None
    begins, ends = quotes[first], quotes[first + 1]
    after = ends + 1
    after += (characters[after] == _RETURN) & (characters[(after + 1) % len(text)] == _NEWLINE)
    cuts = np.flatnonzero(is_cut)
    inside = np.searchsorted(cuts, ends) - np.searchsorted(cuts, begins)
    if inside.any() or not is_cut[after].all():
        return None
    kept = np.ones(len(text), bool)
    kept[begins] = kept[ends] = False
    return characters[kept].tobytes()


def unquote_line(line: bytes, delimiter: bytes) -> Tuple[bytes, Optional[str]]:
    """(the line without the quotes around its cells, what is wrong with these or None)."""
    if b'"' not in line:
        return line, None
    cells, at = [], 0
    while at <= len(line):
        if line[at : at + 1] != b'"':
            end = line.find(delimiter, at)
            end = len(line) if end < 0 else end
            cells.append(line[at:end])
        else:
            quoted = _CELL.match(line, at)
            if not quoted:
                return line, "a quoted cell does not end in its line (it must not hold a newline)"
            cells.append(quoted[1].replace(b'""', b'"'))
            end = quoted.end()
            if delimiter in cells[-1]:
                return line, "a quoted cell holds the delimiter, which is not supported"
            if line[end : end + 1] not in (b"", delimiter):
                return line, "a quoted cell goes on after its closing quote"
        at = end + 1
    return delimiter.join(cells), None
