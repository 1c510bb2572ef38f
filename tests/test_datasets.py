"""datasets.py: which files make up a data set, and when dataset.json is trusted."""

import gzip
import json
import os

import pytest
from conftest import make_records, write_payloads, write_tfrecords

from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.records import dataset_json, tfrecord
from deepfm.records.dataset_json import SamplingRates


def write_tfrecord(path):
    return os.path.getsize(write_payloads(path, [b"record"] * 3))


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


RECORD = tfrecord.framed(b"record")
REFUSED = {  # files, what is asked for (their folder, followed by this), what is said
    "an empty directory": ({}, "", "--data={0}: the directory has no data files"),
    "a glob without a match": ({}, "/*.tfrecords", "no file matches"),
    "an empty entry of a list": ({"a.tfrecords": RECORD}, ",", "empty entry"),
    "a single empty file": ({"a.tfrecords": b""}, "", "{0}/a.tfrecords: empty"),
    "no gzip, but .gz": (
        {"a.tfrecords.gz": RECORD}, "", "a.tfrecords.gz: is named .gz but is not gzip-compressed"
    ),
    "gzip of another name": ({"a.libsvm": gzip.compress(b"1 1:1\n")}, "", "must end in .gz"),
    "mixed formats": (
        {"a.tfrecords": RECORD, "b.libsvm": b"1 1:1\n"}, "", "mixes TFRecord and LibSVM"
    ),
}  # fmt: skip


@pytest.mark.parametrize("files, spec, said", REFUSED.values(), ids=REFUSED)
def test_what_is_no_data_set_is_refused(tmp_path, files, spec, said):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert said.format(tmp_path) in refused(f"{tmp_path}{spec}")


def test_a_remote_glob_in_a_folder_that_is_not_there_is_refused(tmp_path):
    assert "no file matches" in refused(f"file://{tmp_path}/none/*.tfrecords")


def test_a_pipe_among_the_files_is_refused(tmp_path):
    write_tfrecord(tmp_path / "a.tfrecords")
    os.mkfifo(str(tmp_path / "b.tfrecords"))
    assert "b.tfrecords: a pipe or a device; write" in refused(tmp_path)


@pytest.mark.parametrize("spec", ["a.tfrecords", "*.tfrecords", "./a.tfrecords"])
def test_files_of_the_current_folder_need_no_folder(tmp_path, monkeypatch, spec):
    write_tfrecord(tmp_path / "a.tfrecords")
    write_tfrecord(tmp_path / ".hidden.tfrecords")
    monkeypatch.chdir(tmp_path)
    assert [file.path for file in datasets.find(spec, "data").files] == ["./a.tfrecords"]


def test_files_come_in_the_order_of_their_names_and_once_and_without_empty_ones(tmp_path):
    for name in ("c", "a", "b"):
        write_tfrecord(tmp_path / f"{name}.tfrecords")
    (tmp_path / "aa.tfrecords").write_bytes(b"")
    found = datasets.find(f"{tmp_path},{tmp_path}/b*", "data")
    assert [file.path for file in found.files] == [f"{tmp_path}/{n}.tfrecords" for n in "abc"]


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


@pytest.mark.parametrize(
    "more_bytes, names, numbers",
    [(0, "a", (3, 39, 1000)), (1, "a", (None, None, None)), (0, "ab", (None, 39, 1000))],
    ids=["whole", "a file of another size", "a file that is not described"],
)
def test_dataset_json_tells_the_numbers_of_files_of_the_size_that_it_says(
    tmp_path, more_bytes, names, numbers
):
    sizes = [write_tfrecord(tmp_path / f"{name}.tfrecords") for name in names]
    describe(tmp_path, a=(3, sizes[0] + more_bytes))
    found = datasets.find(str(tmp_path), "data")
    assert (found.rows, found.field_size, found.feature_size) == numbers


@pytest.mark.parametrize(
    "text, said",
    [
        ('{"format_version": 2, "field_size": 3, "feature_size": 5, "files": {}}',
         "format_version is 2"),
        ('{"format_version": 1, "field_size": 0, "feature_size": 5, "files": {}}', ""),
        ('{"format_version": 1, "field_size": 4, "feature_size": 5, "files": {}, "weighted": 1}',
         "weighted is 1"),
        *((text, "") for text in ("", "[]", "{", '{"format_version": 1}', '{"files": {}}')),
    ],
)  # fmt: skip
def test_a_broken_dataset_json_is_refused_by_name(tmp_path, text, said):
    """tests/corpus/check_metadata has more that are refused."""
    write_tfrecord(tmp_path / "a.tfrecords")
    (tmp_path / "dataset.json").write_text(text)
    reason = refused(tmp_path)
    assert reason.startswith(f"{tmp_path}/dataset.json: ") and said in reason
    assert len(reason) < 400


@pytest.mark.parametrize(
    "name, both", [("field_size", (3, 4)), ("hash_buckets", (50, 0))], ids=["fields", "hashes"]
)
def test_data_that_differ_are_not_one_data_set(tmp_path, name, both):
    for folder, number in zip("xy", both):
        (tmp_path / folder).mkdir()
        size = write_tfrecord(tmp_path / folder / "a.tfrecords")
        file = datasets.DataFile("a.tfrecords", size, 3, 1)
        numbers = {"field_size": 3, "feature_size": 50, "files": [file], name: number}
        dataset_json.write(str(tmp_path / folder), **numbers)
        assert getattr(datasets.find(str(tmp_path / folder), "data"), name) == number
    assert f"differ in {name}: {sorted(both)}" in refused(tmp_path)


def test_a_file_that_is_named_twice_is_read_once(tmp_path, monkeypatch):
    write_tfrecord(tmp_path / "a.tfrecords")
    os.symlink(tmp_path / "a.tfrecords", tmp_path / "b.tfrecords")
    monkeypatch.chdir(tmp_path)
    for spec in (f"{tmp_path}/a.tfrecords,./a.tfrecords,.", f"{tmp_path}"):
        assert len(datasets.find(spec, "data").files) == 1


def test_a_part_of_several_hosts_data_is_told(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(datasets.logging, "warning", lambda text, *x: said.append(text % x))
    (tmp_path / "shard-00001-of-00003").mkdir()
    write_tfrecord(tmp_path / "shard-00001-of-00003" / "x.tfrecords")
    datasets.find(str(tmp_path), "data")
    assert any("the parts of 1 of 3 hosts; missing: host 0 and others" in x for x in said)


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
    reason = refused(two)
    assert reason.startswith(f"{path}: is not a dataset.json (") and len(reason) < 400
