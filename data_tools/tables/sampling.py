"""Reads rows at evenly spaced places of tables, to see what their columns are."""

from typing import Any, Collection, Dict, NamedTuple, Sequence, Tuple

import numpy as np

from data_tools.tables import blocks, csv_blocks, parquet_blocks, reading
from data_tools.tables.csv_blocks import CsvFile, LinePart
from deepfm.errors import BadInput
from deepfm.records import data_file, text_blocks
from deepfm.records.raw import cells as rules
from deepfm.records.schema import BadRecord

ROWS = 100000  # of the sample, at least
PLACES = 40  # of the files, from which it is drawn
FILES = 40  # of many, at most


class Cells(NamedTuple):
    """The different texts of a column in the sample that are not missing, the most frequent first.

    Attributes:
        texts: n of them, a pyarrow Array.
        counts: int64 [n].
        rows: how many rows the sample has.
    """

    texts: Any
    counts: np.ndarray
    rows: int

    def share(self, which: np.ndarray) -> float:
        """The share of cells whose texts `which`, bool [n], says."""
        return float(self.counts[which].sum() / max(self.counts.sum(), 1))

    def match(self, pattern: str) -> np.ndarray:
        """Whether a whole text matches. bool [n]"""
        import pyarrow.compute as pc

        return np.array(pc.match_substring_regex(self.texts, f"^(?:{pattern})$"))


def sample(
    files: Sequence, options, labels: Collection[str], missing: Sequence[str]
) -> Tuple[CsvFile, Dict[str, Cells], int]:
    """Reads at least ROWS rows, or all.

    Args:
        files: DataFiles.
        options: click_logs.options.PrepareOptions; `delimiter`, `header` and `label` are asked.
        labels: names by which a first line is a header.
        missing: texts of missing cells.

    Returns:
        (how the first file lies, its delimiter and header None where others differ and in Parquet;
        {column: Cells}, none if there are no rows; about how many rows the files have).
    """
    chosen = [files[i * len(files) // FILES] for i in range(FILES)] if files[FILES:] else files
    heads = {f.path: _head(f.path, options, labels) for f in chosen}
    head = heads[files[0].path]
    columns, rows, read = [[] for _ in head.names], 0, 0
    for part, most in _parts(chosen, heads, head.names):
        for size, block in reading.read(part):
            read += size
            for some in blocks.sifted(block, lambda x: x.texts(), _explain):
                if not isinstance(some, BadRecord):
                    text, starts, ends = some
                    for column, begin, end in zip(columns, starts, ends):
                        texts, which = blocks.distinct(text, begin, end)
                        column.append((texts, np.bincount(which, minlength=len(texts))))
                    rows, most = rows + starts.shape[1], most - starts.shape[1]
            if most <= 0:
                break
    found = {name: _cells(x, rows, missing) for name, x in zip(head.names, columns) if rows}
    total = rows * max(sum(f.bytes for f in files) / max(read, 1), 1)
    for key in ("delimiter", "header"):
        if len({getattr(other, key) for other in heads.values()}) > 1:
            head = head._replace(**{key: None})
    return head, found, int(total)


def _head(path, options, labels) -> CsvFile:
    """How a file lies, all of whose columns are read."""
    if data_file.is_parquet(path):
        schema = parquet_blocks.open_file(path).schema_arrow
        for column in schema:
            parquet_blocks.check_text(path, column)
        return CsvFile(None, len(schema), tuple(schema.names), (), None)
    lines, delimiter = csv_blocks.first_rows(path, options.delimiter)
    cells = next(lines)
    texts = [x for x in cells if x and rules.number(x) is None and x not in rules.MISSING]
    header = len(texts) >= len(cells) - 1
    if options.header != "auto":
        header = options.header == "yes"
    elif header and not (options.label in cells or {x.lower() for x in cells} & labels):
        # A cell of a row is in its column once more.
        header = not any(x == y for line in lines for x, y in zip(cells, line) if x)
    twice = next((x for x in cells if x and cells.count(x) > 1), None)
    if header and twice:
        raise BadInput(f"{path}: two columns are called {twice}; give each a name of its own.")
    names = [x or f"Unnamed: {i}" for i, x in enumerate(cells)]
    names = names if header else [f"column_{i}" for i in range(1, len(cells) + 1)]
    return CsvFile(delimiter, len(cells), tuple(names), (), header, True)


def _explain(block, row):
    cells, reason = block.row(row)
    return reason if cells is None else None


def _parts(files, heads, names):
    """[(Part, rows of it to read)]: all, or those at evenly spaced places of all files."""
    about, is_parquet = "as the first file has", data_file.is_parquet(files[0].path)
    if is_parquet:
        parts = []
        for f in files:
            own = heads[f.path].names
            there = tuple(own[blocks.find(f.path, name, own, about)] for name in names)
            found = parquet_blocks.cut(f.path, 1)
            parts += [x._replace(names=names, there=there, texts=True) for x in found]
        sizes = [part.rows for part in parts]
    else:
        ends = {file.path: file.bytes for file in files}
        of = {path: csv_blocks.select(path, heads[path], names, about) for path in ends}
        size = sum(ends.values())
        size = size if size <= PLACES * text_blocks.BLOCK else size // PLACES
        ranges = [lines for lines in text_blocks.cut(files, size) if lines]
        parts = [LinePart(lines.path, lines, of[lines.path]) for lines in ranges]
        sizes = [(lines.end or ends[lines.path]) - lines.start for lines in ranges]
    few, total = ROWS if is_parquet else PLACES * text_blocks.BLOCK, sum(sizes)
    rows_of = lambda size: 1 << 62 if total <= few else -(-size * ROWS // total)
    return [(part, rows_of(size)) for part, size in zip(parts, sizes)]


def _cells(parts, rows, missing) -> Cells:
    """The Cells of a column, from the texts and counts of its blocks."""
    import pyarrow as pa
    import pyarrow.compute as pc

    texts, counts = zip(*parts)
    cells = pa.concat_arrays(texts).dictionary_encode()
    texts, which = cells.dictionary, blocks.numpy_of(cells.indices, np.int32)
    counts = np.bincount(which, np.concatenate(counts)).astype(np.int64)
    there = pc.invert(pc.is_in(texts, pa.array(["", *missing], texts.type)))
    texts, counts = texts.filter(there), counts[np.array(there)]
    by_text = np.array(pc.sort_indices(texts))
    order = by_text[np.argsort(-counts[by_text], kind="stable")]
    return Cells(texts.take(pa.array(order)), counts[order], rows)
