"""Works out the Schema of an input's lines from the flags, the field map and the lines.

`options` is always a libsvm_to_tfrecord.Options.
"""

from typing import Optional, Sequence, Tuple

from data_tools.libsvm import field_lines
from deepfm.data import datasets, libsvm, records
from deepfm.data.plain import libsvm_text
from deepfm.errors import BadInput
from deepfm.runtime import memory


def of_flags(data: datasets.DataSet, options) -> records.Schema:
    """The Schema of a line, with field_size and feature_size only if they are already known.

    Raises:
        BadInput: two flags contradict each other.
    """
    inputs, named = data.files, options.input_format == "libffm"
    if options.input_format == "auto":
        lines = (line.split() for file in inputs for _, line in libsvm.read_lines(file.path))
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
    known = field_lines.read_map(options.fields) if options.fields else None
    if known and options.field_size not in (None, len(known)):
        raise BadInput(
            f"--field_size={options.field_size}, but {options.fields} has {len(known)} fields."
        )
    return records.Schema(
        options.field_size or len(known or ()),
        _feature_size(data, known, options),
        # Pad: a missing field gets id 0.
        options.pad or bool(named or known) and not options.multi_valued,
        options.id_offset,
        options.multi_valued,
        named,
        known,
        options.hash_buckets,
        weighted=datasets.is_weighted(data),
    )


def _feature_size(data, known, options):
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
    lines: records.Schema,
    counts: Optional[Sequence[Tuple[int, int]]],
    inputs: Sequence[datasets.DataFile],
    options,
) -> records.Schema:
    """Completes the Schema with field_size: from the flags, all rows, or the first good row.

    Args:
        lines: from `of_flags`.
        counts: (rows, most fields in a row) of each part of the input; may be None if a row's pairs
            are its fields and none may be missing.
        inputs: the files.
        options: libsvm_to_tfrecord.Options.
    """
    field_size = lines.field_size
    if not field_size and (lines.pad or lines.named_fields):
        field_size = max(most for _, most in counts)
        if not field_size and lines.named_fields:
            _first_row_length(inputs, lines._replace(field_size=memory.MAX_FIELDS), options)
    elif not field_size:
        field_size = _first_row_length(inputs, lines, options)
    if not field_size:
        raise BadInput(f"--input={options.input}: no row holds an id:value pair.")
    if field_size > memory.MAX_FIELDS:
        raise BadInput(
            f"--input={options.input}: has {field_size} fields; the limit is {memory.MAX_FIELDS}."
        )
    return lines._replace(field_size=field_size)


def _first_row_length(inputs, lines, options):
    """The number of id:value pairs in the first good row."""
    bad = 0
    for file in inputs:
        for number, line in libsvm.read_lines(file.path):
            pairs = len(line.split()) - 1
            schema = lines._replace(feature_size=None)
            if not lines.named_fields:
                schema = schema._replace(field_size=max(pairs, 1))
            reason = libsvm_text.explain_line(line, schema)
            if not reason:
                return pairs
            bad += 1
            if bad > options.max_bad_records:
                raise BadInput(f"{file.path}:{number}: {reason}")
    raise BadInput(f"--input={options.input}: the files hold no rows.")
