"""Cuts raw files into tasks, and reads their rows."""

import functools
import itertools
from typing import Iterator, List, NamedTuple, Tuple, Union

import numpy as np

from data_tools.click_logs import column_kinds, row_parser, vocabulary
from data_tools.click_logs.column_kinds import DATASETS, LABEL
from data_tools.click_logs.row_parser import Layout, Rows
from data_tools.click_logs.splitting import Split, split_of
from data_tools.tables import blocks, csv_blocks, parquet_blocks
from data_tools.tables.csv_blocks import CsvFile, LinePart
from data_tools.tables.parts import Part, reader
from deepfm.errors import BadInput
from deepfm.records import data_file, text_blocks
from deepfm.records.bad_record import BadRecord
from deepfm.records.storage import places

COUNT_ROWS = 1 << 17  # rows to count before passing on the counts
MOST = 1000  # slices at most, about, of a large input: each becomes a file


class RawSlice(NamedTuple):
    """One task: rows of a raw file to count or to encode.

    Attributes:
        lines: the Part of the file.
        layout: the layout of the file.
        split: how its rows are divided.
        name: the name of the files made from it, without suffix.
    """

    lines: Part
    layout: Layout
    split: Split
    name: str


class RawInput(NamedTuple):
    """A flag that names raw input.

    Attributes:
        flag: the name of the flag.
        spec: its value.
        split: how rows are divided; `cut` fills in `before` and `total`.
        labels: whether the files must have labels.
    """

    flag: str
    spec: str
    split: Split
    labels: bool = True


def checked(source: RawInput, data) -> list:
    """The DataFiles of a source's DataSet; raises BadInput if they cannot be raw rows."""
    parquet = [f.path for f in data.files if data_file.is_parquet(f.path)]
    if parquet and len(parquet) < len(data.files):
        text = next(f.path for f in data.files if f.path not in parquet)
        raise BadInput(
            f"--{source.flag}={source.spec} mixes Parquet and text ({parquet[0]}, {text}); name "
            f"one kind, with a glob such as '*{data_file.PARQUET[0]}'."
        )
    packed = next((f.path for f in data.files if f.path.endswith(".gz")), None)
    if packed and source.split.by == "order":
        raise BadInput(
            f"{packed}: --split_by=order needs plain files; unpack it, or give --valid_input."
        )
    return data.files


def cut(source: RawInput, files: List, options) -> Iterator[RawSlice]:
    """Yields the slices of a source.

    Parquet files are cut into row groups, plain files into whole lines, gzip files not at all.

    Args:
        source: the source.
        files: from `checked`.
        options: options.Options.
    """
    total = sum(f.bytes for f in files)
    size = max(text_blocks.TASK, total // MOST)
    if files and data_file.is_parquet(files[0].path):
        yield from _cut_parquet(source, [f.path for f in files], size, options)
        return
    slices = [
        (file.path, start, before)
        for file, before in zip(files, itertools.accumulate([0, *(f.bytes for f in files)]))
        for start in range(0, 1 if file.path.endswith(".gz") else file.bytes, size)
    ]
    layout_of = functools.lru_cache(maxsize=1)(read_layout)
    of_slice = lambda i: text_blocks.lines_from(*slices[i][:2], slices[i][1] + size)
    numbers = range(len(slices))
    for i, lines in zip(numbers, places.each(files[0].path if files else "", of_slice, numbers)):
        path, _, before = slices[i]
        layout, file = layout_of(path, source.labels, options)
        if lines:
            split = source.split._replace(before=before, total=total)
            name = f"part-{i:05d}-of-{len(slices):05d}"
            yield RawSlice(LinePart(path, lines, file), layout, split, name)


def _cut_parquet(source, paths, size, options):
    """As `cut`; for order, rows are counted instead of bytes."""
    tasks = [task for path in paths for task in parquet_blocks.cut(path, size)]
    total, before = sum(task.rows for task in tasks), 0
    layout_of = functools.lru_cache(maxsize=1)(_parquet_layout)
    for i, task in enumerate(tasks):
        layout, names = layout_of(task.path, source.labels, options)
        split = source.split._replace(before=before - task.first_row, total=max(total, 1))
        name = f"part-{i:05d}-of-{len(tasks):05d}"
        yield RawSlice(task._replace(names=names, there=names, texts=True), layout, split, name)
        before += task.rows


def _columns(options):
    """(all columns, the name of the label's, the Column of each field)."""
    columns = options.table or DATASETS[options.dataset]
    (label,) = (column.name for column in columns if column.kind == LABEL)
    return columns, label, column_kinds.fields(columns, options.integers)


def read_layout(path: str, labels: bool, options) -> Tuple[Layout, CsvFile]:
    """The layout of a text file, from its first line that is not blank; does not check that row.

    If it is a header, it gives the places of the fields; otherwise a file has the columns of the
    data set, in their order.

    Args:
        path: the file.
        labels: whether the file must have labels.
        options: options.Options.

    Raises:
        BadInput: the line names some of the columns that are needed, but not all.
    """
    cells, delimiter = csv_blocks.first_cells(path, options.delimiter)
    columns, label, fields = _columns(options)
    names = [cell.lower() for cell in cells]
    wanted = [field.name.lower() for field in fields] + [label.lower()] * labels
    there = [name for name in wanted if name in names]
    named = options.header != "no" and len(there) == len(wanted)
    if options.header != "no" and not named and not all(map(csv_blocks.is_number, there)):
        lacking = ", ".join(name for name in wanted if name not in names)
        raise BadInput(
            f"{path}: its first line names column {there[0]}, so it is a header, but not {lacking} "
            "(see --dataset, --columns); name all columns alike, or give --header=no if it is a "
            "row."
        )
    if not named:
        less_label = not labels and len(cells) == len(columns) - 1
        names = [c.name.lower() for c in columns if not (less_label and c.kind == LABEL)]
    place = {name: i for i, name in enumerate(names)}
    layout = Layout(0 if label.lower() in place else None, labels, fields)
    read = [label.lower()] * (layout.label is not None) + [field.name.lower() for field in fields]
    less = " (only --test_input may lack the label)" if labels else ""
    return layout, CsvFile(
        delimiter, len(names), tuple(read), tuple(place[name] for name in read),
        named or options.header == "yes", True, (" (see --dataset, --columns, --delimiter)", less),
    )  # fmt: skip


def _parquet_layout(path, labels, options):
    """The Layout of a file's rows and the names of the columns to read, label first.

    Raises BadInput if a column is missing, or its type has no text.
    """
    schema = parquet_blocks.open_file(path).schema_arrow
    _, label, fields = _columns(options)
    less = not labels and label.lower() not in [name.lower() for name in schema.names]
    about, names = "(see --dataset, --columns)", []
    for name in [label] * (not less) + [field.name for field in fields]:
        more = " (only --test_input may lack the label)" if name == label else ""
        names.append(schema.names[blocks.find(path, name, schema.names, about + more)])
        parquet_blocks.check_text(path, schema.field(names[-1]))
    return Layout(None if less else 0, labels, fields), tuple(names)


def size(part: Part) -> int:
    """The bytes of the file that a part takes."""
    if hasattr(part, "groups"):
        return part.bytes
    return (part.lines.end or places.of(part.path).size(part.path)) - part.lines.start


def read_rows(part: Part, layout: Layout) -> Iterator[Tuple[int, Union[Rows, BadRecord]]]:
    """Yields (bytes of the file read, Rows or a BadRecord) for rows of a file, block by block."""
    accept = lambda block: row_parser.parse(block, layout)
    explain = lambda block, row: row_parser.explain(block, row, layout)
    for size, block in reader(part).read(part):
        for rows in blocks.sifted(block, accept, explain):
            yield 0 if isinstance(rows, BadRecord) else size, rows


def count_rows(task):
    """Yields bad rows and (bytes read, the fields' [Counts] since the last ones, or ())."""
    waiting, texts, rows = [], [[] for _ in task.layout.columns], 0
    for read, block in read_rows(task.lines, task.layout):
        if isinstance(block, BadRecord):
            yield block
            continue
        train = split_of(task.split, task.lines.path, block.starts) == 0
        waiting.append(block.keys[:, train])
        for field, (rows_of, found) in block.long.items():
            texts[field] += [text for row, text in zip(rows_of, found) if train[row]]
        rows += len(train)
        if rows < COUNT_ROWS:
            yield read, ()
        else:
            yield read, _counts(task.layout.columns, waiting, texts)
            waiting, texts, rows = [], [[] for _ in task.layout.columns], 0
    if waiting:
        yield 0, _counts(task.layout.columns, waiting, texts)


def _counts(columns, blocks, texts):
    """[Counts] of the fields, from blocks of keys [F, B] and the long texts of each field."""
    keys = np.concatenate(blocks, axis=1)
    return [vocabulary.count(c.kind, *cells) for c, *cells in zip(columns, keys, texts)]
