"""merge_metadata: one dataset.json from many, and readers that work without it."""

import json
import os

import pytest
from conftest import make_records, write_tfrecords

from data_tools import merge_metadata
from deepfm.data import dataset_json, datasets
from deepfm.data.dataset_json import SamplingRates
from deepfm.data.datasets import DataFile
from deepfm.errors import BadInput


def write_part(folder, name, rows, field_size=4, feature_size=50, rates=None, file=None):
    """Writes a file of some records, a third of them positive, and its metadata of a name."""
    folder.mkdir(exist_ok=True)
    path = write_tfrecords(folder / (file or f"{name}.tfrecords"), make_records(rows))
    described = DataFile(path, os.path.getsize(path), rows, rows // 3)
    dataset_json.write(str(folder), field_size, feature_size, [described], rates, name)
    return described


def part(i, of=2):
    return f"dataset-{i:05d}-of-{of:05d}.json"


def read(folder):
    return json.loads((folder / "dataset.json").read_text())


@pytest.fixture
def two(tmp_path):
    """A folder of two parts: sampled at 0.1 and 1, and at 0.5 and 2."""
    folder = tmp_path / "data"
    write_part(folder, part(0), 30, rates=SamplingRates(0.1, 1.0))
    write_part(folder, part(1), 60, feature_size=70, rates=SamplingRates(0.5, 2.0))
    return folder


# By the definition: (20 + 40) negatives of 200 + 80, and (10 + 20) positives of 10 + 10.
RATES = (pytest.approx(60 / 280), pytest.approx(30 / 20))


def test_parts_become_one_dataset_json(two):
    merge_metadata.merge(str(two))
    content = read(two)
    names = [f"{part(i)}.tfrecords" for i in (0, 1)]
    assert sorted(os.listdir(two)) == sorted([*names, "dataset.json"])
    assert list(content["files"]) == names
    assert (content["field_size"], content["feature_size"]) == (4, 70)
    assert tuple(content["sampling_rates"].values()) == RATES


@pytest.mark.parametrize("merged", [False, True])
def test_readers_see_the_same_of_parts_and_of_what_is_made_of_them(two, merged):
    if merged:
        merge_metadata.merge(str(two))
    found = datasets.find(str(two), "data")
    assert (found.rows, found.field_size, found.feature_size) == (90, 4, 70)
    assert [(file.rows, file.positives) for file in found.files] == [(30, 10), (60, 20)]
    assert found.sampling_rates == RATES


def test_rates_of_several_folders_are_merged_by_rows(two, tmp_path):
    write_part(tmp_path / "other", "dataset.json", 30)
    found = datasets.find(f"{two},{tmp_path}/other", "data")
    assert found.sampling_rates == (pytest.approx(80 / 300), pytest.approx(40 / 30))


@pytest.mark.parametrize("top", ["", "all"])
def test_folders_below_become_one_dataset_json_that_readers_of_the_top_take(tmp_path, top):
    top = tmp_path / top
    for i, host in enumerate(("algo-1", "algo-2")):
        top.mkdir(exist_ok=True)
        write_part(top / host, "dataset.json", 30 + i, file="part.tfrecords")
    merge_metadata.merge(f"{top}/algo-1,{top}/algo-2/", str(top))
    assert list(read(top)["files"]) == ["algo-1/part.tfrecords", "algo-2/part.tfrecords"]
    assert (top / "algo-1" / "dataset.json").exists()
    (top / "algo-1" / "dataset.json").unlink()
    found = datasets.find(str(top), "data")
    assert [file.rows for file in found.files] == [30, 31]


def test_a_file_that_no_dataset_json_describes_leaves_the_rates_unknown(two):
    write_tfrecords(two / "more.tfrecords", make_records(5))
    assert datasets.find(str(two), "data").sampling_rates is None


def test_an_older_dataset_json_tells_no_rates(tmp_path):
    write_part(tmp_path / "data", "dataset.json", 30)
    assert "sampling_rates" not in read(tmp_path / "data")
    assert datasets.find(str(tmp_path / "data"), "data").sampling_rates is None


def test_a_part_without_positives_changes_the_rate_of_no_positive(tmp_path):
    write_part(tmp_path / "data", part(0), 2, rates=SamplingRates(0.5, 0.0))
    write_part(tmp_path / "data", part(1), 30, rates=SamplingRates(0.5, 0.25))
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
    content = json.loads((two / part(0)).read_text())
    (two / part(0)).write_text(json.dumps({**content, "sampling_rates": rates}))
    with pytest.raises(BadInput) as error:
        datasets.find(str(two), "data")
    assert str(error.value).startswith(f"{two}/{part(0)}: is not a dataset.json (")
    assert len(str(error.value)) < 400


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def drop(name):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda d: edit(d / part(1), '_size": 4', '_size": 5'), "{1}: field_size 5, but {0} has 4"),
        (drop(f"{part(0)}.tfrecords"), "{0}.tfrecords: is missing, though {0} names it"),
        (lambda d: edit(d / part(0), '"bytes": ', '"bytes": 1'), "bytes, but {0} says 1"),
        (drop(part(0)), "{0}: is missing, though dataset-00001-of-00002.json is there"),
        (lambda d: (d / part(0)).write_text("{"), "{0}: is not a dataset.json"),
        (lambda d: edit(d / part(1), "00001-of", "00000-of"), "{1}: contradicts"),
        (lambda d: edit(d / part(1), '"dataset', '"../dataset'), "is missing, though {1} names it"),
        (lambda d: write_part(d, "dataset.json", 3), "dataset.json: already exists; --overwrite"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(two, harm, words):
    size = os.path.getsize(two / f"{part(0)}.tfrecords")
    (two / f"{part(1)}.tfrecords").write_bytes(bytes(size))  # of the same size, for the 6th
    edit(two / part(1), '"bytes": ', f'"bytes": {size}, "was": ')
    harm(two)
    before = {path.name: path.read_bytes() for path in two.iterdir()}
    with pytest.raises(BadInput) as error:
        merge_metadata.merge(str(two))
    paths = [f"{two}/{part(i)}" for i in (0, 1)]
    assert words.format(*paths) in str(error.value)
    assert {path.name: path.read_bytes() for path in two.iterdir()} == before


@pytest.mark.parametrize(
    "folders, output_dir, words",
    [
        ("nothing", None, "nothing: has no dataset.json"),
        ("a/b", "a/c", "is not below --output_dir="),
        ("a,b", None, "is not below --output_dir="),
        ("single", None, "nothing to merge"),
    ],
)
def test_folders_that_cannot_be_are_refused(tmp_path, folders, output_dir, words):
    (tmp_path / "nothing").mkdir()
    write_part(tmp_path / "single", "dataset.json", 3)
    folders = ",".join(str(tmp_path / folder) for folder in folders.split(","))
    with pytest.raises(BadInput, match=words):
        merge_metadata.merge(folders, output_dir and str(tmp_path / output_dir), True)


def test_overwrite_replaces_a_dataset_json_that_is_there(two):
    write_part(two, "dataset.json", 3)
    merge_metadata.merge(str(two), overwrite=True)
    assert len(read(two)["files"]) == 2
