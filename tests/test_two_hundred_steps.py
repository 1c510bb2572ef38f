"""200 steps of training against the formulas of the paper and of each optimizer in float64.

On the whole matrix and on the distinct pairs, with compiled kernels and without them.
"""

import numpy as np
import pytest
import test_model

from deepfm.config import ModelConfig, OptimizerConfig
from deepfm.kernels import compiled, first_layer
from deepfm.kernels.compiled import COMPILED
from deepfm.kernels.ops import TENSORFLOW
from deepfm.runtime.tf import tf

v1 = tf.compat.v1
pytestmark = pytest.mark.skipif(not compiled.built(), reason="python -m deepfm.kernels")
F, V, K, B, STEPS, L2 = 6, 600, 8, 128, 200, 1e-3
LAYERS = ("deep_0", "deep_1", "deep_out")
RATES = {"sgd": 0.1, "momentum": 0.01, "adam": 0.002, "adagrad": 0.02}
OF_THEIR_OWN = {  # the names of flags
    "embedding_learning_rate": 0.005, "learning_rate_warmup_steps": 50, "l2_reg_deep": 0.01,
}  # fmt: skip
ELAPSED = {"elapsed": True, "embedding_learning_rate": 0.005}
COWCLIP = {"cowclip_ratio": 0.01, "cowclip_min_norm": 0.002}


def batches():
    """(ids [B, F], values [B, F], labels [B]) of each step; some ids are in several fields."""
    random = np.random.RandomState(0)
    effects = random.randn(V)
    for _ in range(STEPS):
        ids = (V * random.rand(B, F) ** 3).astype(np.int64)
        values = np.float32(0.5 + random.rand(B, F))
        yield ids, values, np.float32(effects[ids].sum(axis=1) > 1)


def trained(name, changes, ops, start=None):
    """(weights before, the loss of each step, weights after), weights by name."""
    config = ModelConfig(
        F, V, K, (16, 8), (0.0, 0.0), l2_reg=L2, embedding_init_stddev=0.1,
        l2_reg_deep=changes.get("l2_reg_deep"),
    )  # fmt: skip
    rates = {k: v for k, v in changes.items() if k in OptimizerConfig._fields}
    with tf.Graph().as_default(), v1.Session() as session:
        first = test_model.named(*next(batches()))
        spec, feed = test_model.build(config, "train", first, ops, name, RATES[name], **rates)
        session.run(v1.global_variables_initializer())
        weights = {v.op.name: v for v in v1.trainable_variables()}
        for of, value in (start or {}).items():
            weights[of].load(value, session)
        before, losses = session.run(weights), []
        for batch in batches():
            losses.append(session.run([spec.loss, spec.train_op], dict(zip(feed, batch)))[0])
        return before, np.array(losses), session.run(weights)


def clipped(g, w, ids, cowclip_ratio, cowclip_min_norm):
    """Each row's gradient, clipped to max(ratio |row|, least), times the id's occurrences."""
    norms = lambda rows: np.sqrt(np.square(rows.reshape(V, -1)).sum(axis=1))
    counts = np.bincount(ids.ravel(), minlength=V)
    limits = counts * np.maximum(cowclip_ratio * norms(w), cowclip_min_norm)
    factors = np.minimum(limits / np.where(counts, norms(g), 1), 1)
    assert np.any(factors[counts > 0] < 1)
    return (g.T * factors).T


def loss_and_gradients(w, ids, x, labels, l2_deep, cowclip):
    """The loss of a batch, and {name: gradient}: of the tables only where `ids` has the row."""
    rows = np.unique(ids)
    e = w["fm_v"][ids] * x[..., None]
    inputs = [e.reshape(B, F * K)]
    for layer in LAYERS[:-1]:
        inputs.append(np.maximum(inputs[-1] @ w[f"{layer}/kernel"] + w[f"{layer}/bias"], 0))
    deep = inputs[-1] @ w["deep_out/kernel"] + w["deep_out/bias"]
    sums = e.sum(axis=1)
    second = 0.5 * (sums**2 - (e**2).sum(axis=1)).sum(axis=1)
    logits = w["fm_bias"] + (w["fm_w"][ids] * x).sum(axis=1) + second + deep[:, 0]
    loss = np.mean(np.logaddexp(0, logits) - labels * logits)
    loss += L2 / 2 * (np.sum(w["fm_w"][rows] ** 2) + np.sum(w["fm_v"][rows] ** 2))
    loss += l2_deep / 2 * sum(np.sum(w[f"{layer}/kernel"] ** 2) for layer in LAYERS)

    by_logits = (1 / (1 + np.exp(-logits)) - labels) / B
    found, by = {"fm_bias": by_logits.sum(keepdims=True)}, by_logits[:, None]
    for layer, into in zip(reversed(LAYERS), reversed(inputs)):
        kernel = w[f"{layer}/kernel"]
        found[f"{layer}/kernel"] = into.T @ by + l2_deep * kernel
        found[f"{layer}/bias"] = by.sum(axis=0)
        by = by @ kernel.T * (into > 0 if into is not inputs[0] else 1)
    by_e = by.reshape(B, F, K) + by_logits[:, None, None] * (sums[:, None] - e)
    for name, by_value in (("fm_w", by_logits[:, None] * x), ("fm_v", by_e * x[..., None])):
        found[name] = np.zeros_like(w[name])
        np.add.at(found[name], ids, by_value)
        if cowclip:
            found[name] = clipped(found[name], w[name], ids, **cowclip)
        found[name][rows] += L2 * w[name][rows]
    return loss, found


def by_the_book(name, changes, start):
    """(the loss of each step, the weights after all), in float64."""
    w = {of: value.astype(np.float64) for of, value in start.items()}
    m, v = ({of: np.zeros_like(value) for of, value in w.items()} for _ in "mv")
    sums = {of: np.full_like(value, 1e-8) for of, value in w.items()}
    losses, l2_deep = [], changes.get("l2_reg_deep", L2)
    seen = {of: np.zeros(V) for of in ("fm_w", "fm_v")}
    cowclip = {k: v for k, v in changes.items() if k.startswith("cowclip")}
    for t, (ids, x, labels) in enumerate(batches(), 1):
        loss, gradients = loss_and_gradients(w, ids, x.astype(float), labels, l2_deep, cowclip)
        losses.append(loss)
        warm = RATES[name] * min(1, t / changes.get("learning_rate_warmup_steps", 1))
        for of, g in gradients.items():
            table = of in ("fm_w", "fm_v")
            at, g = (np.unique(ids), g[np.unique(ids)]) if table else (slice(None), g)
            rate = changes.get("embedding_learning_rate", warm) if table else warm
            if table and changes.get("elapsed"):
                g = g - L2 * w[of][at]  # which the loss's gradient has
                n = (t - seen[of][at]).reshape(-1, *[1] * (g.ndim - 1))
                m[of][at] = 0.9 * m[of][at] + 0.1 * g
                v[of][at] = 0.999**n * v[of][at] + 0.001 * g**2
                rate *= np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
                scale = np.sqrt(v[of][at]) + 1e-8
                moved = w[of][at] - rate * (1 - 0.9**n) / 0.1 * m[of][at] / scale
                w[of][at] = moved / (1 + rate * L2 * n / scale)
                m[of][at] *= 0.9 ** (n - 1)
                seen[of][at] = t
            elif name == "sgd":
                w[of][at] -= rate * g
            elif name == "momentum":
                m[of][at] = 0.95 * m[of][at] + g
                w[of][at] -= rate * m[of][at]
            elif name == "adagrad":
                sums[of][at] += g**2
                w[of][at] -= rate * g / np.sqrt(sums[of][at])
            else:
                m[of][at] = 0.9 * m[of][at] + 0.1 * g
                v[of][at] = 0.999 * v[of][at] + 0.001 * g**2
                corrected = rate * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
                w[of][at] -= corrected * m[of][at] / (np.sqrt(v[of][at]) + 1e-8)
    return np.array(losses), w


IN_TABLE = [  # what they show, the others show of each optimizer and of each change
    ("sgd", OF_THEIR_OWN), ("sgd", COWCLIP), ("momentum", {}), ("momentum", COWCLIP),
    ("adagrad", {}), ("adagrad", OF_THEIR_OWN), ("adam", {}), ("adam", COWCLIP),
]  # fmt: skip
EVERY = [(name, changes) for name in sorted(RATES) for changes in ({}, OF_THEIR_OWN, COWCLIP)]


@pytest.mark.parametrize(
    "name, changes",
    [
        pytest.param(*case, marks=[pytest.mark.table] * (case in IN_TABLE))
        for case in [*EVERY, ("adam", ELAPSED)]
    ],
    ids=lambda x: x if isinstance(x, str) else " and ".join(x),
)
def test_200_steps_are_those_of_float64_and_of_the_whole_matrix(name, changes, monkeypatch):
    start, *found = trained(name, changes, TENSORFLOW)
    runs = {"TensorFlow's operators": found}
    for way, share in (("whole matrix", 1e-9), ("distinct pairs", 2)):
        monkeypatch.setattr(first_layer, "largest_share", lambda *widths, share=share: share)
        runs[way] = trained(name, changes, COMPILED, start)[1:]
    losses, weights = by_the_book(name, changes, start)
    assert losses[-20:].mean() < 0.9 * losses[:20].mean()  # it has learned something
    np.testing.assert_allclose(
        runs["distinct pairs"][0], runs["whole matrix"][0], rtol=1e-5, atol=1e-5
    )
    for way, (of_steps, after) in runs.items():
        np.testing.assert_allclose(of_steps, losses, rtol=1e-4, atol=1e-4, err_msg=way)
        off = [np.abs(after[of] - weights[of]) > 1e-4 for of in weights]
        # Where a gradient nearly cancels, these make of rounding a step of the whole rate.
        most = 1e-4 if name in ("adam", "adagrad") else 0
        assert np.mean(np.concatenate([o.ravel() for o in off])) <= most, way
