"""records.py: one format, two readers (native and plain) that must agree."""

import gzip
import struct
import time

import numpy as np
import pytest
import tensorflow as tf
from conftest import encoded
from reference import crc32c, field, frame, masked

from deepfm.data import bad_records, formats, libsvm, records
from deepfm.data.records import Schema
from deepfm.errors import BadInput
from deepfm.kernels.compiled import COMPILED
from deepfm.kernels.reading import pack
from deepfm.records import libsvm_text, text_blocks
from deepfm.records.bad_record import find_refused


def run(build, *arrays):
    """The value of a graph that `build` makes from constants."""
    with tf.Graph().as_default():
        fetched = build(*(tf.constant(a) for a in arrays))
        with tf.compat.v1.Session() as session:
            return session.run(fetched)


def example(label, ids, values):
    """A tf.train.Example, written the way its documentation does."""
    feature = {
        "label": tf.train.Feature(float_list=tf.train.FloatList(value=[label])),
        "ids": tf.train.Feature(int64_list=tf.train.Int64List(value=ids)),
        "values": tf.train.Feature(float_list=tf.train.FloatList(value=values)),
    }
    return tf.train.Example(features=tf.train.Features(feature=feature))


def parse_line_slowly(line, schema):
    """(label, ids, values) of a good line, by the definition of the format."""
    label, *pairs = line.split("#")[0].split()
    ids = [int(pair.split(":")[0]) + schema.id_offset for pair in pairs]
    values = [float(pair.split(":")[1]) for pair in pairs]
    missing = schema.field_size - len(pairs)
    return float(float(label) > 0), ids + [0] * missing, values + [0.0] * missing


def write_records(path, payloads, compression=""):
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for payload in payloads:
            writer.write(payload)


def some_records(n, field_size=3):
    rng = np.random.RandomState(0)
    return [
        example(i % 2, rng.randint(0, 1000, field_size), rng.rand(field_size)).SerializeToString()
        for i in range(n)
    ]


def test_lines_are_parsed_as_the_format_says():
    lines = ["0 3:1 5:.5", "1 5:2 3:1e-3", "-1\t7:1  8:2 ", "+1 7:1 8:-2.5\r", " 1.0 7:0 7:0 "]
    schema = Schema(2)
    found = zip(*run(lambda x: libsvm.parse_lines(x, schema), lines))
    for line, (label, ids, values) in zip(lines, found):
        slowly = parse_line_slowly(line, schema)
        assert (label, list(ids)) == slowly[:2]
        np.testing.assert_array_equal(values, np.float32(slowly[2]))


def test_pad_fills_short_rows_with_id_0_and_value_0():
    lines = ["0 3:1", "1", "1 1:2 2:3 9:4"]
    schema = Schema(3, pad=True, id_offset=1)
    found = zip(*run(lambda x: libsvm.parse_lines(x, schema), lines))
    for line, (label, ids, values) in zip(lines, found):
        slowly = parse_line_slowly(line, schema)
        assert (label, list(ids), list(values)) == slowly


def test_drop_blank_drops_blank_lines_and_comments_only():
    lines = [b"", b"  ", b"\t\r", b"\v\f", b"# 1 1:1", b"  # caf\xe9", b"1 1:1 # \xff#", b"0 1:1"]
    assert list(run(libsvm.drop_blank, lines)) == [b"1 1:1 ", b"0 1:1"]


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


@pytest.fixture(scope="module")
def parse_one_line():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        line = tf.compat.v1.placeholder(tf.string, [None])
        parsed = libsvm.parse_lines(line, Schema(1, feature_size=10))
        yield lambda text: session.run(parsed, {line: [text]})


@pytest.mark.parametrize("line", [*GOOD_LINES, *BAD_LINES])
def test_the_plain_and_the_native_reader_agree_on_a_line(parse_one_line, line):
    assert (libsvm_text.explain_line(line, Schema(1, 10)) is None) == (line in GOOD_LINES)
    if line in GOOD_LINES:
        parse_one_line(line)
    else:
        with pytest.raises(tf.errors.InvalidArgumentError):
            parse_one_line(line)


@pytest.mark.parametrize(
    "line,schema,words",
    [
        (b"2 1:1", Schema(1), ["label '2'", "0, 1, -1"]),
        (b"1 x", Schema(1), ["'x'", "id:value"]),
        (b"1 1:nan", Schema(1), ["'nan'", "finite"]),
        (b"1 -4:1", Schema(1), ["-4", "negative"]),
        (b"1 9223372036854775808:1", Schema(1), ["9223372036854775808", "2^63"]),
        (b"1 2147483647:1", Schema(1), ["2147483647 is not below 2147483647: no table has more"]),
        (b"1 7:1", Schema(1, 7), ["7", "feature_size 7"]),
        (b"1 6:1", Schema(1, 7, id_offset=1), ["7", "feature_size 7"]),
        (b"1 1:1", Schema(2), ["expected 2", "found 1", "libsvm_to_tfrecord --pad"]),
        (b"1 1:1 2:1", Schema(1, pad=True), ["at most 1", "found 2"]),
        (b"1 0:1", Schema(1, pad=True), ["id 0", "--id_offset=1"]),
    ],
)
def test_the_explanation_says_what_against_what(line, schema, words):
    reason = libsvm_text.explain_line(line, schema)
    assert [word for word in words if word not in reason] == []


def parse_compiled(serialized, schema):
    return COMPILED.parse(pack(serialized), schema, None)


both_parsers = pytest.mark.parametrize("parse", [records.parse, parse_compiled])


@both_parsers
def test_a_record_that_is_no_example_is_refused_without_a_crash(parse):
    build = lambda x: parse(x, Schema(1))
    # The last is an Example whose features are none: parse_example quotes it, and that crashes.
    for payload in (b"garbage", bytes(range(128, 256)), b"\x0a\x02\xff\xff"):
        damaged = (
            tf.errors.DataLossError if parse is records.parse else tf.errors.InvalidArgumentError
        )
        with pytest.raises(damaged):
            run(build, [payload])


def feature(key, *lists):
    """A serialized entry of tf.train.Features; lists are (number of the field, numbers)."""
    wide = {2: lambda x: np.float32(x).tobytes(), 3: lambda x: bytes([x])}
    parts = [field(n, field(1, b"".join(map(wide[n], numbers)))) for n, numbers in lists]
    return field(1, field(1, key) + field(2, b"".join(parts)))


IDS, VALUES, LABEL = feature(b"ids", (3, [1, 2])), feature(b"values", (2, [3, 4])), (2, [1])
MISREAD = {
    "a feature that is there twice": [IDS, VALUES, feature(b"label", (2, [0]))] * 2,
    "a list in two parts": [IDS, feature(b"values", (2, [3, 4]), (2, [5, 6]))],
    "two kinds of list": [IDS, feature(b"values", (2, [3, 4]), (3, [5, 6]))],
    "bytes after the list": [IDS, field(1, field(1, b"values") + field(2, VALUES[12:] + b"\xff"))],
}


@both_parsers
@pytest.mark.parametrize("features", MISREAD.values(), ids=MISREAD)
def test_an_example_that_could_be_read_in_two_ways_is_refused(features, parse):
    serialized = field(1, b"".join([*features, feature(b"label", LABEL)]))
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.DataLossError)):
        run(lambda x: parse(x, Schema(2)), [serialized])


@both_parsers
def test_an_example_is_read_whatever_the_order_and_with_other_features(parse):
    parts = [VALUES, feature(b"label", LABEL), feature(b"other", (2, [7])), IDS]
    serialized = field(1, b"".join(parts))
    labels, ids, values = run(lambda x: parse(x, Schema(2)), [serialized])
    assert (labels.tolist(), ids.tolist(), values.tolist()) == ([1], [[1, 2]], [[3, 4]])


@both_parsers
@pytest.mark.parametrize("counts", [None, [[1, 1], [1, 1]], [[2, 1], [1, 1]]])
def test_what_encode_writes_is_parsed(parse, counts):
    n = 2 if counts is None else int(np.sum(counts, axis=1).max())
    ids = np.arange(2 * n).reshape(2, n)
    ids *= 1 if counts is None else np.arange(n) < np.sum(counts, axis=1, keepdims=True)
    schema = Schema(2, multi_valued=counts is not None)
    record = [np.float32([0, 1]), ids, ids.astype(np.float32) / 3]
    record += [] if counts is None else [np.int32(counts)]
    for found, wanted in zip(run(lambda x: parse(x, schema), encoded(*record)), record):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("bytes_of_a_length", [1, 2, 3])
def test_an_example_is_read_however_many_bytes_its_lengths_take(bytes_of_a_length):
    most = 1 << 7 * bytes_of_a_length  # from here on a length takes a byte more
    parts = IDS + VALUES + feature(b"label", LABEL)
    fill = lambda n: field(1, parts + field(1, field(1, b"text") + field(2, b"\0" * n)))
    sizes = range(max(most - 130, 0), most + 3)
    around = {n: len(fill(n)) - n for n in sizes}  # bytes around the text
    # Those with which the record, or what is in it, comes to that size.
    grown = [n for n in sizes[:-1] if around[n + 1] > around[n] or n + around[n] == most]
    assert len(grown) >= 4
    some = [fill(n) for n in sizes if {n - 2, n - 1, n, n + 1} & set(grown)]
    assert min(map(len, some)) < most < max(map(len, some))
    labels, _, _ = run(lambda x: records.parse(x, Schema(2)), some)
    assert labels.tolist() == [1] * len(some)


def test_find_bad_refuses_a_record_of_an_absurd_length(tmp_path):
    header = struct.pack("<Q", 1 << 60)
    data = frame(some_records(1)[0]) + header + struct.pack("<I", masked(crc32c(header))) + b"1234"
    (tmp_path / "a.tfrecords").write_bytes(data)
    (bad,) = find_bad(tmp_path / "a.tfrecords")
    assert bad.place.startswith(": record 1 ")
    assert str(1 << 60) in bad.reason


def test_an_id_of_a_million_digits_is_refused_at_once():
    start = time.process_time()
    reason = libsvm_text.explain_line(b"1 " + b"9" * (1 << 22) + b":1", Schema(1))
    assert "is not below 2^63" in reason and len(reason) < 300
    assert time.process_time() - start < 5  # digit by digit it takes minutes


def test_a_line_without_end_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(text_blocks, "LONGEST_LINE", 1 << 20)
    (tmp_path / "a.libsvm").write_bytes(b"1 1:1\n" + b"\0" * (3 << 20))
    with pytest.raises(BadInput, match=r"a\.libsvm: has a line of over"):
        list(text_blocks.lines(str(tmp_path / "a.libsvm")))


def test_find_bad_says_that_a_record_is_no_example(tmp_path):
    write_records(tmp_path / "a.tfrecords", [*some_records(2), b"\xff\xfe\xff\xfe"])
    (bad,) = find_bad(tmp_path / "a.tfrecords")
    assert bad.place.startswith(": record 2 ")
    assert "not a tf.train.Example" in bad.reason


def find_bad(path, field_size=3):
    return list(bad_records.find_bad(str(path), formats.TFRECORD, Schema(field_size)))


def test_find_bad_names_record_and_byte_of_a_flipped_bit_and_goes_on(tmp_path):
    payloads = some_records(5000)
    path = tmp_path / "a.tfrecords"
    write_records(path, payloads)
    data = bytearray(path.read_bytes())
    starts = np.cumsum([0] + [len(p) + 16 for p in payloads])
    data[starts[1234] + 20] ^= 4
    data[starts[4321] + 20] ^= 4
    path.write_bytes(data)
    places = [bad.place for bad in find_bad(path)]
    assert places == [f": record {i} at byte {starts[i]}" for i in (1234, 4321)]


def test_find_bad_names_the_record_that_a_truncated_file_ends_in(tmp_path):
    payloads = some_records(10)
    path = tmp_path / "a.tfrecords"
    write_records(path, payloads)
    path.write_bytes(path.read_bytes()[:-5])
    (bad,) = find_bad(path)
    assert bad.place == f": record 9 at byte {sum(len(p) + 16 for p in payloads[:9])}"
    assert "truncated" in bad.reason


def test_find_bad_resumes_after_a_damaged_length(tmp_path):
    payloads = some_records(10)
    payloads[7] = some_records(1, field_size=2)[0]
    path = tmp_path / "a.tfrecords"
    write_records(path, payloads)
    data = bytearray(path.read_bytes())
    starts = np.cumsum([0] + [len(p) + 16 for p in payloads])
    data[starts[3] : starts[3] + 8] = struct.pack("<Q", 1 << 60)
    path.write_bytes(data)
    assert [bad.place for bad in find_bad(path)] == [
        f": record {i} at byte {starts[i]}" for i in (3, 7)
    ]


def test_find_bad_reads_gzip(tmp_path):
    payloads = some_records(10)
    payloads[6] = some_records(1, field_size=4)[0]
    write_records(tmp_path / "a.tfrecords.gz", payloads, "GZIP")
    (bad,) = find_bad(tmp_path / "a.tfrecords.gz")
    assert bad.place.startswith(": record 6 ")
    assert "expected 3 ids, found 4" in bad.reason


def test_find_bad_names_the_line_of_a_libsvm_file(tmp_path):
    lines = [f"{i % 2} 1:1 2:{i}" for i in range(9000)]
    lines[10], lines[4500], lines[8999] = "# note", "1 1:1", "1 1:1 x"
    (tmp_path / "a.libsvm.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    path = str(tmp_path / "a.libsvm.gz")
    found = list(bad_records.find_bad(path, formats.LIBSVM, Schema(2)))
    assert [bad.place for bad in found] == [":4501", ":9000"]


def test_find_refused_finds_each_bad_payload_in_order():
    rng = np.random.RandomState(2)
    accepts = lambda batch: b"bad" not in batch
    for size in (0, 1, 2, 3, 200):
        bad = [i for i in range(size) if rng.rand() < 0.2]
        payloads = [b"bad" if i in bad else b"good" for i in range(size)]
        # The parser decides, whether the plain reader finds all, none, or what is not there.
        for explain in ({b"bad": "bad"}.get, {}.get, {b"good": "bad"}.get):
            assert [i for i, _ in find_refused(accepts, payloads, explain)] == bad
