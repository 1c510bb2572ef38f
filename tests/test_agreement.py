"""Horovod ranks whose steps differ are detected, and the log says what differs."""

import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
import warm
from conftest import (
    LAUNCHERS,
    finish,
    make_records,
    run_horovod,
    run_train,
    small_job,
    small_training,
    started,
    write_tfrecords,
)

from deepfm.errors import BadInput
from deepfm.modes.common.agreement import check_alike

# train.py, but for rank 1's learning rate, which is twice that of the flags.
_DIVERGING = """
import runpy, sys
from deepfm.model import optimizers
import horovod.tensorflow as hvd
made = optimizers.OPTIMIZERS["sgd"]
optimizers.OPTIMIZERS["sgd"] = made._replace(
    make=lambda rate: made.make(rate * (1 + hvd.rank()))
)
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def run_ranks(*command):
    env = warm.for_launchers(os.environ)
    return finish(started([*LAUNCHERS["warm gloo"], 2, *command], env=env))


def test_ranks_whose_weights_differ_end_with_a_sentence(uneven, tmp_path):
    flags = small_training(uneven, tmp_path / "model", "--optimizer=sgd", "--max_steps=5")
    done = run_ranks(warm.PYTHON, "-c", _DIVERGING, *flags)
    assert done.returncode != 0
    assert "rank 1 has different weights than rank 0 (sum of " in done.stdout
    assert "found after 5 steps" in done.stdout
    assert not list((tmp_path / "model").glob("model.ckpt-5*"))


def test_after_an_interruption_all_ranks_cut_the_rate_as_without_one(uneven, tmp_path):
    # Records that are alike have an AUC of 1/2 whatever the model: each evaluation but the first
    # cuts the rate.
    alike = [np.resize(column[:1], (20, *column.shape[1:])) for column in make_records(1)]
    alike[0][::2] = 1 - alike[0][::2]
    val = write_tfrecords(tmp_path / "val.tfrecords", alike)
    flags = lambda folder, steps: (
        *small_job(uneven, tmp_path / folder, "--optimizer=sgd", "--l2_reg=0"),
        f"--val_data_dir={val}", f"--max_steps={steps}", "--num_epochs=9", "--learning_rate=0.5",
        "--learning_rate_decay_on_plateau=0.5", "--eval_every_steps=4",
    )  # fmt: skip
    for folder, steps in (("interrupted", 4), ("interrupted", 14), ("alone", 14)):
        run_horovod(2, *flags(folder, steps), code=0)
    found, wanted = (tf.train.load_checkpoint(str(tmp_path / x)) for x in ("interrupted", "alone"))
    assert wanted.get_tensor("learning_rate_decay") == 0.5**2  # of steps 8 and 12
    for name in ("fm_v", "deep_0/kernel", "learning_rate_decay"):
        np.testing.assert_array_equal(found.get_tensor(name), wanted.get_tensor(name))


@pytest.mark.parametrize("mode", ["mirrored", pytest.param("tower", marks=pytest.mark.table)])
def test_the_rate_of_all_replicas_is_cut(uneven, tmp_path, mode):
    run_train(
        *small_job(uneven, tmp_path, "--learning_rate=1e-12", "--max_steps=5"), "--num_epochs=9",
        "--learning_rate_decay_on_plateau=0.5", "--eval_every_steps=2", "--batch_norm",
        f"--distribution={mode}", "--replicas_per_process=2", code=0,
    )  # fmt: skip
    assert tf.train.load_variable(str(tmp_path), "learning_rate_decay") == 0.5


def test_ranks_with_other_flags_are_refused(uneven, tmp_path):
    flags = " ".join(small_job(uneven, tmp_path / "model"))
    other = "--learning_rate=0.$((1 + HOROVOD_RANK))"
    done = run_ranks("sh", "-c", f"exec {warm.PYTHON} train.py {flags} {other}")
    assert done.returncode != 0
    assert "--learning_rate: rank 0 has 0.1, rank 1 has 0.2; start all ranks" in done.stdout


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.table), 4])
def test_what_one_rank_finds_wrong_ends_all_with_its_sentence(uneven, tmp_path, ranks):
    model, other = tmp_path / "model", tmp_path / "other.tfrecords"
    write_tfrecords(other, make_records(10 * ranks))
    assert run_train(*small_training(uneven, model, "--max_steps=1")).returncode == 0
    run = json.loads((model / "run.json").read_text())
    (model / "run.json").write_text(json.dumps({**run, "ended": 0}))  # as if it was interrupted
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "model.json").write_text("{")
    shutil.copy(model / "checkpoint", tmp_path / "damaged")
    for path in model.glob("model.ckpt-1.*"):
        shutil.copy(path, tmp_path / "damaged")
    last = f"$([ $HOROVOD_RANK = {ranks - 1} ] && echo /missing || echo {uneven})"
    rounds = [
        (uneven, "damaged", "is not a model.json"),  # found by the chief
        (last, "new", "--training_data_dir=/missing"),  # by the last rank
        (other, "model", "add --abandon_interrupted_run"),  # decided by the chief
    ]
    for data, folder, sentence in rounds:
        flags = " ".join(small_training(data, tmp_path / folder))
        # Whatever the launcher sends when the first one has ended, each says how it ends itself.
        words = (
            f"trap '' TERM; {warm.PYTHON} train.py {flags}; echo ended with $?, and waits; sleep 1"
        )
        env = warm.for_launchers(os.environ)
        done = finish(started([*LAUNCHERS["warm gloo"], ranks, "sh", "-c", words], env=env), 60)
        assert done.stdout.count("ended with 2, and waits") == ranks, done.stdout
        assert done.stdout.count(sentence) == ranks, done.stdout


def test_the_first_value_that_differs_is_named():
    theirs = [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": (3,)}]
    with pytest.raises(BadInput, match=r"--b: rank 0 has 2, rank 2 has \(3,\);"):
        check_alike(theirs)
    check_alike([theirs[0], {"a": 1}])  # which does not know b
    check_alike(theirs[:2])
