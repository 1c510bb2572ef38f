"""Cuts raw files into tasks, which count the categories of rows, or write them as records.

What tasks call needs neither TensorFlow nor absl, which Spark's executors lack.
"""

import functools
import os
from typing import Callable, Iterator, List, NamedTuple, Tuple, Union

import numpy as np

from data_tools.click_logs import field_tables, row_parser, vocabulary
from data_tools.click_logs.row_parser import Layout, Rows
from data_tools.click_logs.splitting import SPLITS, Split, split_of
from data_tools.libsvm.line_format import line_writer
from data_tools.libsvm.pieces import facts_of
from data_tools.tables import blocks, csv_blocks, parquet_blocks, reading
from data_tools.tables.csv_blocks import CsvFile, LinePart
from data_tools.tables.reading import Part
from deepfm.errors import BadInput, naming
from deepfm.records import codec, data_file, text_blocks
from deepfm.records.raw import column_kinds
from deepfm.records.raw.column_kinds import KEY, LABEL, WEIGHT, Column
from deepfm.records.raw.feature_map import STEPS, end_of
from deepfm.records.schema import BadRecord
from deepfm.records.storage import places

COUNT_ROWS = 1 << 17  # rows to count before passing on the counts
SUFFIXES = {"tfrecord": data_file.TFRECORD[0], "libsvm": data_file.LIBSVM[0]}
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
        options: options.PrepareOptions.
    """
    size = max(text_blocks.TASK, sum(f.bytes for f in files) // MOST)
    is_parquet = bool(files) and data_file.is_parquet(files[0].path)
    if is_parquet:
        parts = [part for file in files for part in parquet_blocks.cut(file.path, size)]
        sizes = [(part.path, part.rows) for part in parts]
    else:
        parts, sizes = text_blocks.cut(files, size), [(f.path, f.bytes) for f in files]
    before, total = {}, 0
    for path, number in sizes:
        before.setdefault(path, total)
        total += number
    layout_of = functools.lru_cache(maxsize=1)(functools.partial(read_layout, source, options))
    for i, part in enumerate(parts):
        if not part:
            continue
        layout, found = layout_of(part.path)
        if is_parquet:
            part = part._replace(names=found, there=found, texts=True)
        else:
            part = LinePart(part.path, part, found)
        split = source.split._replace(before=before[part.path], total=max(total, 1))
        yield RawSlice(part, layout, split, f"part-{i:05d}-of-{len(parts):05d}")


def read_layout(
    source: RawInput, options, path: str
) -> Tuple[Layout, Union[CsvFile, Tuple[str, ...]]]:
    """(the Layout of a file's rows; how the text lies, or the names of Parquet's columns to read).

    Args:
        source: where the file is from.
        options: options.PrepareOptions.
        path: the file.

    Raises:
        BadInput: a column is missing, or has a type without texts.
    """
    split, columns = source.split, options.table.columns
    first = [x for kind in (LABEL, WEIGHT, KEY) for x in columns if x.kind == kind]
    fields = column_kinds.fields(columns, options.integers)
    by = [Column(split.column, split.by.partition(":")[0], buckets=1 << 62)] if split.column else []
    label, less = first[0].name, " (only --test_input may lack the label)" * source.labels
    if data_file.is_parquet(path):
        schema = parquet_blocks.open_file(path).schema_arrow
        names, about = schema.names, "--dataset, --columns"
    else:
        wanted = [x.name for x in (*first, *fields)][not source.labels :]
        orders = [[x.name for x in columns if x.name != left] for left in ("", label)]
        file = csv_blocks.describe(
            path, wanted, orders[: 2 - source.labels], options.delimiter, options.header
        )
        names, about = file.names, "--dataset, --columns, --header"
    if not source.labels and label.lower() not in {name.lower() for name in names}:
        first = first[1:]
    layout = Layout(tuple(first), fields, tuple(by), options.table.missing)
    more = {label: less, split.column: f" for --split_by={split.by}"}
    asked = [x.name for x in (*first, *fields, *by)]
    find = lambda name: blocks.find(path, name, names, f"(see {about}){more.get(name, '')}")
    places = tuple(map(find, asked))
    if data_file.is_parquet(path):
        for place in places:
            parquet_blocks.check_text(path, schema.field(place))
        return layout, tuple(names[place] for place in places)
    hints = " (see --dataset, --columns, --delimiter)", less
    return layout, file._replace(names=tuple(asked), places=places, texts=True, hints=hints)


def size(part: Part) -> int:
    """The bytes of the file that a part takes."""
    if hasattr(part, "groups"):
        return part.bytes
    return (part.lines.end or places.of(part.path).size(part.path)) - part.lines.start


def read_rows(part: Part, layout: Layout) -> Iterator[Tuple[int, Union[Rows, BadRecord]]]:
    """Yields (bytes of the file read, Rows or a BadRecord) for rows of a file, block by block."""
    accept = lambda block: row_parser.parse(block, layout)
    explain = lambda block, row: row_parser.explain(block, row, layout)
    for size, block in reading.read(part):
        for rows in blocks.sifted(block, accept, explain):
            yield 0 if isinstance(rows, BadRecord) else size, rows


def times_of(task: RawSlice) -> RawSlice:
    """The slice with the cells of its layout.by alone, to be counted in all rows."""
    layout, part = task.layout, task.lines
    only = lambda x, *keys: x._replace(**{key: getattr(x, key)[-1:] for key in keys})
    if hasattr(part, "groups"):
        part = only(part, "names", "there")
    else:
        part = part._replace(file=only(part.file, "names", "places"))
    layout = Layout((), layout.by, missing=layout.missing)
    return task._replace(lines=part, layout=layout, split=Split())


def count_rows(task):
    """The events of an engine's task that counts the categories of a RawSlice.

    Yields:
        BadRecords, and (bytes read, None, the fields' [Counts] since the last ones, or ()).
    """
    waiting, texts, rows = [], [[] for _ in task.layout.columns], 0
    for read, block in read_rows(task.lines, task.layout):
        if isinstance(block, BadRecord):
            yield block
            continue
        train = split_of(task.split, task.lines.path, block.starts, block.keys[-1]) == 0
        keys = list(block.keys[:, train])
        for field, (rows_of, found) in block.long.items():
            texts[field] += [text for row, text in zip(rows_of, found) if train[row]]
        for field, members in block.lists.items():
            mine = train.repeat(members.lengths)
            keys[field] = members.keys[mine]
            texts[field] += [text for i, text in zip(*members.long) if mine[i]]
        waiting.append(keys)
        rows += len(train)
        if rows < COUNT_ROWS:
            yield read, None, ()
        else:
            yield read, None, _counts(task.layout.columns, waiting, texts)
            waiting, texts, rows = [], [[] for _ in task.layout.columns], 0
    if waiting:
        yield 0, None, _counts(task.layout.columns, waiting, texts)


def _counts(columns, blocks, texts):
    """[Counts] of the fields, from each block's keys of each, and the long texts of each field."""
    keys = map(np.concatenate, zip(*blocks))
    return [vocabulary.count(c.kind, *cells) for c, *cells in zip(columns, keys, texts)]


def encode(task, fields: Callable, output_format: str, folder: Callable[[], str]) -> Iterator:
    """The events of an engine's task that encodes the rows of a slice.

    Args:
        task: a RawSlice.
        fields: returns the Field of each field.
        output_format: a key of SUFFIXES.
        folder: of the engine.

    Yields:
        BadRecords, and (bytes read, (index in SPLITS, name of the file, its path), BlockFacts).
    """
    fields, top, name = fields(), folder(), task.name + SUFFIXES[output_format]
    paths = [os.path.join(top, split, name) for split in SPLITS]
    for path in paths:
        places.of(path).make_inner(os.path.dirname(path))
    if output_format == "tfrecord":
        to_bytes = lambda batch, names: codec.encode(*batch, names)[0]
    else:
        to_lines = line_writer(end_of(fields[-1]), STEPS)
        to_bytes = lambda batch, _: to_lines(batch.ids, batch.values, batch.labels > 0)
    with naming(top), places.appending(len(SPLITS)) as put:
        for read, block in read_rows(task.lines, task.layout):
            if isinstance(block, BadRecord):
                yield block
                continue
            batch, unknown = field_tables.encode(block, fields)
            splits = split_of(task.split, task.lines.path, block.starts, block.keys[-1])
            for split in np.unique(splits).tolist():
                mine = splits == split
                some = codec.Batch(*(x if x is None else x[mine] for x in batch))
                names = block.names and (block.names[0], *(x[mine] for x in block.names[1:]))
                put(paths[split], to_bytes(some, names))
                facts = facts_of(some, 0)._replace(max_id=0, unknown=unknown[mine].sum(0))
                yield read, (split, name, paths[split]), facts
                read = 0
