"""--reset_embeddings_each_epoch: each epoch trains fresh tables, and the MLP goes on."""

import json

import numpy as np
import pytest
import tensorflow as tf
from conftest import make_records, report, run_cluster, run_horovod, run_train, write_tfrecords
from mode_steps import weights
from test_modes_agree import FLAGS, OPTIMIZERS, check_weights, dealt
from test_pipe_mode import channels  # noqa: F401  a fixture
from test_resume import STEPS, check_done, check_same, data, job  # noqa: F401

from deepfm.config import ModelConfig
from deepfm.model import fresh_tables, initializers

v1 = tf.compat.v1

RESET = "--reset_embeddings_each_epoch"
ROWS, K, RATE, SEED = 11, 3, 0.5, 4_294_967_295
SLOTS = {  # optimizer: {slot of a table: (initial value, value after a step with a gradient of 1)}
    "sgd": {},
    "momentum": {"Momentum": (0, 1)},
    "adagrad": {"Adagrad": (0.25, 1.25)},
}
MAKE = {
    "sgd": lambda: v1.train.GradientDescentOptimizer(RATE),
    "momentum": lambda: v1.train.MomentumOptimizer(RATE, momentum=0.5),
    "adagrad": lambda: v1.train.AdagradOptimizer(RATE, initial_accumulator_value=0.25),
}


def fresh(epoch, rows, stddev=0.5):
    """The embeddings with which an epoch begins, block by block."""
    with tf.Graph().as_default(), v1.Session() as session:
        seeds = [[SEED + epoch * 2**32, i] for i in range(-(-ROWS // rows))]
        blocks = [
            tf.random.stateless_normal([rows, K], tf.constant(seed, tf.int64), stddev=stddev)
            for seed in seeds
        ]
        return session.run(tf.concat(blocks, 0))[:ROWS]


@pytest.mark.parametrize("optimizer", SLOTS)
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("rows", [4, ROWS])  # of a block
def test_an_epoch_begins_with_fresh_tables_and_slots(monkeypatch, optimizer, lazy, rows):
    monkeypatch.setattr(initializers, "_BLOCK", rows * K)
    config = ModelConfig(
        1, ROWS, K, lazy_updates=lazy, embedding_init_stddev=0.5, seed=SEED,
    )  # fmt: skip
    with tf.Graph().as_default():
        with v1.variable_scope("", use_resource=True):
            zeros = v1.zeros_initializer()
            w, v = (v1.get_variable("fm_w", [ROWS], initializer=zeros),
                    v1.get_variable("fm_v", [ROWS, K], initializer=zeros))  # fmt: skip
            kernel = v1.get_variable("kernel", [], initializer=zeros)
        row = tf.reduce_sum(tf.gather(v, [1])) + tf.reduce_sum(tf.gather(w, [2]))
        if not lazy:
            row += 0 * tf.reduce_sum(v) + 0 * tf.reduce_sum(w)
        step = v1.train.get_or_create_global_step()
        train = MAKE[optimizer]().minimize(row + kernel, step)
        hook = fresh_tables.FreshTables(config, {2: 1, 3: 2})
        with v1.train.SingularMonitoredSession([hook]) as session:
            reading = {variable.op.name: variable for variable in v1.global_variables()}
            read = lambda: session.raw_session().run(reading)
            after = []
            for _ in range(4):
                session.run(train)
                after.append(read())
    slots = SLOTS[optimizer]
    move = RATE if optimizer != "adagrad" else RATE / 1.25**0.5
    for found, epoch in zip(after[2:], (1, 2)):
        table, weights = fresh(epoch, rows), np.zeros(ROWS)
        table[1] -= move
        weights[2] -= move
        np.testing.assert_allclose(found["fm_v"], table, atol=1e-6)
        np.testing.assert_allclose(found["fm_w"], weights, atol=1e-6)
        for name, (start, then) in slots.items():
            expected = np.full(ROWS, float(start))
            expected[2] = then
            np.testing.assert_allclose(found[f"fm_w/{name}"], expected, err_msg=name)
            np.testing.assert_allclose(found[f"fm_v/{name}"][1], then)
            np.testing.assert_allclose(np.delete(found[f"fm_v/{name}"], 1, 0), start)
    kernels = [found["kernel"] for found in after]
    assert kernels == sorted(kernels, reverse=True)  # never set back
    assert kernels[-1] <= -1


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):  # noqa: F811
    """{number of epochs: model_dir} of runs whose tables have ids that no record has."""
    folder = tmp_path_factory.mktemp("runs")
    for epochs in (1, 2, 3):
        flags = job(data, folder / str(epochs), RESET, "--feature_size=60")
        check_done(run_train(*flags, f"--num_epochs={epochs}"))
    return {epochs: folder / str(epochs) for epochs in (1, 2, 3)}


def table(model_dir, name="fm_v"):
    return tf.train.load_variable(tf.train.latest_checkpoint(str(model_dir)), name)


def test_the_last_epochs_tables_are_trained_and_kept(runs):
    never = {epochs: table(folder)[50:] for epochs, folder in runs.items()}
    for epochs, other in ((1, 2), (2, 3), (1, 3)):
        assert not np.isin(never[epochs], never[other]).any()
    for folder in runs.values():
        assert np.all(table(folder, "fm_w")[1:50] != 0)
        assert np.all(table(folder, "fm_w")[50:] == 0)
        moments = table(folder, "fm_v/Adam_1")
        assert np.all(moments[1:50] > 0) and np.all(moments[50:] == 0)


def test_evaluations_see_the_tables_that_were_trained(data, tmp_path):  # noqa: F811
    validation = f"--val_data_dir={data}/1.tfrecords"
    check_done(
        run_train(*job(data, tmp_path / "fresh", RESET, validation, "--num_epochs=2")),
        run_train(*job(data, tmp_path / "plain", validation, "--num_epochs=1")),
        run_train("--task_type=eval", validation, f"--model_dir={tmp_path}/fresh"),
        run_train(
            "--task_type=eval", validation, f"--model_dir={tmp_path}/fresh",
            f"--checkpoint={tmp_path}/fresh/model.ckpt-{STEPS}",
        ),
    )  # fmt: skip
    first, last = json.loads((tmp_path / "fresh/evaluations.json").read_text())
    plain = report(tmp_path / "plain")["eval"]
    assert (first["step"], first["auc"], first["log_loss"]) == (
        STEPS, plain["auc"], plain["log_loss"],
    )  # fmt: skip
    again = report(tmp_path / "fresh", "eval")["eval"]  # of the checkpoint of the first epoch
    assert again["auc"] == pytest.approx(first["auc"], abs=1e-9)
    assert report(tmp_path / "fresh")["eval"]["auc"] == last["auc"] != first["auc"]


@pytest.mark.parametrize(
    "more", [(), ("--lazy_updates=false", "--l2_scope=table", "--clip_norm=1", "--optimizer=ftrl")]
)
def test_a_run_interrupted_around_the_boundary_ends_alike(data, tmp_path, more):  # noqa: F811
    flags = job(data, tmp_path / "parts", RESET, *more)
    stops = [STEPS - 1, STEPS, STEPS + 1, 2 * STEPS]
    for step in stops:
        check_done(run_train(*flags, f"--max_steps={step}"))
        assert report(tmp_path / "parts")["global_step"] == step
    check_done(run_train(*flags), run_train(*job(data, tmp_path / "whole", RESET, *more)))
    check_same(tmp_path / "parts", tmp_path / "whole", atol=0)


def test_more_epochs_continue_a_complete_run_as_if_asked_for_at_once(data, runs, tmp_path):  # noqa: F811
    flags = job(data, tmp_path, RESET, "--feature_size=60")
    check_done(run_train(*flags, "--num_epochs=2"), run_train(*flags, "--num_epochs=3"))
    check_same(tmp_path, runs[3], atol=0)


@pytest.mark.parametrize(
    "mode, more",
    [("tower", []), ("mirrored", []), ("horovod", []), ("mirrored", ["--l2_scope=elapsed"])],
)
def test_every_synchronous_mode_agrees_with_local(tmp_path, mode, more):
    records = make_records(5 * 24 + 14)
    for processes in (1, 2):
        write_tfrecords(tmp_path / f"{processes}.tfrecords", dealt(records, processes))
    flags = [*OPTIMIZERS["lazy_adam"], RESET, "--num_epochs=3", *more]

    def run(name, processes, start=run_train, *more):
        done = start(
            *FLAGS, name, *flags, f"--training_data_dir={tmp_path}/{processes}.tfrecords",
            f"--model_dir={tmp_path}/{name}", *more,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    run("local", 1)
    if mode == "horovod":
        run(mode, 2, lambda *words: run_horovod(2, *words))
    else:
        run(mode, 1, run_train, "--replicas_per_process=2")
    check_weights(tmp_path / mode, weights(tmp_path / "local"))


def test_processes_at_their_own_pace_are_refused(data, tmp_path):  # noqa: F811
    done = run_cluster(*job(data, tmp_path, RESET))
    assert done.returncode == 2
    assert f"{RESET} needs processes that take each step together" in done.stderr


def test_an_unknown_number_of_records_is_refused(channels, tmp_path):  # noqa: F811
    write_tfrecords(tmp_path / "a.tfrecords", make_records(100))
    flags = channels(training=(tmp_path / "a.tfrecords").read_bytes())
    done = run_train(*flags, RESET, "--num_epochs=2", f"--model_dir={tmp_path}/model")
    assert done.returncode == 2
    assert f"{RESET} needs the number of records in an epoch" in done.stderr
