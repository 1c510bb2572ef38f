"""The pieces of output files: which rows go to which, writing them block by block, joining them.

A piece is a contiguous part of an output file, made of rows of one range; the pieces of a file are
joined in order. A range, a part of an input file, is what a task reads: of lines a LineRange, of a
table one of its parts. A reader reads it (LineReader here, data_tools.tables.row_checks.RowReader).

Needs neither TensorFlow nor absl, which Spark's executors lack.
"""

import contextlib
import functools
import gzip
import posixpath
from operator import add, or_
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from data_tools.click_logs.splitting import Split, split_of
from deepfm.errors import BadInput, naming
from deepfm.records import codec, libsvm_text, text_blocks
from deepfm.records.codec import Batch
from deepfm.records.schema import BadRecord, Schema, sifted
from deepfm.records.storage import places
from deepfm.records.text_blocks import LineRange

COPY = 1 << 20  # bytes copied at once
GZIP_LEVEL = 4


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
_TOGETHER = BlockFacts(add, add, max, or_, or_, np.minimum, np.maximum, add, add)


def together(one: BlockFacts, other: BlockFacts) -> BlockFacts:
    """The BlockFacts of two blocks as one."""
    return BlockFacts(*(join(a, b) for join, a, b in zip(_TOGETHER, one, other)))


def facts_of(batch: Batch, size: int) -> BlockFacts:
    """The BlockFacts of a Batch of `size` bytes, whose labels are as they were: -1, 0 or 1."""
    rows, values = len(batch.labels), batch.values
    if batch.counts is None:
        low, high = values.min(0, initial=np.inf), values.max(0, initial=-np.inf)
    else:
        width = batch.counts.shape[1]
        there = np.arange(values.shape[1]) < batch.counts.sum(1)[:, np.newaxis]
        kind = np.uint16 if width < 1 << 16 else np.int64  # numpy sorts these by radix
        fields = np.tile(np.arange(width, dtype=kind), rows).repeat(batch.counts.ravel())
        order = np.argsort(fields, kind="stable")
        fields, values = fields[order], values[there][order]
        first = np.flatnonzero(np.diff(fields.astype(np.int64), prepend=-1))
        low, high = (np.full(width, x, np.float32) for x in (np.inf, -np.inf))
        if len(first):
            low[fields[first]] = np.minimum.reduceat(values, first)
            high[fields[first]] = np.maximum.reduceat(values, first)
    labels, max_id = batch.labels, int(batch.ids.max(initial=0 if rows else -1))
    ones, negative, zero = np.count_nonzero(labels > 0), (labels < 0).any(), (labels == 0).any()
    return BlockFacts(rows, ones, max_id, bool(negative), bool(zero), low, high, bytes=size)


def ranges(low: np.ndarray, high: np.ndarray) -> List[Optional[List[float]]]:
    """[smallest, largest] value of each field, as short as float32 can be written; None if none."""
    number = lambda x: float(str(np.float32(x))) + 0.0  # no -0.0, which the order would decide
    return [[number(a), number(b)] if a <= b else None for a, b in zip(low, high)]


class LineReader:
    """Reads the rows of LibSVM or LibFFM lines."""

    what = "id:value pair"  # that a row holds

    def read(self, lines: LineRange) -> Iterator[Tuple[int, Any]]:
        """Yields (bytes of the file read, a block for `schema.sifted`) for the rows of a range."""
        return text_blocks.read(lines)

    def count(self, lines: LineRange, schema: Schema) -> Iterator:
        """Yields (bytes read, None, (rows, most fields in a row)) for each block of a range.

        The fields count only if they have names, or if rows are padded.
        """
        for _, text, read in text_blocks.blocks(*lines):
            counted = schema.named_fields or schema.pad
            most = text_blocks.most_fields(text, schema.named_fields) if counted else 0
            yield read, None, (len(text_blocks.record_starts(text)), most)

    def records(self, block, schema: Schema) -> Iterator:
        """Yields a BadRecord for each bad row of a block, then the Batch of the others, if any.

        Its labels are -1, 0 or 1: 0 only where there is no minus sign.
        """
        decode = lambda some: codec.decode_lines(some.text, schema)
        explain = lambda some, row: self.explain(some, row, schema)
        return sifted(block, decode, explain, libsvm_text.UNEXPLAINED)

    def explain(self, block, row: int, schema: Schema) -> Optional[str]:
        """What is wrong with a row of a block; None if nothing is."""
        return libsvm_text.explain_line(block.line(row), schema)

    def fields(self, block, row: int) -> int:
        """How many fields a row has."""
        return len(self._words(block, row)) - 1

    def label(self, block, row: int) -> bytes:
        """The label of a good row."""
        return self._words(block, row)[0].partition(b":")[0]

    def _words(self, block, row):
        return text_blocks.without_comment(block.line(row)).split()


def must_count(schema: Schema, options) -> bool:
    """Whether the rows of all files must be counted, or their fields, before any is written."""
    return bool(options.num_files) or not schema.field_size and (schema.pad or schema.named_fields)


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


def write(task, reader, schema: Schema, folder: Callable[[], str]) -> Iterator:
    """The events of a task of `plan`, which writes the rows of a range to its pieces, in order.

    Yields:
        For each block, a BadRecord per bad row, which is not written, and then (bytes of the input
        file read, (index of the output file, path of the piece), BlockFacts).
    """
    lines, planned = task
    top = folder()
    planned = [Piece(posixpath.join(top, name), *rest) for name, *rest in planned]
    schema = Schema(*schema)  # on Spark, named tuples keep their fields, not their methods
    with naming(top), places.appending(len(planned) if planned[0].part else 1) as put:
        for piece, block, read in _cut(reader.read(lines), planned):
            for batch in reader.records(block, schema):
                if isinstance(batch, BadRecord):
                    yield batch
                    continue
                labels = (batch.labels > 0).astype(np.float32)
                data = codec.encode(*batch._replace(labels=labels))[0]
                with naming(piece.path):
                    put(piece.path, data)
                yield read, (piece.output, piece.path), facts_of(batch, len(data))
                read = 0
            if read:
                yield read, (piece.output, piece.path), NO_ROWS


def _cut(blocks, pieces):
    """Yields (piece, block, bytes read) for each block of rows, cut where a piece ends."""
    begins = np.cumsum([0, *(piece.rows or 0 for piece in pieces[:-1])])  # in rows of the range
    row = 0
    for read, block in blocks:
        if pieces[0].part:
            splits = split_of(pieces[0].part[0], block.path, block.starts)
            index = [np.flatnonzero(splits == piece.part[1]) for piece in pieces]
        elif row >= begins[-1]:  # the last piece takes the rest
            yield pieces[-1], block, read
            continue
        else:
            cuts = np.clip(np.append(begins, row + len(block)) - row, 0, len(block))
            index = list(map(range, cuts, cuts[1:]))
            row += len(block)
        for piece, some in zip(pieces, index):
            if len(some):
                yield piece, block if len(some) == len(block) else block.take(some), read
                read = 0


def join(
    engine, files: Dict[str, List[str]], compress: bool, scratch: str, size: int
) -> Dict[str, str]:
    """Joins {name: paths of its parts}, of `size` bytes in all, to {name: path of the whole}."""
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
