"""The same global batches give the same result, whatever --distribution says.

Real processes: Horovod all-reduces over sockets. What they are compared with is local mode, whose
step test_model.py holds against numpy.
"""

import itertools
import re

import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    SMALL_MODEL,
    make_records,
    run_cluster,
    run_horovod,
    run_train,
    write_tfrecords,
)

GLOBAL_BATCH = 24
ROWS = 49 * GLOBAL_BATCH + 14  # so the last batch is short, in each process, by another number
FLAGS = (
    *SMALL_MODEL,
    "--shuffle_buffer=0",
    "--num_parallel_reads=1",
    f"--global_batch_size={GLOBAL_BATCH}",
    "--log_steps=1",
    "--dropout=0",
    "--embedding_init_stddev=0.3",
    "--distribution",
)
OPTIMIZERS = {
    "sgd": ("--optimizer=sgd", "--learning_rate=0.5", "--l2_reg=0"),
    "sgd_l2_clip": ("--optimizer=sgd", "--learning_rate=0.1", "--l2_reg=0.01", "--clip_norm=0.5"),
    "lazy_adam": ("--optimizer=adam", "--learning_rate=0.01", "--l2_reg=0.001"),
}


def dealt(records, processes):
    """The records in such an order that `processes` contiguous shares, in batches, make up the
    same global batches as the records in theirs."""
    cuts = [ROWS * i // processes for i in range(processes + 1)]
    sizes = np.diff(cuts)
    size = GLOBAL_BATCH // processes
    shares = [[] for _ in range(processes)]
    rows = iter(range(ROWS))
    while any(len(share) < n for share, n in zip(shares, sizes)):
        for share, n in zip(shares, sizes):
            share.extend(itertools.islice(rows, min(size, n - len(share))))
    order = np.concatenate(shares)
    assert sorted(order) == list(range(ROWS))
    return [column[order] for column in records]


def losses(text):
    return [float(x) for x in re.findall(r"step \d+  loss ([0-9.]+)", text)]


def weights(model_dir):
    path = tf.train.latest_checkpoint(str(model_dir))
    names = [name for name, _ in tf.train.list_variables(path)]
    return {name: tf.train.load_variable(path, name) for name in names}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the records in order (1.tfrecords) and dealt to 2 and 3 processes."""
    folder = tmp_path_factory.mktemp("modes")
    records = make_records(ROWS)
    for processes in (1, 2, 3):
        write_tfrecords(folder / f"{processes}.tfrecords", dealt(records, processes))
    return folder


@pytest.fixture(scope="module")
def locally(data):
    """name of OPTIMIZERS -> (losses of the steps, weights) of local mode."""

    def run(name):
        done = run_train(
            *FLAGS, "local", *OPTIMIZERS[name], f"--training_data_dir={data}/1.tfrecords",
            f"--model_dir={data}/local_{name}",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return losses(done.stderr), weights(data / f"local_{name}")

    return {name: run(name) for name in OPTIMIZERS}


def check(done, model_dir, expected, compare_losses):
    assert done.returncode == 0, done.stderr
    expected_losses, expected_weights = expected
    found = losses(done.stderr)
    assert len(found) == len(expected_losses) == 50
    if compare_losses:
        np.testing.assert_allclose(found, expected_losses, atol=1e-4)
    found = weights(model_dir)
    assert set(found) == set(expected_weights)
    for name, value in expected_weights.items():
        np.testing.assert_allclose(found[name], value, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("mode", ["tower", "mirrored"])
def test_replicas_of_one_process_agree_with_local(data, locally, tmp_path, mode, name):
    done = run_train(
        *FLAGS, mode, *OPTIMIZERS[name], f"--training_data_dir={data}/1.tfrecords",
        f"--model_dir={tmp_path}", "--replicas_per_process=2",
    )  # fmt: skip
    # The L2 of a batch's rows is reported by each replica for its own rows.
    check(done, tmp_path, locally[name], compare_losses=name == "sgd")


def cases(counts, in_table):
    """(count, name of OPTIMIZERS) of each; those that others imply are in the table alone."""
    found = [(counts[0], name) for name in OPTIMIZERS] + [(counts[1], "lazy_adam")]
    return [pytest.param(*x, marks=[pytest.mark.table] * (x in in_table)) for x in found]


@pytest.mark.parametrize("processes, name", cases((2, 3), [(3, "lazy_adam")]))
def test_horovod_agrees_with_local(data, locally, tmp_path, processes, name):
    done = run_horovod(
        processes, *FLAGS, "horovod", *OPTIMIZERS[name], f"--model_dir={tmp_path}",
        f"--training_data_dir={data}/{processes}.tfrecords",
    )  # fmt: skip
    check(done, tmp_path, locally[name], compare_losses=name == "sgd")


@pytest.mark.parametrize("replicas, name", cases((1, 2), [(1, "sgd"), (1, "lazy_adam")]))
def test_parameter_servers_with_one_worker_agree_with_local(
    data, locally, tmp_path, replicas, name
):
    done = run_cluster(
        *FLAGS, "ps", *OPTIMIZERS[name], f"--model_dir={tmp_path}",
        f"--training_data_dir={data}/1.tfrecords", f"--replicas_per_process={replicas}",
        servers=2, workers=0,
    )  # fmt: skip
    check(done, tmp_path, locally[name], compare_losses=replicas == 1 or name == "sgd")


@pytest.mark.parametrize("cross_device_ops", ["hierarchical_copy"])
def test_every_reduction_of_mirrored_gives_the_same(data, locally, tmp_path, cross_device_ops):
    done = run_train(
        *FLAGS, "mirrored", *OPTIMIZERS["sgd"], f"--training_data_dir={data}/1.tfrecords",
        f"--model_dir={tmp_path}", "--replicas_per_process=2",
        f"--cross_device_ops={cross_device_ops}",
    )  # fmt: skip
    check(done, tmp_path, locally["sgd"], compare_losses=True)


def test_replicas_that_cannot_share_a_global_batch_are_refused(data, tmp_path):
    done = run_train(
        *FLAGS, "tower", "--replicas_per_process=2", "--global_batch_size=25",
        f"--training_data_dir={data}/1.tfrecords", f"--model_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 2
    assert "2 replicas cannot share --global_batch_size=25 evenly; try 24." in done.stderr


def test_more_replicas_than_devices_are_refused(data, tmp_path):
    done = run_train(
        *FLAGS, "mirrored", "--replicas_per_process=500",
        f"--training_data_dir={data}/1.tfrecords", f"--model_dir={tmp_path}",
    )  # fmt: skip
    assert done.returncode == 2
    assert "--replicas_per_process=500, but this machine has" in done.stderr
