"""--reset_embeddings_each_epoch: each epoch trains fresh tables, and the MLP goes on."""

import numpy as np
import pytest
from conftest import (
    evaluations,
    go_back,
    job_of,
    make_records,
    mode_of,
    report,
    run_mode,
    run_train,
    write_tfrecords,
)
from mode_steps import check_same, weights
from test_modes_agree import FLAGS, OPTIMIZERS, check_weights, dealt
from test_pipe_mode import channels  # noqa: F401  a fixture
from test_resume import STEPS, data, job  # noqa: F401

from deepfm import plan
from deepfm.config import ModelConfig
from deepfm.errors import BadInput
from deepfm.model import fresh_tables
from deepfm.model.layers import initializers
from deepfm.model.optimizers import SEEN
from deepfm.runtime.tf import tf

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


UNSEEN = "--feature_size=60"  # so that the tables have ids that no record has


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):  # noqa: F811
    """The model_dir of a run of three epochs, with a checkpoint of the end of each."""
    folder = tmp_path_factory.mktemp("whole")
    run_train(*job(data, folder, RESET, UNSEEN, f"--save_checkpoints_steps={STEPS}"), code=0)
    return folder


def test_each_epochs_tables_are_trained_and_kept(whole):
    def table(epoch, name="fm_v"):
        return tf.train.load_variable(f"{whole}/model.ckpt-{epoch * STEPS}", name)

    for epoch, other in ((1, 2), (2, 3), (1, 3)):
        assert not np.isin(table(epoch)[50:], table(other)[50:]).any()
    for epoch in (1, 2, 3):
        assert np.all(table(epoch, "fm_w")[1:50] != 0)
        assert np.all(table(epoch, "fm_w")[50:] == 0)
        moments = table(epoch, "fm_v/Adam_1")
        assert np.all(moments[1:50] > 0) and np.all(moments[50:] == 0)


def test_the_steps_since_a_row_was_last_used_count_from_the_epoch(whole):
    for table in ("fm_w", "fm_v"):
        seen = tf.train.load_variable(str(whole), f"{table}/{SEEN}")
        assert np.all(seen[50:] == 2 * STEPS)  # ids that no record has
        assert seen[1:50].min() > 2 * STEPS and seen.max() == 3 * STEPS


def test_evaluations_see_the_tables_that_were_trained(data, tmp_path):  # noqa: F811
    validation = f"--val_data_dir={data}/1.tfrecords"
    run_train(*job(data, tmp_path / "fresh", RESET, validation, "--num_epochs=2"), code=0)
    run_train(*job(data, tmp_path / "plain", validation, "--num_epochs=1"), code=0)
    first, last = evaluations(tmp_path / "fresh")
    plain = report(tmp_path / "plain")["eval"]
    assert (first["step"], first["auc"], first["log_loss"]) == (
        STEPS, plain["auc"], plain["log_loss"],
    )  # fmt: skip
    assert report(tmp_path / "fresh")["eval"]["auc"] == last["auc"] != first["auc"]


DENSE = ("--lazy_updates=false", "--l2_scope=table", "--clip_norm=1", "--optimizer=ftrl")


def test_stops_before_and_at_the_boundary_change_nothing(data, whole, tmp_path):  # noqa: F811
    flags = job(data, tmp_path, RESET, UNSEEN)
    for more, step in (f"--max_steps={STEPS - 1}", STEPS - 1), ("--num_epochs=1", STEPS):
        run_train(*flags, more, code=0)
        assert report(tmp_path)["global_step"] == step
    run_train(*flags, code=0)
    check_same(tmp_path, whole, atol=0)


def test_a_run_that_is_killed_after_the_boundary_ends_alike(data, tmp_path):  # noqa: F811
    flags = *job(data, tmp_path, RESET, UNSEEN, *DENSE), f"--save_checkpoints_steps={STEPS + 1}"
    run_train(*flags, code=0)
    whole = weights(tmp_path)
    go_back(tmp_path, STEPS + 1)
    run_train(*flags, code=0)
    check_same(tmp_path, whole, atol=0)


def run_in(mode, folder):
    """Trains in a mode, with Adam that covers elapsed steps."""
    file = "2.tfrecords" if mode == "horovod" else "1.tfrecords"
    run_mode(
        mode, *FLAGS, mode, *OPTIMIZERS["lazy_adam"], RESET, "--num_epochs=3",
        f"--training_data_dir={folder}/{file}", f"--model_dir={folder}/{mode}", code=0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def locally(tmp_path_factory):
    """(a folder of records in order and dealt to two processes, the weights of local mode)."""
    folder = tmp_path_factory.mktemp("modes")
    records = make_records(5 * 24 + 14)
    for processes in (1, 2):
        write_tfrecords(folder / f"{processes}.tfrecords", dealt(records, processes))
    run_in("local", folder)
    return folder, weights(folder / "local")


@pytest.mark.parametrize(
    "mode", ["horovod", *(pytest.param(x, marks=pytest.mark.table) for x in ("tower", "mirrored"))]
)
def test_every_synchronous_mode_agrees_with_local(locally, mode):
    folder, expected = locally
    run_in(mode, folder)
    check_weights(folder / mode, expected)


def test_processes_at_their_own_pace_are_refused():
    job = job_of(distribution=mode_of(synchronous=False))
    a_plan = plan.Plan(plan.Opened(job, None, {}, 0, "last"), *[None] * 6)
    with pytest.raises(BadInput, match=f"{RESET} needs processes that take each step together"):
        plan._check_fresh_tables(a_plan)


def test_an_unknown_number_of_records_is_refused(channels, tmp_path):  # noqa: F811
    write_tfrecords(tmp_path / "a.tfrecords", make_records(100))
    flags = channels(training=(tmp_path / "a.tfrecords").read_bytes())
    done = run_train(*flags, RESET, "--num_epochs=2", f"--model_dir={tmp_path}/model", code=2)
    assert f"{RESET} needs the number of records in an epoch" in done.stderr
