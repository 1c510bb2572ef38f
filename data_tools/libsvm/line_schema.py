"""What the lines of an input have to look like: as flags, maps and the lines themselves tell.

`options` is a libsvm_to_tfrecord.Options everywhere.
"""

from typing import Optional, Sequence, Tuple

from data_tools.libsvm import field_lines
from deepfm.data import datasets, libsvm, records
from deepfm.errors import BadInput
from deepfm.runtime import memory


def of_flags(data: datasets.DataSet, options) -> records.Schema:
    """The Schema of a line, but for its sizes.

    Raises:
        BadInput: two flags do not go together.
    """
    inputs, named = data.files, options.input_format == "libffm"
    if options.input_format == "auto":
        lines = (line.split() for file in inputs for _, line in libsvm.read_lines(file.path))
        first = next((words for words in lines if len(words) > 1), None)
        named = bool(first) and first[1].count(b":") == 2
        if not first and options.multi_valued:
            raise BadInput(f"--input={options.input}: no row holds an id:value pair.")
    pairs = (
        ("fields", named, "a LibFFM input, whose pairs name their fields"),
        ("fields", options.hash_buckets, "--hash_buckets, whose ids are no ranges"),
        ("pad", named or options.fields, "fields that are told: a missing one is filled up anyway"),
        ("id_offset", options.hash_buckets, "--hash_buckets, which makes the ids"),
        ("feature_size", options.hash_buckets, "--hash_buckets, which it is then"),
    )
    for name, other, what in pairs:
        if getattr(options, name) and other:
            raise BadInput(f"--{name} does not go with {what}; leave it out.")
    if options.multi_valued and not (named or options.fields):
        raise BadInput(
            "--multi_valued needs to know the field of each value: give LibFFM, or --fields."
        )
    if options.hash_buckets == 1:
        raise BadInput("--hash_buckets=1 leaves no id beside the one of what is missing; try 2.")
    known = field_lines.read_map(options.fields) if options.fields else None
    if known and options.field_size not in (None, len(known)):
        raise BadInput(
            f"--field_size={options.field_size}, but {options.fields} has {len(known)} fields."
        )
    return records.Schema(
        options.field_size or len(known or ()),
        _feature_size(data, known, options),
        # Id 0 is that of a missing field.
        options.pad or bool(named or known) and not options.multi_valued,
        options.id_offset,
        options.multi_valued,
        named,
        known,
        options.hash_buckets,
    )


def _feature_size(data, known, options):
    """What ids lie below, as a flag, the map of the fields or the input's dataset.json tells."""
    if options.hash_buckets:
        return options.hash_buckets
    given, told = options.feature_size, None
    if known:
        told = max(end for _, end in known) + options.id_offset
        if given and given < told:
            raise BadInput(
                f"--feature_size={given}, but {options.fields} has ids up to {told - 1}; try "
                f"--feature_size={told}."
            )
    elif data.rows is not None:  # and so each file is described
        told = data.feature_size + options.id_offset
    if not given and (told or 0) > memory.MAX_NUMBER:
        raise BadInput(
            f"{f'--fields={options.fields}' if known else data.name}: has ids up to {told - 1}, "
            f"but no table has more than {memory.MAX_NUMBER} rows."
        )
    return given or told


def with_field_size(
    lines: records.Schema,
    counts: Optional[Sequence[Tuple[int, int]]],
    inputs: Sequence[datasets.DataFile],
    options,
) -> records.Schema:
    """The Schema of a line with its field_size, as the flags, all rows or the first good one tell.

    Args:
        lines: of `of_flags`.
        counts: (rows, fields that a row has at most) of each part of the input; may be None where
            a row's pairs are its fields and none may be missing.
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
            f"--input={options.input}: has {field_size} fields, more than {memory.MAX_FIELDS}."
        )
    return lines._replace(field_size=field_size)


def _first_row_length(inputs, lines, options):
    """The id:value pairs of the first row that is good."""
    bad = 0
    for file in inputs:
        for number, line in libsvm.read_lines(file.path):
            pairs = len(line.split()) - 1
            schema = lines._replace(feature_size=None)
            if not lines.named_fields:
                schema = schema._replace(field_size=max(pairs, 1))
            reason = libsvm.explain_line(line, schema)
            if not reason:
                return pairs
            bad += 1
            if bad > options.max_bad_records:
                raise BadInput(f"{file.path}:{number}: {reason}")
    raise BadInput(f"--input={options.input}: the files hold no rows.")
