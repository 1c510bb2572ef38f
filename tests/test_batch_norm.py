"""Batch norm of the global batch, against plain numpy and against tf.layers."""

import mode_steps
import numpy as np
import pytest
import test_model

from deepfm.config import ModelConfig
from deepfm.model.layers import batch_norm
from deepfm.model.layers.batch_norm import BatchPart
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
N, DECAY, EPSILON = 3, 0.75, 1e-3
NAMES = ["gamma", "beta", "moving_mean", "moving_variance"]


def examples(rows, seed=0, mean=0.5):
    """(x [rows, N], the gradient of a loss by y [rows, N])."""
    random = np.random.RandomState(seed)
    x = mean + random.randn(rows, N) * [0.1, 1, 3]
    return x.astype(np.float32), random.randn(rows, N).astype(np.float32)


def start():
    """{name: value} that hides no term."""
    random = np.random.RandomState(7)
    values = [random.rand(N) + 0.5, random.randn(N), random.randn(N), random.rand(N) + 1]
    return {name: value.astype(np.float32) for name, value in zip(NAMES, values)}


def by_the_paper(x, counts, gamma, beta):
    """(y, mean, variance) of algorithm 1, whose batch is the examples that count."""
    batch = x[counts > 0]
    mean = sum(batch) / len(batch)
    variance = sum((batch - mean) ** 2) / len(batch)
    return gamma * (x - mean) / np.sqrt(variance + EPSILON) + beta, mean, variance


def numeric_gradients(x, counts, by_y, gamma, beta):
    """Central differences of sum(y * by_y) by x, gamma and beta, in float64."""
    values = {"x": x, "gamma": gamma, "beta": beta}
    values = {name: value.astype(np.float64) for name, value in values.items()}
    loss = lambda at: np.sum(by_the_paper(at["x"], counts, at["gamma"], at["beta"])[0] * by_y)
    return [test_model.numeric_gradient(loss, values, name) for name in values]


def run(build, xs, by_ys):
    """A step of a layer: what comes out, its gradients, and its variables afterwards.

    Args:
        build: (the number of a replica, its x) -> its y.
        xs, by_ys: float32 [B, N], of each replica.
    """
    with tf.Graph().as_default(), v1.Session() as session:
        xs = [v1.placeholder_with_default(x, [None, N]) for x in xs]
        ys = [build(i, x) for i, x in enumerate(xs)]
        variables = {v.op.name.split("/")[-1]: v for v in v1.global_variables()}
        loss = tf.add_n([tf.reduce_sum(y * by_y) for y, by_y in zip(ys, by_ys)])
        by = tf.gradients(loss, [*xs, variables["gamma"], variables["beta"]])
        session.run(v1.global_variables_initializer())
        for name, value in start().items():
            variables[name].load(value, session)
        y, by, _ = session.run([ys, by, v1.get_collection(v1.GraphKeys.UPDATE_OPS)])
        found = session.run(variables)
    return np.concatenate(y), [np.concatenate(by[:-2]), *by[-2:]], found


def run_parts(sizes, x, by_y, counts):
    """A step of towers that have `sizes` examples each."""
    replicas = mode_steps.make_mode("tower", len(sizes))
    cut = lambda values: np.split(values, np.cumsum(sizes)[:-1])
    counts = cut(counts.astype(np.float32))

    def build(i, x):
        with v1.variable_scope("", reuse=i > 0, use_resource=True):
            part = BatchPart(tf.constant(counts[i]), replicas.stack, replicas.owns_variables())
            return batch_norm.batch_norm(x, "batch_norm_0", DECAY, part)

    return run(build, cut(x), cut(by_y))


# Examples of each replica, and how many of all at the end only fill up.
DIVISIONS = {
    "one": ([7], 0),
    "equal": ([4, 4], 0),
    "unequal": ([5, 1, 2], 0),
    "one has none": ([5, 0], 0),
    "fillers": ([3, 3, 3], 2),
    "one has fillers alone": ([3, 3, 3], 4),
    "a single example": ([1, 1, 1], 2),
}


@pytest.mark.parametrize("division", DIVISIONS)
def test_parts_are_normalized_as_the_global_batch_and_so_are_their_gradients(division):
    sizes, fillers = DIVISIONS[division]
    x, by_y = examples(sum(sizes))
    counts = np.arange(len(x)) < len(x) - fillers
    by_y *= counts[:, np.newaxis]  # fillers have no loss
    y, by, after = run_parts(sizes, x, by_y, counts)
    before = start()
    gamma, beta = before["gamma"], before["beta"]
    expected, mean, variance = by_the_paper(x.astype(np.float64), counts, gamma, beta)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
    for found, gradient in zip(by, numeric_gradients(x, counts, by_y, gamma, beta)):
        np.testing.assert_allclose(found, gradient, rtol=1e-3, atol=1e-3)
    # Once in a step, however many replicas share them.
    for name, value in (("moving_mean", mean), ("moving_variance", variance)):
        moved = DECAY * before[name] + (1 - DECAY) * value
        np.testing.assert_allclose(after[name], moved, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_large_mean_costs_the_variance_no_digits():
    x, by_y = examples(64, mean=1000)
    everything = np.ones(64, bool)
    _, _, after = run_parts([40, 24], x, by_y, everything)
    _, _, variance = by_the_paper(x.astype(np.float64), everything, 1, 0)
    moved = DECAY * start()["moving_variance"] + (1 - DECAY) * variance
    np.testing.assert_allclose(after["moving_variance"], moved, rtol=1e-5)


def test_a_step_without_examples_moves_nothing_and_is_finite():
    y, by, after = run_parts([2, 0], *examples(2), np.zeros(2, bool))
    assert all(np.isfinite(values).all() for values in (y, *by))
    for name, value in start().items():
        np.testing.assert_array_equal(after[name], value, err_msg=name)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("epsilon", [EPSILON, 0.7])
def test_a_replica_alone_does_what_tf_layers_does(training, epsilon):
    x, by_y = examples(50)

    def ours(_, x):
        with v1.variable_scope("", use_resource=True):
            part = BatchPart() if training else None
            return batch_norm.batch_norm(x, "batch_norm_0", DECAY, part, epsilon)

    def tf_layers(_, x):
        with v1.variable_scope("", use_resource=True):
            return v1.layers.batch_normalization(
                x, momentum=DECAY, epsilon=epsilon, training=training, name="batch_norm_0"
            )

    (y, by, after), (expected_y, expected_by, expected_after) = (
        run(build, [x], [by_y]) for build in (ours, tf_layers)
    )
    np.testing.assert_allclose(y, expected_y, rtol=1e-5, atol=1e-5)
    for found, expected in zip(by, expected_by):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert set(after) == set(expected_after) == set(NAMES)
    for name in NAMES:
        np.testing.assert_allclose(after[name], expected_after[name], rtol=1e-6, err_msg=name)


def build(training):
    """The EstimatorSpec of a model with batch norm in the default graph."""
    config = ModelConfig(4, 50, 8, (6, 5), (0.0, 0.0), batch_norm=True)
    mode = tf.estimator.ModeKeys.TRAIN if training else tf.estimator.ModeKeys.PREDICT
    return test_model.build(config, mode, optimizer="adam", use_amp=training)[0]


def test_the_variables_are_those_of_earlier_checkpoints_and_exports_hold_nothing_new():
    with tf.Graph().as_default() as graph:
        build(training=False)
        found = {v.op.name: v for v in v1.global_variables() if "batch_norm" in v.op.name}
        assert {name: v.shape.as_list() for name, v in found.items()} == {
            f"batch_norm_{i}/{name}": [units] for i, units in ((0, 6), (1, 5)) for name in NAMES
        }
        trained = {v.op.name for v in v1.trainable_variables()}
        assert {name for name in found if name in trained} == {
            f"batch_norm_{i}/{name}" for i in range(2) for name in ("gamma", "beta")
        }
        operations = graph.as_graph_def().node
        assert "IdentityN" not in {node.op for node in operations}
        assert not [node.name for node in operations if "_gradient_op_type" in node.attr]


def test_mixed_precision_keeps_all_of_batch_norm_in_float32():
    """The rewrite is TensorFlow's own, for a GPU that is claimed."""
    from tensorflow.core.protobuf import device_properties_pb2 as devices
    from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig
    from tensorflow.python.grappler import cluster, tf_optimizer

    claim = lambda kind, **properties: devices.NamedDevice(
        name=f"/job:localhost/replica:0/task:0/device:{kind}:0",
        properties=devices.DeviceProperties(type=kind, num_cores=4, frequency=1000, **properties),
    )
    gpu = claim("GPU", environment={"architecture": "7.0"})
    config = v1.ConfigProto()
    options = config.graph_options.rewrite_options
    options.auto_mixed_precision = RewriterConfig.ON
    options.optimizers.append("auto_mixed_precision")
    options.min_graph_nodes = -1
    with tf.Graph().as_default() as graph:
        with tf.device("/gpu:0"):
            v1.add_to_collection("train_op", build(training=True).train_op)
        built = v1.train.export_meta_graph(graph=graph)
        there = cluster.Cluster(devices=[claim("CPU"), gpu])
        rewritten = tf_optimizer.OptimizeGraph(config, built, cluster=there)
    half = tf.float16.as_datatype_enum
    in_half = [node for node in rewritten.node if node.attr["T"].type == half]
    assert {"deep_0/MatMul", "deep_1/MatMul"} <= {node.name for node in in_half}
    # A gradient that leaves batch norm may be handed on as what the product before takes.
    others = [node.name for node in in_half if node.op != "Identity"]
    assert [name for name in others if "batch_norm" in name] == []
