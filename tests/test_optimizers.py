"""Row-wise updates against plain numpy."""

import numpy as np
import pytest
from conftest import mode_of

from deepfm import modes
from deepfm.config import ModeFlags, ModelConfig, OptimizerConfig
from deepfm.errors import BadInput
from deepfm.model import optimizers
from deepfm.modes.common.mode import Mode
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
ROWS = np.array([[1.0, -2.0], [0.5, 3.0]], np.float32)
WHERE = np.array([4, 1])


def apply(name, steps, lazy=True, replicas=1, l2=0.0, rows=ROWS, where=WHERE):
    """A table of 6 rows after `steps` equal row gradients; returns (before, after)."""
    with tf.Graph().as_default(), v1.Session() as session:
        start = np.arange(12, dtype=np.float32).reshape(6, 2)
        table = v1.get_variable("table", initializer=start, use_resource=True)
        config = OptimizerConfig(name, 0.1, l2_rows=l2, lazy_updates=lazy)
        optimizer = optimizers.make_optimizer(
            config, mode_of(replicas_per_process=replicas, replicas_in_step=replicas)
        )
        grad = tf.IndexedSlices(tf.constant(rows), tf.constant(where), tf.constant([6, 2]))
        train = optimizer.apply_gradients([(grad, table)])
        session.run(v1.global_variables_initializer())
        for _ in range(steps):
            session.run(train)
        return start, session.run(table)


@pytest.mark.parametrize("name", list(optimizers.OPTIMIZERS))
def test_a_lazy_step_touches_the_rows_of_its_batch_only(name):
    before, after = apply(name, steps=3)
    changed = np.flatnonzero((before != after).any(axis=1))
    assert sorted(changed) == sorted(WHERE)


@pytest.mark.parametrize("name", list(optimizers.OPTIMIZERS))
def test_rows_sent_twice_by_replicas_count_as_their_sum(name):
    _, once = apply(name, steps=2)
    halves = np.concatenate([ROWS / 2, ROWS / 2])
    _, twice = apply(name, steps=2, replicas=2, rows=halves, where=np.concatenate([WHERE, WHERE]))
    np.testing.assert_allclose(once, twice, rtol=1e-6)


def test_l2_counts_a_row_that_two_replicas_sent_once():
    zeros = np.zeros_like(ROWS)
    before, after = apply(
        "sgd", 1, replicas=2, l2=0.5, rows=np.concatenate([zeros, zeros]),
        where=np.concatenate([WHERE, WHERE]),
    )  # fmt: skip
    expected = before.copy()
    expected[WHERE] -= 0.1 * 0.5 * before[WHERE]
    np.testing.assert_allclose(after, expected, rtol=1e-6)


def test_dense_momentum_moves_rows_that_the_batch_no_longer_holds():
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_variable("table", initializer=tf.ones([4, 1]), use_resource=True)
        config = OptimizerConfig("momentum", 0.1, lazy_updates=False)
        optimizer = optimizers.make_optimizer(config, Mode())
        where = v1.placeholder(tf.int64, [1])
        grad = tf.IndexedSlices(tf.ones([1, 1]), where, tf.constant([4, 1]))
        train = optimizer.apply_gradients([(grad, table)])
        session.run(v1.global_variables_initializer())
        session.run(train, {where: [0]})
        first = session.run(table)[0, 0]
        session.run(train, {where: [3]})
        assert session.run(table)[0, 0] == pytest.approx(first - 0.1 * 0.95)


@pytest.mark.parametrize("name", list(optimizers.OPTIMIZERS))
def test_every_optimizer_does_the_same_under_a_mirrored_strategy(name):
    expected = apply(name, steps=2)[1]
    mode = modes.make("mirrored", ModeFlags(replicas_per_process=1))

    def step():
        start = np.arange(12, dtype=np.float32).reshape(6, 2)
        table = v1.get_variable("table", initializer=start, use_resource=True)
        optimizer = optimizers.make_optimizer(OptimizerConfig(name, 0.1), mode)
        grad = tf.IndexedSlices(tf.constant(ROWS), tf.constant(WHERE), tf.constant([6, 2]))
        return table, optimizer.apply_gradients([(grad, table)])

    strategy = mode.strategy
    of_replicas = strategy.experimental_local_results
    with tf.Graph().as_default(), v1.Session(config=mode.session_config) as session:
        with strategy.scope():
            table, train = map(of_replicas, strategy.experimental_run_v2(step))
        session.run(v1.global_variables_initializer())
        for _ in range(2):
            session.run(train)
        found = session.run(table[0])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("rate_of_tables", [None, 0.2])
def test_a_plateau_cuts_the_rates_of_tables_and_of_other_weights(rate_of_tables):
    with tf.Graph().as_default(), v1.Session() as session:
        names = "fm_v", "kernel"
        variables = [v1.get_variable(x, [2], use_resource=True) for x in names]
        config = OptimizerConfig("sgd", 0.1, embedding_learning_rate=rate_of_tables)
        optimizer = optimizers.make_optimizer(config, Mode())
        train = optimizer.apply_gradients([(tf.ones([2]), x) for x in variables])
        session.run(v1.global_variables_initializer())
        (decay,) = [x for x in v1.global_variables() if x.op.name == optimizers.DECAY]
        decay.load(0.25, session)
        before = session.run(variables)
        session.run(train)
        moved = np.subtract(before, session.run(variables))
        np.testing.assert_allclose(moved[0], 0.25 * (rate_of_tables or 0.1), rtol=1e-5)
        np.testing.assert_allclose(moved[1], 0.25 * 0.1, rtol=1e-5)


def test_the_slots_of_ftrl_have_the_names_of_earlier_checkpoints():
    def names(make):
        with tf.Graph().as_default():
            table = v1.get_variable("table", initializer=tf.ones([4, 1]), use_resource=True)
            make(0.1).apply_gradients([(tf.ones([4, 1]), table)])
            return [v.op.name for v in v1.global_variables()]

    assert names(optimizers.OPTIMIZERS["ftrl"].make) == names(v1.train.FtrlOptimizer)


@pytest.mark.parametrize("rates", [{"learning_rate": 0.0}, {"embedding_learning_rate": 0.0}])
def test_a_rate_of_0_is_refused_by_ftrl_alone(rates):
    with pytest.raises(BadInput, match="ftrl divides by its rate"):
        optimizers.complete(OptimizerConfig("ftrl", **rates), ModelConfig(3, 9))
    assert optimizers.complete(OptimizerConfig("adam", **rates), ModelConfig(3, 9))


def test_the_flag_takes_each_optimizer():
    assert OptimizerConfig.settings["name"].choices == tuple(optimizers.OPTIMIZERS)
