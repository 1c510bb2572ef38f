"""Where the converter's rows come from, lines or tables, and what a row must look like.

`data` is always a DataSet, `options` ConvertOptions. What `of` returns can be pickled.
"""

import json
from typing import Any, Dict, NamedTuple, Optional, Sequence, Tuple

from data_tools.click_logs.splitting import Split, shares_of
from data_tools.libsvm import pieces
from deepfm.data import datasets
from deepfm.errors import BadInput, refusing
from deepfm.records import data_file, libsvm_text, text_blocks
from deepfm.records.schema import Schema
from deepfm.records.storage import places
from deepfm.records.text_blocks import LineRange
from deepfm.runtime import memory

_TEXT, _CSV, _PARQUET = "LibSVM text", "CSV", "Parquet"


class InputRows(NamedTuple):
    """The rows of an input.

    Attributes:
        schema: the Schema of a row, with field_size and feature_size only if they are known.
        ranges: the parts of the files, in order, that tasks read; each has a `path`.
        reader: reads them; see pieces.
        fields: {what decides which field an id is of: its value}, for dataset_json.ids.
    """

    schema: Schema
    ranges: Sequence
    reader: Any
    fields: Dict[str, Any]


def of(data, options) -> InputRows:
    """The InputRows of the files that --input names.

    Raises:
        BadInput: a flag is wrong, or a table's columns are.
    """
    if _is_table([file.path for file in data.files], options):
        from data_tools.tables import inputs  # which lines do without

        return inputs.read(data, options)
    lines = _schema_of_lines(data, options)
    ranges = list(filter(None, text_blocks.cut(data.files, text_blocks.TASK)))
    fields = [[first, end - 1] for first, end in lines.field_ids or ()]
    fields = fields or ("named" if lines.named_fields else "by place")
    return InputRows(lines, ranges, pieces.LineReader(), {"fields": fields})


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
    if data_file.is_parquet(path):
        return _PARQUET
    by_name = options.input_format == "auto" and path.endswith(data_file.CSV)
    return _CSV if by_name or options.columns or options.input_format == "csv" else _TEXT


def _schema_of_lines(data, options) -> Schema:
    """The Schema of a line, with field_size and feature_size only if they are already known.

    Raises:
        BadInput: two flags contradict each other.
    """
    inputs, named = data.files, options.input_format == "libffm"
    if options.input_format == "auto":
        lines = (line.split() for file in inputs for _, line in text_blocks.lines(file.path))
        first = next((words for words in lines if len(words) > 1), None)
        named = bool(first) and first[1].count(b":") == 2
        if not first and options.multi_valued:
            raise BadInput(f"--input={options.input}: no row holds an id:value pair.")
    pairs = (
        ("fields", named, "LibFFM input, whose pairs name their fields"),
        ("fields", options.hash_buckets, "--hash_buckets, which leaves fields no id ranges"),
        ("pad", named or options.fields, "LibFFM or --fields, where fields may be missing anyway"),
        ("id_offset", options.hash_buckets, "--hash_buckets, which makes the ids itself"),
        ("feature_size", options.hash_buckets, "--hash_buckets, which is the feature_size"),
    )
    for name, other, what in pairs:
        if getattr(options, name) and other:
            raise BadInput(f"--{name} does not go with {what}; leave out --{name}.")
    if options.multi_valued and not (named or options.fields):
        raise BadInput(
            "--multi_valued needs the field of each value: give LibFFM input, or --fields."
        )
    if options.hash_buckets == 1:
        raise BadInput("--hash_buckets=1 has only id 0, for missing values; try --hash_buckets=2.")
    known = read_map(options.fields) if options.fields else None
    if data.weighted is None and not options.example_weights:
        libsvm_text.check_labelled(data)
    if known and options.field_size not in (None, len(known)):
        raise BadInput(
            f"--field_size={options.field_size}, but {options.fields} has {len(known)} fields."
        )
    return Schema(
        options.field_size or len(known or ()),
        feature_size(data, known, options),
        # Pad: a missing field gets id 0.
        options.pad or bool(named or known) and not options.multi_valued,
        options.id_offset,
        options.multi_valued,
        named,
        known,
        options.hash_buckets,
        weighted=options.example_weights or datasets.shows(data, "weighted"),
    )


def feature_size(data, known, options) -> Optional[int]:
    """The limit of ids from a flag, the field map or the input's dataset.json; None: unknown."""
    if options.hash_buckets:
        return options.hash_buckets
    given, implied = options.feature_size, None
    if known:
        implied = max(end for _, end in known) + options.id_offset
        if given and given < implied:
            raise BadInput(
                f"--feature_size={given}, but {options.fields} has ids up to {implied - 1}; try "
                f"--feature_size={implied}."
            )
    elif data.rows is not None:  # dataset.json describes every file
        implied = data.feature_size + options.id_offset
    if not given and (implied or 0) > memory.MAX_NUMBER:
        raise BadInput(
            f"{f'--fields={options.fields}' if known else data.name}: has ids up to {implied - 1}, "
            f"but ids must be below {memory.MAX_NUMBER}."
        )
    return given or implied


def with_field_size(
    source: InputRows, counts: Optional[Sequence[Tuple[int, int]]], options
) -> Schema:
    """The Schema with field_size: from the flags, all rows, or the first good row.

    Args:
        counts: (rows, most fields in a row) of each range; None where pieces.must_count says that
            nothing needs them.

    Raises:
        BadInput: no row has a field, or one has too many.
    """
    schema, field_size = source.schema, source.schema.field_size
    if not field_size and (schema.pad or schema.named_fields):
        field_size = max(most for _, most in counts)
    field_size = field_size or _first_row_length(source, options)
    if not field_size:
        raise BadInput(f"--input={options.input}: no row holds an {source.reader.what}.")
    if field_size > memory.MAX_FIELDS:
        raise BadInput(
            f"--input={options.input}: has {field_size} fields; the limit is {memory.MAX_FIELDS}."
        )
    return schema._replace(field_size=field_size)


def _rows(source):
    """Yields (block, index of a row in it) for all rows."""
    for part in source.ranges:
        for _, block in source.reader.read(part):
            yield from ((block, row) for row in range(len(block)))


def _first_row_length(source, options):
    """The number of fields in the first good row."""
    for bad, (block, row) in enumerate(_rows(source), 1):
        length, named = source.reader.fields(block, row), source.schema.named_fields
        size = memory.MAX_FIELDS if named else max(length, 1)
        schema = source.schema._replace(field_size=size, feature_size=None)
        reason = source.reader.explain(block, row, schema)
        if not reason:
            return length
        if bad > options.max_bad_records:
            raise BadInput(f"{block.path}{block.place(row)}: {reason}")
    raise BadInput(f"--input={options.input}: the files hold no rows.")


def mixed_labels(source: InputRows, schema: Schema) -> str:
    """The error message for an input with both labels 0 and -1, where 0 is ambiguous."""
    first, reader = {}, source.reader
    for block, row in _rows(source):
        if reader.explain(block, row, schema):  # was skipped
            continue
        label = reader.label(block, row)
        negative = label.startswith(b"-")
        if negative or libsvm_text.number_of(label) == 0:
            first.setdefault(negative, (block.path + block.place(row), label.decode()))
        if len(first) == 2:
            (other_place, other), (place, label) = first.values()  # in the order of the rows
            return (
                f"{place}: label {label}, but {other_place} has label {other}; use 0 and 1, or -1 "
                "and +1, not both."
            )
    raise AssertionError("the parser found labels 0 and -1, the plain reader did not")


def read_map(path: str) -> Tuple[Tuple[int, int], ...]:
    """Reads fields.json: {"fields": [{"name": "site", "first_id": 14, "last_id": 2065}, ...]}.

    Returns:
        ((first id, last id + 1), ...) for each field, in order.

    Raises:
        BadInput: it is not such a file, or two fields share an id.
    """
    try:
        content = places.of(path).content(path)
    except OSError as error:
        raise BadInput(f"--fields={path}: cannot be read ({error}).") from error
    expected = 'expected {"fields": [{"name": "site", "first_id": 14, "last_id": 2065}, ...]}'
    with refusing(f"--fields={path}: is not a field map", expected):
        found = json.loads(content.decode())["fields"]
        ranges = []
        for field in found:
            bounds = field["first_id"], field["last_id"]
            if not all(type(x) is int for x in bounds) or not 0 <= bounds[0] <= bounds[1] < 1 << 62:
                raise ValueError(f"field {len(ranges)} has ids from {bounds[0]} to {bounds[1]}")
            ranges.append((bounds[0], bounds[1] + 1))
        if not ranges:
            raise ValueError("it has no fields")
        order = sorted(range(len(ranges)), key=lambda i: ranges[i])
        for one, other in zip(order, order[1:]):
            if ranges[other][0] < ranges[one][1]:
                raise ValueError(f"fields {one} and {other} share id {ranges[other][0]}")
    return tuple(ranges)
