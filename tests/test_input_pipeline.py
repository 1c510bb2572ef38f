"""Every record once, in the order asked for, from both formats."""

import gzip

import numpy as np
import pytest
from conftest import make_records, write_libsvm, write_tfrecords

from deepfm.config import InputConfig
from deepfm.data import bad_records, datasets, formats, input_pipeline, records
from deepfm.data.input_pipeline import make_input_fn
from deepfm.data.reading import Source
from deepfm.data.shares import Skipped
from deepfm.kernels.compiled import COMPILED
from deepfm.kernels.ops import TENSORFLOW
from deepfm.modes.common.mode import Mode
from deepfm.runtime.tf import tf

SCHEMA = records.Schema(4, 50)
USUAL = {"batch_size": 64}


@pytest.fixture(autouse=True, params=[TENSORFLOW, COMPILED], ids=["tensorflow", "kernels"])
def ops(request, monkeypatch):
    """All of it with TensorFlow's own datasets and ops, and with the compiled kernels."""
    monkeypatch.setitem(USUAL, "ops", request.param)


def read(spec, schema=SCHEMA, damaged=(), **asked):
    """The batches that an input_fn yields: a list of (ids, values, labels)."""
    data = datasets.find(str(spec), "training_data_dir")
    asked = {**USUAL, **asked}
    source = Source(data, ops=asked.pop("ops"), asked=InputConfig(**asked), damaged=damaged)
    fetch = lambda features, labels: [features["feat_ids"], features["feat_vals"], labels]
    return batches_of(make_input_fn(source, schema, Mode()), fetch)


def batches_of(input_fn, fetch):
    """The values of fetch(features, labels) for each batch."""
    batches = []
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fetches = fetch(*tf.compat.v1.data.make_one_shot_iterator(input_fn()).get_next())
        while True:
            try:
                batches.append(session.run(fetches))
            except tf.errors.OutOfRangeError:
                return batches


def values_of(batches):
    """The feature values of all records, in the order read: they identify the records."""
    return np.concatenate([values for _, values, _ in batches])


def sort(rows):
    return rows[np.lexsort(rows.T)]


@pytest.fixture(params=["tfrecord", "libsvm"])
def files(request, tmp_path):
    """(folder of files of 127, 300 and 1 records, all their records)."""
    parts = [make_records(rows, seed=rows) for rows in (127, 300, 1)]
    for i, part in enumerate(parts):
        if request.param == "tfrecord":
            write_tfrecords(tmp_path / f"{i}.tfrecords", part)
        else:
            write_libsvm(tmp_path / f"{i}.libsvm", part)
    return tmp_path, [np.concatenate(column) for column in zip(*parts)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_byte_order_mark_before_libsvm_lines_is_skipped(tmp_path, pack):
    labels, ids, values = make_records(100)
    path = tmp_path / ("a.libsvm" if pack is bytes else "a.libsvm.gz")
    with open(write_libsvm(tmp_path / "plain", (labels, ids, values)), "rb") as f:
        path.write_bytes(pack(b"\xef\xbb\xbf" + f.read()))
    np.testing.assert_array_equal(values_of(read(path)), values)
    assert list(bad_records.find_bad(str(path), formats.LIBSVM, SCHEMA)) == []


def test_reads_every_record_as_it_was_written_in_order_and_drops_no_short_batch(files):
    folder, columns = files
    labels, ids, values = (np.concatenate([column] * 2) for column in columns)
    batches = read(folder, num_epochs=2)
    np.testing.assert_array_equal(np.concatenate([b[0] for b in batches]), ids)
    np.testing.assert_allclose(values_of(batches), values, rtol=1e-6)
    np.testing.assert_array_equal(np.concatenate([b[2] for b in batches]), labels)
    assert [len(b[2]) for b in batches] == [64] * 6 + [44] + [64] * 6 + [44]


@pytest.mark.parametrize(
    "shuffle, config",
    [
        pytest.param(shuffle, config, marks=[pytest.mark.table] if (i + j) % 3 != 2 else [])
        for i, shuffle in enumerate([0, 50, 10000])
        for j, config in enumerate([{}, {"cache": "memory"}, {"num_parallel_reads": 3}])
    ],
)
def test_each_epoch_holds_every_record_once_in_an_order_of_its_own(files, shuffle, config):
    folder, (_, _, values) = files
    batches = read(folder, num_epochs=2, shuffle_buffer=shuffle, **config)
    found = values_of(batches)
    assert len(found) == 2 * len(values)
    for epoch in (found[: len(values)], found[len(values) :]):
        np.testing.assert_allclose(sort(epoch), sort(values), rtol=1e-6)
    assert np.any(found[: len(values)] != found[len(values) :]) or not shuffle


def test_parsers_and_prefetched_batches_change_no_result(files):
    few, many = (
        read(files[0], num_epochs=2, shuffle_buffer=100, num_parsers=n, prefetch_batches=n * n)
        for n in (1, 3)
    )
    assert len(few) == len(many)
    for batch, other in zip(few, many):
        for found, wanted in zip(batch, other):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    "cores, processes, asked, found",
    [(1, 1, (0, 0), (1, 4)), (2, 1, (0, 0), (1, 4)), (32, 1, (0, 0), (16, 32)),
     (32, 4, (0, 0), (4, 8)), (32, 1, (3, 0), (3, 6)), (2, 1, (0, 9), (1, 9))],
)  # fmt: skip
def test_half_the_cores_of_a_process_parse(monkeypatch, cores, processes, asked, found):
    monkeypatch.setattr(input_pipeline.utilization, "cores", lambda: cores)
    config = InputConfig(64, num_parsers=asked[0], prefetch_batches=asked[1])
    assert input_pipeline.parallel(config, processes) == found


@pytest.mark.parametrize("damage", [(), [20], [4000]])
def test_records_are_counted_as_the_plain_reader_numbers_them(files, damage):
    found = datasets.find(str(files[0]), "training_data_dir")
    for file in found.files:
        with open(file.path, "rb") as f:
            content = bytearray(f.read())
        for place in damage:
            content[min(place, len(content) - 1)] ^= 0xFF
        with open(file.path, "wb") as f:
            f.write(content)
    numbered = [sum(1 for _ in found.format.numbered(file.path)) for file in found.files]
    assert [file.rows for file in datasets.count_rows(found).files] == numbered
    assert damage or numbered == [127, 300, 1]


@pytest.mark.parametrize("cache", [pytest.param("none", marks=pytest.mark.table), "memory"])
def test_the_same_seed_repeats_the_order_and_another_does_not(files, cache):
    config = dict(num_epochs=2, shuffle_buffer=100, num_parallel_reads=3, cache=cache)
    first, again, other = (values_of(read(files[0], seed=s, **config)) for s in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)


@pytest.mark.parametrize("ops", [TENSORFLOW], indirect=True)  # it takes both
def test_a_cache_file_is_of_the_kernels_or_of_tensorflow_and_gives_the_same_records(
    files, tmp_path_factory
):
    cache = str(tmp_path_factory.mktemp("cache") / "records")
    folder, (_, _, values) = files
    for ops in (TENSORFLOW, COMPILED, TENSORFLOW, COMPILED):
        found = values_of(read(folder, shuffle_buffer=100, cache=cache, ops=ops))
        np.testing.assert_allclose(sort(found), sort(values), rtol=1e-6)


def test_a_cache_file_holds_what_this_run_does_not_skip(files, tmp_path_factory):
    folder, (_, _, values) = files
    cache = str(tmp_path_factory.mktemp("cache") / "records")
    path = sorted(folder.iterdir())[0]
    places = [place for place, _, _ in datasets.find(str(path), "x").format.numbered(str(path))]
    for bad in (places[5:8], places[7:9]):
        damaged = [Skipped(str(path), dict.fromkeys(bad, "bad"))]
        found = values_of(read(folder, damaged=damaged, cache=cache))
        assert len(found) == len(values) - len(bad)


@pytest.mark.parametrize(
    "bad", [dict(feature_size=49), dict(field_size=3), dict(field_size=5)], ids=str
)
def test_a_record_beyond_the_schema_stops_reading(files, bad):
    with pytest.raises(tf.errors.InvalidArgumentError):
        read(files[0], schema=SCHEMA._replace(**bad))


def test_the_good_records_of_a_damaged_file_are_read_past_the_damage(tmp_path):
    rows = make_records(100)
    path = tmp_path / "a.tfrecords"
    write_tfrecords(path, rows)
    data = bytearray(path.read_bytes())
    frame = len(data) // 100
    data[10 * frame + 30] ^= 1  # in the payload of record 10
    data[50 * frame] ^= 1  # in the length of record 50
    path.write_bytes(bytes(data[:-5]))  # in the middle of record 99
    bad = list(bad_records.find_bad(str(path), formats.TFRECORD, SCHEMA))
    assert len(bad) == 3
    damaged = (Skipped(str(path), frozenset(b.place for b in bad)),)
    found = values_of(read(path, damaged=damaged, shuffle_buffer=1000))
    kept = np.delete(rows[2], [10, 50, 99], axis=0)
    np.testing.assert_array_equal(sort(found), sort(kept))


@pytest.mark.parametrize("left", [1, 5, 11])  # bytes of a header, which has 12
def test_a_file_that_is_cut_within_a_header_is_not_taken_for_whole(tmp_path, left):
    path = write_tfrecords(tmp_path / "a.tfrecords", make_records(3))
    one = write_tfrecords(tmp_path / "one", make_records(1))
    with open(path, "rb+") as f, open(one, "rb") as first:
        f.truncate(2 * len(first.read()) + left)
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.DataLossError)):
        read(path)
