"""Data are identified by content: files that are replaced before, between and during runs."""

import os
import re
import shutil
import signal

import numpy as np
import pytest
from conftest import (
    SMALL_MODEL,
    evaluations,
    make_records,
    report,
    run_train,
    started_train,
    until,
    write_libsvm,
    write_own_ids,
    write_tfrecords,
)
from mode_steps import check_same, weights

EACH_ALONE = 10
ROWS = 300


def write(folder, turned=False):
    """Two files of the same bytes' number, whatever their labels."""
    for i in range(2):
        labels, *features = make_records(ROWS, seed=i)
        new = write_tfrecords(folder / "new", [1 - labels if turned else labels, *features])
        os.replace(new, folder / f"{i}.tfrecords")


def job(folder, *more, model="model"):
    return (
        *SMALL_MODEL, f"--training_data_dir={folder}/*.tfrecords", f"--model_dir={folder}/{model}",
        "--batch_size=50", "--dropout=0", "--learning_rate=0.01", "--log_steps=1", *more,
    )  # fmt: skip


def done(*flags):
    return run_train(*flags, code=0)


def interrupted(folder, meanwhile=lambda: None, number=signal.SIGTERM, more=()):
    """A run that is ended by a signal, or by what happens meanwhile: (exit code, text)."""
    flags = job(folder, "--num_epochs=20000", "--save_checkpoints_steps=200", *more)
    with started_train(*flags) as process:
        until(process.stdout, "step 5 ")
        meanwhile()
        if number:
            process.send_signal(number)
        text, _ = process.communicate(timeout=180)
        return process.returncode, text


def test_after_the_end_of_a_run_a_file_of_the_same_name_and_size_is_new_data(tmp_path):
    write(tmp_path)
    done(*job(tmp_path, "--num_epochs=2"))
    for path in tmp_path.glob("*.tfrecords"):  # written anew, with what was in it
        os.replace(shutil.copy(path, tmp_path / "new"), path)
    again = done(*job(tmp_path, "--num_epochs=2"))
    assert "All 2 epochs of this run are done" in again.stderr
    write(tmp_path, turned=True)
    text = done(*job(tmp_path, "--num_epochs=2")).stderr
    assert "was trained on other data: starting a new run" in text
    assert report(tmp_path / "model")["examples"] == 2 * 2 * ROWS
    assert report(tmp_path / "model")["global_step"] == 2 * 2 * 2 * ROWS / 50


def test_an_interrupted_run_is_not_ended_by_fewer_epochs_and_refuses_a_file_of_other_content(
    tmp_path,
):
    write(tmp_path)
    large = "--batch_size=300"  # 2 steps an epoch: step 5 is of the third
    code, text = interrupted(tmp_path, more=(large,))
    assert code == 143, text
    text = done(*job(tmp_path, large, "--num_epochs=1")).stderr
    (step,) = map(int, re.findall(r"All 1 epochs of this run are done \(step (\d+)\)", text))
    assert f"train longer with --num_epochs={step // 2 + 1}" in text
    write(tmp_path, turned=True)
    refused = run_train(*job(tmp_path, large, "--num_epochs=20000"), code=2)
    assert f"{tmp_path}/0.tfrecords has changed since this run began" in refused.stderr
    assert "--abandon_interrupted_run" in refused.stderr.splitlines()[-1]
    done(*job(tmp_path, large, "--abandon_interrupted_run"))
    assert weights(tmp_path / "model")["global_step"] == step + 2


def test_a_file_that_is_replaced_during_a_run_ends_it_before_its_next_checkpoint(tmp_path):
    write(tmp_path)
    code, text = interrupted(tmp_path, lambda: write(tmp_path, turned=True), number=None)
    assert code == 2, text
    assert "0.tfrecords: replaced since the job began" in text.splitlines()[-1]


def test_a_cache_file_of_other_content_is_not_used(tmp_path):
    write(tmp_path)
    cache = f"--cache={tmp_path}/cached"
    done(*job(tmp_path, cache, "--num_epochs=2", model="first"))
    write(tmp_path, turned=True)
    done(*job(tmp_path, cache, "--num_epochs=2", model="second"))
    done(*job(tmp_path, "--cache=memory", "--num_epochs=2", model="wanted"))
    check_same(tmp_path / "second", tmp_path / "wanted")
    for path in tmp_path.glob("cached-*.data*"):
        os.truncate(path, 100)
    refused = run_train(*job(tmp_path, cache, "--num_epochs=2", model="third"), code=1)
    assert f"{cache} cannot be read or written (" in refused.stderr.splitlines()[-1]
    assert f"delete {tmp_path}/cached-* and run" in refused.stderr.splitlines()[-1]


def test_without_dataset_json_an_interrupted_run_uses_every_record_once(tmp_path):
    sizes, rate = [300] * 10, 1e-4
    write_own_ids([tmp_path / f"{i}.tfrecords" for i in range(10)], sizes)
    flags = (
        f"--training_data_dir={tmp_path}/*s", f"--model_dir={tmp_path}/model", "--batch_size=50",
        f"--feature_size={sum(sizes)}", "--embedding_size=2", "--deep_layers=4", "--dropout=0",
        "--embedding_init_stddev=0", "--l2_reg=0", "--optimizer=sgd", f"--learning_rate={rate}",
        "--shuffle_buffer=500", "--num_parallel_reads=4",
    )  # fmt: skip
    done(*flags, "--max_steps=31")
    done(*flags)
    moved = np.abs(weights(tmp_path / "model")["fm_w"]) / (rate * 0.5 / 50)
    np.testing.assert_allclose(moved, 1, rtol=1e-3)


@pytest.mark.parametrize("suffix", ["libsvm", "tfrecords"])
def test_without_dataset_json_each_epoch_is_evaluated(tmp_path, suffix):
    write = write_libsvm if suffix == "libsvm" else write_tfrecords
    for name, rows in (("train", 200), ("val", 40)):
        write(tmp_path / f"{name}.{suffix}", make_records(rows))
    text = done(
        *SMALL_MODEL, f"--training_data_dir={tmp_path}/train.{suffix}", "--num_epochs=2",
        f"--val_data_dir={tmp_path}/val.{suffix}", f"--model_dir={tmp_path}/model",
        "--batch_size=50", "--early_stopping_patience=3",
    ).stderr  # fmt: skip
    assert "Counting the records, because no dataset.json gives their number" in text
    found = evaluations(tmp_path / "model")
    assert [entry["step"] for entry in found] == [4, 8]


def test_evaluations_on_other_data_are_not_compared(tmp_path):
    write(tmp_path)
    (tmp_path / "val").mkdir()
    val = f"--val_data_dir={tmp_path}/val"
    for seed in (7, 8):
        write_tfrecords(tmp_path / "val" / "a.tfrecords", make_records(200, seed=seed))
        text = done(*job(tmp_path, val, f"--max_steps={10 * (seed - 6)}", "--num_epochs=9")).stderr
        assert ("The validation data changed after 1 evaluation:" in text) == (seed == 8)
    assert report(tmp_path / "model")["best"]["step"] > 10


def test_flags_of_another_model_are_refused_and_those_of_another_optimizer_are_said(tmp_path):
    write(tmp_path)
    done(*job(tmp_path, "--max_steps=3"))
    for flag in ("--loss_type=square_loss", "--batch_norm=True"):
        refused = run_train(*job(tmp_path, flag), code=2)
        assert f"{flag}, but the model of --model_dir={tmp_path}/model was trained with" in (
            refused.stderr
        )
    text = done(*job(tmp_path, "--optimizer=sgd", "--max_steps=5", "--l2_reg=0")).stderr
    assert "--optimizer=sgd (before: adam)" in text and "--l2_reg=0.0 (before: 0.0001)" in text
    assert "--l2_scope=batch (before: elapsed)" in text
    assert not any("Adam" in name for name in weights(tmp_path / "model"))
    text = done(*job(tmp_path, "--optimizer=adam", "--max_steps=6")).stderr
    assert "from another --optimizer or --l2_scope: beta1_power, beta2_power, " in text
    found = weights(tmp_path / "model")
    np.testing.assert_allclose(found["beta1_power"], 0.9**2, rtol=1e-6)  # after one step
    assert np.any(found["fm_v/Adam"] != 0)


def test_going_on_needs_no_flags_of_the_model(tmp_path):
    write(tmp_path)
    flags = job(tmp_path, "--batch_norm", "--l2_reg=0.002")
    done(*flags, "--max_steps=3")
    model, own = tmp_path / "model", tmp_path / "own"
    shutil.copytree(model, own)
    done(*flags)
    of_model = ("--embedding", "--deep", "--dropout", "--batch_norm", "--l2_reg", "--feature")
    rest = [flag for flag in flags if not flag.startswith(of_model)]
    text = done(*rest, f"--model_dir={own}").stderr
    assert "Resuming at step 3, epoch 1, batch 4" in text and "(before:" not in text
    assert (own / "model.json").read_text() == (model / "model.json").read_text()
    check_same(own, model)
    # And a model whose first checkpoint a kill prevented is none to go on with.
    shutil.rmtree(own)
    own.mkdir()
    shutil.copy(model / "model.json", own)
    done(*rest, f"--model_dir={own}", "--feature_size=50", "--embedding_size=2", "--max_steps=1")
    assert weights(own)["fm_v"].shape == (50, 2)


def test_without_run_json_the_checkpoint_says_where_to_go_on(tmp_path):
    write(tmp_path)
    done(*job(tmp_path, "--max_steps=5"))
    (tmp_path / "model" / "run.json").unlink()
    text = done(*job(tmp_path)).stderr
    assert "run.json of --model_dir" in text and "is missing" in text
    assert "Resuming at step 5, epoch 1, batch 6" in text
    assert report(tmp_path / "model")["examples"] == 2 * ROWS - 5 * 50
