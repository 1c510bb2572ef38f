"""datasets.py: which files make up a data set, and when dataset.json is trusted."""

import gzip
import json
import os

import pytest
import tensorflow as tf
from conftest import make_records, write_tfrecords

from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import dataset_json
from deepfm.records.dataset_json import SamplingRates


def write_tfrecord(path, n=3):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for _ in range(n):
            writer.write(b"record")
    return path.stat().st_size


def describe(folder, **files):
    """Writes a dataset.json; files are name=(rows, bytes)."""
    described = [
        datasets.DataFile(str(folder / f"{name}.tfrecords"), size, rows, 1)
        for name, (rows, size) in files.items()
    ]
    dataset_json.write(str(folder), 39, 1000, described)


def refused(spec):
    with pytest.raises(BadInput) as error:
        datasets.find(str(spec), "data")
    return str(error.value)


def test_an_empty_directory_is_refused(tmp_path):
    assert f"--data={tmp_path}: the directory has no data files" in refused(tmp_path)


@pytest.mark.parametrize("spec", ["a.tfrecords", "*.tfrecords", "./a.tfrecords"])
def test_files_of_the_current_folder_need_no_folder(tmp_path, monkeypatch, spec):
    write_tfrecord(tmp_path / "a.tfrecords")
    write_tfrecord(tmp_path / ".hidden.tfrecords")
    monkeypatch.chdir(tmp_path)
    assert [file.path for file in datasets.find(spec, "data").files] == ["./a.tfrecords"]


def test_a_glob_without_a_match_is_refused(tmp_path):
    assert "no file matches" in refused(tmp_path / "*.tfrecords")


def test_a_remote_glob_in_a_folder_that_is_not_there_is_refused(tmp_path):
    assert "no file matches" in refused(f"file://{tmp_path}/none/*.tfrecords")


def test_an_empty_entry_of_a_list_is_refused(tmp_path):
    write_tfrecord(tmp_path / "a.tfrecords")
    assert "empty entry" in refused(f"{tmp_path},")


def test_a_single_empty_file_is_refused(tmp_path):
    (tmp_path / "a.tfrecords").write_bytes(b"")
    assert f"{tmp_path}/a.tfrecords: empty" in refused(tmp_path)


def test_an_empty_file_beside_others_is_left_out(tmp_path):
    (tmp_path / "a.tfrecords").write_bytes(b"")
    write_tfrecord(tmp_path / "b.tfrecords")
    paths = [file.path for file in datasets.find(str(tmp_path), "data").files]
    assert paths == [f"{tmp_path}/b.tfrecords"]


def test_a_gz_file_that_is_not_gzip_is_refused(tmp_path):
    write_tfrecord(tmp_path / "a.tfrecords.gz")
    assert "a.tfrecords.gz: is named .gz but is not gzip-compressed" in refused(tmp_path)


def test_a_gzip_file_that_is_not_named_gz_is_refused(tmp_path):
    (tmp_path / "a.libsvm").write_bytes(gzip.compress(b"1 1:1\n"))
    assert "its name must end in .gz" in refused(tmp_path)


def test_mixed_formats_are_refused(tmp_path):
    write_tfrecord(tmp_path / "a.tfrecords")
    (tmp_path / "b.libsvm").write_bytes(b"1 1:1\n")
    assert "mixes TFRecord and LibSVM" in refused(tmp_path)


def test_files_come_in_the_order_of_their_names_and_once(tmp_path):
    for name in ("c", "a", "b"):
        write_tfrecord(tmp_path / f"{name}.tfrecords")
    found = datasets.find(f"{tmp_path},{tmp_path}/b*", "data")
    assert [file.path[-11:] for file in found.files] == [f"{n}.tfrecords" for n in "abc"]


def test_a_pipe_among_the_files_is_refused(tmp_path):
    write_tfrecord(tmp_path / "a.tfrecords")
    os.mkfifo(str(tmp_path / "b.tfrecords"))
    assert "b.tfrecords: a pipe or a device; write" in refused(tmp_path)


def test_a_link_to_a_folder_above_it_is_not_followed(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "other").mkdir()
    write_tfrecord(tmp_path / "in" / "a.tfrecords")
    write_tfrecord(tmp_path / "other" / "b.tfrecords")
    os.symlink(str(tmp_path / "in"), str(tmp_path / "in" / "loop"))
    os.symlink(str(tmp_path / "other"), str(tmp_path / "in" / "more"))
    found = datasets.find(str(tmp_path / "in"), "data")
    assert [file.path for file in found.files] == [
        f"{tmp_path}/in/a.tfrecords", f"{tmp_path}/in/more/b.tfrecords",
    ]  # fmt: skip


@pytest.mark.parametrize("content,expected", [(b"1 1:1 2:1\n", "libsvm"), (None, "tfrecord")])
def test_the_format_of_a_file_without_suffix_is_told_by_its_bytes(tmp_path, content, expected):
    path = tmp_path / "data"
    path.write_bytes(content) if content else write_tfrecord(path)
    assert datasets.find(str(path), "data").data_format == expected


def test_dataset_json_tells_rows_and_sizes(tmp_path):
    describe(tmp_path, a=(3, write_tfrecord(tmp_path / "a.tfrecords")))
    found = datasets.find(str(tmp_path), "data")
    assert (found.rows, found.field_size, found.feature_size) == (3, 39, 1000)


def test_dataset_json_is_not_trusted_for_a_file_of_another_size(tmp_path):
    describe(tmp_path, a=(3, write_tfrecord(tmp_path / "a.tfrecords") + 1))
    found = datasets.find(str(tmp_path), "data")
    assert (found.rows, found.field_size, found.feature_size) == (None, None, None)


def test_rows_are_unknown_where_one_file_is_not_described(tmp_path):
    describe(tmp_path, a=(3, write_tfrecord(tmp_path / "a.tfrecords")))
    write_tfrecord(tmp_path / "b.tfrecords")
    assert datasets.find(str(tmp_path), "data").rows is None


@pytest.mark.parametrize(
    "old,new",
    [
        ("39", "39.7"),
        ("39", '"39"'),
        ("39", "true"),
        ("39", "0"),
        ("39", "Infinity"),
        ("1000", str(1 << 63)),
        ('"rows": 3', '"rows": -3'),
        ('"positives": 1', '"positives": 4'),
        ('"field_size": 39', '"field_size": 39, "field_size": 40'),
        ('"format_version": 1', '"format_version": ' + "[" * 5000),
    ],
)
def test_a_dataset_json_with_numbers_that_cannot_be_is_refused(tmp_path, old, new):
    describe(tmp_path, a=(3, write_tfrecord(tmp_path / "a.tfrecords")))
    text = (tmp_path / "dataset.json").read_text()
    assert old in text
    (tmp_path / "dataset.json").write_text(text.replace(old, new, 1))
    reason = refused(tmp_path)
    assert reason.startswith(f"{tmp_path}/dataset.json: ")
    assert len(reason) < 400


def test_a_dataset_json_that_is_not_utf8_is_refused(tmp_path):
    write_tfrecord(tmp_path / "a.tfrecords")
    (tmp_path / "dataset.json").write_bytes(b'{"caf\xe9": 1}')
    assert refused(tmp_path).startswith(f"{tmp_path}/dataset.json: ")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"format_version": 1}', '{"files": {}}'])
def test_a_broken_dataset_json_is_refused_by_name(tmp_path, content):
    write_tfrecord(tmp_path / "a.tfrecords")
    (tmp_path / "dataset.json").write_text(content)
    assert refused(tmp_path).startswith(f"{tmp_path}/dataset.json: ")


def test_a_dataset_json_of_a_later_version_is_refused(tmp_path):
    describe(tmp_path, a=(3, write_tfrecord(tmp_path / "a.tfrecords")))
    content = json.loads((tmp_path / "dataset.json").read_text())
    (tmp_path / "dataset.json").write_text(json.dumps({**content, "format_version": 2}))
    assert "format_version is 2" in refused(tmp_path)


def test_data_sets_of_different_field_size_are_refused(tmp_path):
    for name, field_size in (("x", 3), ("y", 4)):
        folder = tmp_path / name
        folder.mkdir()
        size = write_tfrecord(folder / "a.tfrecords")
        file = datasets.DataFile(str(folder / "a.tfrecords"), size, 3, 1)
        dataset_json.write(str(folder), field_size, 1000, [file])
    assert "differ in field_size: [3, 4]" in refused(tmp_path)


def test_a_file_that_is_named_twice_is_read_once(tmp_path, monkeypatch):
    write_tfrecord(tmp_path / "a.tfrecords")
    os.symlink(tmp_path / "a.tfrecords", tmp_path / "b.tfrecords")
    monkeypatch.chdir(tmp_path)
    for spec in (f"{tmp_path}/a.tfrecords,./a.tfrecords,.", f"{tmp_path}"):
        assert len(datasets.find(spec, "data").files) == 1


def test_data_of_hashes_and_of_none_are_not_one_data_set(tmp_path):
    for name, buckets in (("a", 50), ("b", 0)):
        (tmp_path / name).mkdir()
        size = write_tfrecord(tmp_path / name / "x.tfrecords")
        file = datasets.DataFile("x.tfrecords", size, 1, 0)
        dataset_json.write(str(tmp_path / name), 2, 50, [file], hash_buckets=buckets)
    assert datasets.find(str(tmp_path / "a"), "data").hash_buckets == 50
    assert datasets.find(str(tmp_path / "b"), "data").hash_buckets == 0
    with pytest.raises(BadInput, match=r"differ in hash_buckets: \[0, 50\]"):
        datasets.find(str(tmp_path), "data")


def test_a_part_of_several_hosts_data_is_told(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(datasets.logging, "warning", lambda text, *x: said.append(text % x))
    (tmp_path / "shard-00001-of-00003").mkdir()
    write_tfrecord(tmp_path / "shard-00001-of-00003" / "x.tfrecords")
    datasets.find(str(tmp_path), "data")
    assert any("the parts of 1 of 3 hosts; missing: host 0 and others" in x for x in said)


def test_a_dataset_json_in_parts_is_refused_with_how_to_write_it(tmp_path):
    write_part(tmp_path, 30)
    (tmp_path / "dataset.json").rename(tmp_path / "dataset-00000-of-00002.json")
    words = refused(tmp_path)
    assert words.startswith(f"{tmp_path}/dataset-00000-of-00002.json: ")
    assert f"'python -m data_tools.inspect_dataset --data={tmp_path} --write'" in words


# The dataset.json of several hosts, and rates of sampling.


def write_part(folder, rows, feature_size=50, rates=None):
    """Writes a file of some records, a third of them positive, and its metadata."""
    folder.mkdir(exist_ok=True, parents=True)
    path = write_tfrecords(folder / "a.tfrecords", make_records(rows, seed=rows))
    described = datasets.DataFile(path, os.path.getsize(path), rows, rows // 3)
    dataset_json.write(str(folder), 4, feature_size, [described], rates)


def part(i):
    return f"shard-{i:05d}-of-00002"


@pytest.fixture
def two(tmp_path):
    """The folders of two hosts: sampled at 0.1 and 1, and at 0.5 and 2."""
    folder = tmp_path / "data"
    write_part(folder / part(0), 30, rates=SamplingRates(0.1, 1.0))
    write_part(folder / part(1), 60, feature_size=70, rates=SamplingRates(0.5, 2.0))
    return folder


def test_the_folders_of_hosts_are_read_as_one_data_set(two):
    found = datasets.find(str(two), "data")
    assert (found.rows, found.field_size, found.feature_size) == (90, 4, 70)
    assert [(file.rows, file.positives) for file in found.files] == [(30, 10), (60, 20)]
    # By the definition: (20 + 40) negatives of 200 + 80, and (10 + 20) positives of 10 + 10.
    assert found.sampling_rates == (pytest.approx(60 / 280), pytest.approx(30 / 20))


def test_rates_of_several_folders_are_merged_by_rows(two, tmp_path):
    write_part(tmp_path / "other", 15)
    found = datasets.find(f"{two},{tmp_path}/other", "data")
    assert found.sampling_rates == (pytest.approx(70 / 290), pytest.approx(35 / 25))


def test_a_file_that_no_dataset_json_describes_leaves_the_rates_unknown(two):
    write_tfrecords(two / "more.tfrecords", make_records(5))
    assert datasets.find(str(two), "data").sampling_rates is None


def test_an_older_dataset_json_tells_no_rates(tmp_path):
    write_part(tmp_path / "data", 30)
    assert "sampling_rates" not in (tmp_path / "data" / "dataset.json").read_text()
    assert datasets.find(str(tmp_path / "data"), "data").sampling_rates is None


def test_a_part_without_positives_changes_the_rate_of_no_positive(tmp_path):
    write_part(tmp_path / "data" / part(0), 2, rates=SamplingRates(0.5, 0.0))
    write_part(tmp_path / "data" / part(1), 30, rates=SamplingRates(0.5, 0.25))
    assert datasets.find(str(tmp_path / "data"), "data").sampling_rates == (0.5, 0.25)


@pytest.mark.parametrize(
    "rates",
    [
        [],
        {"negative": 1.0},
        {"negative": -1, "positive": 1},
        {"negative": True, "positive": 1},
        {"negative": float("nan"), "positive": 1},
        {"negative": 1e400, "positive": 1},
        {"negative": 10**400, "positive": 1},
        {"negative": 0, "positive": 1},
        {"negative": 1, "positive": "x"},
        3,
    ],
)
def test_rates_that_cannot_be_are_refused_by_name(two, rates):
    path = two / part(0) / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "sampling_rates": rates}))
    with pytest.raises(BadInput) as error:
        datasets.find(str(two), "data")
    assert str(error.value).startswith(f"{path}: is not a dataset.json (")
    assert len(str(error.value)) < 400
