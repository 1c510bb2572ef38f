"""The readers and the converter against tests/reference.py: a corpus of odd cases, and random ones.

tests/soak_fuzz.py does the same, as long as you like.
"""

import pathlib
import random

import fuzz_checks
import mutation
import numpy as np
import pytest
import reference
import soak_fuzz
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference import Refused, Rules

from deepfm.data import formats, libsvm, records
from deepfm.records import libsvm_text

CORPUS = sorted(path for path in soak_fuzz.CORPUS.glob("*/*") if path.is_file())
drawn = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def rules_of(path):
    """The Rules in a file's name, as in found.field_size=3.pad=1.libsvm."""
    told = [part.split("=") for part in path.name.split(".") if "=" in part]
    return Rules(**{"field_size": 1, **{key: int(value) for key, value in told}})


def names(path):
    """The name that a case is checked under."""
    if path.parent.name == "check_metadata":
        return "dataset.json"
    return "a" + "".join(f".{part}" for part in path.name.split(".")[1:] if "=" not in part)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_corpus_is_read_as_the_reference_reads_it(path, tmp_path):
    copy = tmp_path / names(path)
    copy.write_bytes(path.read_bytes())
    outcome = getattr(fuzz_checks, path.parent.name)(str(copy), rules_of(path))
    assert outcome.differences == []
    assert outcome.accepted + outcome.refused > 0


@pytest.mark.parametrize(
    "case",
    [
        *soak_fuzz.line_cases(7, 400),
        *soak_fuzz.record_cases(7, 150),
        *soak_fuzz.metadata_cases(7, 60),
    ],
    ids=lambda case: case.check,
)
def test_drawn_files_are_read_as_the_reference_reads_them(case, tmp_path):
    path = tmp_path / case.name
    path.write_bytes(case.data)
    outcome = getattr(fuzz_checks, case.check)(str(path), case.rules)
    assert outcome.differences == []


class Parser:
    """A native parser of one record at a time."""

    def __init__(self, parse, rules):
        with tf.Graph().as_default() as graph:
            self._raw = tf.compat.v1.placeholder(tf.string, [None])
            self._parsed = parse(self._raw, records.Schema(*rules))
        self._session = tf.compat.v1.Session(graph=graph)

    def __call__(self, payload):
        """A reference.Record, or None where it is refused."""
        try:
            labels, ids, values = self._session.run(self._parsed, {self._raw: [payload]})
        except (tf.errors.InvalidArgumentError, tf.errors.DataLossError):
            return None
        return reference.Record(int(labels[0]), ids[0].tolist(), values[0].view("u4").tolist())


def refers(parse, payload, rules):
    """The reference's result for a record; None if it refuses the record."""
    try:
        return parse(payload, rules)
    except Refused:
        return None


@pytest.fixture(scope="module")
def parse_line():
    return Parser(libsvm.parse_lines, Rules(1, 1000))


@pytest.fixture(scope="module")
def parse_example():
    return Parser(records.parse, Rules(2, 1000))


NUMBERS = st.one_of(
    st.sampled_from(mutation._NUMBERS),
    st.floats(width=32).map(lambda x: repr(x).encode()),
    st.floats().map(lambda x: repr(x).encode()),
    st.from_regex(rb"[+-]?[0-9]{0,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
)


@drawn
@given(NUMBERS)
def test_a_number_is_the_nearest_float32_or_refused(parse_line, text):
    line = b"1 7:" + text
    if not reference.records_of_text(line) or b"\n" in line or b"#" in line:
        return
    assert parse_line(line) == refers(reference.parse_line, line, Rules(1, 1000))
    assert (libsvm_text.explain_line(line, records.Schema(1, 1000)) is None) == (
        parse_line(line) is not None
    )


@drawn
@given(
    st.lists(st.sampled_from([*mutation._IDS, *mutation._BLANKS, b":", b"1", b"0:1"]), max_size=6)
)
def test_pieces_of_lines_are_read_as_the_reference_reads_them(parse_line, pieces):
    line = b"1 " + b"".join(pieces)
    expected = refers(reference.parse_line, line, Rules(1, 1000))
    assert parse_line(line) == expected
    assert (libsvm_text.explain_line(line, records.Schema(1, 1000)) is None) == bool(expected)


@drawn
@given(st.randoms(use_true_random=False))
def test_an_example_is_read_as_the_reference_reads_it(parse_example, drawer):
    payload = mutation.example(drawer, 2)
    expected = refers(reference.parse_example, payload, Rules(2, 1000))
    assert parse_example(payload) == expected


@drawn
@given(
    st.lists(st.binary(max_size=30), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 150), st.integers(0, 255)), max_size=2),
    st.integers(0, 20),
)
def test_a_damaged_file_has_the_frames_that_the_reference_finds(tmp_path, payloads, edits, cut):
    data = bytearray(b"".join(map(reference.frame, payloads)))
    for at, byte in edits:
        data[at % len(data)] ^= byte
    data = bytes(data[: len(data) - cut % len(data)])
    path = tmp_path / "a.tfrecords"
    path.write_bytes(data)
    found = [(int(place.split()[-1]), x) for place, x, _ in formats.TFRECORD.numbered(str(path))]
    assert found == reference.frames(data)


# The reference itself, where something else knows the answer.


def test_the_reference_rounds_to_the_nearer_of_two_floats():
    draw = random.Random(3)
    for _ in range(1000):
        bits = draw.randrange(0x00800000, 0x7F000000)
        low, high = (float(np.uint32(x).view("f4")) for x in (bits, bits + 1))
        middle = (low + high) / 2
        assert reference.number(b"%.9g" % low) == bits
        assert reference.number(b"%.25g" % np.nextafter(middle, low)) == bits
        assert reference.number(b"%.25g" % np.nextafter(middle, high)) == bits + 1


def test_the_reference_knows_the_checksum_of_the_standard():
    assert reference.crc32c(b"123456789") == 0xE3069283  # RFC 3720's CRC-32C


def test_the_reference_reads_and_writes_what_tensorflow_does(tmp_path):
    record = reference.Record(1, [3, 300], [0x3F800000, 0x40000000])
    payload = reference.serialize(record)
    features = tf.train.Example.FromString(payload).features.feature
    assert list(features["ids"].int64_list.value) == [3, 300]
    with tf.io.TFRecordWriter(str(tmp_path / "a")) as writer:
        writer.write(payload)
    data = pathlib.Path(tmp_path / "a").read_bytes()
    assert data == reference.frame(payload)
    assert reference.parse_example(reference.frames(data)[0][1], Rules(2)) == record
