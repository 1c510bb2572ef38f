"""rebalance: every record as often as wanted, in random order, in files of equal size."""

import collections
import dataclasses
import gzip
import json
import os
import pathlib
import shutil
import struct

import numpy as np
import pytest
from conftest import (
    example,
    make_records,
    run_tool,
    write_libsvm,
    write_own_ids,
    write_payloads,
    write_tfrecords,
)
from scipy import stats

from data_tools import rebalance
from data_tools.common.command_line import ALONE, Host
from data_tools.engines.processes import Processes
from data_tools.jobs import rebalance as job
from data_tools.rebalance import RebalanceOptions
from data_tools.rebalancing import sampling, shuffling
from data_tools.rebalancing.selecting import Order
from deepfm.data import datasets
from deepfm.data.datasets import DataFile
from deepfm.errors import BadInput
from deepfm.records import dataset_json, text_blocks, tfrecord
from deepfm.records.dataset_json import SamplingRates
from deepfm.runtime.tf import tf

SIZES = (301, 2, 1000, 97)  # records of the files of an input


def content_of(path):
    content = pathlib.Path(path).read_bytes()
    return gzip.decompress(content) if str(path).endswith(".gz") else content


def frames_of(path):
    """The frames of a TFRecord file, by the definition of the format."""
    data, frames = content_of(path), []
    while data:
        size = 16 + struct.unpack("<Q", data[:8])[0]
        frames.append(data[:size])
        data = data[size:]
    return frames


def lines_of(path):
    return [line for line in content_of(path).splitlines() if line.partition(b"#")[0].strip()]


def records_of(paths):
    read = lines_of if ".libsvm" in str(paths[0]) else frames_of
    return [record for path in paths for record in read(path)]


def features_of(frame):
    return tf.train.Example.FromString(frame[12:-4]).features.feature


def label_of(frame):
    return int(features_of(frame)["label"].float_list.value[0] > 0)


def ids_of(frame):
    return features_of(frame)["ids"].int64_list.value


def describe(paths, field_size=4, feature_size=50, **more):
    """Writes the dataset.json of files in one folder."""
    files = []
    for path in paths:
        labels = [label_of(frame) for frame in frames_of(path)]
        files.append(DataFile(path, os.path.getsize(path), len(labels), sum(labels)))
    dataset_json.write(os.path.dirname(paths[0]), field_size, feature_size, files, **more)


def make_input(folder, suffix=".tfrecords", sizes=SIZES):
    """Files of some records each; returns their paths."""
    folder.mkdir()
    write = write_libsvm if "libsvm" in suffix else write_tfrecords
    paths = []
    for i, size in enumerate(sizes):
        path = folder / f"{i}{suffix}"
        write(path, make_records(size, seed=i))
        if suffix.endswith(".gz"):
            path.write_bytes(gzip.compress(path.read_bytes()))
        paths.append(str(path))
    return paths


@pytest.fixture
def run(tmp_path):
    """run(host, flag=value ...) -> paths of the files that are made of tmp_path/in, or by one of
    several hosts of in/I.*, I its index."""

    def run(host=ALONE, **flags):
        mine = f"{tmp_path}/in" if host == ALONE else f"{tmp_path}/in/{host.index}.*"
        options = RebalanceOptions(mine, str(tmp_path / "out"), seed=3)
        made = rebalance.rebalance(dataclasses.replace(options, **flags), host)
        return [file.path for file in made]

    return run


def said(folder):
    return json.loads((folder / "dataset.json").read_text())


# Every record once.


@pytest.mark.parametrize("suffix", [".tfrecords", ".tfrecords.gz", ".libsvm", ".libsvm.gz"])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("num_files", [1, 50])
def test_every_record_is_there_once_in_files_of_as_many(tmp_path, run, suffix, shuffle, num_files):
    paths = make_input(tmp_path / "in", suffix)
    made = run(num_files=num_files, shuffle=shuffle)
    counts = [len(records_of([path])) for path in made]
    assert len(counts) == num_files and max(counts) - min(counts) <= 1
    before, after = records_of(paths), records_of(made)
    assert collections.Counter(after) == collections.Counter(before)
    assert (after == before) is not shuffle


def test_dataset_json_describes_the_files(tmp_path, run):
    make_input(tmp_path / "in")
    made = run(num_files=3)
    found = datasets.find(str(tmp_path / "out"), "data")
    assert (found.field_size, found.sampling_rates) == (4, None)
    assert found.feature_size == 1 + max(max(ids_of(frame)) for frame in records_of(made))
    for path, file in zip(made, found.files):
        labels = [label_of(frame) for frame in frames_of(path)]
        expected = DataFile(path, os.path.getsize(path), len(labels), sum(labels))
        assert file == expected


@pytest.mark.parametrize(
    "flags, kept",
    [
        ({}, True),
        ({"negative_rate": 0.5}, False),
        ({"positive_share": 0.5, "oversample": True}, False),
        ({"input": "in/[01].*", "num_files": 1}, False),
        ({"max_bad_records": 1}, False),
    ],
)
def test_what_was_measured_on_all_records_is_said_of_all_alone(
    tmp_path, run, monkeypatch, flags, kept
):
    monkeypatch.chdir(tmp_path)
    measured = {"value_ranges": [[0, 1]] * 4, "unknown_shares": {"x": 0.5}}
    ids = dataset_json.ids(pad=True)
    paths = make_input(tmp_path / "in")
    describe(paths, **measured, ids=ids)
    if "max_bad_records" in flags:
        damage(paths[0], 0)
    run(**flags)
    found = datasets.find(str(tmp_path / "out"), "data").made
    assert found == ({**measured, "ids": ids} if kept else {"ids": ids})


def test_a_larger_feature_size_of_the_input_is_kept(tmp_path, run):
    describe(make_input(tmp_path / "in"), feature_size=999)
    run()
    assert said(tmp_path / "out")["feature_size"] == 999


def test_gzip_files_have_one_member(tmp_path, run):
    make_input(tmp_path / "in")
    for path in run(num_files=2, compress=True):
        with tf.io.gfile.GFile(path, "rb") as f:
            assert f.read().count(b"\x1f\x8b\x08") == 1
        assert path.endswith(".tfrecords.gz")


def test_lines_are_copied_as_they_are_without_blank_ones(tmp_path, run):
    (tmp_path / "in").mkdir()
    text = b"\n# head\n1 1:1 2:.5 # tail\r\n  0\t3:1\n \n+1 5:1 6:-2\n-1"
    (tmp_path / "in" / "a.libsvm").write_bytes(text)
    (path,) = run(shuffle=False)
    with open(path, "rb") as f:
        assert f.read() == b"1 1:1 2:.5 # tail\r\n  0\t3:1\n+1 5:1 6:-2\n-1\n"


def test_examples_that_another_writer_made_are_copied_as_they_are(tmp_path, run):
    (tmp_path / "in").mkdir()
    path = str(tmp_path / "in" / "a.tfrecords")
    messages = [tf.train.Example.FromString(example(label, [5], [1.0])) for label in (0, 1, 1)]
    for message in messages:
        message.features.feature["more"].bytes_list.value.append(b"x")
    write_payloads(path, [message.SerializeToString() for message in messages])
    before = frames_of(path)
    describe([path], 1)
    assert sorted(records_of(run())) == sorted(before)
    assert said(tmp_path / "out")["files"]["part-00000-of-00001.tfrecords"]["positives"] == 2


# The order.


@pytest.mark.parametrize("buckets, memory", [(1, 2000), (8, 2000), (1, 1 << 30), (8, 1 << 30)])
def test_buckets_hold_records_in_the_order_of_their_keys(tmp_path, memory, buckets):
    order = Order(1, True)
    keys = order.keys(0, 0, 500)
    data = [b"%d," % i * (1 + i % 7) for i in range(500)]
    positive = np.arange(500) % 3 == 0
    ends = np.cumsum([len(record) for record in data])
    scatter = shuffling.Scatter(str(tmp_path / "b"), order.cuts([500], buckets), 1000)
    for part in np.array_split(np.arange(500), 9):
        args = (np.concatenate([[0], ends[:-1]])[part], ends[part], keys[part], positive[part])
        scatter.add(b"".join(data), *args)
    scatter.flush()
    found = []
    for number, bucket in shuffling.buckets_of(str(tmp_path / "b")).items():
        assert len(found) == 500 * number // buckets
        blocks = list(shuffling.ordered(bucket, memory))
        text = b"".join(block for block, _ in blocks)
        ends_found = np.cumsum(np.concatenate([entries["bytes"] for _, entries in blocks])).tolist()
        assert (len(ends_found), len(text)) == (bucket.rows, bucket.bytes)
        starts = [0, *ends_found[:-1]]
        ones = np.concatenate([entries["positive"] for _, entries in blocks]).tolist()
        found += zip([text[i:j] for i, j in zip(starts, ends_found)], ones)
    by_key = sorted(range(500), key=lambda i: int(keys[i]))
    assert found == [(data[i], i % 3 == 0) for i in by_key]
    assert not any(files for folder, _, files in os.walk(str(tmp_path)))


def test_no_two_records_have_the_same_key():
    order = Order(1, True)
    keys = [order.keys(task, first, 50000) for task in (0, 1, 77) for first in (0, 50000)]
    assert len(np.unique(np.concatenate(keys))) == 6 * 50000


def test_every_place_of_the_input_is_as_likely_at_every_place_of_the_output(tmp_path, run):
    """Chi-squared over tenths of the input and tenths of the output, for 20 seeds."""
    (tmp_path / "in").mkdir()
    rows = 1000
    paths = [str(tmp_path / "in" / f"{name}.tfrecords") for name in "ab"]
    write_own_ids(paths, (rows // 4, rows - rows // 4))
    p_values = []
    for seed in range(20):
        made = run(num_files=3, seed=seed, overwrite=True)
        order = np.array([ids_of(frame)[0] for frame in records_of(made)])
        table = np.zeros([10, 10])
        np.add.at(table, (order * 10 // rows, np.arange(rows) * 10 // rows), 1)
        p_values.append(stats.chi2_contingency(table)[1])
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 5 / rows**0.5
    assert sum(p > 0.001 for p in p_values) >= 19, p_values
    # They are p-values, evenly spread, too: an order that is too even is not random either.
    assert stats.kstest(p_values, "uniform")[1] > 0.001


def test_the_same_seed_writes_the_same_bytes_with_any_workers_and_memory(
    tmp_path, run, monkeypatch
):
    make_input(tmp_path / "in")
    flags = "--seed=3", "--num_files=3", "--positive_rate=2.5", "--num_workers=2"
    run_tool("rebalance", f"--input={tmp_path}/in", f"--output_dir={tmp_path}/two", *flags, code=0)
    run(num_files=3, positive_rate=2.5)
    monkeypatch.setattr(shuffling, "BUFFER", 1000)
    monkeypatch.setattr(shuffling, "BUCKET", 1000)
    options = RebalanceOptions(
        str(tmp_path / "in"), str(tmp_path / "small"), num_files=3, positive_rate=2.5, seed=3
    )
    job.rebalance(options, Processes(1, 5000))
    names = sorted(os.listdir(tmp_path / "out"))
    assert len(names) == 4
    for other in ("two", "small"):
        assert sorted(os.listdir(tmp_path / other)) == names
        for name in names:
            assert (tmp_path / other / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    run(num_files=3, positive_rate=2.5, overwrite=True, seed=4)
    assert (tmp_path / "out" / names[1]).read_bytes() != (tmp_path / "two" / names[1]).read_bytes()


def test_files_that_are_not_even_are_refused():
    data = datasets.DataSet([DataFile("a", 1, 9, 1)], "tfrecord", 3, 10, name="--input=x")
    check = lambda *rows: sampling.check_written(
        data, {x: ("", (n, 0)) for x, n in zip("ab", rows)}, 9
    )
    check(4, 5)
    with pytest.raises(BadInput, match="x: has 8 records, dataset.json says 9"):
        check(3, 5)
    with pytest.raises(OSError, match="x: was written to while it was read"):
        check(5, 4)


# Sampling.


@pytest.mark.parametrize(
    "suffix, rates",
    [
        (".tfrecords", (0.1, 3)),
        (".libsvm", (1, 2.5)),
        (".tfrecords", (0, 1)),
        (".libsvm", (70, 0.5)),
    ],
)
def test_records_are_kept_at_the_rate_of_their_label(tmp_path, run, suffix, rates):
    before = records_of(make_input(tmp_path / "in", suffix, sizes=(1500, 1500)))
    made = run(negative_rate=rates[0], positive_rate=rates[1])
    times = collections.Counter(records_of(made))
    label = label_of if suffix == ".tfrecords" else lambda line: int(line[:1] == b"1")
    assert set(times) <= set(before)
    achieved = []
    for kind, rate in enumerate(rates):
        kept = [times[record] for record in before if label(record) == kind]
        assert set(kept) <= {int(np.floor(rate)), int(np.ceil(rate))}
        part = rate % 1
        assert abs(sum(kept) - rate * len(kept)) <= 5 * (part * (1 - part) * len(kept)) ** 0.5
        achieved.append(sum(kept) / len(kept))
    if suffix == ".tfrecords":
        assert datasets.find(str(tmp_path / "out"), "data").sampling_rates == tuple(achieved)


def test_what_is_kept_of_one_file_tells_nothing_of_another(tmp_path, run):
    (path,) = make_input(tmp_path / "in", sizes=(1000,))
    shutil.copy(path, tmp_path / "in" / "again.tfrecords")
    made = run(negative_rate=0.5, positive_rate=0.5)
    times = collections.Counter(collections.Counter(records_of(made)).values())
    assert abs(times[2] - 250) < 5 * (1000 * 0.25 * 0.75) ** 0.5


@pytest.mark.parametrize(
    "share, oversample, described",
    [(0.2, False, True), (0.2, True, False), (0.9, False, False), (0.9, True, True)],
)
def test_positive_share_is_met_by_the_one_label_that_it_should(
    tmp_path, run, share, oversample, described
):
    paths = make_input(tmp_path / "in", sizes=(1000, 2000))
    if described:
        describe(paths)
    labels = [label_of(frame) for frame in records_of(paths)]
    run(positive_share=share, oversample=oversample)
    rates = datasets.find(str(tmp_path / "out"), "data").sampling_rates
    files = said(tmp_path / "out")["files"].values()
    positives, rows = (sum(file[key] for file in files) for key in ("positives", "rows"))
    assert positives / rows == pytest.approx(share, abs=5 * (0.25 / rows) ** 0.5)
    too_few = int(np.mean(labels) < share)
    assert rates[1 - too_few if oversample else too_few] == 1
    assert (rates[too_few] > 1) if oversample else (rates[1 - too_few] < 1)


@pytest.mark.parametrize("rate", [None, 0.25])
def test_rates_of_a_sampled_input_are_multiplied(tmp_path, run, rate):
    paths = make_input(tmp_path / "in", sizes=(500, 500))
    describe(paths, sampling_rates=SamplingRates(0.5, 2.0))
    before, after = (
        [label_of(frame) for frame in records_of(some)].count(0)
        for some in (paths, run(negative_rate=rate))
    )
    expected = {"negative": pytest.approx(0.5 * after / before), "positive": 2.0}
    assert said(tmp_path / "out")["sampling_rates"] == expected
    assert (after == before) == (rate is None)


# Bad records.


def damage(path, number, payload=None):
    """Flips a bit of a record, or replaces its payload; returns the byte where it begins."""
    frames = frames_of(path)
    if payload is None:
        frames[number] = frames[number][:20] + bytes([frames[number][20] ^ 1]) + frames[number][21:]
    else:
        frames[number] = tfrecord.framed(payload)
    pathlib.Path(path).write_bytes(b"".join(frames))
    return len(b"".join(frames[:number]))


BAD = {
    "corrupt": (None, "corrupt"),
    "short": (example(1, [1, 2, 3], [1.0, 1, 1]), "expected 4 ids, found 3"),
    "label": (example(7, [1, 2, 3, 4], [1.0, 1, 1, 1]), "label [7.0] is not [0]"),
    "nan": (example(1, [1, 2, 3, 4], [1.0, 1, float("nan"), 1]), "is not a finite number"),
    "negative": (example(1, [1, 2, -3, 4], [1.0, 1, 1, 1]), "feature id -3 is negative"),
    "junk": (b"junk", "not a tf.train.Example"),
}


@pytest.mark.parametrize("described", [False, True])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_is_refused_by_file_record_and_byte(tmp_path, run, name, described):
    paths = make_input(tmp_path / "in")
    good = records_of(paths)
    lost = frames_of(paths[2])[700]
    payload, words = BAD[name]
    if described:
        describe(paths)
    place = damage(paths[2], 700, payload)
    if described:  # as it now is
        path = tmp_path / "in" / "dataset.json"
        content = said(tmp_path / "in")
        content["files"]["2.tfrecords"]["bytes"] = os.path.getsize(paths[2])
        path.write_text(json.dumps(content))
    with pytest.raises(BadInput) as error:
        run()
    assert str(error.value).startswith(f"{paths[2]}: record 700 at byte {place}: ")
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()
    good.remove(lost)
    assert sorted(records_of(run(max_bad_records=1, num_files=2))) == sorted(good)


def shorten(path, size):
    os.truncate(path, os.path.getsize(path) - size)


@pytest.mark.parametrize("cut", [3, 11, 40])
def test_a_file_that_is_cut_short_is_refused(tmp_path, run, cut):
    paths = make_input(tmp_path / "in")
    shorten(paths[3], len(frames_of(paths[3])[-1]) - cut)
    with pytest.raises(BadInput, match=r"3\.tfrecords: record 96 at byte \d+: .*truncated"):
        run()
    assert len(records_of(run(max_bad_records=1))) == sum(SIZES) - 1


def test_one_bad_record_more_than_max_bad_records_ends_the_run(tmp_path, run):
    paths = make_input(tmp_path / "in")
    for i in (5, 6, 90):
        damage(paths[3], i, b"junk")
    with pytest.raises(BadInput, match=r"record 90 .* \(2 bad records were skipped before; --max"):
        run(max_bad_records=2)
    assert len(records_of(run(max_bad_records=3))) == sum(SIZES) - 3


@pytest.mark.parametrize(
    "suffix, lost", [(".tfrecords.gz", 9), (".tfrecords.gz", 8), (".libsvm.gz", 9)]
)
def test_a_gzip_file_that_is_not_whole_is_refused(tmp_path, run, suffix, lost):
    """Without the last 8 bytes, a checksum and a length, all that is packed can still be read."""
    paths = make_input(tmp_path / "in", suffix)
    shorten(paths[2], lost)
    with pytest.raises(BadInput, match=r"2\.\w+\.gz: "):
        run()


def test_two_gzip_files_in_one_are_refused(tmp_path, run):
    paths = make_input(tmp_path / "in", ".tfrecords.gz")
    with open(paths[1], "ab") as both:
        both.write(pathlib.Path(paths[0]).read_bytes())
    with pytest.raises(BadInput, match=r"1\.tfrecords\.gz: has several gzip members"):
        run()


@pytest.mark.parametrize(
    "line, words", [(b"2 1:1", "label '2' is not 0"), (b"1 1:nan", "is not a finite number")]
)
def test_a_bad_line_is_refused_by_file_and_line(tmp_path, run, line, words, monkeypatch):
    monkeypatch.setattr(text_blocks, "TASK", 5000)
    paths = make_input(tmp_path / "in", ".libsvm")
    before = records_of(paths)
    path = pathlib.Path(paths[2])
    lines = path.read_bytes().split(b"\n")
    lines[600:600] = [b"# a comment \xe9", b"", line]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(BadInput, match=rf"2\.libsvm:603: .*({words})"):
        run()
    assert sorted(records_of(run(max_bad_records=1))) == sorted(before)


def test_a_dataset_json_that_counts_wrong_is_refused(tmp_path, run):
    paths = make_input(tmp_path / "in")
    describe(paths)
    text = (tmp_path / "in" / "dataset.json").read_text().replace('"rows": 1000', '"rows": 1001')
    (tmp_path / "in" / "dataset.json").write_text(text)
    with pytest.raises(BadInput, match="has 1400 records, dataset.json says 1401"):
        run()


def test_labels_that_dataset_json_counts_wrong_change_no_rates(tmp_path, run):
    paths = make_input(tmp_path / "in")
    describe(paths, sampling_rates=SamplingRates(0.5, 2.0))
    wrong = said(tmp_path / "in")
    wrong["files"][os.path.basename(paths[0])]["positives"] -= 1
    (tmp_path / "in" / "dataset.json").write_text(json.dumps(wrong))
    run()
    assert said(tmp_path / "out")["sampling_rates"] == {"negative": 0.5, "positive": 2.0}


# Flags.


@pytest.mark.parametrize("flags, words", [
    ({"positive_share": 0.5, "negative_rate": 0.1}, "leave out --negative_rate and --positive_"),
    ({"positive_share": 0.0}, "--positive_share=0.0 is not between 0 and 1; try 0.5"),
    ({"positive_share": float("nan")}, "--positive_share=nan is not"),
    ({"oversample": True}, "--oversample needs --positive_share"),
    ({"negative_rate": 0, "positive_rate": 0}, "keep no record"),
    ({"num_files": 2000}, "--num_files=2000: 1400 records cannot fill 2000 files"),
    ({"output_dir": "file:///bucket/x"}, "is not local"),
    ({"host": Host(0, 3, True), "num_files": 2}, "too few for 3 hosts; try --num_files=3"),
])  # fmt: skip
def test_flags_that_cannot_be_are_refused(tmp_path, run, flags, words):
    make_input(tmp_path / "in")
    with pytest.raises(BadInput) as error:
        run(**flags)
    assert words in str(error.value)
    assert not (tmp_path / "out").exists()


def test_positive_share_needs_both_labels(tmp_path, run):
    (tmp_path / "in").mkdir()
    write_payloads(tmp_path / "in" / "a.tfrecords", [example(1, [1], [1.0])])
    with pytest.raises(BadInput, match="0 negatives and 1 positives; it needs both"):
        run(positive_share=0.5)


def test_a_folder_in_the_input_is_no_place_for_the_output(tmp_path, run):
    make_input(tmp_path / "in")
    with pytest.raises(BadInput, match="would then hold every record twice"):
        run(input=str(tmp_path), output_dir=str(tmp_path / "sub"))
    assert not (tmp_path / "sub").exists()


def test_an_input_that_is_in_part_an_earlier_output_is_refused(tmp_path, run):
    make_input(tmp_path / "in")
    shutil.copytree(str(tmp_path / "in"), str(tmp_path / "out"))
    both = f"{tmp_path}/in,{tmp_path}/out"
    with pytest.raises(BadInput, match=r"out/.*is in --output_dir"):
        run(input=both, output_dir=str(tmp_path / "out"), overwrite=True)


@pytest.mark.parametrize("suffix", [".tfrecords", ".libsvm"])
def test_an_existing_data_set_is_replaced_only_where_asked(tmp_path, run, suffix):
    make_input(tmp_path / "in", suffix)
    run(num_files=5)
    with pytest.raises(BadInput, match="--overwrite replaces it"):
        run(num_files=2)
    made = run(num_files=2, overwrite=True)
    kept = {*map(os.path.basename, made), *(["dataset.json"] if suffix == ".tfrecords" else [])}
    assert set(os.listdir(tmp_path / "out")) == kept


def test_a_file_that_is_not_read_is_not_replaced(tmp_path, run):
    paths = make_input(tmp_path / "in")
    contents = lambda: [pathlib.Path(path).read_bytes() for path in paths]
    before = contents()
    flags = dict(output_dir=str(tmp_path / "in"), num_files=2, overwrite=True)
    with pytest.raises(BadInput, match=r"in: 2\.tfrecords is not in --input, but would be"):
        run(input=f"{tmp_path}/in/[013].tfrecords", **flags)
    assert contents() == before
    assert len(run(input=str(tmp_path / "in"), **flags)) == 2  # of all that is there


# Hosts with files of their own.


def host(index, number):
    return Host(index, number, own_files=True)


def test_hosts_write_the_records_of_all_into_folders_of_their_own(tmp_path, run):
    before = records_of(make_input(tmp_path / "in"))
    made = [run(host(i, 4), num_files=7, positive_rate=2.0) for i in range(4)]
    assert [len(paths) for paths in made] == [1, 2, 2, 2]
    for i, paths in enumerate(made):
        folder = tmp_path / "out" / f"shard-0000{i}-of-00004"
        names = {os.path.basename(path) for path in paths} | {"dataset.json"}
        assert set(os.listdir(folder)) == names
    found = datasets.find(str(tmp_path / "out"), "data")
    assert [file.path for file in found.files] == sum(made, [])
    times = collections.Counter(records_of(sum(made, [])))
    assert times == {record: 1 + label_of(record) for record in before}
    assert (found.rows, found.sampling_rates) == (sum(times.values()), (1, 2))


def test_hosts_draw_independently(tmp_path, run):
    (tmp_path / "in").mkdir()
    orders = []
    for i in range(2):  # hosts with the same records
        write_own_ids([tmp_path / "in" / f"{i}.tfrecords"], [1000])
        orders.append([ids_of(x)[0] for x in records_of(run(host(i, 2), num_files=2))])
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def test_a_host_replaces_its_own_files_and_no_others(tmp_path, run):
    make_input(tmp_path / "in")
    first, _ = [run(host(i, 2))[0] for i in range(2)]
    before = pathlib.Path(first).stat()
    with pytest.raises(BadInput, match="--overwrite replaces it"):
        run(host(1, 2))
    run(host(1, 2), overwrite=True)
    assert pathlib.Path(first).stat() == before
