"""Folders that Spark and Hadoop wrote are read as they are, and get the dataset.json they lack."""

import gzip
import json

import numpy as np
import pytest
from conftest import example, make_records, run_train, small_job, write_libsvm

from data_tools import inspect_dataset
from deepfm.data import datasets
from deepfm.errors import BadInput
from deepfm.runtime.tf import tf

SIZES = 0, 70, 130, 1  # records of the files
ID = "5d0f0f4e-6a3e-4a2e-9c2f-1c3f0a8c6f11"


def columns(sizes=SIZES):
    """The records of all files as make_records gives them."""
    parts = [make_records(n, seed=i) for i, n in enumerate(sizes)]
    return [np.concatenate(column) for column in zip(*parts)]


def write_part(path, records):
    """A file as spark-tfrecord writes it, with the checksum beside it that Hadoop makes."""
    with tf.io.TFRecordWriter(str(path), "GZIP" if path.name.endswith(".gz") else "") as writer:
        for record in records:
            writer.write(record)
    (path.parent / f".{path.name}.crc").write_bytes(b"crc\0" + bytes(8))


def spark_folder(folder, suffix=".tfrecord", sizes=SIZES, name="part-{:05d}-" + ID + "-c000{}"):
    """What a Spark job leaves: parts, an empty one among them, their checksums, and _SUCCESS."""
    folder.mkdir(parents=True)
    for i, n in enumerate(sizes):
        rows = zip(*make_records(n, seed=i))
        write_part(folder / name.format(i, suffix), [example(*row) for row in rows])
    (folder / "_SUCCESS").write_bytes(b"")
    (folder / "._SUCCESS.crc").write_bytes(b"crc\0" + bytes(4))
    return folder


def test_training_and_evaluation_read_each_record_of_a_spark_folder_once(tmp_path):
    folder = spark_folder(tmp_path / "data", ".tfrecord.gz")
    result = run_train(*small_job(folder, tmp_path / "model", "--num_epochs=1"), code=0)
    assert f"examples={sum(SIZES)} " in result.stderr
    assert f" on {sum(SIZES)} examples in " in result.stderr


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_parts_without_a_suffix_are_told_by_their_bytes(tmp_path, suffix):
    folder = spark_folder(tmp_path / "data", suffix, name="part-r-{:05d}{}")
    assert inspect_dataset.inspect(str(folder))["rows"] == sum(SIZES)


def test_gzip_parts_of_nothing_alone_have_no_records(tmp_path):
    folder = spark_folder(tmp_path / "data", ".gz", sizes=(0, 0), name="part-r-{:05d}{}")
    with pytest.raises(BadInput, match="the files have no records"):
        datasets.find(str(folder), "data")


def test_text_that_spark_wrote_is_read(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_libsvm(folder / "part-00000", make_records(5))
    (folder / ".part-00000.crc").write_bytes(b"crc\0\xff")
    (folder / "part-00001.gz").write_bytes(gzip.compress(b"1 1:1 2:1 3:1 4:1\n"))
    (folder / "_SUCCESS").write_bytes(b"")
    assert inspect_dataset.inspect(str(folder))["rows"] == 6


def test_partitions_are_read_and_what_hadoop_hides_is_not(tmp_path):
    top = tmp_path / "data"
    for name in ("day=1", "_day=2", "_spark_metadata", "_temporary/0/task"):
        spark_folder(top / name)
    (top / "_SUCCESS").write_bytes(b"")
    found = {
        file.path[len(f"{top}/") :].split("/")[0] for file in datasets.find(str(top), "x").files
    }
    assert found == {"day=1", "_day=2"}
    with pytest.raises(BadInput, match="the directory has no data files"):
        (tmp_path / "none").mkdir()
        spark_folder(tmp_path / "none" / "_old")
        datasets.find(str(tmp_path / "none"), "data")


@pytest.mark.parametrize("spec", ["{}", "{}/part-*"])
@pytest.mark.parametrize("sizes", [SIZES, ()])
def test_the_folder_of_a_job_that_is_not_done_is_refused(tmp_path, spec, sizes):
    folder = spark_folder(tmp_path / "data", sizes=sizes)
    (folder / "_SUCCESS").unlink()
    (folder / "_temporary" / "0").mkdir(parents=True)
    if sizes or spec == "{}":
        with pytest.raises(BadInput, match="still running or was cut short .* run it again"):
            datasets.find(spec.format(folder), "data")


def test_what_another_codec_compressed_is_refused_by_name(tmp_path):
    folder = spark_folder(tmp_path / "data", ".tfrecord.snappy")
    with pytest.raises(
        BadInput, match=r"snappy: \.snappy cannot be read; write it plain or as \.gz"
    ):
        datasets.find(str(folder), "data")


def test_an_integer_as_label_is_told_what_it_is(tmp_path):
    record = tf.train.Example.FromString(example(1, [1], [1.0]))
    record.features.feature["label"].int64_list.value.append(1)
    write_part(tmp_path / "part-00000.tfrecord", [record.SerializeToString()])
    with pytest.raises(BadInput, match="label is an int64, not a float; write it as a float"):
        inspect_dataset.inspect(str(tmp_path))


def written(folder, *flags):
    """The dataset.json that inspect_dataset --write makes."""
    options = inspect_dataset.InspectOptions(str(folder), write=True, json=True, **dict(flags))
    inspect_dataset.check_write(options)
    inspect_dataset.write_metadata(str(folder), inspect_dataset.inspect(str(folder)))
    return json.loads((folder / "dataset.json").read_text())


def test_write_makes_the_dataset_json_that_is_missing(tmp_path):
    top = tmp_path / "data"
    spark_folder(top / "day=1")
    spark_folder(top / "day=2", ".tfrecord.gz")
    found = written(top)
    labels, ids, values = columns()
    counts = {}
    for day, suffix in (("day=1", ".tfrecord"), ("day=2", ".tfrecord.gz")):
        for i, n in enumerate(SIZES):
            name = f"{day}/part-{i:05d}-{ID}-c000{suffix}"
            size = (top / name).stat().st_size
            positives = int((make_records(n, seed=i)[0] > 0).sum())
            if size:
                counts[name] = {"rows": n, "bytes": size, "positives": positives}
    assert found.pop("files") == counts
    ranges = np.stack([values.min(axis=0), values.max(axis=0)], axis=1)
    np.testing.assert_allclose(found.pop("value_ranges"), ranges, rtol=1e-6)
    assert found == {"format_version": 1, "field_size": 4, "feature_size": int(ids.max()) + 1}
    data = datasets.find(str(top), "data")
    assert (data.rows, data.multi_valued, data.weighted) == (2 * sum(SIZES), False, False)


def test_write_says_that_fields_hold_several_values_and_examples_weights(tmp_path):
    def record(ids, counts, weight):
        found = tf.train.Example.FromString(example(1, ids, [1.0] * len(ids)))
        found.features.feature["counts"].int64_list.value.extend(counts)
        found.features.feature["weight"].float_list.value.append(weight)
        return found.SerializeToString()

    write_part(
        tmp_path / "part-00000.tfrecord", [record([3], [1, 0, 0], 2.0), record([], [0] * 3, 1)]
    )
    found = written(tmp_path)
    expected = {"field_size": 3, "feature_size": 4, "multi_valued": True, "weighted": True}
    assert {key: found[key] for key in expected} == expected


def test_write_refuses_to_replace_and_with_overwrite_keeps_what_cannot_be_counted(tmp_path):
    folder = spark_folder(tmp_path / "data")
    content = dict(written(folder), feature_size=1000, feature_map="0123456789abcdef")
    (folder / "dataset.json").write_text(json.dumps(content))
    with pytest.raises(BadInput, match=r"dataset\.json is already there; --overwrite replaces it"):
        written(folder)
    assert written(folder, ("overwrite", True)) == content


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(overwrite=True), "--overwrite has no effect without --write"),
        (dict(write=True, data="{}/*"), "is not a local directory"),
        (dict(write=True, data="s3://bucket/data"), "is not a local directory"),
    ],
)
def test_write_where_it_cannot_be_is_refused(tmp_path, options, words):
    options = {**options, "data": options.get("data", "{}").format(tmp_path)}
    with pytest.raises(BadInput) as error:
        inspect_dataset.check_write(inspect_dataset.InspectOptions(**options))
    assert words in str(error.value)


def test_write_refuses_rows_that_differ_in_length(tmp_path):
    (tmp_path / "part-00000").write_text("1 1:1 2:1\n0 3:1\n")
    with pytest.raises(BadInput, match="the rows have 1 to 2 ids.* --pad or --multi_valued"):
        written(tmp_path)
    assert not (tmp_path / "dataset.json").exists()
