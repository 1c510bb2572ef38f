"""dataset_json.py: no program silently misses a file that dataset.json names."""

import os

import pytest
from conftest import job_of, make_records, mode_of, write_tfrecords

from data_tools import inspect_dataset, rebalance
from data_tools.common.command_line import Host
from deepfm import open_data
from deepfm.config import InputConfig
from deepfm.data import datasets, named_files
from deepfm.errors import BadInput
from deepfm.records import dataset_json
from deepfm.runtime import sagemaker

NAMES = tuple("abcd")


@pytest.fixture
def four(tmp_path):
    """A data set of four files, of 10 records each."""
    folder = tmp_path / "data"
    folder.mkdir()
    described = []
    for i, name in enumerate(NAMES):
        path = write_tfrecords(folder / f"{name}.tfrecords", make_records(10, seed=i))
        described.append(datasets.DataFile(path, os.path.getsize(path), 10, 3))
    dataset_json.write(str(folder), 4, 50, described)
    return folder


@pytest.fixture
def said(monkeypatch):
    """The lines that named_files logs."""
    lines = []
    for level in ("info", "warning"):
        say = lambda text, *values: lines.append(text % values)
        monkeypatch.setattr(named_files.logging, level, say)
    return lines


GONE = r"data/c\.tfrecords: missing or empty, but the dataset\.json of .*/data names it"


@pytest.mark.parametrize(
    "lose", [lambda path: path.unlink(), lambda path: path.write_bytes(b"")], ids=["gone", "empty"]
)
@pytest.mark.parametrize("spec", ["{0}", "{0}/", "{0}/*.tfrecords", "{0}/[a-d].*,{0}/a.tfrecords"])
def test_a_file_that_is_named_and_lost_is_refused_by_name(four, lose, spec):
    lose(four / "c.tfrecords")
    with pytest.raises(BadInput, match=GONE):
        datasets.find(spec.format(four), "training_data_dir")


def test_how_many_more_are_lost_is_said(four):
    for name in "bcd":
        (four / f"{name}.tfrecords").unlink()
    with pytest.raises(BadInput, match=r"b\.tfrecords: missing.* names it and 2 more; put"):
        datasets.find(str(four), "data")


def test_a_folder_below_that_has_lost_all_its_files_is_missed(four, tmp_path):
    (tmp_path / "more").mkdir()
    write_tfrecords(tmp_path / "more" / "e.tfrecords", make_records(3))
    for name in NAMES:
        (four / f"{name}.tfrecords").unlink()
    with pytest.raises(BadInput, match=r"data/a\.tfrecords: missing"):
        datasets.find(str(tmp_path), "data")


@pytest.mark.parametrize("spec", ["{0}/[ab].tfrecords", "{0}/a.tfrecords,{0}/b.tfrecords"])
def test_what_a_glob_or_a_list_leaves_out_is_told_in_one_line(four, said, spec):
    (four / "d.tfrecords").unlink()  # the flag does not ask for it
    found = datasets.find(spec.format(four), "data")
    assert len(found.files) == 2
    (line,) = said
    assert "leaves some out; reading 2 of the 4 files that dataset.json names. Not read: " in line
    assert "c.tfrecords" in line


def test_a_whole_data_set_is_nothing_to_talk_about(four, said):
    assert datasets.find(str(four), "data").rows == 40
    assert datasets.find(f"{four}/*.tfrecords", "data").rows == 40
    assert said == []


def test_a_file_that_dataset_json_does_not_name_is_told(four, said):
    (four / "below").mkdir()
    for n, name in enumerate(("x.tfrecords", "below/y.tfrecords"), 3):
        write_tfrecords(four / name, make_records(n))
    datasets.find(str(four), "data")
    (line,) = said
    assert "x.tfrecords" in line and "below/y.tfrecords" in line and "does not name" in line


def test_a_dataset_json_of_other_files_says_nothing(four, said):
    (four / "raw.libsvm").write_text("1 1:1\n")
    assert datasets.find(f"{four}/raw.libsvm", "data").rows is None
    assert said == []


def test_a_name_that_leads_elsewhere_is_no_file_to_miss(four, said):
    text = (four / "dataset.json").read_text().replace('"a.tfrecords"', '"../a.tfrecords"')
    (four / "dataset.json").write_text(text)
    assert len(datasets.find(str(four), "data").files) == 4
    assert len(said) == 1 and "a.tfrecords" in said[0]


# Programs.


def find(folder, flag, of_job=None):
    of_job = of_job or sagemaker.Job(input_dir=str(folder / "nowhere"))
    asked = InputConfig(1, **{flag: str(folder)})
    mode = mode_of(size=of_job.num_hosts)
    return open_data.find(flag, job_of(input=asked, sagemaker=of_job, distribution=mode))


@pytest.mark.parametrize("flag", ["training_data_dir", "val_data_dir", "infer_data_dir"])
def test_every_job_refuses_what_is_not_whole(four, flag):
    (four / "c.tfrecords").unlink()
    with pytest.raises(BadInput, match=GONE):
        find(four, flag)


def test_a_host_may_have_its_part_of_a_sharded_channel_and_says_so(four, said, tmp_path):
    (four / "c.tfrecords").unlink()
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "inputdataconfig.json").write_text(
        '{"training": {"S3DistributionType": "ShardedByS3Key"}}'
    )
    hosts = {"hosts": ("algo-1", "algo-2"), "current_host": "algo-1"}
    sharded = sagemaker.Job(input_dir=str(tmp_path), **hosts)
    flagged = sagemaker.Job(input_dir=str(tmp_path / "nowhere"), enable_s3_shard=True, **hosts)
    for of_job in (sharded, flagged):
        assert len(find(four, "training_data_dir", of_job).files) == 3
        assert "this host has only its part; reading 3 of the 4 files" in said.pop()
        with pytest.raises(BadInput, match=GONE):
            find(four, "val_data_dir", of_job)


@pytest.mark.parametrize("own_files", [False, True])
def test_tools_refuse_what_is_not_whole_but_of_a_host_that_has_its_part(four, tmp_path, own_files):
    (four / "c.tfrecords").unlink()
    options = rebalance.RebalanceOptions(str(four), str(tmp_path / "out"))
    if own_files:
        assert inspect_dataset.inspect(str(four), own_files=True)["rows"] == 30
        assert sum(file.rows for file in rebalance.rebalance(options, Host(own_files=True))) == 30
        return
    with pytest.raises(BadInput, match=GONE):
        inspect_dataset.inspect(str(four))
    with pytest.raises(BadInput, match=GONE):
        rebalance.rebalance(options)
