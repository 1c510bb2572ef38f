"""The compiled kernels against TensorFlow's own ops, which do the same."""

import contextlib
import fcntl
import functools
import os
import pathlib
import subprocess

import numpy as np
import psutil
import pytest
import test_model
from conftest import (
    both_ops,
    callable_of,
    compiler,
    copying_compiler,
    encoded,
    make_records,
    mode_of,
    run_python,
    run_train,
    small_training,
    write_payloads,
)

from deepfm.config import ModelConfig, OptimizerConfig
from deepfm.data import libsvm, records
from deepfm.kernels import build, compiled, reading
from deepfm.kernels.compiled import COMPILED
from deepfm.kernels.ops import TENSORFLOW
from deepfm.model import embeddings, optimizers
from deepfm.model.layers import terms
from deepfm.model.model_fn import make_model_fn
from deepfm.modes.common.mode import Mode
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
THREADS = v1.ConfigProto(intra_op_parallelism_threads=4)
THREADS.graph_options.rewrite_options.disable_meta_optimizer = True
F, V, K = 5, 200, 9
refused = functools.partial(pytest.raises, tf.errors.InvalidArgumentError)
REPLACED = ("SparseTensorDenseMatMul", "StatelessRandomUniformInt", "ResourceGather", "Unique")


def test_setup_has_built_them():
    assert compiled.built()


def evaluate(*tensors):
    with v1.Session(config=THREADS) as session:
        session.run(v1.global_variables_initializer())
        return session.run(tensors)


def assert_equal(found, wanted):
    for one, other in zip(found, wanted):
        np.testing.assert_array_equal(one, other)


def types_of(graph):
    return {op.type for op in graph.get_operations()}


def variables_of(start, *names):
    """Resource variables that begin alike."""
    return [v1.get_variable(name, initializer=start, use_resource=True) for name in names]


MOMENTS = "variable", "m", "v"
NUMBERS = 0.1, 0.9, 0.999, 1e-8  # of Adam: rate, betas, epsilon


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default():
        yield


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize(
    "ids",
    [
        [],
        [7],
        [3, 3, 3],
        np.random.RandomState(0).randint(0, 50, 1000),
        np.random.RandomState(1).permutation(10000),
        np.arange(0, 1 << 31, 1 << 16)[:-1].repeat(2),  # differ in their high bits alone
    ],
    ids=["none", "one", "same", "repeated", "all distinct", "far apart"],
)
def test_unique_is_that_of_tensorflow(ids, dtype):
    ids = np.array(ids, np.int64)
    found, wanted = COMPILED.unique(tf.constant(ids), dtype), tf.unique(tf.constant(ids))
    distinct, where, *wanted = evaluate(*found, *wanted)
    assert_equal([distinct, where], wanted)
    assert distinct.dtype == dtype.as_numpy_dtype


def rows_of_batch(examples):
    """(weights [U], embeddings [U, K], where [N], x [N])."""
    random = np.random.RandomState(0)
    where = random.randint(0, V, examples * F).astype(np.int32)
    floats = lambda *shape: random.randn(*shape).astype(np.float32)
    return floats(V), floats(V, K), where, floats(examples * F)


def look_up(w, v, where, x):
    return COMPILED.look_up(*map(tf.convert_to_tensor, (w, v, where, x)), None, F, None)


@pytest.mark.parametrize("examples", [0, 1, 1000])
def test_look_up_is_its_formula_and_has_its_gradient(examples):
    w, v, where, x = map(tf.constant, rows_of_batch(examples))
    random = np.random.RandomState(1)
    by = [tf.constant(random.randn(examples, *n), tf.float32) for n in ([F * K], [])]
    e = tf.reshape(tf.gather(v, where) * x[:, tf.newaxis], [examples, F, K])
    weighted = tf.reshape(tf.gather(w, where) * x, [examples, F])
    fm = terms.first_order(weighted) + terms.second_order(e)
    both = look_up(w, v, where, x), [tf.reshape(e, [examples, F * K]), fm]
    found, wanted = ([*y, *map(tf.convert_to_tensor, tf.gradients(y, [w, v], by))] for y in both)
    found, wanted = evaluate(found, wanted)
    np.testing.assert_allclose(found[0], wanted[0])
    for one, other in zip(found, wanted):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def pairs_of(where, x, num_ids, fields, counts=(), mean=False):
    counts = tf.constant(counts, tf.int32)
    return build.raw_ops().deepfm_pairs(where, x, counts, num_ids, field_size=fields, mean=mean)


def first_layer(w, v, where, x, kernel, fields, counts=(), mean=False):
    pairs = pairs_of(where, x, tf.shape(w)[0], fields, counts, mean)
    return build.raw_ops().deepfm_first_layer(w, v, kernel, *pairs)[:2]


BATCHES = {
    "an id in one field each": lambda random, fields: (
        20 * fields + random.randint(0, 20, fields.shape)
    ),
    "ids in several fields": lambda random, fields: random.randint(0, 100, fields.shape),
    "one id": lambda random, fields: np.full(fields.shape, 3),
}
COUNTS = {
    "one value each": lambda random, places: np.ones(places, np.int32),
    "0 to 3 values": lambda random, places: random.randint(0, 4, places),
    "no values": lambda random, places: np.zeros(places, np.int32),
}


@pytest.mark.parametrize("counted, mean", [(c, m) for c in COUNTS for m in (False, True)])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    "examples, width, units", [(0, 8, 16), (1, 1, 1), (300, 32, 128), (999, 9, 50)]
)
def test_the_first_layer_on_distinct_pairs_is_the_product_of_the_whole_matrix(
    examples, width, units, batch, counted, mean
):
    random = np.random.RandomState(5)
    counts = COUNTS[counted](random, examples * F)
    place = np.repeat(np.arange(examples * F), counts)  # of each value: b F + f
    distinct, where = np.unique(batch(random, place % F), return_inverse=True)
    shapes = [len(distinct)], [len(distinct), width], [len(place)], [F * width, units]
    w, v, x, kernel = (random.randn(*shape) for shape in shapes)
    by_y, by_fm = random.randn(examples, units), random.randn(examples)
    factor = x / counts[place] if mean else x  # in float64, as all that is wanted
    e = np.zeros([examples * F, width])
    np.add.at(e, place, v[where] * factor[:, np.newaxis])
    e = e.reshape(examples, F, width)
    total = e.sum(axis=1, keepdims=True)
    linear = np.zeros(examples)
    np.add.at(linear, place // F, w[where] * factor)
    fm = linear + 0.5 * (np.sum(total[:, 0] ** 2, axis=1) - np.sum(e**2, axis=(1, 2)))
    by_e = (by_y @ kernel.T).reshape(e.shape) + by_fm[:, np.newaxis, np.newaxis] * (total - e)
    by_v, by_w = np.zeros_like(v), np.zeros_like(w)
    np.add.at(by_v, where, by_e.reshape(-1, width)[place] * factor[:, np.newaxis])
    np.add.at(by_w, where, by_fm[place // F] * factor)
    matrix = e.reshape(examples, F * width)
    wanted = matrix @ kernel, fm, by_w, by_v, matrix.T @ by_y

    given = [tf.constant(a, tf.float32) for a in (w, v, x, kernel)]
    tensors = given[0], given[1], tf.constant(where, tf.int32), given[2], given[3]
    outputs = first_layer(*tensors, F, counts, mean)
    by = [tf.constant(a, tf.float32) for a in (by_y, by_fm)]
    gradients = tf.gradients(outputs, [given[0], given[1], given[3]], by)
    for one, other in zip(evaluate(*outputs, *gradients), wanted):
        least = 1e-3 if counted == "one value each" else 1  # sums of several values may cancel
        scale = max(least, np.abs(other).max(initial=0))
        np.testing.assert_allclose(one / scale, other / scale, atol=3e-6)


@pytest.mark.parametrize("counts", [None, np.arange(1000 * F) % 3])
def test_the_first_layer_is_the_same_on_any_number_of_threads(counts):
    w, v, where, x = map(tf.constant, rows_of_batch(1000))
    random = np.random.RandomState(1)
    kernel, by_y, by_fm = (
        random.randn(*n).astype(np.float32) for n in ([F * K, 70], [1000, 70], [1000])
    )
    kernel = tf.constant(kernel)
    if counts is None:
        counts = []
    else:
        where, x = where[: sum(counts)], x[: sum(counts)]
    outputs = first_layer(w, v, where, x, kernel, F, counts)
    fetched = [*outputs, *tf.gradients(outputs, [w, v, kernel], [by_y, by_fm])]
    runs = []
    for threads in (1, 2, 7):
        config = v1.ConfigProto(inter_op_parallelism_threads=threads, use_per_session_threads=True)
        with v1.Session(config=config) as session:
            runs += [session.run(fetched) for _ in range(5)]
    for found in runs[1:]:
        assert_equal(found, runs[0])


def applied(ids, values, feature_size, width, units, changed=None):
    """What the layer of an applied model and that of a batch alone find, batch after batch.

    Args:
        ids, values: [batches, B, F].
        changed: name of the weights that get another value before each batch.
    """
    random = np.random.RandomState(7)
    shapes = {"w": [feature_size], "v": [feature_size, width], "kernel": [F * width, units]}
    made = {n: v1.get_variable(n, s, use_resource=True) for n, s in shapes.items()}
    i, x = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None])
    kept = COMPILED.applied_first_layer(*list(made.values())[:2], i, x, made["kernel"], F)
    distinct, where = tf.unique(i)
    rows = [tf.gather(made[name], distinct) for name in ("w", "v")]
    alone = first_layer(*rows, where, x, made["kernel"], F)
    with v1.Session(config=THREADS) as session:
        for name, variable in made.items():
            variable.load(random.randn(*shapes[name]), session)
        for one, other in zip(ids, values):
            if changed:
                made[changed].load(random.randn(*shapes[changed]), session)
            yield session.run([kept, alone], {i: one.ravel(), x: other.ravel()})


@pytest.mark.parametrize(
    "examples, width, units", [(0, 8, 16), (1, 1, 1), (600, 32, 128), (1300, 9, 50)]
)
@pytest.mark.parametrize("ids", [100, 30000])
def test_the_first_layer_of_an_applied_model_is_to_the_bit_that_of_a_batch_alone(
    ids, examples, width, units
):
    random = np.random.RandomState(6)
    shape = [4, examples, F]
    # The squares make some ids frequent; others push each other out.
    batches = (random.rand(*shape) ** 2 * ids).astype(np.int64)
    batches[..., 0] = 3
    for both in applied(batches, random.randn(*shape), ids, width, units):
        assert_equal(*both)


@pytest.mark.parametrize("changed", ["w", "v", "kernel"])
def test_the_first_layer_of_an_applied_model_is_that_of_its_present_weights(changed):
    ids = np.random.RandomState(8).randint(0, V, [1, 40, F]).repeat(3, axis=0)
    results = list(applied(ids, np.ones(ids.shape), V, K, 20, changed))
    for both in results:
        assert_equal(*both)
    for before, after in zip(results, results[1:]):
        assert any(np.any(one != other) for one, other in zip(before[0], after[0]))


def applied_to(row):
    w, v = (v1.get_variable(n, s, use_resource=True) for n, s in (("w", [V]), ("v", [V, K])))
    return COMPILED.applied_first_layer(w, v, [0, row], tf.ones([2]), tf.ones([2 * K, 4]), 2)


def looked_up(row):
    w, v, _, x = rows_of_batch(1)
    return look_up(w, v, np.full(F, row, np.int32), x)


@pytest.mark.parametrize("row", [-1, V])
@pytest.mark.parametrize(
    "make, said",
    [
        (looked_up, "beyond the last"),
        (lambda row: pairs_of([0, row], [1.0, 1.0], V, 2), "beyond the last"),
        (applied_to, "is not in"),
        (lambda row: [COMPILED.gather(*variables_of(tf.ones([V, K]), "t"), tf.constant([0, row]))],
         r"indices\[1\] = -?\d+ is not in"),
    ],
    ids=["look_up", "pairs", "applied first layer", "gather"],
)  # fmt: skip
def test_a_row_that_is_not_there_is_refused(make, said, row):
    with refused(match=said):
        evaluate(*make(row))


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (([0, 1, 2, 1, 0, 0], np.float32([1, 2, 3, 4, 5, 6]), 3, 2), {
            "pairs": [0, 2, 1, 2, 0, 3], "by": [1, 2, 3, 4, 5, 6], "begins": [],
            "rows": [0, 2, 1, 0], "fields": [0, 2, 4], "starts": [0, 2, 3, 5, 6],
            "uses": [0, 2, 1, 0, 1, 2], "factors": [1, 5, 3, 2, 4, 6],
        }),
        # Two examples of three fields: {0, 1}, {}, {2} and {1}, {1, 1}, {}.
        (([0, 1, 2, 1, 1, 1], np.float32([1, 2, 3, 4, 5, 6]), 3, 3, [2, 0, 1, 1, 2, 0], True), {
            "pairs": [0, 1, 3, 1, 2, 2], "by": [0.5, 1, 3, 4, 2.5, 3],
            "begins": [0, 2, 2, 3, 4, 6, 6], "rows": [0, 1, 1, 2], "fields": [0, 2, 3, 4],
            "starts": [0, 1, 3, 5, 6], "uses": [0, 0, 1, 1, 1, 0],
            "factors": [0.5, 1, 4, 2.5, 3, 3],
        }),
    ],
    ids=["one value", "several values"],
)  # fmt: skip
def test_pairs_are_those_of_each_field_with_their_uses(arguments, expected):
    found = evaluate(pairs_of(*arguments))[0]._asdict()
    assert {name: numbers.tolist() for name, numbers in found.items()} == expected


@pytest.mark.parametrize(
    "values, counts, match",
    [(3, counts, "counts|number of values")
     for counts in ([1, 1, 0, 0], [2, 2, -1, 0], [5, 0, 0, 0], [3], [1, 1, 1, 1])]
    + [(4, [1] * n, "number of values") for n in (2, 6)],
)  # fmt: skip
def test_pairs_refuse_counts_that_are_not_those_of_the_values(values, counts, match):
    with refused(match=match):
        evaluate(*pairs_of([0, 1, 2, 0][:values], tf.ones([values]), 3, 2, counts))


def test_last_rows_that_no_value_uses_have_no_gradient():
    # Each row is in one field. What was computed for all rows leaves its memory to be used again.
    where = v1.placeholder(tf.int32, [None])
    w, v = tf.ones([64]), tf.ones([64, 8])
    outputs = first_layer(w, v, where, tf.ones_like(where, tf.float32), tf.ones([16, 4]), 2)
    gradients = tf.gradients(outputs, [w, v])
    with v1.Session() as session:
        for used in [64, 62] * 20:
            by_w, by_v = session.run(gradients, {where: np.arange(used)})
            np.testing.assert_array_equal(by_w, [1] * used + [0] * (64 - used))
            assert by_v[:used].all() and not by_v[used:].any()
            del by_w, by_v


def test_rows_that_no_value_uses_have_no_gradient():
    w, v = tf.ones([2]), tf.ones([2, 3])
    # As many pairs as rows: the first row is in both fields, the second in none.
    outputs = first_layer(w, v, tf.constant([0, 0]), tf.ones([2]), tf.ones([6, 4]), 2)
    by_w, by_v = evaluate(*tf.gradients(outputs, [w, v]))
    np.testing.assert_array_equal(by_w, [2, 0])
    # 4 units in 2 fields; of the FM, x^2 v^2 summed over the one pair of fields: 2 v.
    np.testing.assert_array_equal(by_v, [[10] * 3, [0] * 3])


@pytest.mark.parametrize("counts", [None, np.ones(500 * F, np.int32)])
@pytest.mark.parametrize("ids, by_pairs", [(10, True), (100000, False)])
def test_the_first_layer_takes_pairs_where_these_repeat(ids, by_pairs, counts):
    random = np.random.RandomState(0)
    distinct, where = np.unique(random.randint(0, ids, [500 * F]), return_inverse=True)
    rows = tf.ones([len(distinct)]), tf.ones([len(distinct), 32])
    where = v1.placeholder_with_default(where.astype(np.int32), [None])  # nothing is known before
    values = where, tf.ones([500 * F]), counts
    whole = lambda: (tf.zeros([500, 128]), tf.zeros([500]))
    pairs = COMPILED.pairs(*values, len(distinct), ModelConfig(F, ids, 32, (128,)))
    y, _ = COMPILED.first_layer(*rows, *values, pairs, tf.ones([F * 32, 128]), F, whole)
    traced, options = v1.RunMetadata(), v1.RunOptions(trace_level=v1.RunOptions.SOFTWARE_TRACE)
    with v1.Session() as session:
        found = session.run(y, options=options, run_metadata=traced)
    # With several values a field, the whole matrix is the caller's; else it is ones, too.
    expected = F * 32 if by_pairs or counts is None else 0
    np.testing.assert_array_equal(found, np.full([500, 128], expected))
    ran = {node.node_name for device in traced.step_stats.dev_stats for node in device.node_stats}
    (of_pairs,) = (op for op in y.graph.get_operations() if op.type == "DeepfmFirstLayer")
    assert (of_pairs.name in ran) == by_pairs


@pytest.mark.parametrize(
    "changes",
    [{}, {"pooling": "mean"}, {"pooling": "max"}, {"lazy_updates": False, "l2_scope": "table"},
     {"embedding_size": 2}, {"l2_reg": 0.01, "l2_scope": "batch"}, {"feature_size": 1 << 32}],
)  # fmt: skip
@pytest.mark.parametrize("ops", [COMPILED, TENSORFLOW])
def test_what_the_input_finds_ahead_is_what_a_step_finds(changes, ops):
    random, several = np.random.RandomState(3), "pooling" in changes
    counts = random.randint(0, 3, [200, F]).astype(np.int32) if several else np.ones([200, F])
    width = int(counts.sum(axis=1).max())
    features = {"feat_ids": random.randint(0, 40, [200, width])}
    features["feat_vals"] = random.rand(200, width).astype(np.float32)
    features.update({"feat_counts": counts} if several else {})
    config = ModelConfig(F, 40, 32, (64, 8), (0.0, 0.0), multi_valued=several)
    config = config._replace(**changes)
    found, ran = [], []
    for ahead in (lambda x: x, lambda x: embeddings.ahead(x, config, ops)):
        with tf.Graph().as_default():
            batch = tf.data.Dataset.from_tensors(features).map(ahead)
            values = embeddings.values_of(v1.data.make_one_shot_iterator(batch).get_next(), config)
            distinct = values.distinct or embeddings.distinct_of(values, config, True, ops)
            wanted = [distinct.ids, distinct.where, *(distinct.pairs or ())]
            found.append(v1.Session().run([x for x in wanted if x is not None]))
            ran.append(types_of(v1.get_default_graph()))
    assert ("DeepfmUnique" in ran[0]) == (ops is COMPILED and config.lazy_updates)
    assert not {"DeepfmUnique", "Unique", "DeepfmPairs"} & set(ran[1])
    worth = config.lazy_updates and config.pooling != "max" and config.embedding_size > 2
    assert ("DeepfmPairs" in ran[0]) == (ops is COMPILED and worth)
    assert found[0][0].dtype == found[1][0].dtype
    assert len(found[0]) == len(found[1])
    for own, others in zip(*found):
        np.testing.assert_array_equal(own, others)


@pytest.mark.parametrize(
    "units, rate, odd",
    [(1, 0.5, None), (65, 0.3, None), (128, 0.999, None), (7, 0.001, None)]
    + [(99, 0.5, odd) for odd in (np.nan, np.inf, -np.inf)],
)
def test_dropout_drops_the_units_that_tensorflow_drops(units, rate, odd):
    v1.train.get_or_create_global_step()
    x = np.random.RandomState(0).randn(333, units) if odd is None else np.full([333, units], odd)
    x = v1.placeholder_with_default(np.float32(x), [None, units])
    how = terms.seed_of_step(7, 2), terms.dropped(rate)
    found, wanted = (ops.relu_dropout(x, *how) for ops in (COMPILED, TENSORFLOW))
    for y in found, wanted:
        assert y.shape.as_list() == [None, units]  # as the next layer needs to know
    by = tf.constant(np.random.RandomState(1).randn(333, units), tf.float32)
    gradients = [tf.gradients(y, x, by)[0] for y in (found, wanted)]
    found, wanted, *gradients = evaluate(found, wanted, *gradients)
    assert_equal([found, gradients[0]], [wanted, gradients[1]])


UPDATED = {"adam": "DeepfmAdam", "ftrl": "DeepfmFtrl"}
# The difference of two roots, divided by the rate, is large beside the sums that it enters here.
AS_IN_TENSORFLOW = {"adam": dict(rtol=1e-5, atol=1e-7), "ftrl": dict(rtol=1e-5, atol=3e-5)}


@pytest.mark.parametrize("name", UPDATED)
@pytest.mark.parametrize("shape", [[], [7], [300, 70], [2, 3, 4]])
def test_the_update_of_a_whole_variable_is_that_of_tensorflow(name, shape):
    random = np.random.RandomState(0)
    initial, *grads = (np.float32(random.randn(*shape)) for _ in range(5))
    after = []
    for ops in (TENSORFLOW, COMPILED):
        with tf.Graph().as_default() as graph, v1.Session(config=THREADS) as session:
            (variable,), grad = variables_of(initial, "v"), v1.placeholder(tf.float32, shape)
            optimizer = optimizers.make_optimizer(OptimizerConfig(name, 0.1), Mode(), ops)
            step = optimizer.apply_gradients([(grad, variable)])
            assert (ops is COMPILED) == (UPDATED[name] in types_of(graph))
            session.run(v1.global_variables_initializer())
            for each in grads:
                session.run(step, {grad: each})
            after.append(session.run(v1.global_variables()))
    for one, other in zip(*after):
        np.testing.assert_allclose(one, other, **AS_IN_TENSORFLOW[name])


def adam_of(variables, grad, rows=None, numbers=NUMBERS):
    """The step of Adam on a whole variable, or on its first rows."""
    if rows is None:
        return COMPILED.adam(*variables, grad, *numbers)
    return COMPILED.adam_rows(*variables, tf.range(rows), grad, *numbers)


@pytest.mark.parametrize("rows", [None, 2])
def test_adam_does_not_write_into_what_was_read(rows):
    variables = variables_of(tf.fill([4, 2], 2.0), *MOMENTS)
    before = [variable.read_value() for variable in variables]
    with tf.control_dependencies(before):
        step = adam_of(variables, tf.ones([rows or 4, 2]), rows)
    with tf.control_dependencies([step]):
        kept = [tf.identity(x) + 0 for x in before]
        after = [variable.read_value() for variable in variables]
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        initial = session.run(variables)
        for first, then, last in zip(initial, *session.run([kept, after])):
            np.testing.assert_array_equal(then, first)
            assert (last[:rows] != first[:rows]).all()


def after_adam(w, m, v, g):
    m, v = (1 - np.float32(0.9)) * g, (1 - np.float32(0.999)) * g**2
    return w - 0.1 * m / (np.sqrt(v) + 1e-8), m, v


def after_ftrl(w, n, z, g):
    z = z + g - (np.sqrt(n + g**2) - np.sqrt(n)) / 0.1 * w
    return -0.1 * z / np.sqrt(n + g**2), n + g**2, z


@both_ops
@pytest.mark.parametrize(
    "shape", [[90], [90, 1], [20000, 1], [20000, 3], [90, 32], [90, 70], [90, 2, 4]], ids=str
)
@pytest.mark.parametrize(
    "name, slots, numbers, after, atol",
    [
        ("adam_rows", (0, 0), NUMBERS, after_adam, (1e-6, 1e-7, 1e-7)),
        ("ftrl_rows", (4, 1), [0.1], after_ftrl, (1e-5, 1e-5, 1e-5)),
    ],
)
def test_an_update_adds_l2_of_its_rows_and_changes_no_others(
    name, slots, numbers, after, atol, ops, shape
):
    l2, random = 0.5, np.random.RandomState(0)
    rows, others = np.split(random.permutation(shape[0]), [shape[0] * 8 // 9])
    grad = random.randn(len(rows), *shape[1:]).astype(np.float32)
    initial = random.randn(*shape).astype(np.float32)
    starts = initial, *(np.full(shape, slot, np.float32) for slot in slots)
    variables = [variables_of(*each)[0] for each in zip(starts, MOMENTS)]
    with v1.Session(config=THREADS) as session:
        session.run(v1.global_variables_initializer())
        numbers = map(tf.constant, numbers)  # so that 1 - beta is that of float32
        session.run(getattr(ops, name)(*variables, tf.constant(rows), grad, *numbers, l2=l2))
        found = session.run(variables)
    before = [np.float64(start[rows]) for start in starts]
    wanted = after(*before, np.float64(grad + l2 * initial[rows]))
    for one, start, each, least in zip(found, starts, wanted, atol):
        np.testing.assert_allclose(one[rows], each, rtol=1e-5, atol=least)
        np.testing.assert_array_equal(one[others], start[others])


@pytest.mark.parametrize("shape", [[], [5], [3, 4], [3000, 1000]])
def test_zeros_are_zeros(shape):
    with v1.Session() as session:
        session.run(tf.reduce_sum(tf.ones([4000, 1000])))  # leaves memory that is not zero
        for _ in range(3):
            zeros = session.run(COMPILED.zeros(shape))
            np.testing.assert_array_equal(zeros, np.zeros(shape))
            zeros += 1


@pytest.mark.parametrize("shape", [[7], [50, 3], [300000, 32]])
def test_rows_are_those_of_the_table(shape):
    """Also of a table that is put on large pages meanwhile."""
    random = np.random.RandomState(0)
    initial = random.rand(*shape).astype(np.float32)
    table = v1.get_variable("table", initializer=tf.constant(initial), use_resource=True)
    with v1.Session(config=THREADS) as session:
        session.run(v1.global_variables_initializer())
        for seed in range(20):
            rows = np.random.RandomState(seed).randint(0, shape[0], 20000)
            found = session.run(COMPILED.gather(table, tf.constant(rows)))
            np.testing.assert_array_equal(found, initial[rows])
        np.testing.assert_array_equal(session.run(table), initial)


@pytest.mark.parametrize("name", UPDATED)
@pytest.mark.parametrize("have_them", [False, True])
def test_parameter_servers_need_no_kernels(name, have_them):
    """Only where they have them do these hold and update the parts of a table there."""
    config = ModelConfig(F, V, K, (8,), (0.5,))
    parts = v1.fixed_size_partitioner(2)
    mode = mode_of(partitioner=parts, all_run=lambda make: have_them)
    ops = compiled.of_steps(COMPILED, mode)
    features = {
        "feat_ids": v1.placeholder(tf.int64, [None, F]),
        "feat_vals": v1.placeholder(tf.float32, [None, F]),
    }
    how = OptimizerConfig(name, 0.01, cowclip_ratio=1.0)
    model_fn = make_model_fn(config, how, mode_of(partitioner=parts), ops)
    model_fn(features, v1.placeholder(tf.float32, [None]), "train")
    on_servers = {
        "DeepfmZeros", "DeepfmGatherRows", "DeepfmClipRows", "DeepfmAdamRows", "DeepfmAdam",
        "DeepfmElapsedAdamRows", "DeepfmFtrl", "DeepfmFtrlRows",
    }  # fmt: skip
    types = types_of(v1.get_default_graph())
    assert "DeepfmLookUp" in types
    assert types & on_servers == (
        {f"{UPDATED[name]}Rows", UPDATED[name], "DeepfmClipRows", "DeepfmZeros"}
        if have_them
        else set()
    )


@pytest.mark.parametrize("by_rows", [False, True])
def test_updates_of_adam_that_come_at_once_come_one_after_the_other(by_rows):
    """With these numbers each takes 1 from each number, and its gradient is the moment after it."""
    rows, ops, times = 30000 if by_rows else 300000, 8, 20
    variables = variables_of(tf.zeros([rows, 2]), *MOMENTS)
    grads = [tf.fill([rows, 2], float(i + 1)) for i in range(ops)]
    numbers = (1.0, 0.0, 0.0, 0.0)
    each = [adam_of(variables, grad, rows if by_rows else None, numbers) for grad in grads]
    threads = v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=ops)
    with v1.Session(config=threads) as session:
        session.run(v1.global_variables_initializer())
        session.run(each[0])  # without locks, more than one would make the variable its own
        for i in range(1, times + 1):
            session.run(each)
            variable, m, _ = session.run(variables)
            np.testing.assert_array_equal(variable, np.full([rows, 2], -1 - i * ops))
            assert m.min() == m.max()


TWICE = """
from deepfm.runtime.tf import tf
from deepfm.kernels.compiled import COMPILED

v1, numbers = tf.compat.v1, (0.1, 0.9, 0.999, 1e-8)
a, b = (v1.get_variable(name, [4, 2], use_resource=True) for name in "ab")
for three in ([a, a, b], [a, b, a], [b, a, a], [b, b, a], [b, a, b], [a, b, b], [a, a, a]):
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        for step in (
            COMPILED.adam(*three, tf.ones([4, 2]), *numbers),
            COMPILED.adam_rows(*three, tf.constant([0, 3]), tf.ones([2, 2]), *numbers),
        ):
            try:
                session.run(step)
            except tf.errors.InvalidArgumentError as error:
                assert "a variable is given twice" in error.message
                print("refused")
"""


def test_adam_refuses_a_variable_that_is_given_twice():
    """Runs in a separate process, which would hang if it took a lock twice."""
    done = run_python("-c", TWICE)
    assert done.stdout.split() == 14 * ["refused"], done.stderr


def test_adam_refuses_gradients_and_rows_that_do_not_fit():
    variables = variables_of(tf.ones([4, 2]), *MOMENTS)
    with refused(match="do not fit"):
        evaluate(COMPILED.adam(*variables, tf.ones([2, 4]), *NUMBERS))
    for rows, shape in (([4], [1, 2]), ([0], [1, 3]), ([0], [2, 2]), ([-1], [1, 2])):
        with refused():
            evaluate(COMPILED.adam_rows(*variables, tf.constant(rows), tf.ones(shape), *NUMBERS))


def unpack(chunk):
    """The records of a packed chunk: string [2] -> string [n]."""
    ends = tf.io.decode_raw(chunk[1], tf.int64)
    starts = tf.concat([[0], ends], 0)[:-1]
    return tf.strings.substr(tf.fill(tf.shape(ends), chunk[0]), starts, ends - starts)


def unpacked(dataset):
    """The records of packed chunks, chunk by chunk."""
    return strings_of(dataset.map(unpack))


def reader_of(session, dataset):
    """A function that reads the elements of a dataset, each time anew."""
    iterator = v1.data.make_initializable_iterator(dataset)
    following = iterator.get_next()

    def read():
        session.run(iterator.initializer)
        found = []
        with contextlib.suppress(tf.errors.OutOfRangeError):
            while True:
                found.append(session.run(following).tolist())
        return found

    return read


def strings_of(dataset):
    """The elements of a dataset."""
    with v1.Session() as session:
        return reader_of(session, dataset)()


def numbered(sizes):
    """A dataset of chunks, string [n], of these sizes, of numbered strings."""
    ends = np.cumsum(sizes)
    chunk = lambda i: tf.strings.as_string(tf.range(tf.gather(ends - sizes, i), tf.gather(ends, i)))
    return tf.data.Dataset.range(len(sizes)).map(chunk)


# Each pair of values once, and all combinations in the table.
CHUNKS = [
    pytest.param(sizes, buffer, *part, marks=[] if (i + j + k) % 4 == 0 else [pytest.mark.table])
    for i, sizes in enumerate([[0], [3], [5, 0, 1, 7, 0], [100] * 30])
    for j, buffer in enumerate([0, 2, 10, 5000])
    for k, part in enumerate(
        [(0, -1, 4), (3, -1, 1), (3001, 5, 7), (0, 0, 1), (2, 8, 4), (2, 9, 4)]
    )
]


@pytest.mark.parametrize("sizes, buffer, skip, take, size", CHUNKS)
def test_chunks_are_shuffled_skipped_and_batched_as_by_tensorflow(sizes, buffer, skip, take, size):
    v1.set_random_seed(5)  # as Estimator does
    sizes, seed = np.array(sizes), tf.constant(11, tf.int64)
    found = COMPILED.rechunked(numbered(sizes).map(reading.pack), size, buffer, seed, skip, take)
    wanted = numbered(sizes).unbatch()
    if buffer > 1:
        wanted = wanted.shuffle(buffer, seed, reshuffle_each_iteration=False)
    assert unpacked(found) == strings_of(wanted.skip(skip).take(take).batch(size))


@pytest.mark.parametrize("sizes", [[], [0], [3], [1000, 0, 1, 0, 0, 70]])
@pytest.mark.parametrize("buffer", [0, 3])
def test_records_of_any_length_come_out_as_they_went_in(sizes, buffer):
    random = np.random.RandomState(0)
    strings = [bytes(random.randint(0, 256, size).tolist()) for size in sizes]
    packed = reading.pack(tf.constant(strings, tf.string))
    found = COMPILED.rechunked(tf.data.Dataset.from_tensors(packed), 2, buffer)
    told, again = evaluate(COMPILED.num_records(packed), unpack(packed))
    assert again.tolist() == strings and told == len(strings)
    assert sorted(sum(unpacked(found), [])) == sorted(strings)


@pytest.mark.parametrize(
    "parts",
    [
        ["abc"], ["abc", "", ""], ["abc", b"\3\0\0\0"], ["abc", b"\2" + bytes(7)], ["abc", ""],
        ["abc", b"\4" + bytes(7)], ["abc", b"\4" + bytes(7) + b"\3" + bytes(7)],
    ],
)  # fmt: skip
def test_what_is_not_packed_is_refused(parts):
    wrong = tf.constant(parts)
    dataset = tf.data.Dataset.from_tensors(wrong)
    for attempt in (
        lambda: evaluate(COMPILED.parse(wrong, SCHEMA, None)[0]),
        lambda: evaluate(COMPILED.parse_lines(wrong, SCHEMA, None)[0]),
        lambda: unpacked(COMPILED.rechunked(dataset, 2)),
    ):
        with refused(match="packed|ends do not fit"):
            attempt()


def test_reading_may_go_on_behind_what_is_not_packed():
    right, wrong = np.int64([1, 3]).tobytes(), np.int64([2]).tobytes()
    packed = tf.constant([["abc", right], ["abc", wrong]] * 2)
    dataset = COMPILED.rechunked(tf.data.Dataset.from_tensor_slices(packed), 1)
    following, found = v1.data.make_one_shot_iterator(dataset.map(unpack)).get_next(), []
    with v1.Session() as session:
        for _ in range(6):
            try:
                found += session.run(following).tolist()
            except tf.errors.InvalidArgumentError:
                found.append(None)
    assert found == [b"a", b"bc", None] * 2


def test_chunks_of_a_function_that_autograph_rewrites_are_whole():
    strings = tf.constant(["a", "b", "c"])
    chunks = lambda _: COMPILED.rechunked(tf.data.Dataset.from_tensors(reading.pack(strings)), 2)
    assert unpacked(tf.data.Dataset.range(1).flat_map(chunks)) == [[b"a", b"b"], [b"c"]]


def test_a_few_long_records_do_not_make_a_shuffle_buffer_large():
    def record(i):
        length = tf.where(tf.equal(i % 20, 0), 200_000, 10)
        return reading.pack([tf.strings.substr(long, 0, length)])

    long, buffer = tf.constant("x" * 200_000), 500
    packed = tf.data.Dataset.range(20 * buffer).map(record)
    before = psutil.Process().memory_info().rss
    following = v1.data.make_one_shot_iterator(COMPILED.rechunked(packed, 10, buffer)).get_next()
    most = 0
    with v1.Session() as session, pytest.raises(tf.errors.OutOfRangeError):
        while True:
            session.run(following)
            most = max(most, psutil.Process().memory_info().rss - before)
    assert most < 40 << 20  # 5 MB of them are in the buffer at a time; each place has had some


def test_an_error_of_the_input_is_passed_on():
    wrong = lambda x: tf.strings.as_string(tf.strings.to_number(tf.strings.join([x, "?"])))
    with refused(match="StringToNumber"):
        unpacked(COMPILED.rechunked(numbered(np.array([3, 3])).map(wrong).map(reading.pack), 2))


@pytest.fixture(scope="module")
def tfrecord(tmp_path_factory):
    """(a file, its records)."""
    payloads = [b"", b"a", b"b" * 1000, b"c" * 37, b"\xff" * 300]
    return write_payloads(tmp_path_factory.mktemp("records") / "some.tfrecords", payloads), payloads


@pytest.mark.parametrize("buffer_bytes", [1, 11, 12, 13, 1000, 1 << 20])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_records_are_those_of_the_file(tfrecord, buffer_bytes, size):
    path, payloads = tfrecord
    chunks = unpacked(reading.records_of(path, buffer_bytes, size))
    assert sum(chunks, []) == payloads
    assert [len(chunk) for chunk in chunks[:-1]] == [size] * (len(chunks) - 1)


@pytest.fixture
def records_of(tmp_path):
    """A function of bytes: the records of a file some.tfrecords that has them."""
    path = tmp_path / "some.tfrecords"
    with v1.Session() as session:
        read = reader_of(session, reading.records_of(str(path), 64, 1).map(unpack))
        yield lambda content: (path.write_bytes(content), sum(read(), []))[1]


def test_an_end_within_a_record_and_a_wrong_byte_are_noticed_wherever_they_are(
    tfrecord, records_of
):
    path, payloads = tfrecord
    whole = bytearray(pathlib.Path(path).read_bytes())
    ends = np.cumsum([0] + [len(payload) + 16 for payload in payloads]).tolist()
    for end in [*range(60), *range(len(whole) - 20, len(whole) + 1)]:
        if end in ends:
            assert records_of(whole[:end]) == payloads[: ends.index(end)]
        else:
            with pytest.raises(tf.errors.DataLossError, match="truncated record.*some.tfrecords"):
                records_of(whole[:end])
    for at in [*range(40), *range(1000, len(whole), 50)]:
        whole[at] ^= 0x10
        with pytest.raises(tf.errors.DataLossError, match="some.tfrecords"):
            records_of(whole)
        whole[at] ^= 0x10


@pytest.mark.parametrize("more", [-1, 1])
def test_a_file_of_another_length_than_told_is_refused(tfrecord, more):
    path, size = tfrecord[0], os.path.getsize(tfrecord[0])
    assert sum(unpacked(reading.records_of(path, 64, 2, size)), []) == tfrecord[1]
    with pytest.raises(tf.errors.DataLossError, match=f"some.tfrecords ended after {size} of"):
        unpacked(reading.records_of(path, 64, 2, size + more))


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(tf.errors.NotFoundError, match="none.tfrecords"):
        unpacked(reading.records_of(str(tmp_path / "none.tfrecords"), 64, 1))


SCHEMA = records.Schema(4, 50)


@pytest.fixture(scope="module", params=["", "multi_valued", "weighted", "with_labels"])
def schema(request):
    """The schema of plain records, or with one of its switches thrown."""
    switch = {request.param: not getattr(SCHEMA, request.param)} if request.param else {}
    return SCHEMA._replace(feature_size=5000, **switch)


@contextlib.contextmanager
def both_parsers(kernel, tensorflow, schema):
    """(strings -> what the kernel makes of them, likewise TensorFlow); None if it refuses them."""
    with tf.Graph().as_default(), v1.Session() as session:
        place = v1.placeholder(tf.string, [None])

        def outcome(parse, strings):
            try:
                return parse(strings)
            except (tf.errors.InvalidArgumentError, tf.errors.DataLossError):
                return None

        parsed = kernel(reading.pack(place), schema, None), tensorflow(place, schema)
        parsers = [callable_of(session, place, each) for each in parsed]
        yield [functools.partial(outcome, parse) for parse in parsers]


@pytest.fixture(scope="module")
def parsers(schema):
    with both_parsers(COMPILED.parse, records.parse, schema) as found:
        yield found


def assert_records_agree(parsers, serialized):
    """What the kernel reads, to the bit as TensorFlow does; None if both refuse the records."""
    found, wanted = (parse(serialized) for parse in parsers)
    assert (found is None) == (wanted is None), serialized
    for one, other in zip(found or [], wanted or []):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    return found


def records_to_parse(rows, multi_valued):
    """Arguments of `encoded`."""
    labels, ids, values = make_records(rows, field_size=12)
    if not multi_valued:
        return labels, ids[:, : SCHEMA.field_size], values[:, : SCHEMA.field_size]
    counts = np.random.RandomState(0).randint(0, 3, [rows, SCHEMA.field_size], np.int32)
    return labels, ids, values, counts


def test_records_are_parsed_as_by_tensorflow(parsers, schema):
    arrays = records_to_parse(100, schema.multi_valued)
    serialized = encoded(*arrays)
    if not schema.multi_valued:
        labels, *found = parsers[0](serialized)[:3]
        assert_equal([labels, *found], [arrays[0] * schema.with_labels, *arrays[1:]])
    if schema.multi_valued:  # without values, and without counts
        nothing = np.zeros([1, 0])
        serialized += encoded(
            [1.0], nothing.astype(int), nothing, np.zeros([1, SCHEMA.field_size], np.int32)
        )
        serialized += encoded(*records_to_parse(1, False))
    for rows in (0, 1, 100, len(serialized)):
        assert assert_records_agree(parsers, serialized[:rows]) is not None
    for bad in (b"", b"abc", serialized[0] + b"\x28"):
        assert assert_records_agree(parsers, [*serialized, bad, *serialized]) is None


@pytest.fixture(scope="module", params=[{}, {"pad": True}, {"weighted": True}], ids=str)
def line_parsers(request):
    schema = SCHEMA._replace(id_offset=1, **request.param)
    with both_parsers(COMPILED.parse_lines, libsvm.parse_lines, schema) as found:
        yield found


def test_lines_are_parsed_or_refused_as_by_tensorflow(line_parsers):
    lines = [b"1 3:0.25 0:1 48:-7.5 12:100", b"-1 1:1 2:2\t3:3 4:4", b"+1 01:.5 2:2 3:3 4:1e-3 \r"]
    assert assert_records_agree(line_parsers, lines)
    for bad in (b"2 1:1 2:2 3:3 4:4", b"1 1:1 2:2 3:3 4:x", b"1 1:1 2:2 3:3 50:1", b"1 1:1 \xff"):
        assert assert_records_agree(line_parsers, [*lines, bad, *lines]) is None


@pytest.mark.parametrize(
    "text, lines",
    [
        (b"", []), (b"1 1:1", [b"1 1:1"]), (b"1 1:1\n", [b"1 1:1"]),
        (b"\n\n-1 1:1\n\n+1 2:1 \r\n.5\n", [b"-1 1:1", b"+1 2:1 \r", b".5"]),
        (b"1 1:1\n \n", [b"1 1:1"]), (b"1 1:1 # 5\n", [b"1 1:1 "]), (b"#\n", []),
        (b"\x0b\n1 1:1", [b"1 1:1"]),
        (b"\t\r\n\v\f\n  # caf\xe9\n1 1:1 # \xff#\n0 1:1", [b"1 1:1 ", b"0 1:1"]),
    ],
)  # fmt: skip
@both_ops
def test_text_is_split_into_lines_that_are_neither_blank_nor_a_comment(text, lines, ops, tmp_path):
    path = tmp_path / "some.libsvm"
    path.write_bytes(text)
    chunks = libsvm.line_chunks(tf.constant(str(path)), [], 8 << 20, ops)
    assert sum(unpacked(chunks) if ops.packed else strings_of(chunks), []) == lines


# With batch norm the gradient of a bias is 0, of which Adam would make steps of rounding errors.
@pytest.mark.parametrize(
    "name, changes",
    [
        *(
            pytest.param(name, {}, marks=pytest.mark.table)
            for name in sorted(optimizers.OPTIMIZERS)
        ),
        *((name, {}) for name in UPDATED),
        ("sgd", {"batch_norm": True}), ("adam", {"l2_scope": "table"}),
        ("adam", {"lazy_updates": False}), ("adam", {"clip_norm": 0.0}),
    ],
)  # fmt: skip
def test_training_gives_the_same_weights(name, changes, monkeypatch):
    changes = {"l2_reg": 0.1, "embedding_init_stddev": 0.1, **changes}
    how = {"rate": 0.01, "clip_norm": changes.pop("clip_norm", 1.0)}
    config = ModelConfig(F, V, K, (8, 7), (0.5, 0.2), **changes)
    random = np.random.RandomState(0)
    ids = random.randint(0, V, [5, 64, F])
    values, labels = random.rand(5, 64, F).astype("f4"), (random.rand(5, 64) < 0.3).astype("f4")
    whole_matrix, distinct_pairs = 1e-9, 2  # the largest share of distinct pairs that pays
    trained = []
    for ops, share in ((TENSORFLOW, None), (COMPILED, whole_matrix), (COMPILED, distinct_pairs)):
        monkeypatch.setattr(
            "deepfm.kernels.first_layer.largest_share", lambda *widths, share=share: share
        )
        with tf.Graph().as_default() as graph, v1.Session() as session:
            first = test_model.named(ids[0], values[0], labels[0])
            mode = tf.estimator.ModeKeys.TRAIN
            spec, feed = test_model.build(config, mode, first, ops, name, **how)
            session.run(v1.global_variables_initializer())
            for batch in zip(ids, values, labels):
                session.run(spec.train_op, dict(zip(feed, batch)))
            trained.append(session.run(v1.global_variables()))
            types = types_of(graph)
            assert (ops is COMPILED) == ("DeepfmLookUp" in types)
            assert ops is TENSORFLOW or not types & set(REPLACED)
    for by_tensorflow, *others in zip(*trained):
        for other in others:
            np.testing.assert_allclose(by_tensorflow, other, rtol=2e-4, atol=1e-6)


def train(data, folder, *more, **env):
    """A short training with a folder of its own for the kernels; what it says."""
    env = {**os.environ, "DEEPFM_KERNELS_DIR": str(folder / "kernels"), **env}
    return run_train(*small_training(data, folder / "model", *more), env=env, code=0).stderr


def test_a_compiler_that_fails_or_makes_no_library_is_told(tmp_path, monkeypatch):
    of_nothing = compiler(tmp_path, 'while [ "$1" != -o ]; do shift; done; echo nothing > "$2"')
    said = []
    monkeypatch.setattr(compiled.logging, "warning", lambda text, *words: said.append(text % words))
    monkeypatch.setattr(compiled, "raw_ops", build.raw_ops.__wrapped__)  # it is loaded here
    monkeypatch.setenv("DEEPFM_KERNELS_DIR", str(tmp_path))
    for program, reason in (
        ("false", "cannot be built (Command"),
        (of_nothing, "cannot be built (the library cannot be loaded)"),
    ):
        monkeypatch.setenv("CXX", program)
        assert not compiled.ready()
        assert reason in said.pop()


@pytest.mark.parametrize("damaged", [False, True])
def test_a_library_that_another_process_has_just_built_is_taken(tmp_path, monkeypatch, damaged):
    for name, value in copying_compiler(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("DEEPFM_KERNELS_DIR", str(tmp_path))
    path = pathlib.Path(build.library())
    if damaged:
        path.write_bytes(b"cut")

    def load():  # not a second time in this process
        if path.read_bytes() == b"cut":
            raise tf.errors.NotFoundError(None, None, "cut")

    of = build.build
    monkeypatch.setattr(build, "build", lambda *seen: of(*seen) and of(*seen))
    monkeypatch.setattr(compiled, "raw_ops", load)
    assert compiled.ready()
    assert (tmp_path / "compiled").read_text() == "call\n" * 3  # two units, and both in one


def test_training_builds_them_if_it_can_and_a_run_says_that_it_goes_on_without(data, tmp_path):
    said = train(data, tmp_path, "--max_steps=1", CXX="no-such-compiler")
    assert "no-such-compiler" in said and "python -m deepfm.kernels" in said
    said = train(data, tmp_path, "--max_steps=2", **copying_compiler(tmp_path))
    assert "Building the compiled kernels" in said
    assert "Building" not in train(data, tmp_path, "--max_steps=3")
    said = train(data, tmp_path, "--max_steps=4", "--nocompiled_kernels")
    assert "Resuming with --compiled_kernels=False (before: True)." in said


def test_a_compiler_that_takes_too_long_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPFM_KERNELS_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, "exec sleep 1000"))
    with pytest.raises(subprocess.TimeoutExpired):
        build.build(0.5)
    with open(tmp_path / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(subprocess.TimeoutExpired, match="another process"):
            build.build(0.2)


def test_a_compiler_that_is_missing_is_told(tmp_path):
    env = {**os.environ, "CXX": "no-such-compiler", "DEEPFM_KERNELS_DIR": str(tmp_path)}
    done = run_python("-m", "deepfm.kernels", env=env, code=1)
    assert "cannot be built" in done.stderr and "no-such-compiler" in done.stderr
