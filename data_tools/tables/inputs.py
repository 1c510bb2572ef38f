"""Tables with encoded ids as input of the converter: their columns, and the Schema of their rows.

`options` is always a data_tools.libsvm.options.ConvertOptions.
"""

from absl import logging

from data_tools.libsvm import sources
from data_tools.libsvm.sources import InputRows
from data_tools.tables import blocks, csv_blocks, layouts, parquet_blocks
from data_tools.tables.csv_blocks import LinePart
from data_tools.tables.row_checks import RowReader
from deepfm.errors import BadInput, listed
from deepfm.records import data_file, text_blocks
from deepfm.records.schema import Schema

ROWS = 1 << 18  # rows of a task: to reach them, those before in their row group are decoded, too


def read(data, options) -> InputRows:
    """The rows of files, whose columns are what their names or --columns say.

    Args:
        data: a DataSet of tables.

    Raises:
        BadInput: a column is missing or cannot be what it should, or flags contradict the table.
    """
    paths = [file.path for file in data.files]
    cut = _cut_parquet if data_file.is_parquet(paths[0]) else _cut_csv
    if options.columns:
        layout = layouts.load(options.columns)
    else:
        layout = _named(paths[0])
        for path in paths[1:]:
            layouts.check_same(paths[0], path, layout, _named(path))
        if not (layout.fields or layout.ids):
            raise BadInput(f"{paths[0]}: has no column of ids beside {layout.label}.")
    parts = [part for file in data.files for part in cut(file, layout)]
    if not parts:
        raise BadInput(f"--input={options.input}: the files hold no rows.")
    _check_flags(layout, options)
    if layout.fields:
        names = (field.id or field.value for field in layout.fields)
        logging.info("The fields are the columns %s.", listed(list(names), 100))
    schema = Schema(
        len(layout.fields) or options.field_size or 0,
        sources.feature_size(data, None, options),
        options.pad,
        options.id_offset,
        bool(layout.counts),
        weighted=bool(layout.weight),
    )
    logging.info(
        "The ids of a table stay as they are; 'python -m data_tools.prepare --columns' encodes raw "
        "cells, beside ids or alone."
    )
    return InputRows(schema, parts, RowReader(layout), layouts.described(layout))


def _named(path):
    """The Layout that the names of a file's columns say."""
    if data_file.is_parquet(path):
        return layouts.named(parquet_blocks.open_file(path).schema_arrow.names)
    return layouts.named(next(csv_blocks.first_rows(path)[0]))


def _cut_parquet(file, layout):
    """The tasks of a file; raises BadInput if a column is missing or unfit."""
    path, wanted = file.path, layouts.columns(layout)
    schema = parquet_blocks.open_file(path).schema_arrow
    about = "(--columns says what each is)"
    places = [blocks.find(path, name, schema.names, about) for name, _ in wanted]
    for (_, kind), place in zip(wanted, places):
        layouts.check_type(path, schema.field(place), kind)
    names, there = tuple(name for name, _ in wanted), tuple(schema.names[i] for i in places)
    tasks = []
    for part in parquet_blocks.cut(path, text_blocks.TASK):
        number = max(-(-part.rows // ROWS), 1)
        ends = [part.rows * i // number for i in range(number + 1)]
        part = part._replace(names=names, there=there)
        tasks += [part._replace(begin=a, end=b) for a, b in zip(ends, ends[1:]) if a < b]
    return tasks


def _cut_csv(file, layout):
    """The tasks of a file; raises BadInput if a column is missing."""
    path, wanted = file.path, layouts.columns(layout)
    lists = [name for name, kind in wanted if kind in layouts.LISTS]
    if lists:
        raise BadInput(
            f"{path}: column {lists[0]} would hold lists, but a cell of a CSV is one number; give "
            "each field a column, or write Parquet."
        )
    names, about = [name for name, _ in wanted], "(--columns says what each is)"
    if not layout.order:
        about += "; prepare reads raw cells; LibSVM text needs --input_format=libsvm"
    cells = csv_blocks.describe(path, names, [layout.order] if layout.order else [])
    cells = csv_blocks.select(path, cells, names, about)
    ranges = filter(None, text_blocks.cut([file], text_blocks.TASK))
    return [LinePart(path, lines, cells) for lines in ranges]


def _check_flags(layout, options):
    """Refuses (BadInput) flags that a table's columns leave no meaning."""
    lists = bool(layout.ids) and not layout.counts
    pairs = (
        ("fields", True, "a table, whose columns say what the fields are"),
        ("hash_buckets", True, "a table, whose ids must be numbers"),
        ("pad", not lists, "a table that has a column for each field, or counts"),
        ("multi_valued", not layout.counts, "a table without a column counts (or one of its kind)"),
    )
    for name, wrong, what in pairs:
        if getattr(options, name) and wrong:
            raise BadInput(f"--{name} does not go with {what}; leave out --{name}.")
    if layout.fields and options.field_size not in (None, len(layout.fields)):
        raise BadInput(
            f"--field_size={options.field_size}, but the table has columns for "
            f"{len(layout.fields)} fields; leave --field_size out."
        )
