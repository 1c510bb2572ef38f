"""Which record of a file is bad, and what is said of it."""

import gzip
import struct
import time

import numpy as np
import pytest
from conftest import example, write_payloads
from reference import field, header

from deepfm.data import bad_records, formats, records
from deepfm.data.records import Schema
from deepfm.errors import BadInput
from deepfm.records import libsvm_text, text_blocks, tfrecord, wire
from deepfm.records.schema import find_refused
from deepfm.runtime.tf import tf


def run(build, *arrays):
    """The value of a graph that `build` makes from constants."""
    with tf.Graph().as_default():
        fetched = build(*(tf.constant(a) for a in arrays))
        with tf.compat.v1.Session() as session:
            return session.run(fetched)


def some_records(n, field_size=3):
    rng = np.random.RandomState(0)
    return [
        example(i % 2, rng.randint(0, 1000, field_size), rng.rand(field_size)) for i in range(n)
    ]


@pytest.mark.parametrize("bytes_of_a_length", [1, 2, 3])
def test_an_example_is_read_however_many_bytes_its_lengths_take(bytes_of_a_length):
    most = 1 << 7 * bytes_of_a_length  # from here on a length takes a byte more
    (parts,) = wire._messages(example(1, [1, 2], [3, 4]), 1)
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


def find_bad(path, field_size=3):
    return list(bad_records.find_bad(str(path), formats.TFRECORD, Schema(field_size)))


def test_find_bad_names_record_and_byte_of_what_is_damaged_and_goes_on(tmp_path):
    payloads = some_records(5000)
    payloads[9] = some_records(1, field_size=2)[0]
    path = tmp_path / "a.tfrecords"
    write_payloads(path, payloads)
    data = bytearray(path.read_bytes())
    starts = np.cumsum([0] + [len(p) + 16 for p in payloads])
    data[starts[3] : starts[3] + 8] = struct.pack("<Q", 1 << 60)
    data[starts[1234] + 20] ^= 4
    data[starts[4321] + 20] ^= 4
    path.write_bytes(data)
    places = [bad.place for bad in find_bad(path)]
    assert places == [f": record {i} at byte {starts[i]}" for i in (3, 9, 1234, 4321)]


WRONG = {  # what is made of the last frame, and what is said of it
    "cut": (lambda frame: frame[:-5], "truncated"),
    "absurd length": (lambda frame: header(1 << 60) + b"1234", str(1 << 60)),
    "no Example": (lambda frame: tfrecord.framed(b"\xff\xfe\xff\xfe"), "not a tf.train.Example"),
    "too wide": (lambda frame: tfrecord.framed(some_records(1, 4)[0]), "expected 3 ids, found 4"),
}


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("spoil, words", WRONG.values(), ids=WRONG)
def test_find_bad_says_what_is_wrong(tmp_path, spoil, words, pack):
    whole = [tfrecord.framed(payload) for payload in some_records(7)]
    path = tmp_path / ("a.tfrecords" if pack is bytes else "a.tfrecords.gz")
    path.write_bytes(pack(b"".join([*whole[:6], spoil(whole[6])])))
    (bad,) = find_bad(path)
    assert bad.place == f": record 6 at byte {sum(map(len, whole[:6]))}"
    assert words in bad.reason


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
            assert [i for i, _ in find_refused(accepts, payloads, explain, "")] == bad
