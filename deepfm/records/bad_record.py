"""A bad record, and which records of a batch are bad."""

import itertools
from typing import Callable, Iterable, Iterator, NamedTuple, Optional, Sequence, Tuple

from deepfm.records.libsvm_text import UNEXPLAINED
from deepfm.records.text_blocks import without_comment

_MANY = 100
_PIECE = 64  # of a batch that is refused: the first bad record is found soon


class BadRecord(NamedTuple):
    """A record that breaks the schema: its file, place (line, or record and byte) and reason.

    `few` says whether few others near it are bad, so that it makes sense to skip them.
    """

    path: str
    place: str
    reason: str
    few: bool = True

    def __str__(self):
        return f"{self.path}{self.place}: {self.reason}"


def marked(bad: Iterable[BadRecord], rows: int) -> Iterator[BadRecord]:
    """The bad records of a block of so many rows; `few` are at most half and less than _MANY."""
    bad = iter(bad)
    first = list(itertools.islice(bad, _MANY))
    few = len(first) < _MANY and 2 * len(first) <= rows
    return (record._replace(few=few) for record in itertools.chain(first, bad))


def find_refused(
    accepts: Callable[[Sequence[bytes]], bool],
    payloads: Sequence[bytes],
    explain: Callable[[bytes], Optional[str]],
    unexplained: str = UNEXPLAINED,
) -> Iterator[Tuple[int, str]]:
    """Yields (index, reason) of each payload that a batch parser refuses, in order.

    The parser alone decides. But what the plain reader finds bad is put to it one by one, and the
    rest at once: where many are bad that is much faster than to look for each by halving.

    Args:
        accepts: whether the parser accepts a batch; it must refuse one that holds a bad payload.
        payloads: the batch.
        explain: what is wrong with a payload; None where nothing is.
        unexplained: the reason where `explain` has none.
    """
    if not payloads or accepts(payloads):
        return
    for start in range(0, len(payloads), _PIECE):
        piece = payloads[start : start + _PIECE]
        if accepts(piece):
            continue
        reasons = [explain(payload) for payload in piece]
        rest = [payload for payload, reason in zip(piece, reasons) if not reason]
        sure = not rest or accepts(rest)
        for i, (payload, reason) in enumerate(zip(piece, reasons), start):
            if (reason or not sure) and not accepts([payload]):
                yield i, reason or unexplained


def sift(
    path: str,
    text: bytes,
    number: int,
    accepts: Callable[[bytes], bool],
    explain: Callable[[bytes], Optional[str]],
    content: Callable[[bytes], bytes] = without_comment,
) -> Iterator[BadRecord]:
    """Yields a BadRecord for each line of a block that the parser refuses; returns the others.

    Args:
        path: the file's path.
        text: the block.
        number: the number of its first line.
        accepts: whether the parser accepts a text; it refuses one with a bad line.
        explain: says what is wrong with a line, or returns None for a good one.
        content: returns the part of a line to parse.

    Returns:
        {index: content} of the lines that are good or hold no record.
    """
    contents = {i: content(line) for i, line in enumerate(text.split(b"\n"))}
    rows = [i for i, line in contents.items() if line.strip()]
    accepted = lambda lines: accepts(b"\n".join(lines) + b"\n")
    refused = find_refused(accepted, [contents[i] for i in rows], explain)
    bad = (BadRecord(path, f":{number + rows[i]}", reason) for i, reason in refused)
    for record in marked(bad, len(rows)):
        del contents[int(record.place[1:]) - number]
        yield record
    return contents
