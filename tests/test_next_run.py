"""What a run leaves in model_dir does not reach the next one; see docs/reliability.md."""

import pathlib
import shutil

import pytest
from conftest import make_records, run_python, run_train, scalars, small_job, write_tfrecords
from mode_steps import check_same

from deepfm.runtime.tf import tf

STEPS = 5  # of an epoch of batches of 64
# No evaluation improves by 1: each but the first cuts the rate.
PLATEAU = ("--learning_rate_decay_on_plateau=0.3", "--eval_every_steps=2", "--min_improvement=1")


def job(folder, data, *more):
    flags = small_job(folder / data, folder / "model", "--learning_rate=0.02", "--log_steps=1")
    return (*flags, *more)


@pytest.fixture
def folder(tmp_path):
    for seed, name in enumerate("ab"):
        write_tfrecords(tmp_path / name, make_records(64 * STEPS, seed=seed))
    return tmp_path


def rates(folder):
    """The learning rate of each step, over all runs."""
    found = scalars(folder / "model")
    return [found[tag, step] for tag, step in sorted(found) if tag == "learning_rate"]


def test_cuts_of_the_rate_and_its_warm_up_belong_to_one_run(folder):
    done = run_train(*job(folder, "a", *PLATEAU), code=0)
    assert rates(folder)[-1] == pytest.approx(0.02 * 0.3)  # cut after step 4
    assert done.stderr.count("auc did not improve: the learning rate is now 0.006.") == 1
    again = pathlib.Path(shutil.copytree(str(folder), f"{folder}-again"))
    done = run_train(*job(folder, "a", "--num_epochs=2"), code=0)
    assert "--learning_rate_decay_on_plateau=1.0 (before: 0.3)" in done.stderr
    assert rates(folder)[STEPS:] == pytest.approx([0.02] * STEPS)
    done = run_train(*job(again, "b", "--learning_rate_warmup_steps=4"), code=0)
    assert "starting a new run" in done.stderr
    expected = [0.005, 0.01, 0.015, 0.02, 0.02]
    assert rates(again)[STEPS:] == pytest.approx(expected)
    assert tf.train.load_variable(str(again / "model"), "learning_rate_decay") == 1


# train.py, killed as soon as an evaluation of some step is recorded.
KILLED = """
import os, runpy, sys
from deepfm.state.evaluations import History

def keep_and_die(history, keep=History.keep, step=int(sys.argv.pop(1)), **more):
    keep(history, **more)
    if history.entries[-1]["step"] == step:
        os._exit(9)

History.keep = keep_and_die
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def test_a_kill_after_the_last_evaluation_leaves_the_rate_that_an_uninterrupted_run_has(folder):
    flags = job(folder, "a", *PLATEAU, "--early_stopping_patience=1")
    run_python("-c", KILLED, 4, *flags, code=9)
    run_train(*flags, code=0)
    (folder / "model").rename(folder / "killed")
    run_train(*flags, code=0)
    check_same(folder / "killed", folder / "model", atol=0)
