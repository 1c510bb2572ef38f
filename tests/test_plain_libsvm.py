"""LibSVM and LibFFM text without TensorFlow: the same records, and the same lines refused."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from conftest import native
from hypothesis import given, settings
from hypothesis import strategies as st

from deepfm.data import libsvm, records
from deepfm.records import libsvm_decoder
from deepfm.records.hashes import fingerprints
from deepfm.records.libsvm_text import explain_line, number_of
from deepfm.records.schema import Schema

SCHEMAS = {
    "plain": Schema(2, 50),
    "padded": Schema(3, pad=True, id_offset=1),
    "weighted": Schema(2, weighted=True),
    "named": Schema(3, 50, pad=True, named_fields=True),
    "multi": Schema(3, 50, multi_valued=True, named_fields=True, weighted=True),
    "map": Schema(3, 51, pad=True, field_ids=((0, 10), (30, 40), (10, 20)), id_offset=1),
    "hashed": Schema(2, 50, hash_buckets=50),
    "hashed ffm": Schema(3, 9, True, named_fields=True, hash_buckets=9, weighted=True),
    "multi map": Schema(3, 50, multi_valued=True, field_ids=((0, 10), (10, 20), (30, 40))),
}
NUMBERS = st.one_of(
    st.from_regex(r"[+-]?[0-9]{0,10}\.?[0-9]{0,12}([eE][+-]?[0-9]{1,2})?", fullmatch=True),
    st.floats(width=32).map(repr),
    st.sampled_from(["1", "0.5", "0x1F", "nan", "inf", "1e-42", "1_0", "", ".", "5.", "+.5", "-"]),
    st.sampled_from(["1.00000005960464478", "0." + "1" * 28, "0." + "1" * 30, "16777217", "1e39"]),
)
IDS = st.one_of(
    st.integers(0, 45).map(str),
    st.sampled_from(["-0", "-1", "007", "2147483647", "9" * 19, "0" * 20 + "7", "x", "", "+1"]),
    st.sampled_from(["red", "a#b", "#", "\xe9t\xe9", "a\x01b", "\x1f", "\x7f", "s" * 80]),
)
BLANKS = st.sampled_from([" ", " ", " ", "  ", "\t", "\r", "\v"])
LABELS = st.one_of(
    st.sampled_from(["0", "1", "-1", "+1", "1.0"]),
    st.sampled_from(["2", "0x1", "1:2", "0:", ":1", "1:-1", "1:1e-45", "1:0.25", "1:1:1", "a"]),
)


ENDS = st.sampled_from(["", "", " ", " # 3:4", " #3:4", "#"])
GOOD_LABELS, GOOD_IDS = st.sampled_from(["0", "1", "-1", "+1"]), st.integers(1, 39).map(str)
GOOD_NUMBERS = st.floats(-1e9, 1e9, width=32).map(lambda x: f"{x:.6g}")


@st.composite
def lines(draw, named):
    """A line; about half of them are good."""
    good = draw(st.booleans())
    labels, ids = (GOOD_LABELS, GOOD_IDS) if good else (LABELS, IDS)
    fields = st.integers(0, 2).map(str)
    if not good:
        fields = st.one_of(fields, st.sampled_from(["3", "00", "-1", "1000000"]))
    line = draw(labels)
    for _ in range(draw(st.sampled_from([2, 2, 2, 0, 1, 3]))):
        colon = ":" if good else draw(st.sampled_from([":"] * 9 + ["", "::"]))
        pair = draw(ids) + colon + draw(GOOD_NUMBERS if good else NUMBERS)
        line += draw(BLANKS) + (draw(fields) + ":" if named else "") + pair
    return draw(st.sampled_from(["", " "])) + line + draw(ENDS)


def with_op(op, *inputs):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run(op(*inputs))


@functools.lru_cache(maxsize=None)
def parser(schema):
    def parse(text):
        lines = libsvm.drop_blank(tf.compat.v1.string_split([text], "\n").values)
        return libsvm.parse_lines(lines, schema)

    return native(parse, (tf.string, []))


@functools.lru_cache(maxsize=None)
def hashes(buckets):
    return native(lambda x: records.hashed(x, buckets), (tf.string, [None]))


def with_tensorflow(text, schema):
    """(labels, ids, values, weights if weighted); None if it is refused."""
    try:
        return parser(schema)(text) if text.isascii() else None
    except tf.errors.InvalidArgumentError:
        return None


def slowly(text, schema):
    """As libsvm_decoder.decode, a pair at a time, of lines that name fields or strings."""
    lines = [line for line in text.split(b"\n") if line.partition(b"#")[0].split()]
    if any(explain_line(line, schema) for line in lines):
        return None
    labels, weights, rows = [], [], []
    for line in lines:
        first, *pairs = line.partition(b"#")[0].split()
        label, _, weight = first.partition(b":")
        labels.append(number_of(label) > 0)
        weights.append(number_of(weight or b"1"))
        row = [[] for _ in range(schema.field_size)]
        for place, pair in enumerate(pairs):
            *field, name, value = pair.split(b":")
            number = 0 if schema.hash_buckets else int(name)
            for i, (begin, end) in enumerate(schema.field_ids or ()):
                place = i if begin <= number < end else place
            number += schema.id_offset
            if schema.hash_buckets:
                (number,) = hashes(schema.hash_buckets)([name])
            row[int(field[0]) if field else place].append((number, number_of(value)))
        rows.append(row)
    counts = np.array([[len(cell) for cell in row] for row in rows]).reshape(len(rows), -1)
    cells = [[pair for cell in row for pair in cell] for row in rows]
    if not schema.multi_valued:
        cells = [[cell[0] if cell else (0, 0) for cell in row] for row in rows]
    width = max(map(len, cells), default=0)
    ids, values = (
        np.array([[pair[i] for pair in row] + [0] * (width - len(row)) for row in cells], dtype)
        for i, dtype in ((0, np.int64), (1, np.float32))
    )
    more = [counts] * schema.multi_valued + [weights] * schema.weighted
    return (labels, ids, values, *more)


def agree(text, schema):
    named = schema.named_fields or schema.field_ids or schema.hash_buckets
    found = libsvm_decoder.decode(text, schema)
    expected = (slowly if named else with_tensorflow)(text, schema)
    assert (found is None) == (expected is None), text
    if found is not None:
        for one, other in zip((x for x in found if x is not None), expected):
            np.testing.assert_array_equal(one, other, err_msg=str(text))
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_line_is_taken_as_others_take_it_or_refused_with_a_reason(name):
    schema = SCHEMAS[name]
    good = []

    @settings(max_examples=100, deadline=None, derandomize=True, database=None)
    @given(lines(schema.named_fields))
    def check(line):
        line = line.encode()
        found = agree(line + b"\n", schema)
        assert (found is None) == (explain_line(line, schema) is not None), line
        good.extend([line + b"\n"] * (found is not None))

    check()
    assert len(good) > 20
    agree(b"".join(good), schema)
    agree(b"# only a comment\n\n \r\n".join(good), schema)


def test_fingerprints_are_those_of_tensorflow_for_strings_of_all_lengths():
    """By the modulus TensorFlow returns the lower 63 bits, and by 3 what the upper bit changes."""
    rng = np.random.RandomState(0)
    strings = [rng.bytes(n) for n in rng.permutation(np.repeat(np.arange(201), 10))]
    ends = np.cumsum([len(x) for x in strings])
    starts = ends - [len(x) for x in strings]
    text = np.frombuffer(b"".join(strings) + rng.bytes(8), np.uint8)
    words = np.ndarray([len(text) - 7], "<u8", text, 0, [1])
    found = fingerprints.of_strings(words, starts, ends)
    for buckets in (3, 2**63 - 1):
        expected = with_op(tf.strings.to_hash_bucket_fast, strings, buckets)
        np.testing.assert_array_equal(found % np.uint64(buckets), expected.astype(np.uint64))
    assert len(set(found.tolist())) == len({bytes(x) for x in strings})


def test_texts_are_the_float32_nearest_to_them():
    rng = np.random.RandomState(0)
    numbers = rng.standard_normal(3000) * 10.0 ** rng.randint(-6, 9, 3000)
    texts = [f"{x:.{digits}g}".encode() for x, digits in zip(numbers, rng.randint(1, 18, 3000))]
    texts += [f"{x:.{digits}f}".encode() for x, digits in zip(numbers, rng.randint(0, 9, 3000))]
    text = b"".join(b"1 1:%s\n" % x for x in texts if len(x) <= 31)
    found = libsvm_decoder.decode(text, Schema(1)).values[:, 0]
    assert found.tolist() == [number_of(x) for x in texts if len(x) <= 31]


def test_a_block_without_a_record_holds_none():
    for text in (b"", b"\n", b"# 1 2:3\n \n"):
        assert len(libsvm_decoder.decode(text, Schema(2)).labels) == 0
