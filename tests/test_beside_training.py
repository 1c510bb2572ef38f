"""Evaluation, inference and export beside a training that deletes its older checkpoints."""

import itertools
import re
import shutil

import pytest
from conftest import report, run_python, run_train, small_job, started_train

from deepfm.runtime.tf import tf
from deepfm.state import checkpoints

# train.py, where something happens just before a checkpoint is restored.
TRAIN = """
import glob, os, runpy, sys
from deepfm.runtime.tf import tf
from deepfm.state import checkpoints

folder, links = sys.argv.pop(1), sys.argv.pop(1) == "True"

def no_links(source, target):
    raise PermissionError(1, "Operation not permitted")

def rotate():
    names = checkpoints.read_state(folder).names
    newest = os.path.join(folder, names[-1])
    {rotate}

def rotate_and_restore(saver, session, path, restore=tf.compat.v1.train.Saver.restore):
    rotate()
    return restore(saver, session, path)

if not links:
    os.link = no_links
tf.compat.v1.train.Saver.restore = rotate_and_restore
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""
# The state file names the other checkpoint, and the newest is deleted ...
ONCE = """
    if len(names) == 2:
        checkpoints.write_state(folder, names[:1])
        [os.remove(part) for part in glob.glob(newest + ".*")]
"""
# ... or each newest one has another name as soon as it is to be read.
OVER_AND_OVER = """
    following = "model.ckpt-" + str(int(names[-1][11:]) + 1)
    for part in glob.glob(newest + ".*"):
        os.rename(part, os.path.join(folder, following + part[len(newest):]))
    checkpoints.write_state(folder, [following])
"""


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    model = tmp_path_factory.mktemp("trained") / "model"
    run_train(*small_job(data, model, "--val_data_dir=", "--save_checkpoints_steps=5"), code=0)
    return model


@pytest.fixture
def model(trained, tmp_path):
    """A model_dir with the checkpoints of steps 5 and 10."""
    shutil.copytree(str(trained), str(tmp_path / "model"))
    assert len(checkpoints.read_state(str(tmp_path / "model")).names) == 2
    return tmp_path / "model"


def run_beside(rotate, model, links, *flags, code=0):
    program = TRAIN.format(rotate=rotate.strip())
    return run_python("-c", program, model, links, *flags, code=code)


def flags(data, model, task):
    return small_job(
        data, model, f"--task_type={task}", f"--infer_data_dir={data}",
        f"--servable_model_dir={model}/../servable",
    )  # fmt: skip


@pytest.mark.parametrize(
    "task, line",
    [
        ("eval", "Evaluation: step=10 examples=640 "),
        pytest.param("infer", "Wrote 640 predictions ", marks=pytest.mark.table),
        pytest.param("export", "Exported the model of step 10 ", marks=pytest.mark.table),
    ],
)
def test_a_checkpoint_that_is_deleted_before_it_is_read_is_read(data, model, task, line):
    done = run_beside(ONCE, model, True, *flags(data, model, task))
    assert line in done.stderr
    assert report(model, task)["global_step"] == 10
    assert not list(model.glob(".reading-*"))


@pytest.mark.parametrize(
    "task, line",
    [
        pytest.param("eval", "Evaluation: step=5 examples=640 ", marks=pytest.mark.table),
        pytest.param("infer", "Wrote 640 predictions ", marks=pytest.mark.table),
        ("export", "Exported the model of step 5 "),
    ],
)
def test_where_no_link_holds_it_the_newest_is_taken_again(data, model, task, line):
    done = run_beside(ONCE, model, False, *flags(data, model, task))
    assert line in done.stderr
    assert report(model, task)["global_step"] == 5


@pytest.mark.table
def test_when_each_is_deleted_before_it_is_read_a_sentence_says_so(data, model):
    done = run_beside(OVER_AND_OVER, model, False, *flags(data, model, "eval"), code=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        f"train.py: OSError: --model_dir={model}: 10 times in a row the newest checkpoint was"
    )
    assert "(--keep_checkpoint_max)" in last
    assert "Traceback" not in done.stderr


def test_a_state_file_that_training_writes_meanwhile_is_left_alone(model, monkeypatch):
    """Each time one has read it, training deletes what it names and names another."""
    first, second = checkpoints.read_state(str(model)).names
    names = itertools.cycle([[second], [first]])

    def read_just_before_it_changes(folder, read=checkpoints.read_state):
        for part in model.glob(f"{first}.*"):
            part.unlink()
        checkpoints.write_state(folder, next(names))
        return read(folder)

    for part in model.glob(f"{second}.*"):
        part.unlink()
    monkeypatch.setattr(checkpoints, "read_state", read_just_before_it_changes)
    checkpoints.prepare(str(model), tidy=False)  # raises BadInput if no checkpoint is whole


@pytest.mark.table
@pytest.mark.timeout(300)
@pytest.mark.parametrize("keep", [1, 2])
def test_evaluations_beside_a_training_that_saves_every_step_are_of_one_checkpoint(
    data, tmp_path, keep
):
    model = tmp_path / "model"
    train = small_job(
        data, model, "--val_data_dir=", "--save_checkpoints_steps=1", "--num_epochs=100000",
        f"--keep_checkpoint_max={keep}",
    )  # fmt: skip
    steps = []
    with started_train(*train) as process:
        while not tf.train.latest_checkpoint(str(model)):
            assert process.poll() is None
        for _ in range(8):
            done = run_train(*flags(data, model, "eval"), code=0)
            steps.append(int(re.search(r"Evaluation: step=(\d+) ", done.stderr)[1]))
            assert report(model, "eval")["global_step"] == steps[-1]
        assert process.poll() is None
    assert steps == sorted(steps)
