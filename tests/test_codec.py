"""The codec: the same bytes, numbers, refusals and sentences as TensorFlow's."""

import gzip
import io
import pathlib
import warnings

import google.protobuf.message
import numpy as np
import pytest
import reference
from conftest import callable_of, example, write_payloads
from reference import field

from deepfm.data import records
from deepfm.errors import BadInput
from deepfm.records import codec, frames, library, tfrecord, wire
from deepfm.records.schema import BadRecord, Schema
from deepfm.runtime.tf import tf

LARGE = [1, 127, 128, 10**6, 2**31 - 2]  # ids of one byte and more


def batch(seed, rows, fields, largest, multi_valued=False, weighted=False):
    """The arguments of encode, drawn."""
    rng = np.random.RandomState(seed)
    counts, width = None, fields
    if multi_valued:
        counts = rng.randint(0, 4, [rows, fields]).astype(np.int32)
        counts[rng.rand(rows) < 0.1] = 0
        width = int(counts.sum(axis=1).max())
    labels = rng.randint(0, 2, rows).astype(np.float32)
    ids = rng.randint(0, largest + 1, [rows, width])
    values = rng.standard_normal([rows, width]).astype(np.float32)
    weights = rng.rand(rows).astype(np.float32) if weighted else None
    return labels, ids, values, counts, weights


@pytest.fixture(params=["compiled", "plain"])
def either(request, monkeypatch):
    """The compiled codec, or the plain Python that does as much without it."""
    if request.param == "plain":
        monkeypatch.setattr(library, "load", lambda: None)
        monkeypatch.setattr(codec, "MOST", 10**9)
    else:
        assert library.load()


def written(path, payloads):
    return pathlib.Path(write_payloads(path, payloads)).read_bytes()


def all_serialized(batch):
    rows, found = len(batch[0]), []
    columns = ([None] * rows if x is None else x.tolist() for x in batch)
    for label, ids, values, counts, weight in zip(*columns):
        n = len(ids) if counts is None else sum(counts)
        found.append(example(label, ids[:n], values[:n], counts, weight))
    return found


def places(payloads):
    """(the payloads, concatenated; where each begins, and ends)."""
    ends = np.cumsum([len(payload) for payload in payloads]).astype(np.int64)
    return b"".join(payloads), ends - [len(payload) for payload in payloads], ends


@pytest.mark.parametrize("multi_valued", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("fields", [1, 39, 300])
def test_a_file_has_the_bytes_that_tensorflow_writes_and_is_decoded_as_it_was_encoded(
    tmp_path, either, fields, weighted, multi_valued
):
    schema = Schema(fields, multi_valued=multi_valued, weighted=weighted)
    for seed, largest in enumerate(LARGE):
        drawn = batch(seed, 15, fields, largest, multi_valued, weighted)
        data, sizes = codec.encode(*drawn)
        assert data == written(tmp_path / "x", all_serialized(drawn))
        assert sizes.sum() == len(data) and len(sizes) == 15
        labels, ids, values, counts, weights = drawn
        ends = np.cumsum(sizes)
        found = codec.decode(data, ends - sizes + frames.HEADER, ends - 4, schema)
        if multi_valued:
            there = np.arange(ids.shape[1]) < counts.sum(axis=1)[:, np.newaxis]
            ids, values = ids * there, values * there
            assert (found.counts == counts).all()
        assert (found.labels == labels).all() and (found.ids == ids).all()
        assert (found.values == values).all()
        assert (found.weights == weights).all() if weighted else found.weights is None


def test_no_records_are_encoded_and_decoded_as_none(either):
    nothing = np.zeros(0, np.int64)
    for schema in (Schema(3), Schema(3, multi_valued=True), Schema(3, weighted=True)):
        assert len(codec.decode(b"", nothing, nothing, schema).labels) == 0
    assert codec.encode(nothing, np.zeros([0, 3]), np.zeros([0, 3]))[0] == b""


def test_counts_that_do_not_fit_the_ids_are_not_encoded():
    for counts in ([[2, 2]], [[-1, 2]], [[2**62, 2**62]]):
        with pytest.raises(ValueError, match="row 0 has other counts than ids"):
            codec.encode(np.ones(1), np.ones([1, 3]), np.ones([1, 3]), np.array(counts))


def test_places_outside_of_the_data_are_refused():
    data, _ = codec.encode(np.ones(1), np.ones([1, 3]), np.ones([1, 3]))
    for start, end in ((-1, 5), (5, 4), (0, len(data) + 1), (2**62, 2**62 + 1)):
        assert codec.decode(data, np.array([start]), np.array([end]), Schema(3)) is None


def events(path, size, raw=None):
    """[(byte, payload or None, reason)] of a file."""
    found = []
    for block in frames.frames_of(raw or io.BytesIO(path.read_bytes()), str(path), size):
        if isinstance(block, BadRecord):
            number, byte = block.place.replace(": record ", "").split(" at byte ")
            assert int(number) == len(found)
            found.append((int(byte), None, block.reason))
            continue
        assert block.first == len(found)
        for start, end in zip(block.starts.tolist(), block.ends.tolist()):
            payload = block.data[start + frames.HEADER : end - 4]
            found.append((block.offset + start, payload, ""))
    return found


def until_damage(path):
    """(the payloads that TensorFlow reads of a file, what it says of the next record)."""
    compression = tf.io.TFRecordOptions("GZIP" if path.suffix == ".gz" else "")
    found, said = [], ""
    try:
        found.extend(tf.compat.v1.io.tf_record_iterator(str(path), compression))
    except tf.errors.DataLossError as error:
        said = error.message
    return found, said


def check_events(path, found, data):
    """Compares events with TensorFlow's, up to the first damage, and with the reference's."""
    read, said = until_damage(path)
    assert [event[:2] for event in found] == reference.frames(data)[: len(found)]
    assert [payload for _, payload, _ in found[: len(read)]] == read
    for _, payload, reason in found[len(read) :][:1]:
        assert payload is None
        assert reason == frames.TRUNCATED if "corrupt" not in said else "corrupt" in reason


def test_frames_are_those_that_tensorflow_reads_also_past_damage(tmp_path, either):
    rng = np.random.RandomState(1)
    path = tmp_path / "x.tfrecords"
    payloads = [rng.bytes(n) for n in (0, 1, 5, 300, 2, 40, 41, 0, 3000, 7, 8, 90)]
    whole = written(path, payloads)
    for i in range(60):
        damaged = bytearray(whole)
        for place in rng.randint(0, len(whole), rng.randint(0, 4)) if i else ():
            damaged[place] = rng.randint(256)
        if i % 3 == 1:
            del damaged[rng.randint(len(damaged)) :]
        if i % 10 == 2:  # a length that no record has
            damaged[100:108] = b"\xff" * 8
        path.write_bytes(bytes(damaged))
        found = events(path, 500)
        assert events(path, 16) == events(path, 1 << 20) == found
        assert len(found) == len(reference.frames(bytes(damaged)))
        check_events(path, found, bytes(damaged))


def test_a_packed_file_is_read_up_to_its_first_damage(tmp_path):
    path = tmp_path / "x.tfrecords.gz"
    whole = written(tmp_path / "x", [b"a" * 100, b"b" * 50, b"c" * 20])
    damaged = whole[:120] + b"?" + whole[121:]
    cases = (whole, 3), (whole[:-10], 3), (whole[:-30], 2), (whole[: 116 + 5], 1), (damaged, 2)
    for text, number in cases:
        path.write_bytes(gzip.compress(text))
        with gzip.open(str(path)) as raw:
            found = events(path, 64, raw)
        check_events(path, found, text)
        assert len(found) == number
    packed = gzip.compress(whole)
    for data in (packed[:-4], packed[:-8] + bytes(8), packed + b"junk"):
        path.write_bytes(data)
        with pytest.raises(BadInput, match="x.tfrecords.gz: is a truncated or damaged gzip file"):
            list(frames.frames_of_file(str(path)))


def example_of(order=1, **lists):
    """A serialized Example of two fields, with these features; None: without one."""
    entries = []
    normal = {"ids": [1, 2], "label": [1.0], "values": [3.0, 4.0], "other": [7.0]}
    for name, numbers in sorted({**normal, **lists}.items())[::order]:
        if numbers is not None:
            entry = tf.train.Features()
            feature = entry.feature[name]
            of_kind = feature.int64_list if name in ("ids", "counts") else feature.float_list
            of_kind.value.extend(numbers)
            entries.append(entry.SerializeToString())
    return field(1, b"".join(entries))


always, never, unlabelled = lambda schema: True, lambda schema: False, lambda x: not x.with_labels
ODD = [  # features, and the schemas by which they are good
    *(({"label": [x]}, always) for x in (0.0, -0.0, -1.0, 1e-40)),
    *(({"label": x}, unlabelled) for x in ([2.0], [np.nan], [], [1.0, 1.0], None)),
    *(({"ids": x}, never) for x in ([1, 300], [1, -1], [1], [1, 2, 3], [], None)),
    *(({"values": x}, never) for x in ([1.0], [1.0, np.inf], [1.0, np.nan], [], None)),
    ({"counts": [1, 1]}, always),
    ({"counts": [2, 0]}, lambda schema: schema.multi_valued),
    ({"counts": [0, 0], "ids": [], "values": []}, lambda schema: schema.multi_valued),
    *(({"counts": x}, never) for x in ([2, 2], [3, -1], [2**62, 2**62], [1], [1, 1, 0], [])),
    *(({"weight": x}, lambda schema: schema.weighted or not schema.with_labels)
      for x in ([0.5], [-1e-40], [0.0])),
    *(({"weight": x}, unlabelled) for x in ([], [1.0, 2.0], [-1.0], [np.inf])),
]  # fmt: skip


def feature(key, *lists):
    """A serialized entry of tf.train.Features; lists are (number of the field, numbers)."""
    wide = {2: lambda x: np.float32(x).tobytes(), 3: lambda x: bytes([x])}
    parts = [field(n, field(1, b"".join(map(wide[n], numbers)))) for n, numbers in lists]
    return field(1, field(1, key) + field(2, b"".join(parts)))


IDS, VALUES, LABEL = feature(b"ids", (3, [1, 2])), feature(b"values", (2, [3, 4])), (2, [1])
MISREAD = [
    [IDS, VALUES, feature(b"label", (2, [0]))] * 2,  # features that are there twice
    [IDS, feature(b"values", (2, [3, 4]), (2, [5, 6]))],  # a list in two parts
    [IDS, feature(b"values", (2, [3, 4]), (3, [5, 6]))],  # two kinds of list
    [IDS, field(1, field(1, b"values") + field(2, VALUES[12:] + b"\xff"))],  # bytes after it
    [feature(b"ids", (2, [1, 2])), VALUES],  # another kind of list
]
# Groups, which nothing uses any more, in an Example: up to 100 in each other are passed over.
GROUPS = [
    (b"\x2b" * 100, b"\x2c" * 100, always), (b"\x2b" * 101, b"\x2c" * 101, never),
    (b"\x2b" * 5000, b"\x2c" * 5000, never), (b"\x2b", b"\x34", never), (b"\x2b", b"", never),
    (b"", b"\x2c", never),
]  # fmt: skip
NO_EXAMPLES = b"", b"\n", b"\n\0", b"\x0b\x0c", b"\x0b\x14", b"\x0c", b"abc", b"\xff" * 11


def others():
    """(Examples that others may write, and what is none; the schemas by which they are good)."""
    for lists, good in ODD:
        yield from ((example_of(order, **lists), good) for order in (1, -1))
    for features in MISREAD:
        yield field(1, b"".join([*features, feature(b"label", LABEL)])), never
    for begin, end, good in GROUPS:
        yield field(1, example_of()[2:] + begin + b"\x28\x05" + end), good
    # The last is an Example whose features are none: parse_example quotes it, and that crashes.
    for payload in (*NO_EXAMPLES, bytes(range(128, 256)), b"\x0a\x02\xff\xff", example_of() * 2):
        yield payload, never


def mutated(rng):
    """Our own Examples with a few bytes changed, put in or taken out."""
    for multi_valued in (False, True):
        for weighted in (False, True):
            drawn = batch(3, 25, 2, 300, multi_valued, weighted)
            for payload in all_serialized(drawn):
                text = bytearray(payload)
                for place in rng.randint(0, len(text), rng.randint(1, 3)):
                    kind = rng.randint(3)
                    text[place : place + (kind != 1)] = b"" if kind == 2 else rng.bytes(1)
                yield bytes(text)
                yield payload


def features_of(serialized):
    """What wire.features_of returns, by TensorFlow's class; None if it is no Example."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            example = tf.train.Example.FromString(serialized)
        except (google.protobuf.message.DecodeError, RuntimeError):
            return None
    if warned:  # bytes after an end-group tag were not read
        return None
    lists = lambda x: (x.int64_list.value, x.float_list.value, x.bytes_list.value)
    features = {name: lists(x) for name, x in example.features.feature.items()}
    return {n: (list(a), list(b), len(c)) for n, (a, b, c) in features.items()}


SCHEMAS = [
    Schema(2, 300, multi_valued=multi_valued, weighted=weighted, with_labels=with_labels)
    for multi_valued in (False, True)
    for weighted in (False, True)
    for with_labels in (False, True)
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_any_example_is_taken_refused_and_explained_as_tensorflow_does(schema, monkeypatch):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        serialized = tf.compat.v1.placeholder(tf.string, [None])
        parse = callable_of(session, serialized, records.parse(serialized, schema))
        taken = []
        drawn = ((payload, None) for payload in mutated(np.random.RandomState(5)))
        for payload, good in [*others(), *drawn]:
            why, features = wire.explain(payload, schema), features_of(payload)
            deep = b"\x2b" * 100 in payload  # more than TensorFlow's class reads
            none = (why or "").startswith("not a tf.train.Example (")
            assert deep or (features is None) == none, payload
            if features is not None:
                found = {name: x[:3] for name, x in wire.features_of(payload).items()}
                np.testing.assert_equal(found, features, str(payload))
            try:
                expected = parse([payload])
            except (tf.errors.InvalidArgumentError, tf.errors.DataLossError):
                expected = None
            found = codec.decode(*places([payload]), schema)
            assert (found is None) == (expected is None), payload
            assert (wire.numbers(payload, schema) is None) == (expected is None), payload
            assert good is None or good(schema) == (found is not None), payload
            if found is not None:
                taken.append(payload)
                same(found, expected)
        assert len(taken) > 20
        expected = parse(taken)
    same(codec.decode(*places(taken), schema), expected)
    monkeypatch.setattr(library, "load", lambda: None)
    same(codec.decode(*places(taken), schema), expected)


def same(found, expected):
    found = [x for x in found if x is not None]
    assert len(found) == len(expected)
    for one, other in zip(found, expected):
        if other.shape != one.shape:  # records without an id: TensorFlow makes a column for them
            assert one.shape == (len(other), 0) and not other.any()
        else:
            np.testing.assert_array_equal(one, other)


def test_numbers_are_written_as_by_python():
    random = np.random.RandomState(9)
    bits = random.randint(0, 1 << 32, 100000).astype(np.uint32).view(np.float32)  # all exponents
    few = np.float32([1 / 3, 1, 0, -0.0, -1, 2, 1e9, 1e-45, np.nan, np.inf, -np.inf])
    powers = np.float32(10.0) ** np.arange(-20, 1, dtype=np.float32)
    ties = np.arange(1, 1 << 16, 2, dtype=np.float32) / (1 << 16)  # of 17 bits: digits end in 5
    near = [np.nextafter(powers, np.float32(to)) for to in (0, 1)]
    numbers = np.concatenate([bits, few, powers, *near, ties, ties / 256, random.rand(100000)])
    numbers = numbers.astype(np.float32)
    assert codec.number_lines(numbers) == "%.9g\n" * len(numbers) % tuple(numbers.tolist())
    assert codec.number_lines(numbers[:0]) == ""


def test_keys_are_written_and_found_as_plain_python_and_tensorflow_do(tmp_path):
    keys = [b"a", b"", "é".encode(), b"k" * 300, b"\0"]
    n, ends = len(keys), np.cumsum([len(key) for key in keys])
    ids, ones = np.arange(2 * n).reshape(n, 2), np.ones([n, 2], np.float32)
    batch = np.ones(n, np.float32), ids, ones, None, np.ones(n, np.float32)
    places = b"".join(keys), ends - [len(key) for key in keys], ends
    data, sizes = codec.encode(*batch, places)
    frames = [
        tfrecord.framed(wire.write(1, i, x, None, 1, key)) for i, x, key in zip(ids, ones, keys)
    ]
    assert data == b"".join(frames) and sizes.tolist() == list(map(len, frames))
    starts, ends, _ = codec.scan(data)
    starts, ends = starts + 12, ends - 4  # of the payloads
    assert codec.keys(data, starts, ends) == keys
    records = [data[a:b] for a, b in zip(starts, ends)]
    assert list(map(wire.key, records)) == keys
    for record, key in zip(records, keys):
        features = tf.train.Example.FromString(record).features.feature
        assert list(features["key"].bytes_list.value) == ([key] if key else [])
        assert record == tf.train.Example.FromString(record).SerializeToString(deterministic=True)
    schema = Schema(2, weighted=True)
    assert codec.decode(data, starts, ends, schema).ids.tolist() == ids.tolist()
    other = tf.train.Example()  # without the shortest lengths, and with two lists
    other.features.feature["key"].bytes_list.value.extend([b"x", b"y"])
    text = other.SerializeToString()
    assert codec.keys(text, np.array([0]), np.array([len(text)])) == [wire.key(text)] == [b"x"]
