"""The pieces of output files: which lines go to which, writing them block by block, joining them.

A piece is a contiguous part of an output file, made of lines of one range; the pieces of a file are
joined in order. Needs neither TensorFlow nor absl, which Spark's executors lack.
"""

import contextlib
import functools
import gzip
import posixpath
import re
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np

from data_tools.click_logs.splitting import Split, split_of
from data_tools.libsvm import field_lines
from deepfm.errors import BadInput, naming
from deepfm.records import codec, libsvm_text, text_blocks
from deepfm.records.bad_record import sift
from deepfm.records.codec import Batch
from deepfm.records.schema import Schema
from deepfm.records.storage import places
from deepfm.records.text_blocks import LineRange

COPY = 1 << 20  # bytes copied at once
GZIP_LEVEL = 4
_BLANK, _MINUS = b" -"
_NEGATIVE = re.compile(rb"\s*-")


class Piece(NamedTuple):
    """A contiguous part of an output file.

    Attributes:
        path: the name of the temporary file for it alone; when it is written, its path.
        output: the index of the output file.
        rows: how many rows of the range it takes; None: all of them.
        part: (how the rows are divided, the index of its split); None: they are not.
    """

    path: str
    output: int
    rows: Optional[int] = None
    part: Optional[Tuple[Split, int]] = None


class BlockFacts(NamedTuple):
    """Facts about the records of a block.

    Attributes:
        rows: records written.
        positives: how many of them have label 1.
        max_id: the largest id, negative if there is no record.
        negative: whether a label has a minus sign.
        zero: whether a label is 0.
        low, high: float32 [F], the smallest and the largest value of each field.
        unknown: int64 [F], cells of each field that a feature map does not know.
        bytes: what the records take.
    """

    rows: int
    positives: int
    max_id: int
    negative: bool
    zero: bool
    low: np.ndarray = np.float32(np.inf)
    high: np.ndarray = np.float32(-np.inf)
    unknown: np.ndarray = np.int64(0)
    bytes: int = 0


NO_ROWS = BlockFacts(0, 0, -1, False, False)


def together(one: BlockFacts, other: BlockFacts) -> BlockFacts:
    """The BlockFacts of two blocks as one."""
    return BlockFacts(
        one.rows + other.rows,
        one.positives + int(other.positives),
        max(one.max_id, other.max_id),
        one.negative or other.negative,
        one.zero or other.zero,
        np.minimum(one.low, other.low),
        np.maximum(one.high, other.high),
        one.unknown + other.unknown,
        one.bytes + other.bytes,
    )


def facts_of(batch: Batch, negative: bool, zero: bool, size: int) -> BlockFacts:
    """The BlockFacts of a Batch of `size` bytes, its labels as `negative` and `zero` say."""
    rows, values = len(batch.labels), batch.values
    if batch.counts is None:
        low, high = values.min(0, initial=np.inf), values.max(0, initial=-np.inf)
    else:
        size = batch.counts.shape[1]
        there = np.arange(values.shape[1]) < batch.counts.sum(1)[:, np.newaxis]
        fields = np.tile(np.arange(size), rows).repeat(batch.counts.ravel())
        order = np.argsort(fields, kind="stable")
        fields, values = fields[order], values[there][order]
        first = np.flatnonzero(np.diff(fields, prepend=-1))
        low, high = (np.full(size, x, np.float32) for x in (np.inf, -np.inf))
        if len(first):
            low[fields[first]] = np.minimum.reduceat(values, first)
            high[fields[first]] = np.maximum.reduceat(values, first)
    ones = int(np.count_nonzero(batch.labels > 0))
    max_id = int(batch.ids.max(initial=0 if rows else -1))
    return BlockFacts(rows, ones, max_id, negative, zero, low, high, bytes=size)


def ranges(low: np.ndarray, high: np.ndarray) -> List[Optional[List[float]]]:
    """[smallest, largest] value of each field, as short as float32 can be written; None if none."""
    number = lambda x: float(str(np.float32(x))) + 0.0  # no -0.0, which the order would decide
    return [[number(a), number(b)] if a <= b else None for a, b in zip(low, high)]


def mixed(labelled: Iterable[Tuple[str, bytes]]) -> str:
    """The error message for an input with both labels 0 and -1, where 0 is ambiguous.

    Args:
        labelled: the place and the label of each good row.
    """
    first = {}
    for place, label in labelled:
        negative = label.startswith(b"-")
        if negative or libsvm_text.number_of(label) == 0:
            first.setdefault(negative, (place, label.decode()))
        if len(first) == 2:
            (other_place, other), (place, label) = first.values()  # in the order of the rows
            return (
                f"{place}: label {label}, but {other_place} has label {other}; use 0 and 1, or -1 "
                "and +1, not both."
            )
    raise AssertionError("the parser found labels 0 and -1, the plain reader did not")


def must_count(lines, options) -> bool:
    """Whether the rows of all files must be counted, or their fields, before any is written."""
    return bool(options.num_files) or not lines.field_size and (lines.pad or lines.named_fields)


def count(lines: LineRange, named_fields: bool, weighted: bool, pad: bool) -> Iterator:
    """Yields (bytes read, None, (rows, most fields in a row)) for each block of a range.

    The fields count only if they have names, or if rows are padded.
    """
    for _, text, read in text_blocks.blocks(*lines):
        starts = text_blocks.record_starts(text)
        if named_fields:
            pairs = libsvm_text.weights_as_pairs_of(text) if weighted else text
            most = field_lines.num_fields(pairs)
        else:
            most = text_blocks.longest_record(text, starts, weighted) if pad else 0
        yield read, None, (len(starts), most)


def plan(
    ranges: Sequence[LineRange],
    counts: Optional[Sequence[Tuple[int, int]]],
    num_files: int,
    split: Optional[Split] = None,
) -> List[Tuple[LineRange, List[Piece]]]:
    """Says which pieces the lines of each range go to: (a range, its Pieces in order).

    Args:
        ranges: all ranges, in order.
        counts: (rows, most fields in a row) of each; needed if there are num_files.
        num_files: files of equally many rows; 0: one for each input file, sorted.
        split: how rows are divided; each of SPLITS then has a file for each input file.

    Raises:
        BadInput: there are fewer rows than files.
    """
    tasks = []
    if not num_files:
        paths = sorted({r.path for r in ranges})
        for i, lines in enumerate(ranges):
            path, output = f"piece-{i}", paths.index(lines.path)
            made = [
                Piece(f"{path}-{j}", output + i * len(paths), None, (split, j))
                for i, j in enumerate(np.flatnonzero(split.shares if split else ()))
            ]
            tasks.append((lines, made or [Piece(path, output)]))
        return tasks
    total = sum(rows for rows, _ in counts)
    if total < num_files:
        hint = f"; try --num_files={total}" if total else ""
        raise BadInput(f"--num_files={num_files}: the input has only {total} rows{hint}.")
    ends = [total * (i + 1) // num_files for i in range(num_files)]
    row = output = 0
    for i, (lines, (rows, _)) in enumerate(zip(ranges, counts)):
        pieces, last = [], row + rows
        while row < last:
            path = f"piece-{i}-{len(pieces)}"
            pieces.append(Piece(path, output, min(last, ends[output]) - row))
            row += pieces[-1].rows
            output += row == ends[output]
        if pieces:
            tasks.append((lines, pieces))
    return tasks


def both(one: Tuple[int, int], other: Tuple[int, int]) -> Tuple[int, int]:
    """(rows, most fields in a row) of two blocks together."""
    return one[0] + other[0], max(one[1], other[1])


def written(task, write: Callable, schema, folder: Callable[[], str]) -> Iterator:
    """The events of an engine's task that writes the rows of a range to its pieces.

    Args:
        task: one of `plan`.
        write: InputRows.write.
        schema: Schema of the rows.
        folder: of the engine.
    """
    rows, planned = task
    top = folder()
    planned = [Piece(posixpath.join(top, name), *rest) for name, *rest in planned]
    at_once = len(planned) if planned[0].part else 1
    # On Spark, named tuples keep their fields, not their methods.
    with naming(top), places.appending(at_once) as put:
        yield from write((rows, planned), Schema(*schema), put)


def write(
    task: Tuple[LineRange, List[Piece]], schema: Schema, put: Callable[[str, bytes], Any]
) -> Iterator:
    """Writes the lines of a range to its pieces, in order.

    Args:
        task: one of `plan`.
        schema: Schema of the lines.
        put: appends bytes to a path.

    Yields:
        For each block, a BadRecord per bad line, which is not written, and then (bytes of the input
        file read, (index of the output file, path of the piece), BlockFacts).
    """
    accepts = lambda text: codec.decode_lines(text, schema) is not None
    explain, content = (
        functools.partial(f, schema=schema) for f in (libsvm_text.explain_line, _without_comment)
    )
    lines, pieces = task
    path, first = lines.path, text_blocks.numbering(lines)
    for piece, text, lines_before, read in _cut(lines, pieces):
        batch = codec.decode_lines(text, schema)
        if batch is None:
            number = first() + lines_before
            good = yield from sift(path, text, number, accepts, explain, content)
            text = b"\n".join(good.values())
            batch = codec.decode_lines(text, schema)
        data = codec.encode(*batch)[0]
        with naming(piece.path):
            put(piece.path, data)
        negative = _negative(text) if b"-" in text else np.zeros(len(batch.labels), bool)
        zero = bool((~negative & (batch.labels == 0)).any())
        facts = facts_of(batch, bool(negative.any()), zero, len(data))
        yield read, (piece.output, piece.path), facts


def _negative(text):
    """Whether the label of each record of a text has a minus sign. bool [B]."""
    starts = text_blocks.record_starts(text)
    first = np.frombuffer(text, np.uint8)[starts]
    negative = first == _MINUS
    for i in np.flatnonzero(first <= _BLANK).tolist():
        negative[i] = bool(_NEGATIVE.match(text, starts[i]))
    return negative


def _without_comment(line, schema):
    """A line without its comment, unless that may have been meant as part of an id."""
    content = text_blocks.without_comment(line)
    doubtful = schema.hash_buckets and content.strip() and libsvm_text.HASH_IN_ID.search(line)
    return line if doubtful else content


def _cut(lines, pieces):
    """Yields (piece, text, lines of the range before it, bytes read) for each block of a piece."""
    if pieces[0].part:
        yield from _divided(lines, pieces)
        return
    pieces = iter(pieces)
    piece = next(pieces)
    left, lines_before = piece.rows, 0
    for _, text, read in text_blocks.blocks(*lines):
        starts = [] if left is None else text_blocks.record_starts(text)
        row = begin = 0
        while left is not None and row + left <= len(starts):
            row += left
            end = starts[row] if row < len(starts) else len(text)
            yield piece, text[begin:end], lines_before, read
            lines_before += text_blocks.newlines(text, begin, end)
            begin, read = end, 0
            piece = next(pieces, None)
            if piece is None:  # no rows are left
                return
            left = piece.rows
        if begin < len(text):
            yield piece, text[begin:], lines_before, read
            lines_before += text_blocks.newlines(text, begin)
            left = None if left is None else left - (len(starts) - row)


def _divided(lines, pieces):
    """As _cut; the lines of other pieces are blank, so that lines keep their numbers."""
    lines_before = 0
    for begin, text, read in text_blocks.blocks(*lines):
        starts = text_blocks.record_starts(text)
        splits = split_of(pieces[0].part[0], lines.path, begin + starts)
        newlines = np.flatnonzero(np.frombuffer(text, np.uint8) == ord("\n"))
        of_line = dict(zip(np.searchsorted(newlines, starts).tolist(), splits.tolist()))
        whole = text.split(b"\n")
        for piece in pieces:
            mine = (x if of_line.get(i) == piece.part[1] else b"" for i, x in enumerate(whole))
            yield piece, b"\n".join(mine), lines_before, read
            read = 0
        lines_before += len(newlines)


def join(
    engine, files: Dict[str, List[str]], compress: bool, scratch: str, size: int
) -> Dict[str, str]:
    """Joins the parts of each file in order; {name: path of the whole}.

    Args:
        engine: who does it.
        files: {name: paths of its parts}.
        compress: whether to compress them.
        scratch: the folder to write to.
        size: bytes of all.
    """
    wholes = {} if compress else {name: parts[0] for name, parts in files.items() if not parts[1:]}
    tasks = [(name, parts) for name, parts in files.items() if name not in wholes]
    work = functools.partial(
        _join, compress=compress, folder=engine.folder(scratch), remove=not engine.retries
    )
    if tasks:
        title = "Compressing" if compress else "Joining"
        with engine.map(work, tasks, title, size, lambda _, path: path) as results:
            wholes.update((name, path) for _, name, path in results)
    return wholes


def _join(task, compress, folder, remove) -> Iterator[Tuple[int, str, str]]:
    name, parts = task
    whole = posixpath.join(folder(), name)
    files = places.of(whole)
    with naming(whole), files.create(whole) as raw, compressed(raw, compress) as f:
        for part in parts:
            with files.open_file(part) as copied:
                for block in iter(lambda copied=copied: copied.read(COPY), b""):
                    f.write(block)
                    yield len(block), name, whole
            if remove:
                files.remove(part)


def compressed(raw, compress: bool):
    """A file that writes to an open one, with or without compression.

    One gzip member per file: TensorFlow reads the first and ignores the rest.
    """
    if not compress:
        return contextlib.nullcontext(raw)
    return gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0)
