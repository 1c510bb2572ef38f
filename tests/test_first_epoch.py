"""What training says of labels in order or all alike, and of values that are not scaled."""

import numpy as np
import pytest
from conftest import (
    make_records,
    report,
    run_mode,
    run_tool,
    run_train,
    small_job,
    small_training,
    write_libsvm,
)

from deepfm.runtime import divergence

ROWS = 2000


def tenths(labels):
    return [[len(x), x.sum()] for x in np.array_split(labels, 10)]


def shuffled_tenths(random, rows, positives):
    """Those of a random order, and of steps of a size that leaves a short tenth at the end."""
    sizes = np.diff(np.linspace(0, -(-rows // 64), 11).astype(int)) * 64
    sizes[-1] += rows - sizes.sum()
    found, left = [], positives
    for i, size in enumerate(sizes):
        found.append(random.hypergeometric(left, sizes[i:].sum() - left, size) if size else 0)
        left -= found[-1]
    return np.stack([sizes, found], axis=1).astype(float)


@pytest.mark.parametrize("rows", [65, 700, 45_000_000])
@pytest.mark.parametrize("rate", [0.0005, 0.03, 0.5, 0.97])
def test_at_most_one_of_1000_shuffled_runs_is_taken_for_ordered(rows, rate):
    random = np.random.RandomState(rows)
    runs = (shuffled_tenths(random, rows, random.binomial(rows, rate)) for _ in range(2000))
    assert sum(map(divergence.out_of_order, runs)) <= 2


@pytest.mark.parametrize("rows", [3000, 300_000])
def test_labels_that_a_buffer_cannot_shuffle_are_out_of_order(rows):
    labels = np.sort(np.random.RandomState(0).rand(rows) < 0.25)
    random, buffer, read = np.random.RandomState(1), list(labels[: rows // 3]), []
    for label in labels[rows // 3 :]:
        i = random.randint(len(buffer))
        read.append(buffer[i])
        buffer[i] = label
    read += list(random.permutation(buffer))
    assert divergence.out_of_order(tenths(np.array(read)))
    assert not divergence.out_of_order(tenths(random.permutation(labels)))


def said(text, words):
    return [line for line in text.splitlines() if words in line]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The path of records of which each half, the share of a process of two, is sorted by label."""
    labels, ids, values = make_records(ROWS)
    order = np.lexsort([labels, np.arange(ROWS) >= ROWS // 2])
    path = tmp_path_factory.mktemp("data") / "sorted.libsvm"
    return write_libsvm(path, [labels[order], ids[order], values[order]])


MODES = "local", "tower", "mirrored", "horovod", "ps"


@pytest.mark.parametrize(
    "mode", [pytest.param(x, marks=[pytest.mark.table] * (x in ("local", "tower"))) for x in MODES]
)
def test_each_mode_warns_once_of_labels_in_order(data, tmp_path, mode):
    flags = small_training(data, tmp_path, "--shuffle_buffer=300", "--num_epochs=2")
    text = run_mode(mode, *flags, workers=1, code=0).stderr
    (order,) = said(text, "not in random order")
    assert "data_tools.rebalance" in order and "--shuffle_buffer (now 300)" in order


def test_labels_are_judged_by_an_epoch_from_its_beginning_alone(tmp_path):
    _, ids, values = make_records(640)
    path = write_libsvm(tmp_path / "a.libsvm", [np.arange(640) < 192, ids, values])
    # To the end of an epoch; from there, almost to the end of the second; the rest.
    for epochs, steps, times in ((1, 10, 1), (2, 19, 1), (2, 20, 0)):
        more = "--shuffle_buffer=1", f"--num_epochs={epochs}", f"--max_steps={steps}"
        text = run_train(*small_training(path, tmp_path / "model", *more), code=0).stderr
        assert len(said(text, "tenths of an epoch")) == times
        assert not said(text, "nothing can be learned")


def test_a_shuffled_file_of_scaled_values_brings_no_warning(tmp_path):
    path = write_libsvm(tmp_path / "a.libsvm", make_records(ROWS))
    done = run_train(*small_job(path, tmp_path / "model", "--shuffle_buffer=300"), code=0)
    for words in ("not in random order", "saturated", "All "):
        assert not said(done.stderr, words)
    assert report(tmp_path / "model")["train"]["saturated"] == 0
    assert report(tmp_path / "model")["eval"]["saturated"] == 0


@pytest.mark.parametrize("label", [0, 1])
def test_labels_that_are_all_alike_and_saturated_predictions_are_said(tmp_path, label):
    _, ids, values = make_records(300)
    values[:, 1] *= 1e6
    path = write_libsvm(tmp_path / "a.libsvm", [np.full(300, label), ids, values])
    done = run_train(*small_job(path, tmp_path / "model"), code=0)
    (alike,) = said(done.stderr, "nothing can be learned")
    assert f"All 300 labels of --training_data_dir={path} are {label}" in alike
    (saturated,) = said(done.stderr, "are saturated")
    assert report(tmp_path / "model")["train"]["saturated"] > 0.9
    assert report(tmp_path / "model")["eval"]["saturated"] > 0.9
    assert said(done.stderr, f"All 300 labels of --val_data_dir={path} are {label}")


@pytest.mark.parametrize("mode", ["horovod", "ps"])
def test_saturated_predictions_of_another_process_than_the_chief_are_said(tmp_path, mode):
    labels, ids, values = make_records(1280)
    values[640:] *= 1e6  # the share of the second process
    path = write_libsvm(tmp_path / "a.libsvm", [labels, ids, values])
    flags = small_training(path, tmp_path / "model")
    text = run_mode(mode, *flags, workers=1, code=0).stderr
    (line,) = said(text, "are saturated")
    assert report(tmp_path / "model")["train"]["saturated"] == pytest.approx(0.5, abs=0.05)


def test_fields_that_are_not_scaled_are_said_by_dataset_json(tmp_path):
    labels, ids, values = make_records(300)
    values[:, 2:] *= 1000
    path = write_libsvm(tmp_path / "a.libsvm", [labels, ids, values])
    run_tool("libsvm_to_tfrecord", f"--input={path}", f"--output_dir={tmp_path}/data", code=0)
    done = run_train(*small_training(tmp_path / "data", tmp_path / "model"), code=0)
    (line,) = said(done.stderr, "not scaled")
    assert "Field 2" in line and "to 99" in line and "and 1 more fields are like it" in line
