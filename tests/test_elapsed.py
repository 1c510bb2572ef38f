"""--l2_scope=elapsed: an update of a row covers all steps since the row was last in a batch."""

import numpy as np
import pytest
from conftest import both_ops, mode_of, run_train
from test_resume import STEPS, data, job  # noqa: F401

from deepfm.config import ModelConfig, OptimizerConfig
from deepfm.kernels.ops import TENSORFLOW
from deepfm.model import optimizers
from deepfm.model.model_fn import make_model_fn
from deepfm.modes.common.mode import Mode
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
RATE, BETA1, BETA2, EPSILON, L2 = 0.001, 0.9, 0.999, 1e-8, 0.003


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default():
        yield


def visits(rows, width, steps, each=lambda t: None):
    """(step, the rows of its batch, their gradients) of each; row i comes in 1 of i + 1 steps."""
    random = np.random.RandomState(0)
    for t in range(1, steps + 1):
        which = np.flatnonzero(random.rand(rows) < 1 / (1 + np.arange(rows)))
        yield t, which, np.float32(1e-3 * random.randn(len(which), width) + 2e-4)


class Table:
    """A table with the slots of Adam, updated by `ops`."""

    def __init__(self, ops, rows, width, l2, run_step=0):
        start = np.random.RandomState(1).randn(rows, width).astype(np.float32) / 10
        make = lambda name, value: v1.get_variable(name, initializer=value, use_resource=True)
        self.variables = [make("w", start), *(make(n, np.zeros_like(start)) for n in "mv")]
        self.seen = make("seen", np.zeros(rows, np.int64))
        self.rows = v1.placeholder(tf.int32, [None])
        self.grad = v1.placeholder(tf.float32, [None, width])
        self.now = v1.placeholder(tf.int64, [])
        self.rate = v1.placeholder(tf.float32, [])
        numbers = self.rate, tf.constant(BETA1), tf.constant(BETA2), tf.constant(EPSILON)
        of_rows = self.rows, self.grad
        self.lazy = ops.adam_rows(*self.variables, *of_rows, *numbers, l2=l2)
        self.elapsed = ops.elapsed_adam(
            *self.variables, self.seen, *of_rows, self.now, run_step, *numbers, l2=l2
        )

    def after(self, update, batches, first=0):
        """(w, m, v, seen) after the updates of `visits`, whose steps are counted from `first`."""
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for t, which, grad in batches:
                numbers = {self.now: first + t, self.rate: corrected(t)}
                session.run(update, {self.rows: which, self.grad: grad, **numbers})
            return session.run([*self.variables, self.seen])


def corrected(t):
    return RATE * np.sqrt(1 - BETA2**t) / (1 - BETA1**t)


def by_the_book(start, batches, l2, run_step=0, first=0):
    w, seen = start.astype(np.float64), np.zeros(len(start))
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, which, grad in batches:
        for i, g in zip(which, grad.astype(np.float64)):
            n = max(first + t - max(seen[i], run_step), 1)
            m[i] = BETA1 * m[i] + (1 - BETA1) * g
            v[i] = BETA2**n * v[i] + (1 - BETA2) * g**2
            scale = np.sqrt(v[i]) + EPSILON
            w[i] -= corrected(t) * sum(BETA1**j for j in range(int(n))) * m[i] / scale
            w[i] /= 1 + corrected(t) * l2 * n / scale
            m[i] *= BETA1 ** (n - 1)
            seen[i] = first + t
    return w, m, v, seen


@both_ops
@pytest.mark.parametrize("width", [1, 3, 40])
@pytest.mark.parametrize("first, run_step", [(0, 0), (500, 480), (2**27, 2**27), (2**33, 2**33)])
def test_each_row_moves_by_its_formula(ops, width, first, run_step):
    table = Table(ops, 70, width, L2, run_step)
    found = table.after(table.elapsed, visits(70, width, 400), first)
    start = np.random.RandomState(1).randn(70, width).astype(np.float32) / 10
    expected = by_the_book(start, visits(70, width, 400), L2, run_step, first)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5 * np.abs(other).max())


@both_ops
@pytest.mark.parametrize("steps", [1025, 3000, 2**25])
def test_the_moments_of_a_row_that_returns_late_have_decayed(ops, steps):
    table = Table(ops, 3, 2, l2=0.0)
    grad = np.full((3, 2), 0.5, np.float32)
    visits = [(1, np.arange(3), grad), (1 + steps, np.arange(3), grad)]
    v = table.after(table.elapsed, visits)[2]
    np.testing.assert_allclose(v, 0.001 * 0.25 * (1 + BETA2**steps), rtol=1e-4)


def dense_adam(start, batches, l2):
    """Adam on the whole table in each step, with L2 in the gradient."""
    w = start.astype(np.float64)
    m, v = np.zeros_like(w), np.zeros_like(w)
    for t, which, grad in batches:
        g = l2 * w
        g[which] += grad
        m = BETA1 * m + (1 - BETA1) * g
        v = BETA2 * v + (1 - BETA2) * g**2
        w -= corrected(t) * m / (np.sqrt(v) + EPSILON)
    return w


def test_rare_rows_end_near_those_of_dense_adam():
    """Dense Adam has no closed form; lazy Adam's rows end several times as far from its."""
    rows, width, steps = 60, 16, 4000
    table = Table(TENSORFLOW, rows, width, L2)
    start = np.random.RandomState(1).randn(rows, width).astype(np.float32) / 10
    dense = dense_adam(start, visits(rows, width, steps), L2)
    off = lambda update: np.sqrt(
        np.mean((table.after(update, visits(rows, width, steps))[0] - dense)[10:] ** 2)
    )
    assert off(table.elapsed) < off(table.lazy) / 3


def test_only_adam_on_the_batchs_rows_covers_elapsed_steps():
    config = optimizers.complete(OptimizerConfig("adam"), ModelConfig(3, 9, l2_scope="elapsed"))
    assert config.elapsed
    assert not optimizers.loss_has_l2_of_rows(config, Mode())  # the optimizer adds it
    assert not optimizers.complete(OptimizerConfig("adam"), ModelConfig(3, 9)).elapsed


def add_training(parts):
    """Adds training with tables in parts to the graph; returns (placeholder of the ids, step)."""
    config = ModelConfig(3, 30, 4, (4,), (0.0,), embedding_init_stddev=0.1, l2_scope="elapsed")
    how = optimizers.complete(OptimizerConfig("adam"), config._replace(l2_reg=L2))
    batch = v1.placeholder(tf.int64, [8, 3])
    features = {"feat_ids": batch, "feat_vals": tf.ones([8, 3])}
    partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
    make = make_model_fn(config, how, mode_of(partitioner=partitioner))
    labels = tf.constant([0.0, 1.0] * 4)
    return batch, make(features, labels, tf.estimator.ModeKeys.TRAIN).train_op


def saved_after_steps(folder, parts):
    """The tensors of a checkpoint after six steps with tables in parts."""
    random = np.random.RandomState(0)
    ids = random.randint(0, 30, [6, 8, 3])
    with tf.Graph().as_default(), v1.Session() as session:
        batch, step = add_training(parts)
        session.run(v1.global_variables_initializer())
        for each in ids:
            session.run(step, {batch: each})
        path = v1.train.Saver().save(session, str(folder / "model"))
    names = [name for name, _ in tf.train.list_variables(path)]
    return {name: tf.train.load_variable(path, name) for name in names}


def test_parts_of_a_table_keep_their_rows_steps(tmp_path):
    """So that a checkpoint means the same whatever number of servers wrote it."""
    whole = saved_after_steps(tmp_path, 1)
    parts = saved_after_steps(tmp_path, 3)
    assert whole[f"fm_v/{optimizers.SEEN}"].shape == (30,)
    for name, value in whole.items():
        np.testing.assert_allclose(parts[name], value, atol=1e-5, err_msg=name)


def test_the_rows_steps_pull_no_table_from_its_gpu():
    """GPUs cannot gather int64, and TensorFlow moves whatever is colocated with such a variable."""
    with tf.Graph().as_default() as graph:
        add_training(1)
        handle = graph.get_operation_by_name(f"fm_v/{optimizers.SEEN}")
        assert handle.colocation_groups() == [b"loc:@" + handle.name.encode()]


def test_an_older_checkpoint_goes_on(data, tmp_path):  # noqa: F811
    """It has no `seen`: its rows, which are up to date, count from the restart."""
    flags = job(data, tmp_path / "model")
    run_train(*flags, "--num_epochs=1", "--l2_scope=batch", code=0)
    done = run_train(*flags, "--num_epochs=2", "--l2_scope=elapsed", code=0)
    path = tf.train.latest_checkpoint(str(tmp_path / "model"))
    step = tf.train.load_variable(path, "global_step")
    seen = tf.train.load_variable(path, f"fm_v/{optimizers.SEEN}")
    assert seen.max() == step and f"fm_v/{optimizers.SEEN}" in done.stderr
    assert seen.min() == STEPS  # of ids that no record has
