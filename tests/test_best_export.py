"""The best model is exported at the end, and training stops when evaluations stop improving."""

import time

import numpy as np
import pytest
from conftest import (
    SMALL_MODEL,
    evaluations,
    make_records,
    report,
    run_horovod,
    run_train,
    small_training,
    started_train,
    write_tfrecords,
)

from deepfm.runtime.tf import tf
from deepfm.state import checkpoints

v1 = tf.compat.v1
STEPS = 10  # of an epoch


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """(folder, validation records): so few to train on that the model soon learns them by heart."""
    folder = tmp_path_factory.mktemp("best")
    validation = make_records(300, seed=2)
    write_tfrecords(folder / "train.tfrecords", make_records(STEPS * 32, seed=1))
    write_tfrecords(folder / "val.tfrecords", validation)
    return folder, validation


def job(data, folder, *more):
    return (
        *SMALL_MODEL, f"--training_data_dir={data[0]}/train.tfrecords",
        f"--val_data_dir={data[0]}/val.tfrecords", f"--model_dir={folder}/model",
        f"--servable_model_dir={folder}/servable", "--global_batch_size=32", "--num_epochs=30",
        "--learning_rate=0.03", "--dropout=0", "--export=best",
        f"--eval_every_steps={STEPS}", *more,
    )  # fmt: skip


def history(folder):
    return evaluations(folder / "model")


def log_loss_of_export(folder, records):
    """The log loss of the one exported model on some records."""
    (path,) = (folder / "servable").iterdir()
    labels, ids, values = records
    with tf.Graph().as_default(), v1.Session() as session:
        signature = v1.saved_model.load(session, ["serve"], str(path)).signature_def
        found = signature["serving_default"]
        prob = session.run(
            found.outputs["prob"].name,
            {found.inputs["feat_ids"].name: ids, found.inputs["feat_vals"].name: values},
        )
    return float(-np.where(labels > 0, np.log(prob), np.log(1 - prob)).mean())


def kept_best(folder):
    """The names in the state of the best checkpoint."""
    return checkpoints.read_state(str(folder / "model/best")).names


def test_the_one_export_and_checkpoint_are_the_best_evaluated_model_also_after_a_restart(
    data, tmp_path
):
    flags = job(data, tmp_path, "--best_metric=log_loss", "--early_stopping_patience=2")
    run_train(*flags, f"--max_steps={STEPS + 5}", "--export=last", "--servable_model_dir=", code=0)
    run_train(*flags, code=0)
    found = history(tmp_path)
    best = min(found, key=lambda entry: entry["log_loss"])
    assert best != found[-1], "it has not learnt them by heart"
    assert log_loss_of_export(tmp_path, data[1]) == pytest.approx(best["log_loss"], abs=1e-5)
    assert report(tmp_path / "model")["best"]["step"] == best["step"]
    assert kept_best(tmp_path) == [f"model.ckpt-{best['step']}"]

    # And it stopped when two in a row were not better.
    last = report(tmp_path / "model")["global_step"]
    after = [entry for entry in found if entry["step"] > best["step"]]
    assert len(after) == 2
    assert last == after[-1]["step"]
    again = run_train(*flags, code=0)
    assert f"Nothing to do: early stopping ended this run at step {last}." in again.stderr
    assert len(exports(tmp_path)) == 1
    assert report(tmp_path / "model")["global_step"] == last


def exports(folder):
    return sorted((folder / "servable").iterdir())


def test_a_signal_exports_nothing_and_says_how_to(data, tmp_path):
    with started_train(*job(data, tmp_path, "--num_epochs=100000", "--log_steps=1")) as process:
        while not (tmp_path / "model/evaluations.json").exists():
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        said, _ = process.communicate()
    assert process.returncode == 143, said
    assert "Nothing was exported; --task_type=export --checkpoint=auto does it." in said
    assert not list(tmp_path.glob("servable/[0-9]*"))
    (kept,) = kept_best(tmp_path)
    done = run_train(*job(data, tmp_path, "--task_type=export", "--checkpoint=auto"), code=0)
    assert f"Exported the model of step {kept.partition('-')[2]} to" in done.stderr


def test_a_signal_before_the_first_evaluation_says_what_can_be_exported(data, tmp_path):
    flags = "--num_epochs=100000", "--log_steps=1", "--eval_every_steps=1000000"
    with started_train(*job(data, tmp_path, *flags)) as process:
        while "step 1 " not in process.stdout.readline():
            assert process.poll() is None
        process.terminate()
        said, _ = process.communicate()
    assert "Nothing was exported; --task_type=export --checkpoint=auto does it." in said
    run_train(*job(data, tmp_path, "--task_type=export", "--checkpoint=auto"), code=0)


def test_a_finished_command_exports_nothing_again(data, tmp_path):
    flags = (*job(data, tmp_path), "--export=last", "--val_data_dir=", f"--max_steps={STEPS}")
    for _ in range(2):
        done = run_train(*flags, code=0)
        left = tmp_path / "servable/.export-abcd1234"  # as of an export that was killed
        left.mkdir()  # fails unless the next run has removed it
    left.rmdir()
    (path,) = exports(tmp_path)
    assert f"The model of step {STEPS} is already exported at {path}." in done.stderr


def test_all_ranks_stop_early_at_the_same_step_and_keep_the_best(data, tmp_path):
    flags = job(data, tmp_path, "--best_metric=log_loss", "--early_stopping_patience=1")
    done = run_horovod(2, *flags, "--learning_rate=0.05", code=0)  # at which it stops soon
    found = history(tmp_path)
    assert "Stopping early at step" in done.stderr
    assert report(tmp_path / "model")["global_step"] == found[-1]["step"] < 30 * STEPS
    assert len(exports(tmp_path)) == 1
    best = min(found, key=lambda entry: entry["log_loss"])
    assert best == found[-2]
    assert kept_best(tmp_path) == [f"model.ckpt-{best['step']}"]


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (["--export=best"], "--export=best needs --val_data_dir and --servable_model_dir."),
        (["--early_stopping_patience=2"], "--early_stopping_patience needs evaluations"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(data, tmp_path, flags, sentence):
    done = run_train(*small_training(data[0] / "train.tfrecords", tmp_path, *flags), code=2)
    assert sentence in done.stderr
