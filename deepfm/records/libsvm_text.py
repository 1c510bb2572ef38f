"""A line of LibSVM text: what is wrong with it, and what number a text in it is.

A line is `label id:value id:value ...`; only the converter also reads LibFFM's `label
field:id:value ...`. In weighted data `label:weight` may stand in place of the label, as XGBoost
reads it (https://xgboost.readthedocs.io/en/stable/tutorials/input_format.html). A `#` begins a
comment. Lines without a record are skipped.
"""

import fractions
import re
from typing import Optional

import numpy as np

from deepfm.errors import BadInput
from deepfm.records import library, text_blocks
from deepfm.records.schema import (
    LARGER,
    NO_WEIGHT,
    Schema,
    Shape,
    explain_id,
    explain_width,
    is_weight,
    normal,
)

UNEXPLAINED = "refused by the decoder"  # though `explain_line` finds no fault
HASH_IN_ID = re.compile(rb"[^\s]#|[ \t]#\S")  # a '#' that may begin a comment or belong to an id
_CONTROL = re.compile(rb"[^\x20-\xff\t\n\r\v\f]")  # a character that is neither blank nor text
_NO_LABELS = "lines without labels need one before each (for inference sed 's/^/0 /')"
_A_TABLE = (
    "is it a table? data_tools.prepare --columns reads raw cells, libsvm_to_tfrecord "
    "--input_format=csv encoded ids"
)
_ID = re.compile(rb"-?[0-9]+")
_FIELD = re.compile(rb"[0-9]{1,6}")
_NUMBER = re.compile(rb"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_HEXADECIMAL = re.compile(rb"[+-]?0[xX][0-9a-fA-F]+")
_NUMBER_CHARACTERS = 31  # longest number that TensorFlow's decoder reads
_INT64_MAX = np.iinfo(np.int64).max


def first_shape(path: str) -> Shape:
    """The Shape of a file's first line with a record."""
    words = next((line.split() for _, line in text_blocks.lines(path)), None)
    return Shape(len(words) - 1, weighted=b":" in words[0]) if words else Shape()


def check_labelled(data):
    """Refuses (BadInput) a DataSet whose lines all begin with the same `label:weight`.

    They have no labels, it seems: an id:value pair was taken for one. Reads on only while that may
    be so.
    """
    lines = (line for file in data.files for _, line in text_blocks.lines(file.path))
    firsts = (line.split(None, 1)[0].partition(b":") for line in lines)
    label, colon, _ = next(firsts, (b"", b"", b""))
    if colon and all(other == label and given for other, given, _ in firsts):
        raise BadInput(
            f"{data.name}: every line begins {_text(label + colon)}, so labels seem to be missing; "
            f"{_NO_LABELS}; if these are weights, give --example_weights."
        )


def explain_line(line: bytes, schema: Schema) -> Optional[str]:
    """What is wrong with a LibSVM line, and what was expected; None if nothing is."""
    if schema.hash_buckets and HASH_IN_ID.search(line):
        return f"'#' begins a comment and cannot be in an id; put spaces around it: {_text(line)}"
    line = text_blocks.without_comment(line)
    first, *pairs = line.split()
    if pairs and pairs[0].startswith(b"qid:"):
        return f"query groups are not supported; leave {_text(pairs[0])} out: {_text(line)}"
    label, colon, weight = first.partition(b":")
    if number_of(label) not in (-1, 0, 1):
        hint = f" ({_NO_LABELS})" if colon and _ID.fullmatch(label) else ""
        hint = f" ({_A_TABLE})" if b"," in line and b":" not in line else hint
        return f"label {_text(first)} is not 0, 1, -1 or +1{hint}: {_text(line)}"
    if colon and not schema.weighted:
        return (
            f"label {_text(first)} has a weight, but the first record has none; write that one as "
            f"label:1 (or give train.py --example_weights): {_text(line)}"
        )
    if colon and not is_weight(number_of(weight)):
        return f"weight {_text(weight)} {NO_WEIGHT}: {_text(line)}"
    positional = not (schema.named_fields or schema.field_ids)
    fields = set()
    for pair in pairs:
        field, rest = None, pair
        if schema.named_fields:
            field, _, rest = pair.partition(b":")
            if not _FIELD.fullmatch(field):
                return f"{_text(pair)} is not field:id:value: {_text(line)}"
            field = int(field)
        feature_id, colon, value = rest.partition(b":")
        known = feature_id if schema.hash_buckets else _ID.fullmatch(feature_id)
        if not colon or not known or not value:
            form = "field:id:value" if schema.named_fields else "id:value"
            return f"{_text(pair)} is not {form}: {_text(line)}"
        if schema.hash_buckets and _CONTROL.search(feature_id):
            return f"id {_text(feature_id)} has a control character: {_text(line)}"
        if positional and value.count(b":") == 1:
            hint = "like LibFFM, which data_tools.libsvm_to_tfrecord converts"
            return f"{_text(pair)} is not id:value ({hint}): {_text(line)}"
        number = 1 if schema.hash_buckets else _integer(feature_id)
        if number > _INT64_MAX:
            return f"feature id {_text(feature_id)} is not below 2^63{LARGER}: {_text(line)}"
        if len(value) > _NUMBER_CHARACTERS:
            limit = f"longer than {_NUMBER_CHARACTERS} characters"
            return f"value {_text(value)} is {limit}: {_text(line)}"
        if not np.isfinite(number_of(value)):
            return f"value {_text(value)} is not a finite number: {_text(line)}"
        # The decoder refuses a negative id before the offset could lift it.
        reason = explain_id(number + (schema.id_offset if number >= 0 else 0), schema)
        if schema.field_ids and not reason:
            found = [i for i, (a, b) in enumerate(schema.field_ids) if a <= number < b]
            field = found[0] if found else None
            reason = None if found else f"feature id {number} belongs to no field of the map"
        reason = reason or _explain_field(field, fields, schema)
        if reason:
            return f"{reason}: {_text(line)}"
        fields.add(field)
    if not positional:
        return None
    return explain_width(len(pairs), schema, "id:value pairs", _text(line))


def numbers(line: bytes, schema: Schema) -> Optional[tuple]:
    """(label, ids, values, counts, weight) of a line with a record; None if `explain_line` finds a
    fault. The label is 0, 1, or -1 if it has a minus sign. What a string hashes to only the
    compiled codec knows."""
    if explain_line(line, schema):
        return None
    if schema.hash_buckets:
        raise BadInput(f"--hash_buckets needs the compiled codec; {library.ADVICE}.")
    first, *pairs = line.partition(b"#")[0].split()
    label, _, weight = first.partition(b":")
    row = [[] for _ in range(schema.field_size)]
    for place, pair in enumerate(pairs):
        *named, name, value = pair.split(b":")
        ranges = enumerate(schema.field_ids or ())
        place = next((i for i, (a, b) in ranges if a <= int(name) < b), place)
        row[int(named[0]) if named else place].append((int(name) + schema.id_offset, value))
    cells = row if schema.multi_valued else [cell or [(0, b"0")] for cell in row]
    ids, values = zip(*sum(cells, [])) if any(cells) else ((), ())
    counts = [len(cell) for cell in row]
    values = [number_of(value) for value in values]
    if schema.pad and not (schema.named_fields or schema.field_ids or schema.multi_valued):
        values = [value + 0 for value in values]  # no -0, as if added to the zeros that fill a row
    label = -1 if label.startswith(b"-") else number_of(label)
    return label, list(ids), values, counts, number_of(weight or b"1")


def _explain_field(field, before, schema):
    if field is not None and field >= schema.field_size:
        found = f"field {field} (counted from 0) is beyond --field_size={schema.field_size}"
        return f"{found}; try --field_size={field + 1}"
    if field is not None and field in before and not schema.multi_valued:
        return f"field {field} has two values; try --multi_valued, which keeps both"
    return None


def _integer(text):
    """An id as a number; only the first 20 digits of a longer one, which exceed any id."""
    number = int(text.lstrip(b"-0")[:20] or b"0")
    return -number if text.startswith(b"-") else number


def number_of(text: bytes) -> np.float32:
    """The number that TensorFlow's decoder reads; NaN if it reads none."""
    if len(text) > _NUMBER_CHARACTERS:
        return np.float32("nan")
    with np.errstate(over="ignore"):
        if _HEXADECIMAL.fullmatch(text):
            return np.float32(int(text, 16))
        return normal(np.float32(_double(text))) if _NUMBER.fullmatch(text) else np.float32("nan")


def _double(text):
    """A float64 that rounds to the float32 nearest to the text."""
    number = np.float64(text)
    if number.view(np.int64) & (1 << 29) - 1 == 1 << 28:  # half-way between two float32
        exact = fractions.Fraction(text.decode())
        if exact != number:
            return np.nextafter(number, np.inf if exact > number else -np.inf)
    return number


def _text(raw, limit=60):
    text = raw.decode("utf-8", "replace").strip()
    return repr(text if len(text) <= limit else text[: limit - 4] + " ...")
