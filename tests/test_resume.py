"""A run that is interrupted and resumed ends with the same model as one that was not."""

import os
import re
import signal
import sys

import numpy as np
import psutil
import pytest
import warm
from conftest import (
    SMALL_MODEL,
    finish,
    go_back,
    make_records,
    marked,
    report,
    run_cluster,
    run_mode,
    run_train,
    started,
    started_cluster,
    started_horovod,
    started_train,
    until,
    write_own_ids,
    write_tfrecords,
)
from mode_steps import check_same, weights

pytestmark = pytest.mark.timeout(300)  # whole clusters
EACH_ALONE = 20
SIZES = (150, 700, 3, 147)
STEPS = 16  # of an epoch of batches of 64
INTERRUPTED = 143


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    for i, rows in enumerate(SIZES):
        write_tfrecords(folder / f"{i}.tfrecords", make_records(rows, seed=i))
    return folder


def job(data, model_dir, *more):
    """Flags of a run with everything in it that keeps a state."""
    return (
        *SMALL_MODEL, f"--training_data_dir={data}/*.tfrecords", f"--model_dir={model_dir}",
        "--global_batch_size=64", "--num_epochs=3", "--dropout=0.3", "--batch_norm",
        "--l2_reg=0.001", "--shuffle_buffer=200", *more,
    )  # fmt: skip


PLATEAU = (  # No evaluation improves by 1, so the third cuts the rate.
    "--learning_rate_decay_on_plateau=0.5", "--learning_rate_decay_patience=2",
    "--min_learning_rate=0.0001", "--eval_every_steps=12", "--min_improvement=1",
    "--learning_rate_warmup_steps=14",
    "--embedding_learning_rate=0.003", "--l2_reg_deep=0.01", "--cowclip_ratio=0.01",
    "--l2_scope=elapsed",
)  # fmt: skip


def test_local_ends_with_the_same_weights_bit_for_bit(data, tmp_path):
    more = (*PLATEAU, "--cache=memory", f"--val_data_dir={data}/3.tfrecords")
    flags, whole = (job(data, tmp_path / name, *more) for name in ("parts", "whole"))
    run_train(*whole, code=0)
    run_train(*flags, f"--max_steps={STEPS + 8}", code=0)
    assert weights(tmp_path / "parts")["learning_rate_decay"] == 1
    run_train(*flags, code=0)
    assert weights(tmp_path / "parts")["learning_rate_decay"] == 0.5
    assert report(tmp_path / "parts")["examples"] == 2 * sum(SIZES) - 8 * 64
    check_same(tmp_path / "parts", tmp_path / "whole", atol=0)

    # The same command after the end trains nothing, but evaluates other data if they are given.
    again = run_train(*whole, f"--val_data_dir={data}/1.tfrecords", code=0)
    said = f"All 3 epochs of this run are done (step {3 * STEPS}); train longer with --num_epochs=4"
    assert said in again.stderr
    found = report(tmp_path / "whole")
    assert found["global_step"] == 3 * STEPS
    assert found["eval"]["examples"] == SIZES[1]
    named = found["validation_data"]["name"], found["flags"]["val_data_dir"]
    assert named == (f"--val_data_dir={data}/1.tfrecords", f"{data}/1.tfrecords")
    # What it says is what the training did that led there.
    assert found["examples"] == 3 * sum(SIZES) and found["training_seconds"] > 0


@pytest.mark.parametrize(
    "mode", ["mirrored", "horovod", pytest.param("tower", marks=pytest.mark.table)]
)
def test_several_replicas_end_with_the_same_weights_and_rate(data, tmp_path, mode):
    # Records that are alike have an AUC of 1/2 whatever the model: each evaluation but the first
    # cuts the rate.
    alike = [np.resize(column[:1], (20, *column.shape[1:])) for column in make_records(1)]
    alike[0][::2] = 1 - alike[0][::2]
    val = write_tfrecords(tmp_path / "val.tfrecords", alike)
    more = (
        "--num_epochs=2", f"--val_data_dir={val}", "--learning_rate_decay_on_plateau=0.5",
        "--eval_every_steps=14",
    )  # fmt: skip
    run_mode(mode, *job(data, tmp_path / "model", *more), code=0)
    whole = weights(tmp_path / "model")
    go_back(tmp_path / "model", 28)
    run_mode(mode, *job(data, tmp_path / "model", *more), code=0)
    assert whole["learning_rate_decay"] == 0.5  # of step 28
    check_same(tmp_path / "model", whole, atol=0 if mode == "horovod" else 1e-6)


def interrupt(context, number, send):
    """Runs a command until its third step; (exit code, what it wrote) after a signal then."""
    with context as process:
        until(process.stdout, "step 3 ")
        send(process, number)
        text, _ = process.communicate(timeout=150)
        return process.returncode, text


def to_all(process, number):
    os.killpg(process.pid, number)


def to_parent(process, number):
    process.send_signal(number)


def to_second_rank(process, number):
    ours = psutil.Process(process.pid).children(recursive=True)  # of which some may have ended
    (second,) = (x for x in marked("OMPI_COMM_WORLD_RANK", "1") if x in ours)
    second.send_signal(number)


OTHERS = signal.SIGINT, signal.SIGUSR1
SLOW = ("--log_steps=1", "--num_epochs=2000", "--save_checkpoints_secs=600")


def test_two_trainings_in_one_folder_are_refused(data, tmp_path):
    flags = job(data, tmp_path, *SLOW)
    with started_train(*flags) as process:
        until(process.stdout, "step 3 ")
        for more in ((), ("--clear_existing_model",)):
            done = run_train(*flags, *more, code=2)
            assert f"--model_dir={tmp_path}: another process is training there" in done.stderr
        assert process.poll() is None


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, *(pytest.param(n, marks=pytest.mark.table) for n in OTHERS)]
)
def test_a_signal_ends_training_with_the_checkpoint_of_its_step(data, tmp_path, number):
    flags = job(data, tmp_path, *SLOW)
    code, text = interrupt(started_train(*flags, fresh=True), number, to_parent)
    assert code == INTERRUPTED
    (step,) = re.findall(r"saved the checkpoint of step (\d+)", text)
    assert weights(tmp_path)["global_step"] == int(step) >= 3
    assert not (tmp_path / "report.json").exists()
    run_train(*flags, f"--max_steps={int(step) + 5}", code=0)
    assert report(tmp_path)["global_step"] == int(step) + 5


@pytest.mark.parametrize("send", [to_all, pytest.param(to_parent, marks=pytest.mark.table)])
def test_a_cluster_ends_with_a_checkpoint_and_goes_on_where_each_was(tmp_path, send):
    write_own_ids([tmp_path / "a.tfrecords"], [4000])
    flags = (
        "--embedding_size=2", "--deep_layers=2", "--feature_size=4000", "--shuffle_buffer=0",
        f"--training_data_dir={tmp_path}/a.tfrecords", f"--model_dir={tmp_path}/model",
        "--batch_size=10", "--log_steps=1", "--optimizer=sgd", "--l2_reg=0",
    )  # fmt: skip
    context = started_cluster(*flags, python=warm.PYTHON)
    code, text = interrupt(context, signal.SIGTERM, send)
    assert code == INTERRUPTED, text
    (step,) = map(int, re.findall(r"saved the checkpoint of step (\d+)", text))
    assert 3 <= step < 400
    run_cluster(*flags, code=0)
    assert report(tmp_path / "model")["global_step"] == 400
    assert report(tmp_path / "model")["examples"] == 4000 - 10 * step
    assert np.all(weights(tmp_path / "model")["fm_w"] != 0)  # each record was used


@pytest.mark.parametrize(
    "launcher, number, send",
    [
        ("mpi", signal.SIGUSR1, to_second_rank),
        pytest.param("mpi", signal.SIGUSR1, to_parent, marks=pytest.mark.table),
        pytest.param("gloo", signal.SIGTERM, to_parent, marks=pytest.mark.table),
    ],
)
def test_horovod_ends_with_the_checkpoint_of_its_step(data, tmp_path, launcher, number, send):
    flags = job(data, tmp_path, *SLOW)
    context = started_horovod(2, *flags, launcher=launcher)
    code, text = interrupt(context, number, send)
    assert code != 0
    (step,) = map(int, re.findall(r"saved the checkpoint of step (\d+)", text))
    assert weights(tmp_path)["global_step"] == step
    # horovodrun itself ends with a trace.
    assert {"gloo": "<stderr>:Traceback", "mpi": "Traceback"}[launcher] not in text


def soak(*flags):
    command = [sys.executable, "tests/soak_interruptions.py", *flags]
    return finish(started(command), timeout=280)


@pytest.mark.parametrize(
    "mode, kills",
    [
        ("local", 1),
        pytest.param("local", 2, marks=pytest.mark.table),
        pytest.param("ps", 2, marks=pytest.mark.table),
    ],
)
def test_kills_at_random_moments_lose_no_record(mode, kills):
    done = soak(f"--modes={mode}", "--configurations=plain", f"--kills={kills}", "--rows=1000")
    assert done.returncode == 0, done.stdout
    assert f"{kills} kills in " in done.stdout
    assert "1140 records used 2 to 2 times" in done.stdout


@pytest.mark.table
@pytest.mark.parametrize(
    "epochs, sentence", [(1, "2100 uses lost"), (3, "0 uses lost, 2100 again")]
)
def test_the_soak_sees_records_that_were_not_used_once_per_epoch(epochs, sentence):
    done = soak(
        "--modes=local", "--configurations=plain", "--kills=1", "--rows=2000", "--",
        f"--num_epochs={epochs}",
    )  # fmt: skip
    assert done.returncode == 1
    assert sentence in done.stdout
