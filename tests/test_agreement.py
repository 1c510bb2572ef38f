"""Horovod ranks whose steps differ are detected, and the log says what differs."""

import json
import os
import re
import shutil

import pytest
import warm
from conftest import (
    LAUNCHERS,
    ROOT,
    SMALL_MODEL,
    finish,
    make_records,
    run_train,
    small_job,
    small_training,
    started,
    started_cluster,
    started_horovod,
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


def run_ranks(*command, ranks=2):
    env = warm.for_launchers(os.environ)
    return finish(started([*LAUNCHERS["warm gloo"], ranks, *command], env=env))


def test_ranks_whose_weights_differ_end_with_a_sentence(uneven, tmp_path):
    flags = small_training(uneven, tmp_path / "model", "--optimizer=sgd", "--max_steps=5")
    done = run_ranks(warm.PYTHON, "-c", _DIVERGING, *flags)
    assert done.returncode != 0
    assert "rank 1 has different weights than rank 0 (sum of " in done.stdout
    assert "found after 5 steps" in done.stdout
    assert not list((tmp_path / "model").glob("model.ckpt-5*"))


def test_ranks_with_other_flags_are_refused(uneven, tmp_path):
    flags = " ".join(small_job(uneven, tmp_path / "model"))
    other = "--learning_rate=0.$((1 + HOROVOD_RANK))"
    done = run_ranks("sh", "-c", f"exec {warm.PYTHON} train.py {flags} {other}")
    assert done.returncode != 0
    assert "--learning_rate: rank 0 has 0.1, rank 1 has 0.2; start all ranks" in done.stdout


@pytest.mark.parametrize("ranks", [3, pytest.param(4, marks=pytest.mark.table)])
def test_what_one_rank_finds_wrong_ends_all_with_its_sentence(uneven, tmp_path, ranks):
    model, other = tmp_path / "model", tmp_path / "other.tfrecords"
    write_tfrecords(other, make_records(10 * ranks))
    run_train(*small_training(uneven, model, "--max_steps=1"), code=0)
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
        done = run_ranks("sh", "-c", words, ranks=ranks)
        assert done.stdout.count("ended with 2, and waits") == ranks, done.stdout
        assert done.stdout.count(sentence) == ranks, done.stdout


def test_the_first_value_that_differs_is_named():
    theirs = [{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"a": 1, "b": (3,)}]
    with pytest.raises(BadInput, match=r"--b: rank 0 has 2, rank 2 has \(3,\);"):
        check_alike(theirs)
    check_alike([theirs[0], {"a": 1}])  # which does not know b
    check_alike(theirs[:2])


# train.py, in which PROCESS in a flag is the number of the process.
_OWN_FILES = """
import json, os, sys
sys.path[0] = "{root}"
task = json.loads(os.environ.get("TF_CONFIG", "{{}}")).get("task", {{}})
number = os.environ.get("HOROVOD_RANK", str(int(task.get("type") == "worker")))
sys.argv = [word.replace("PROCESS", number) for word in sys.argv]
from deepfm import __main__ as train
from deepfm.runtime import program
sys.exit(program.run(train.main, train.before_tensorflow))
"""


@pytest.mark.parametrize("mode", ["ps", "horovod"])
def test_processes_that_see_other_files_are_refused(mode, tmp_path):
    """Each would read its share of its own."""
    for i in range(2):
        write_tfrecords(tmp_path / f"{i}.tfrecords", make_records(100 + i))
    (tmp_path / "train.py").write_text(_OWN_FILES.format(root=ROOT))
    train = tmp_path / "train.py"
    whole, own = (str(tmp_path / f"{name}.tfrecords") for name in ("0", "PROCESS"))

    def run(data, validation, *more):
        words = (f"--training_data_dir={data}", f"--val_data_dir={validation}", *SMALL_MODEL, *more)
        words = *words, f"--model_dir={tmp_path}/model", "--batch_size=50"
        if mode == "ps":
            return finish(started_cluster(*words, python=warm.PYTHON, train=train))
        return finish(started_horovod(2, *words, program=train, python=warm.PYTHON))

    said = "rank 0 has 1 files, .* rank 1 has 1 files, .*; start all ranks with the same"
    done = run(own, whole)
    assert done.returncode and re.search(f"--training_data_dir: {said}", done.stdout)
    done = run(whole, own)
    if mode == "ps":  # whose chief evaluates alone
        assert done.returncode == 0
        return
    assert done.returncode and re.search(f"--val_data_dir: {said}", done.stdout)
    assert run(whole, whole).returncode == 0
    for i in range(2):
        (tmp_path / str(i)).mkdir()
    (tmp_path / "0" / ".p.txt.part-1").write_text("0.5\n")  # which a job has left that was killed
    done = run(whole, whole, "--task_type=infer", f"--predictions_file={tmp_path}/PROCESS/p.txt")
    assert done.returncode and "name a path in a folder that all hosts share" in done.stdout
    assert not (tmp_path / "0" / "p.txt").exists()
    for flag in ("--task_type=eval", "--task_type=infer"):
        done = run(whole, own, flag)
        assert done.returncode and re.search(f"--val_data_dir: {said}", done.stdout), done.stdout
