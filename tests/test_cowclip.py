"""CowClip against slow loops; test_two_hundred_steps.py has it in whole steps."""

import collections

import numpy as np
import pytest
from conftest import mode_of

from deepfm.config import ModelConfig, OptimizerConfig
from deepfm.kernels.compiled import COMPILED
from deepfm.kernels.ops import TENSORFLOW
from deepfm.model import embeddings
from deepfm.model.model_fn import make_model_fn
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
F, V, K = 3, 20, 4
MODEL = ModelConfig(F, V, K, (5,), (0.0,), embedding_init_stddev=0.3, l2_reg=0.01)
SGD = OptimizerConfig("sgd", 1.0, l2_rows=0.01, cowclip_ratio=0.01, cowclip_min_norm=0.001)


def batch(examples, counts=None, seed=0):
    """The features of a batch; what fills up a row of fewer values than another has id 0."""
    random = np.random.RandomState(seed)
    lengths = np.full(examples, F) if counts is None else np.sum(counts, axis=1)
    ids = random.randint(1, V, [examples, max(lengths)])
    ids[np.arange(max(lengths)) >= lengths[:, np.newaxis]] = 0
    features = {"feat_ids": ids.astype(np.int64), "feat_vals": random.rand(*ids.shape)}
    features["feat_vals"] = features["feat_vals"].astype(np.float32)
    if counts is not None:
        features["feat_counts"] = np.int32(counts)
    return features


def occurrences(features, there):
    """{id: count} that the model finds."""
    with tf.Graph().as_default(), v1.Session() as session:
        values = embeddings.values_of({k: tf.constant(x) for k, x in features.items()}, MODEL)
        found = embeddings.look_up(values, MODEL, True, TENSORFLOW).occurrences(there)
        return dict(zip(*session.run(found)))


@pytest.mark.parametrize("ops", [TENSORFLOW, COMPILED], ids=["plain", "compiled"])
def test_the_terms_that_another_layer_takes_are_those_of_the_first_layer(ops):
    """docs/extending.md adds such a layer."""
    kernel = np.random.RandomState(1).randn(F * K, 2).astype(np.float32)
    with tf.Graph().as_default(), v1.Session() as session:
        features = {k: tf.constant(x) for k, x in batch(5).items()}
        tables = embeddings.look_up(embeddings.values_of(features, MODEL), MODEL, True, ops)
        (embedded, fm), (product, same) = tables.terms(), tables.project(kernel)
        session.run(v1.global_variables_initializer())
        embedded, fm, product, same = session.run([embedded, fm, product, same])
    assert np.abs(embedded).max() > 0.1
    np.testing.assert_allclose(product, embedded @ kernel, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(same, fm, rtol=1e-4, atol=1e-6)


COUNTS = [[1, 1, 1], [2, 0, 3], [0, 0, 0], [1, 4, 1], [0, 1, 0]]


@pytest.mark.parametrize("counts", [None, COUNTS], ids=["one value", "several values"])
@pytest.mark.parametrize("there", [None, [True, True, True, False, False]], ids=["all", "padded"])
def test_occurrences_are_those_of_every_value_of_an_example_that_counts(counts, there):
    features = batch(5, counts)
    wanted = collections.Counter()
    for i, ids in enumerate(features["feat_ids"]):
        mine = ids if counts is None else ids[: sum(counts[i])]
        for id in mine:
            wanted[id] += there is None or there[i]
    found = occurrences(features, there)
    assert 0 in found.values() or there is None  # an id of padded examples alone
    assert found == dict(wanted)


def test_a_batch_without_examples_has_no_occurrences():
    assert occurrences(batch(5, COUNTS[2:3] * 5), None) == {}


@pytest.mark.parametrize("indices", [np.int32, np.int64])
@pytest.mark.parametrize("ops", [TENSORFLOW, COMPILED], ids=["tensorflow", "kernels"])
@pytest.mark.parametrize("shape", [(6, K), (6,)])
def test_a_row_is_clipped_to_its_norm_times_its_occurrences(shape, ops, indices):
    random = np.random.RandomState(1)
    rows, counts = random.randn(*shape), np.array([1.0, 3, 2, 1, 5, 0])
    grad = random.randn(*shape) * np.logspace(-3, 1, 6).reshape([-1] + [1] * (len(shape) - 1))
    rows[2], grad[[3, 5]] = 0, 0
    wanted = grad.copy()
    for i, count in enumerate(counts):
        norm = np.linalg.norm(grad[i])
        limit = count * max(0.1 * np.linalg.norm(rows[i]), 0.01)
        if norm > limit:
            wanted[i] *= limit / norm
    values = np.column_stack([grad, counts]).astype(np.float32)
    with tf.Graph().as_default(), v1.Session() as session:
        start = np.concatenate([rows[::-1], rows]).astype(np.float32)
        table = v1.get_variable("table", initializer=start, use_resource=True)
        session.run(table.initializer)
        where = tf.constant(np.arange(6, 12), indices)
        found = session.run(ops.clip_rows(table, where, tf.constant(values), 0.1, 0.01))
    assert not np.allclose(wanted, grad) and np.allclose(wanted[0], grad[0])
    assert found.shape == shape
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


def trained(optimizer, partitioner=None, ops=TENSORFLOW):
    """(the graph, the weights after three steps by name)."""
    with tf.Graph().as_default() as graph, v1.Session() as session:
        features = {name: tf.constant(x) for name, x in batch(16).items()}
        make = make_model_fn(MODEL, optimizer, mode_of(partitioner=partitioner), ops)
        labels = tf.constant(np.arange(16) % 2, tf.float32)
        spec = make(features, labels, tf.estimator.ModeKeys.TRAIN)
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(spec.train_op)
        parts = collections.defaultdict(list)
        for variable in v1.trainable_variables():
            parts[variable.op.name.split("/part_")[0]].append(session.run(variable))
        return graph, {name: np.concatenate(x) for name, x in parts.items()}


@pytest.mark.parametrize("parts", [pytest.param(2, marks=pytest.mark.table), 3])
def test_parts_of_a_table_count_their_own_rows(parts):
    _, whole = trained(SGD)
    _, found = trained(SGD, v1.fixed_size_partitioner(parts))
    for name, value in whole.items():
        np.testing.assert_allclose(found[name], value, atol=1e-5, err_msg=name)
    _, plain = trained(SGD._replace(cowclip_ratio=0.0))
    assert not np.allclose(plain["fm_v"], whole["fm_v"], atol=1e-3)


def test_without_it_a_step_counts_nothing():
    kinds = lambda optimizer: {op.type for op in trained(optimizer)[0].get_operations()}
    assert "Bincount" in kinds(SGD)
    assert "Bincount" not in kinds(SGD._replace(cowclip_ratio=0.0))


@pytest.mark.parametrize("rows, shape", [([V], (1, K + 1)), ([0], (1, K)), ([0], (2, K + 1))])
def test_the_kernel_refuses_rows_that_do_not_fit(rows, shape):
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_variable("table", [V, K], use_resource=True)
        session.run(table.initializer)
        clipped = COMPILED.clip_rows(table, tf.constant(rows), tf.ones(shape), 0.1, 0.01)
        with pytest.raises(tf.errors.InvalidArgumentError):
            session.run(clipped)
