"""LibSVM and LibFFM text by the codec: the records of TensorFlow, and the same lines refused."""

import functools

import mutation
import numpy as np
import pytest
from conftest import callable_of
from hypothesis import given, settings
from hypothesis import strategies as st

from deepfm.data import libsvm, records
from deepfm.records import codec, library, text_blocks
from deepfm.records.libsvm_text import explain_line, number_of
from deepfm.records.schema import Schema
from deepfm.runtime.tf import tf

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
texts = lambda pieces: st.sampled_from([x.decode("utf-8", "surrogateescape") for x in pieces])
NUMBERS = st.one_of(
    texts(mutation._NUMBERS),
    st.from_regex(r"[+-]?[0-9]{0,10}\.?[0-9]{0,12}([eE][+-]?[0-9]{1,2})?", fullmatch=True),
    st.floats(width=32).map(repr),
    st.floats().map(repr),
    st.sampled_from(["1", "0.5", "0x1F", "nan", "inf", "1e-42", "1_0", "", ".", "5.", "+.5", "-"]),
    st.sampled_from(["1.00000005960464478", "0." + "1" * 28, "0." + "1" * 30, "16777217", "1e39"]),
)
IDS = st.one_of(
    texts(mutation._IDS),
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


@functools.lru_cache(maxsize=None)
def native(op, *inputs):
    """A function of strings that runs operators; it returns a list of arrays."""
    with tf.Graph().as_default():
        place = tf.compat.v1.placeholder(tf.string, [None])
        return callable_of(tf.compat.v1.Session(), place, tf.nest.flatten(op(place, *inputs)))


@pytest.fixture(scope="module", autouse=True)
def _sessions_end():
    yield
    native.cache_clear()


def parse(lines, schema):
    return libsvm.parse_lines(libsvm.drop_blank(lines), schema)


def with_tensorflow(text, schema):
    """(labels, ids, values, weights if weighted); None if it is refused."""
    try:
        return native(parse, schema)(text.split(b"\n"))
    except tf.errors.InvalidArgumentError:
        return None


def written_with_hashes(line, schema):
    """A line whose ids are the numbers that TensorFlow makes of its strings."""
    first, *pairs = line.partition(b"#")[0].split()
    cut = [pair.split(b":") for pair in pairs]
    if cut:
        names = [cells[-2] for cells in cut]
        (numbers,) = native(records.hashed, schema.hash_buckets)(names)
        for cells, number in zip(cut, numbers):
            cells[-2] = b"%d" % number
    return b" ".join([first, *map(b":".join, cut)])


def slowly(text, schema):
    """The Batch of lines that name fields or strings, by the plain reader; None if one is bad."""
    lines = [line for line in text.split(b"\n") if line.partition(b"#")[0].split()]
    if any(explain_line(line, schema) for line in lines):
        return None
    if schema.hash_buckets:
        lines = [written_with_hashes(line, schema) for line in lines]
        schema = schema._replace(hash_buckets=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load", lambda: None)
        patch.setattr(codec, "MOST", 10**9)
        return codec.decode_lines(b"".join(line + b"\n" for line in lines), schema)


def agree(text, schema):
    named = schema.named_fields or schema.field_ids or schema.hash_buckets
    found = codec.decode_lines(text, schema)
    expected = [(found, slowly(text, schema))]
    if not named:  # TensorFlow's labels tell no -1 from 0
        positive = found and found._replace(labels=(found.labels > 0).astype(np.float32))
        expected.append((positive, with_tensorflow(text, schema)))
    for mine, other in expected:
        assert (mine is None) == (other is None), text
        if mine is not None:
            arrays = ([x for x in batch if x is not None] for batch in (mine, other))
            for one, two in zip(*arrays):
                np.testing.assert_array_equal(one, two, err_msg=str(text))
                assert one.dtype != np.float32 or (np.signbit(one) == np.signbit(two)).all()
    return found


@pytest.mark.parametrize("examples", [70, pytest.param(700, marks=pytest.mark.table)])
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_line_is_taken_as_others_take_it_or_refused_with_a_reason(name, examples):
    schema, good = SCHEMAS[name], []

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(lines(schema.named_fields))
    def check(line):
        line = line.encode("utf-8", "surrogateescape")
        found = agree(line + b"\n", schema)
        assert (found is None) == (explain_line(line, schema) is not None), line
        (start,) = text_blocks.record_starts(b"#\n \r\n" + line + b"\n")
        assert start == 5
        widths = lambda: [text_blocks.most_fields(line, named) for named in (False, True)]
        compiled = widths()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(library, "load", lambda: None)
            assert widths() == compiled, line
        good.extend([line + b"\n"] * (found is not None))

    check()
    assert len(good) > examples / 10
    agree(b"".join(good), schema)
    agree(b"# only a comment\n\n \r\n".join(good), schema)


@pytest.mark.parametrize(
    "text, pairs, fields",
    [
        (b"", 0, 0),
        (b"1 1:2 3:4\n\n0 5:6 # 7:8 9:9\n", 2, 0),
        (b"1:0.5 0:1:2 12:3:4\r\n0 x:1:1 99:1:1 98:1:1\n# 7:7:7", 3, 13),
        (b" 1\t000001:1:\v1:: \n0 2:2:2#3:3:3\n0 1234567:1:1", 2, 3),
    ],
)
def test_the_text_of_lines_tells_how_many_fields_they_need(text, pairs, fields):
    found = [text_blocks.most_fields(text, named) for named in (False, True)]
    assert found == [pairs, fields]


GOOD_LINES = [
    b"1 1:1", b"-1 1:1", b"+1 1:1", b"1.0 1:1", b"1e0 1:1", b"3e-40 1:1", b"-0 1:1", b"1 0:0",
    b"1 01:1", b"1 -0:1", b"1 1:1.", b"1 1:.5", b"1 1:+5", b"1 1:-0", b"1 1:1E2", b"1 1:5e+3",
    b"1 1:0x10", b"1 1:1e-50", b"1 1:3.4028235e38", b"  1\t1:1 \r", b"1\v1:1\f", b"1 9:1",
    b"1 1:" + b"0" * 30 + b"1", b"1 " + b"0" * 30 + b"1:1",
]  # fmt: skip
BAD_LINES = [
    b"1 10:1", b"2 1:1", b"0.5 1:1", b"nan 1:1", b"inf 1:1", b"one 1:1", b"1", b"1,1:1", b"1:1",
    b"1 1:1 2:1", b"1 1", b"1 1:", b"1 :1", b"1 1: 1", b"1 1 :1", b"1 1;1", b"1 1:1:1", b"1 1:1e",
    b"1 1:--1", b"1 1:1_0", b"1 1:1f", b"1 1:nan", b"1 1:inf", b"1 1:-Infinity", b"1 1:1e50",
    b"1 1:" + b"0" * 31 + b"1", b"1 -1:1", b"1 +1:1", b"1 1.5:1", b"1 0x1:1",
    b"1 9223372036854775807:1", b"1 3:1\r5", b"1 9223372036854775808:1",
    b"1 99999999999999999999999:1", b"1 qid:3", b"1 1:1\0", b"\xff 1:1", b"1 1:\xc3\xa9",
    "1\u00a01:1".encode(), "1 \u0661:1".encode(),
]  # fmt: skip


@pytest.mark.parametrize("line", [*GOOD_LINES, *BAD_LINES])
def test_odd_lines_are_good_or_bad_to_all(line):
    assert (agree(line + b"\n", Schema(1, 10)) is not None) == (line in GOOD_LINES)


def test_ids_of_strings_are_those_of_tensorflow_for_all_lengths():
    """By the modulus TensorFlow returns the lower 63 bits, and by 3 what the upper bit changes."""
    letters = np.delete(np.arange(32, 256, dtype=np.uint8), [ord(c) - 32 for c in " #:"])
    rng = np.random.RandomState(0)
    strings = [rng.choice(letters, n).tobytes() for n in np.repeat(np.arange(1, 201), 10)]
    text = b"".join(b"1 %s:1\n" % x for x in strings)
    for buckets in (4, 2**62):
        ids = codec.decode_lines(text, Schema(1, buckets, hash_buckets=buckets)).ids[:, 0]
        (wanted,) = native(records.hashed, buckets)(strings)
        assert ids.tolist() == wanted.tolist()


ODD_NUMBERS = [
    b"16777216", b"16777217", b"1677721.7", b"0.000000059604645", b".5", b"1.", b"-0", b"33554431",
    b"0.1234567890123456789012345", b"1.00000017881393432617187499", b"9007199254740993",
    b"00000000000000000000001.5",
]  # fmt: skip


def test_texts_are_the_float32_nearest_to_them():
    rng = np.random.RandomState(0)
    numbers = rng.standard_normal(3000) * 10.0 ** rng.randint(-6, 9, 3000)
    texts = [f"{x:.{digits}g}".encode() for x, digits in zip(numbers, rng.randint(1, 18, 3000))]
    texts += [f"{x:.{digits}f}".encode() for x, digits in zip(numbers, rng.randint(0, 9, 3000))]
    texts += [b"%d.%014d" % pair for pair in zip(*rng.randint(0, 10**12, [2, 500]))]
    texts += ODD_NUMBERS
    lows = rng.standard_normal(500).astype(np.float32)
    middles = (lows.astype(float) + np.nextafter(lows, np.float32(np.inf))) / 2
    texts += [b"%.16g" % x for x in middles]  # often not where their nearest doubles are
    # Powers of ten up to 10^22 are exact as doubles, and digits up to 2^53: at both limits.
    for behind in range(8, 25):
        for digits in ("5", "16777217", "9007199254740991", "9007199254740992", "9007199254740993"):
            text = digits.zfill(behind + 1).encode()
            texts += [sign + text[:-behind] + b"." + text[-behind:] for sign in (b"", b"-")]
    text = b"".join(b"1 1:%s\n" % x for x in texts if len(x) <= 31)
    found = codec.decode_lines(text, Schema(1)).values[:, 0]
    assert found.tolist() == [number_of(x) for x in texts if len(x) <= 31]


def test_a_number_is_rounded_to_the_nearer_of_two_floats():
    bits = np.random.RandomState(3).randint(0x00800000, 0x7F000000, 1000).astype(np.uint32)
    lows, highs = bits.view("f4"), (bits + np.uint32(1)).view("f4")
    for low, high in zip(lows, highs):
        middle = (float(low) + float(high)) / 2
        assert number_of(b"%.9g" % low) == low
        assert number_of(b"%.25g" % np.nextafter(middle, 0)) == low
        assert number_of(b"%.25g" % np.nextafter(middle, np.inf)) == high


def test_a_block_without_a_record_holds_none():
    for text in (b"", b"\n", b"# 1 2:3\n \n"):
        assert len(codec.decode_lines(text, Schema(2)).labels) == 0
