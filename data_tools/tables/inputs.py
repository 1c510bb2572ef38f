"""Which input is a table with encoded ids, what its columns are, and the Schema of its rows.

`options` is always a data_tools.libsvm.options.Options.
"""

from typing import List, NamedTuple, Optional, Sequence, Tuple

from absl import logging

from data_tools.click_logs import parquet_rows
from data_tools.libsvm import line_schema
from data_tools.tables import csv_blocks, layouts, parquet_blocks, writing
from data_tools.tables.layouts import Layout
from data_tools.tables.writing import Part
from deepfm.errors import BadInput, listed
from deepfm.records.schema import Schema

TEXT, CSV, PARQUET = "LibSVM text", "CSV", "Parquet"


class Table(NamedTuple):
    """An input: its Layout, what is known of the Schema of its rows, and its parts in order."""

    layout: Layout
    schema: Schema
    parts: List[Part]


def is_table(paths: Sequence[str], options) -> bool:
    """Whether files are tables, not LibSVM or LibFFM text.

    Raises:
        BadInput: they are of several kinds, or not what a flag says.
    """
    asked = options.input_format
    if options.columns and asked in ("libsvm", "libffm"):
        raise BadInput(f"--columns does not go with --input_format={asked}; leave it out.")
    kinds = [_kind(path, options) for path in paths]
    other = next((i for i, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other:
        raise BadInput(
            f"--input={options.input} mixes {kinds[0]} and {kinds[other]} ({paths[0]}, "
            f"{paths[other]}); name files of one kind."
        )
    if kinds[0] == PARQUET and asked != "auto":
        raise BadInput(f"--input_format={asked}: {paths[0]} is Parquet; leave --input_format out.")
    return kinds[0] != TEXT


def _kind(path, options):
    if parquet_rows.is_parquet(path):
        return PARQUET
    by_name = options.input_format == "auto" and path.endswith(csv_blocks.SUFFIXES)
    return CSV if by_name or options.columns or options.input_format == "csv" else TEXT


def read(data, options) -> Table:
    """The Table that files are, from their names of columns or --columns.

    Args:
        data: a DataSet of files for which `is_table`.

    Raises:
        BadInput: a column is missing or cannot be what it should, or flags contradict the table.
    """
    paths = [file.path for file in data.files]
    blocks = parquet_blocks if parquet_rows.is_parquet(paths[0]) else csv_blocks
    if options.columns:
        layout = layouts.load(options.columns)
    else:
        layout = blocks.named(paths[0])
        for path in paths[1:]:
            layouts.check_same(paths[0], path, layout, blocks.named(path))
        if not (layout.fields or layout.ids):
            raise BadInput(f"{paths[0]}: has no column of ids beside {layout.label}.")
    parts = [part for file in data.files for part in blocks.cut(file.path, file.bytes, layout)]
    if not parts:
        raise BadInput(f"--input={options.input}: the files hold no rows.")
    _check_flags(layout, options)
    if layout.fields:
        names = (field.id or field.value for field in layout.fields)
        logging.info("The fields are the columns %s.", listed(list(names), 100))
    schema = Schema(
        len(layout.fields) or options.field_size or 0,
        line_schema.feature_size(data, None, options),
        options.pad,
        options.id_offset,
        bool(layout.counts),
        weighted=bool(layout.weight),
    )
    return Table(layout, schema, parts)


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


def with_field_size(table: Table, counts: Optional[Sequence[Tuple[int, int]]], options) -> Schema:
    """Completes the Schema with field_size: from the longest list, or that of the first good row.

    Args:
        table: from `read`.
        counts: (rows, most fields in a row) of each part; needed with --pad.
    """
    layout, schema = table.layout, table.schema
    size = schema.field_size
    if not size and schema.pad:
        size = max(most for _, most in counts)
    elif not size:
        size = writing.first_length(table.parts, layout, schema, options.max_bad_records)
    if not size:
        raise BadInput(f"--input={options.input}: no row holds an id.")
    return line_schema.with_size(schema, size, options)
