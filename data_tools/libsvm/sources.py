"""Where the converter's rows come from: lines of LibSVM and LibFFM text, or tables.

Its functions can be pickled.
"""

import functools
from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence

from data_tools.click_logs.splitting import Split, shares_of
from data_tools.common import line_blocks
from data_tools.common.line_blocks import LineRange
from data_tools.libsvm import line_schema, pieces
from deepfm.errors import BadInput
from deepfm.records import data_file, file_bytes
from deepfm.records.schema import Schema

_TEXT, _CSV, _PARQUET = "LibSVM text", "CSV", "Parquet"


class InputRows(NamedTuple):
    """The rows of an input.

    Attributes:
        schema: the Schema of a row, with field_size and feature_size only if they are known.
        ranges: the parts of the files, in order, that tasks read; each has a `path`.
        count: a range -> for each block, (bytes read, (rows, most fields in a row)).
        complete: [(rows, most fields in a row)] of the ranges, or None where pieces.must_count says
            that nothing needs them -> the Schema with field_size.
        write: ((a range, its Pieces), schema, a function (path, bytes) that appends to a file) ->
            what pieces.write yields.
        mixed_labels: schema -> the error message for both labels 0 and -1.
        fields: {what decides which field an id is of: its value}, for made.ids.
    """

    schema: Schema
    ranges: Sequence
    count: Callable
    complete: Callable
    write: Callable
    mixed_labels: Callable
    fields: Dict[str, Any]


def of(data, options) -> InputRows:
    """The InputRows of the files that --input names.

    Args:
        data: their DataSet.
        options: Options.

    Raises:
        BadInput: a flag is wrong, or a table's columns are.
    """
    if _is_table([file.path for file in data.files], options):
        from data_tools.tables import inputs  # which lines do without

        return inputs.read(data, options)
    files, lines = data.files, line_schema.of_flags(data, options)
    fields = [[first, end - 1] for first, end in lines.field_ids or ()]
    return InputRows(
        lines,
        [part for file in files for part in line_blocks.cut(file.path, file.bytes)],
        functools.partial(
            pieces.count,
            named_fields=lines.named_fields,
            weighted=lines.weighted,
            pad=lines.pad,
        ),
        lambda counts: line_schema.with_field_size(lines, counts, files, options),
        pieces.write,
        lambda schema: line_schema.mixed_labels(files, schema),
        {"fields": fields or ("named" if lines.named_fields else "by place")},
    )


def split_of(options, source: InputRows, hosts: int) -> Optional[Split]:
    """How --split divides the rows; BadInput if it cannot."""
    if not options.split:
        return None
    pairs = (
        (not isinstance(source.ranges[0], LineRange), "a table"),
        (options.num_files, "--num_files (data_tools.rebalance makes even files)"),
        (hosts > 1, "several hosts"),
    )
    for wrong, what in pairs:
        if wrong:
            raise BadInput(f"--split does not go with {what}; leave one of them out.")
    return Split(shares_of(options.split), seed=options.seed)


def _is_table(paths: Sequence[str], options) -> bool:
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
    if kinds[0] == _PARQUET and asked != "auto":
        raise BadInput(f"--input_format={asked}: {paths[0]} is Parquet; leave --input_format out.")
    return kinds[0] != _TEXT


def _kind(path, options):
    if file_bytes.is_parquet(path):
        return _PARQUET
    by_name = options.input_format == "auto" and path.endswith(data_file.CSV)
    return _CSV if by_name or options.columns or options.input_format == "csv" else _TEXT
