"""The best evaluated model is exported, and training stops when evaluations stop improving."""

import json

import numpy as np
import pytest
import tensorflow as tf
from conftest import (
    SMALL_MODEL,
    make_records,
    report,
    run_horovod,
    run_python,
    run_train,
    write_tfrecords,
)

from deepfm.model.metrics import Evaluation
from deepfm.state import checkpoints, evaluations, export

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
    return json.loads((folder / "model" / evaluations.FILE).read_text())


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
    evaluation = Evaluation()
    logits = np.log(prob / (1 - prob))
    losses = -np.where(labels > 0, np.log(prob), np.log(1 - prob))
    evaluation.add(labels, logits, prob, losses)
    return float(losses.mean())


def kept_best(folder):
    """The names in the state of the best checkpoint."""
    return checkpoints.read_state(str(folder / "model/best")).names


def test_the_one_export_and_checkpoint_are_the_best_evaluated_model_also_after_a_restart(
    data, tmp_path
):
    flags = job(data, tmp_path, "--best_metric=log_loss", "--early_stopping_patience=4")
    done = run_train(*flags, f"--max_steps={STEPS + 5}")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "servable").iterdir())) == 1  # the first evaluation is the best
    done = run_train(*flags)
    assert done.returncode == 0, done.stderr
    found = history(tmp_path)
    best = min(found, key=lambda entry: entry["log_loss"])
    assert best != found[-1], "it has not learnt them by heart"
    assert log_loss_of_export(tmp_path, data[1]) == pytest.approx(best["log_loss"], abs=1e-5)
    assert report(tmp_path / "model")["best"]["step"] == best["step"]
    assert kept_best(tmp_path) == [f"model.ckpt-{best['step']}"]

    # And it stopped when four in a row were not better.
    last = report(tmp_path / "model")["global_step"]
    after = [entry for entry in found if entry["step"] > best["step"]]
    assert len(after) == 4
    assert last == after[-1]["step"]
    again = run_train(*flags)
    assert again.returncode == 0, again.stderr
    assert f"Nothing to do: early stopping ended this run at step {last}." in again.stderr
    assert len(exports(tmp_path)) == 1
    assert report(tmp_path / "model")["global_step"] == last


# train.py, which a kill ends at one of its calls of something.
KILLED = """
import os, runpy, sys
from deepfm.state import {module}

calls = []
def killed(*arguments, call={module}.{name}, **more):
    calls.append(arguments)
    if len(calls) == {count}:
        os._exit(9)
    return call(*arguments, **more)

{module}.{name} = killed
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def run_killed(module, name, count, *flags, env=None):
    code = KILLED.format(module=module, name=name, count=count)
    done = run_python("-c", code, *flags, env=env)
    assert done.returncode == 9, done.stderr


def plant(folder, number, model_id, kind):
    """An export as another model, or a user, has made it."""
    path = folder / "servable" / str(number)
    (path / "assets.extra").mkdir(parents=True)
    (path / "saved_model.pb").touch()
    stamp = export.Stamp(model_id, 7, "0123", kind)
    content = json.dumps({"format_version": 1, **stamp._asdict()})
    (path / "assets.extra" / "deepfm.json").write_text(content)
    return path


def exports(folder):
    return sorted((folder / "servable").iterdir())


@pytest.mark.parametrize(
    "module, name, count",
    [
        ("evaluations", "History.keep", 2),
        pytest.param("export", "remove", 1, marks=pytest.mark.table),
    ],
)
def test_after_a_kill_at_an_export_the_best_one_is_there_and_none_too_many(
    data, tmp_path, module, name, count
):
    """The second evaluation is the best by far; the kill comes before it is noted."""
    flags = job(data, tmp_path, "--best_metric=auc", "--learning_rate=0.003")
    run_killed(module, name, count, *flags)
    model_id = export.model_id(str(tmp_path / "model"))
    others = [
        plant(tmp_path, 5, "another model's", "best"), plant(tmp_path, 6, model_id, "asked"),
        plant(tmp_path, 8, model_id, "last"),
    ]  # fmt: skip
    before = exports(tmp_path)
    done = run_train(*flags, f"--max_steps={2 * STEPS}")
    assert done.returncode == 0, done.stderr
    (best,) = set(exports(tmp_path)) - set(others)
    assert set(others) < set(exports(tmp_path))
    assert best in before
    assert f"The model of step {2 * STEPS} is already exported at {best}." in done.stderr
    assert report(tmp_path / "model")["best"]["step"] == 2 * STEPS
    assert history(tmp_path)[-1]["export"] == str(best)


def test_a_finished_command_exports_nothing_again(data, tmp_path):
    flags = (*job(data, tmp_path), "--export=last", "--val_data_dir=", f"--max_steps={STEPS}")
    for _ in range(2):
        done = run_train(*flags)
        assert done.returncode == 0, done.stderr
        left = tmp_path / "servable/.export-abcd1234"  # as of an export that was killed
        left.mkdir()  # fails unless the next run has removed it
    left.rmdir()
    (path,) = exports(tmp_path)
    assert f"The model of step {STEPS} is already exported at {path}." in done.stderr


def test_only_a_numbered_export_of_its_folder_is_ever_deleted(tmp_path):
    servable = tmp_path / "servable"
    for folder in (servable / "17", servable / "mine", tmp_path / "other/17"):
        folder.mkdir(parents=True)
        (folder / "saved_model.pb").touch()
    for path in (servable / "mine", tmp_path / "other/17", f"{servable}/..", f"{servable}/17/.."):
        export.remove(str(servable), str(path))
    assert len(list(tmp_path.rglob("saved_model.pb"))) == 3
    export.remove(f"{servable}/", f"{servable}/17")
    assert sorted(servable.iterdir()) == [servable / "mine"]


def test_all_ranks_stop_early_at_the_same_step_and_keep_the_best(data, tmp_path):
    flags = job(data, tmp_path, "--best_metric=log_loss", "--early_stopping_patience=1")
    done = run_horovod(2, *flags)
    assert done.returncode == 0, done.stderr
    found = history(tmp_path)
    assert "Stopping early at step" in done.stderr
    assert report(tmp_path / "model")["global_step"] == found[-1]["step"] < 30 * STEPS
    assert len(list((tmp_path / "servable").iterdir())) == 1
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
    done = run_train(
        *SMALL_MODEL, f"--training_data_dir={data[0]}/train.tfrecords", f"--model_dir={tmp_path}/m",
        *flags,
    )  # fmt: skip
    assert done.returncode == 2
    assert sentence in done.stderr
