"""The model against the paper's formulas written plainly in numpy."""

import itertools

import numpy as np
import pytest
from conftest import both_ops

from deepfm.config import ModelConfig, OptimizerConfig
from deepfm.kernels.ops import TENSORFLOW
from deepfm.model.layers import terms
from deepfm.model.model_fn import make_model_fn
from deepfm.modes.common.mode import Mode
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
B, F, V, K = 6, 4, 12, 3


def batch(seed=0):
    random = np.random.RandomState(seed)
    ids = random.randint(0, V, size=(B, F)).astype(np.int64)
    ids[1] = ids[0]  # rows that occur more than once
    return ids, random.randn(B, F).astype(np.float32), (random.rand(B) > 0.5).astype(np.float32)


def config(**changes):
    fields = dict(
        field_size=F, feature_size=V, embedding_size=K, deep_layers=(5, 3), dropout=(0.0, 0.0),
        embedding_init_stddev=0.5,
    )  # fmt: skip
    return ModelConfig(**{**fields, **changes})


def named(ids, values, labels, **more):
    """{name: array} of the features and the labels of a batch, but those that are None."""
    found = {"feat_ids": ids, "feat_vals": values, "labels": labels, **more}
    return {name: x for name, x in found.items() if x is not None}


def build(model_config, mode, given=None, ops=TENSORFLOW, optimizer="sgd", rate=1.0, **changes):
    """(spec, {placeholder: array} of a batch as of `named`) in the default graph."""
    given = given or named(*batch())
    places = {name: v1.placeholder(x.dtype, [None, *x.shape[1:]]) for name, x in given.items()}
    rows = model_config.l2_reg if model_config.l2_scope == "batch" else 0.0
    how = OptimizerConfig(
        optimizer, rate, l2_rows=rows, lazy_updates=model_config.lazy_updates, **changes
    )
    features = {name: x for name, x in places.items() if name != "labels"}
    spec = make_model_fn(model_config, how, Mode(), ops=ops)(features, places["labels"], mode)
    return spec, {places[name]: x for name, x in given.items()}


def run_step(model_config, given=None, **how):
    """One training step from random weights: (weights and moving averages by name before it, the
    same after it, the loss and the logits before it)."""
    with tf.Graph().as_default(), v1.Session() as session:
        spec, feed = build(model_config, tf.estimator.ModeKeys.TRAIN, given, **how)
        session.run(v1.global_variables_initializer())
        trained = v1.trainable_variables()
        moving = [v for v in v1.global_variables() if "moving" in v.op.name]
        variables = {v.op.name: v for v in trained + moving}
        # Zeros would hide mistakes in the terms that they multiply.
        for i, variable in enumerate(trained):
            random = np.random.RandomState(i)
            variable.load(random.randn(*variable.shape.as_list()).astype(np.float32), session)
        before = session.run(variables)
        prob, loss = session.run(["prob:0", spec.loss], feed)
        session.run(spec.train_op, feed)
        return before, session.run(variables), loss, np.log(prob / (1 - prob))


def numpy_logits(w, ids, values, counts=None, pooling="sum", normalize=lambda hidden, i: hidden):
    """The paper's equations, one example and one pair of fields at a time.

    Args:
        counts: values of each field, of which `pooling` makes one; None: one of each.
        normalize: (what hidden layer i makes of all examples, i) -> that after batch norm.
    """
    pool = {"sum": np.sum, "mean": np.mean, "max": np.max}[pooling]
    logits, embedded = [], []
    counts = np.ones(ids.shape, int) if counts is None else counts
    for row_ids, row_values, row_counts in zip(ids, values, counts):
        ends = np.cumsum(row_counts)
        first, e = 0, []
        for begin, end in zip([0, *ends], ends):
            of_field = list(zip(row_ids[begin:end], row_values[begin:end]))
            if not of_field:
                e.append(np.zeros(K))
                continue
            first += pool([w["fm_w"][i] * x for i, x in of_field])
            e.append(pool([w["fm_v"][i] * x for i, x in of_field], axis=0))
        second = sum(np.dot(a, b) for a, b in itertools.combinations(e, 2))
        logits.append(w["fm_bias"][0] + first + second)
        embedded.append(np.concatenate(e))
    hidden = np.array(embedded)
    for i in range(sum(name.endswith("/kernel") for name in w) - 1):
        hidden = hidden @ w[f"deep_{i}/kernel"] + w[f"deep_{i}/bias"]
        hidden = np.maximum(normalize(hidden, i), 0)
    return logits + (hidden @ w["deep_out/kernel"] + w["deep_out/bias"])[:, 0]


def numpy_loss(w, ids, values, labels, l2=0.0, scope="batch", loss_type="log_loss"):
    """Mean loss of the batch plus lambda/2 of the squares that `scope` covers."""
    prob = 1 / (1 + np.exp(-numpy_logits(w, ids, values)))
    if loss_type == "log_loss":
        loss = -np.mean(labels * np.log(prob) + (1 - labels) * np.log(1 - prob))
    else:
        loss = np.mean((labels - prob) ** 2)
    rows = sorted(set(ids.ravel())) if scope == "batch" else slice(None)
    covered = [w["fm_w"][rows], w["fm_v"][rows]]
    covered += [w[name] for name in w if name.endswith("kernel")]
    return loss + l2 / 2 * sum(np.sum(np.square(x)) for x in covered)


def numeric_gradient(loss, weights, name):
    """Central differences of loss(weights) in each entry of weights[name]."""
    gradient = np.zeros_like(weights[name])
    for index in np.ndindex(gradient.shape):
        sides = []
        for delta in (1e-5, -1e-5):
            moved = {k: v.copy() for k, v in weights.items()}
            moved[name][index] += delta
            sides.append(loss(moved))
        gradient[index] = (sides[0] - sides[1]) / 2e-5
    return gradient


def test_second_order_equals_the_sum_over_pairs():
    e = np.random.RandomState(0).randn(B, F, K).astype(np.float32)
    pairs = sum((e[:, i] * e[:, j]).sum(axis=1) for i, j in itertools.combinations(range(F), 2))
    with tf.Graph().as_default(), v1.Session() as session:
        np.testing.assert_allclose(session.run(terms.second_order(e)), pairs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize(
    "changes",
    [{}, {"loss_type": "square_loss"}, {"l2_reg": 0.3}, {"l2_reg": 0.3, "l2_scope": "table"}],
)
def test_a_step_of_sgd_follows_the_numeric_gradient_of_the_papers_loss(changes, lazy):
    before, after, loss, _ = run_step(config(lazy_updates=lazy, **changes))
    before = {k: v.astype(np.float64) for k, v in before.items()}
    ids, values, labels = batch()
    l2, scope = changes.get("l2_reg", 0.0), changes.get("l2_scope", "batch")
    expected = lambda w: numpy_loss(
        w, ids, values, labels, l2, scope, changes.get("loss_type", "log_loss")
    )
    assert loss == pytest.approx(expected(before), rel=1e-5)
    for name in before:
        gradient = numeric_gradient(expected, before, name)
        np.testing.assert_allclose(before[name] - after[name], gradient, atol=2e-4, err_msg=name)


def test_the_gradient_is_clipped_by_its_global_norm():
    before, free, *_ = run_step(config())
    _, clipped, *_ = run_step(config(), clip_norm=0.01)
    norm = np.sqrt(sum(np.sum((free[k] - before[k]) ** 2) for k in before))
    for name in before:
        np.testing.assert_allclose(
            clipped[name] - before[name], (free[name] - before[name]) * 0.01 / norm, atol=1e-6
        )


@pytest.mark.parametrize("optimize_graph", [True, False])
def test_evaluation_and_prediction_leave_the_moving_statistics_alone(optimize_graph):
    session_config = v1.ConfigProto()
    if not optimize_graph:
        options = session_config.graph_options
        options.rewrite_options.disable_meta_optimizer = True
        options.optimizer_options.opt_level = v1.OptimizerOptions.L0
    ids, values, labels = batch()
    for mode in (tf.estimator.ModeKeys.EVAL, tf.estimator.ModeKeys.PREDICT):
        with tf.Graph().as_default(), v1.Session(config=session_config) as session:
            spec, feed = build(config(batch_norm=True), mode, named(ids, values + 5, labels))
            session.run(v1.global_variables_initializer())
            moving = [v for v in v1.global_variables() if "moving" in v.op.name]
            assert len(moving) == 4
            before = session.run(moving)
            fetches = [spec.predictions or spec.loss]
            fetches += [op for _, op in (spec.eval_metric_ops or {}).values()]
            session.run(fetches, feed)
            for old, new in zip(before, session.run(moving)):
                np.testing.assert_array_equal(old, new)


def test_training_moves_the_statistics_of_batch_norm_by_the_decay():
    with tf.Graph().as_default(), v1.Session() as session:
        changes = dict(batch_norm=True, batch_norm_decay=0.75)
        spec, feed = build(config(**changes), tf.estimator.ModeKeys.TRAIN)
        session.run(v1.global_variables_initializer())
        w = {v.op.name: v for v in v1.global_variables()}
        start = session.run(w)
        session.run(spec.train_op, feed)
        ids, values, _ = batch()
        e = (start["fm_v"][ids] * values[:, :, None]).reshape(B, -1)
        hidden = e @ start["deep_0/kernel"] + start["deep_0/bias"]
        np.testing.assert_allclose(
            session.run(w["batch_norm_0/moving_mean"]), 0.25 * hidden.mean(axis=0), atol=1e-5
        )


def drop(x, rate, seed):
    return TENSORFLOW.relu_dropout(x, terms.seed_of_step(*seed), terms.dropped(rate))


def test_dropout_is_the_rate_of_dropped_units_and_keeps_the_mean():
    with tf.Graph().as_default(), v1.Session() as session:
        v1.train.get_or_create_global_step()
        dropped = drop(tf.ones([1000, 100]), 0.2, [1, 0])
        session.run(v1.global_variables_initializer())
        found = session.run(dropped)
    assert np.mean(found == 0) == pytest.approx(0.2, abs=0.01)
    assert found.mean() == pytest.approx(1, abs=0.01)


def test_dropout_differs_between_steps_and_layers_and_repeats_with_the_seed():
    with tf.Graph().as_default(), v1.Session() as session:
        step = v1.train.get_or_create_global_step()
        masks = [drop(tf.ones([50, 50]), 0.5, [seed, i]) for seed, i in ((1, 0), (1, 1), (2, 0))]
        again = drop(tf.ones([50, 50]), 0.5, [1, 0])
        session.run(v1.global_variables_initializer())
        first, *others, same = session.run([*masks, again])
        session.run(step.assign_add(1))
        next_step = session.run(masks[0])
    np.testing.assert_array_equal(first, same)
    for other in (*others, next_step):
        assert np.any(first != other)


def test_predictions_are_the_sigmoid_of_the_papers_logits_and_without_dropout():
    ids, values, _ = batch()
    with tf.Graph().as_default(), v1.Session() as session:
        spec, feed = build(config(dropout=(0.9, 0.9)), tf.estimator.ModeKeys.PREDICT)
        session.run(v1.global_variables_initializer())
        w = session.run({v.op.name: v for v in v1.trainable_variables()})
        prob = session.run(spec.predictions["prob"], feed)
    np.testing.assert_allclose(prob, 1 / (1 + np.exp(-numpy_logits(w, ids, values))), rtol=1e-5)
    assert prob.shape == (B,)


def test_table_gradients_stay_row_wise_from_end_to_end():
    with tf.Graph().as_default() as graph:
        build(config(l2_reg=0.1), tf.estimator.ModeKeys.TRAIN, optimizer="adam")
        ops = {op.type for op in graph.get_operations() if "fm_v" in op.name or "fm_w" in op.name}
    assert "ResourceScatterSub" in ops
    assert not any(op.startswith("ResourceApply") for op in ops)


@both_ops
@pytest.mark.parametrize("rows", [0, 5, 12, 20])
def test_batches_side_by_side_are_predicted_as_each_alone(rows, ops):
    random, size = np.random.RandomState(rows), 6
    ids, values = random.randint(0, V, [rows, F]), random.randn(rows, F).astype("f4")
    model_config = config(embedding_size=32, deep_layers=(128, 8), batch_norm=True)
    with tf.Graph().as_default(), v1.Session() as session:
        places = v1.placeholder(tf.int64, [None, F]), v1.placeholder(tf.float32, [None, F])

        def predictions(side_by_side):
            make = make_model_fn(
                model_config, OptimizerConfig(), Mode(), ops=ops, side_by_side=side_by_side
            )
            with v1.variable_scope("", reuse=v1.AUTO_REUSE):
                features = dict(zip(("feat_ids", "feat_vals"), places))
                return make(features, None, tf.estimator.ModeKeys.PREDICT).predictions["prob"]

        together, alone = predictions((size, 4)), predictions((0, 1))
        names = [variable.op.name for variable in v1.global_variables()]
        assert len(set(names)) == len(names) and "deep_1/kernel" in names
        session.run(v1.global_variables_initializer())
        run = lambda of, i, end: session.run(of, dict(zip(places, (ids[i:end], values[i:end]))))
        each = [run(alone, i, i + size) for i in range(0, rows, size)]
        np.testing.assert_array_equal(run(together, 0, rows), np.concatenate([[], *each]))


@pytest.mark.parametrize(
    "each, changes, items",
    [
        (1, {}, [0, 3]),
        (1, {"batch_norm": True, "lazy_updates": False, "l2_scope": "table"}, [1]),
        (2, {"multi_valued": True}, [0, 1, 2]),
        (2, {"multi_valued": True, "pooling": "mean"}, [1]),
        (2, {"multi_valued": True, "pooling": "max"}, [0, 3]),
        (0, {"multi_valued": True}, [0, 1, 2]),
    ],
)
def test_candidates_are_predicted_as_whole_rows(each, changes, items):
    ids, values, _ = batch()
    ids, values = np.repeat(ids, each, axis=1), np.repeat(values, each, axis=1)
    values *= np.random.RandomState(1).rand(*values.shape).astype(np.float32)
    user = [f for f in range(F) if f not in items]
    places = lambda fields: [f * each + i for f in fields for i in range(each)]
    for x in ids, values:
        x[:, places(user)] = x[:1, places(user)]

    def of(fields, rows=slice(None)):
        found = {"feat_ids": ids[rows, places(fields)], "feat_vals": values[rows, places(fields)]}
        if "multi_valued" in changes:
            found["feat_counts"] = np.full([len(ids[rows]), len(fields)], each, np.int32)
        return {name: tf.constant(x) for name, x in found.items()}

    with tf.Graph().as_default(), v1.Session() as session:
        make = make_model_fn(config(**changes), OptimizerConfig(), Mode())
        with v1.variable_scope("", reuse=v1.AUTO_REUSE):
            apart = {"user": of(user, slice(1)), "items": of(items), "item_fields": items}
            probs = [
                make(features, None, tf.estimator.ModeKeys.PREDICT).predictions["prob"]
                for features in (of(range(F)), apart)
            ]
        session.run(v1.global_variables_initializer())
        session.run(v1.local_variables_initializer())  # as when an exported model is loaded
        whole, apart = session.run(probs)
    np.testing.assert_allclose(apart, whole, rtol=0, atol=1e-6)
    assert apart.shape == (B,) and (whole.std() > 1e-3) == (each > 0)
