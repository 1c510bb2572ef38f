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
from deepfm.records.raw.column_kinds import DATASETS, HASH, KEY, LABEL, WEIGHT, Column
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
    read = functools.partial(_parquet_layout if is_parquet else read_layout, source)
    layout_of = functools.lru_cache(maxsize=1)(read)
    for i, part in enumerate(parts):
        if not part:
            continue
        layout, columns = layout_of(part.path, options)
        if is_parquet:
            part = part._replace(names=columns, there=columns, texts=True)
        else:
            part = LinePart(part.path, part, columns)
        split = source.split._replace(before=before[part.path], total=max(total, 1))
        yield RawSlice(part, layout, split, f"part-{i:05d}-of-{len(parts):05d}")


def _columns(options, split):
    """(all columns, the Layout of a row with all of them, the names of its cells)."""
    columns = options.table.columns if options.table else DATASETS[options.dataset]
    fields = column_kinds.fields(columns, options.integers)
    named = {column.kind: column for column in columns if column.kind in (LABEL, WEIGHT, KEY)}
    label, weight, key = map(named.get, (LABEL, WEIGHT, KEY))
    missing = options.table.missing if options.table else ()
    layout = Layout(True, fields, weight is not None, label.positive or (), missing)
    if split.column:
        buckets = 1 << 62 if split.by.startswith(HASH) else None
        layout = layout._replace(
            by=Column(split.column, split.by.partition(":")[0], buckets=buckets)
        )
    layout = layout._replace(keyed=key is not None)
    others = [column.name for column in (weight, key, layout.by) if column]
    return columns, layout, [label.name, *others, *(field.name for field in fields)]


def read_layout(source: RawInput, path: str, options) -> Tuple[Layout, CsvFile]:
    """The layout of a text file, from its first line that is not blank; does not check that row.

    If it is a header, it gives the places of the fields; otherwise a file has the columns of the
    data set, in their order.

    Args:
        source: where the file is from.
        path: the file.
        options: options.PrepareOptions.

    Raises:
        BadInput: the line names some of the columns that are needed, but not all.
    """
    table = options.table
    given = table and options.delimiter == "auto" and table.separator
    cells, delimiter = csv_blocks.first_cells(path, given or options.delimiter)
    header = options.header
    if table and header == "auto" and table.header is not None:
        header = "yes" if table.header else "no"
    labels = source.labels
    columns, layout, read = _columns(options, source.split)
    label, *others = read = [name.lower() for name in read]
    names = [cell.lower() for cell in cells]
    by = layout.by and layout.by.name.lower()  # which another check is about
    wanted = [name for name in others if name != by] + [label] * labels
    there = [name for name in wanted if name in names]
    named = header != "no" and len(there) == len(wanted)
    if header != "no" and not named and not all(map(csv_blocks.is_number, there)):
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
    if by and by not in place:
        raise BadInput(f"--split_by={source.split.by}: {path} has no such column.")
    layout = layout._replace(labelled=label in place)
    read = read if layout.labelled else others
    less = " (only --test_input may lack the label)" if labels else ""
    return layout, CsvFile(
        delimiter, len(names), tuple(read), tuple(place[name] for name in read),
        named or header == "yes", True, (" (see --dataset, --columns, --delimiter)", less),
    )  # fmt: skip


def _parquet_layout(source, path, options):
    """The Layout of a file's rows and the names of the columns to read, label first.

    Raises BadInput if a column is missing, or its type has no text.
    """
    schema = parquet_blocks.open_file(path).schema_arrow
    labels = source.labels
    _, layout, read = _columns(options, source.split)
    label, *others = read
    less = not labels and label.lower() not in [name.lower() for name in schema.names]
    about, names = "(see --dataset, --columns)", []
    for name in others if less else read:
        more = " (only --test_input may lack the label)" if name == label else ""
        names.append(schema.names[blocks.find(path, name, schema.names, about + more)])
        parquet_blocks.check_text(path, schema.field(names[-1]))
    return layout._replace(labelled=not less), tuple(names)


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
    i = layout.labelled + layout.weighted + layout.keyed
    only = lambda x, *keys: x._replace(**{key: getattr(x, key)[i : i + 1] for key in keys})
    if hasattr(part, "groups"):
        part = only(part, "names", "there")
    else:
        part = part._replace(file=only(part.file, "names", "places"))
    layout = Layout(False, (layout.by,), missing=layout.missing)
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
        train = split_of(task.split, task.lines.path, block.starts, block.by) == 0
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
            batch = field_tables.encode(block, fields)
            unknown = field_tables.unknown(block, fields, batch)
            splits = split_of(task.split, task.lines.path, block.starts, block.by)
            for split in np.unique(splits).tolist():
                mine = splits == split
                some = codec.Batch(*(x if x is None else x[mine] for x in batch))
                names = block.names and (block.names[0], *(x[mine] for x in block.names[1:]))
                put(paths[split], to_bytes(some, names))
                facts = facts_of(some, 0)._replace(max_id=0, unknown=unknown[mine].sum(0))
                yield read, (split, name, paths[split]), facts
                read = 0
