"""AUC, log loss and calibration against scikit-learn and plain numpy."""

import numpy as np
import pytest
import sklearn.metrics

from deepfm.model import metrics


def evaluate(labels, logits, sizes=(64,), weights=None):
    """Results by name of an Evaluation that is fed batches of the sizes given, in turn."""
    evaluation = metrics.Evaluation(weighted=weights is not None)
    prob = probabilities(logits)
    columns = [labels.astype(np.float32), logits.astype(np.float32), prob, np.square(labels - prob)]
    columns += [] if weights is None else [weights]
    start, turn = 0, 0
    while start < len(labels):
        end = start + sizes[turn % len(sizes)]
        evaluation.add(*(column[start:end] for column in columns))
        start, turn = end, turn + 1
    return dict(zip(metrics.RESULTS, evaluation.results())), evaluation


def probabilities(logits):
    return (1 / (1 + np.exp(-logits.astype(np.float32).astype(np.float64)))).astype(np.float32)


def make(rows=5000, shift=0.0, scale=1.0, seed=0):
    random = np.random.RandomState(seed)
    score = random.randn(rows)
    labels = (random.rand(rows) < 1 / (1 + np.exp(-score))) * 1.0
    logits = (score * scale + shift).astype(np.float32)
    return labels, logits


def weights_of(labels, scale, whole=False):
    """Weights, of which a quarter are 0; None for no scale."""
    random = np.random.RandomState(1)
    weights = random.randint(0, 4, len(labels)) * (1 if whole else random.rand(len(labels)))
    return None if scale is None else weights.astype(np.float32) * np.float32(scale)


weigh = pytest.mark.parametrize("weigh", [None, 1, 0.001, 1e-12])


@weigh
@pytest.mark.parametrize("shift, scale", [(0, 1), (-6, 1), (-18, 1), (-5, 1e-3), (3, 4)])
def test_auc_equals_scikit_learns_wherever_the_predictions_lie(shift, scale, weigh):
    labels, logits = make(shift=shift, scale=scale)
    weights, prob = weights_of(labels, weigh), probabilities(logits)
    expected = sklearn.metrics.roc_auc_score(labels, prob, sample_weight=weights)
    assert evaluate(labels, logits, weights=weights)[0]["auc"] == pytest.approx(expected, abs=1e-9)


def test_ties_count_half():
    labels, _ = make()
    assert evaluate(labels, np.zeros(len(labels), np.float32))[0]["auc"] == 0.5


@weigh
def test_log_loss_and_calibration_equal_scikit_learns_and_their_definition(weigh):
    labels, logits = make()
    weights, prob = weights_of(labels, weigh), 1 / (1 + np.exp(-logits.astype(np.float64)))
    found, evaluation = evaluate(labels, logits, weights=weights)
    expected = sklearn.metrics.log_loss(labels, prob, sample_weight=weights)
    assert found["log_loss"] == pytest.approx(expected, abs=1e-9)
    expected = np.average(prob, weights=weights) / np.average(labels, weights=weights)
    assert found["calibration"] == pytest.approx(expected, rel=1e-6)
    assert len(evaluation.deciles()) == 10


def test_weight_3_is_the_example_three_times():
    labels, logits = make(rows=3000)
    logits = logits.round(2)  # some are equal
    weights = weights_of(labels, 1, whole=True)
    times = weights.astype(int)
    results, found = evaluate(labels, logits, weights=weights)
    wanted, same = evaluate(np.repeat(labels, times), np.repeat(logits, times))
    assert results.pop("examples") == 3000  # which are counted, not weighed
    del wanted["examples"], results["positive_rate"], wanted["positive_rate"]
    assert results == pytest.approx(wanted, abs=1e-9)
    assert found.roc() == same.roc()
    assert found.precision_recall() == same.precision_recall()
    for one, other in zip(found.deciles(), same.deciles()):
        assert one == pytest.approx(other, abs=1e-9)


def test_log_loss_of_extreme_logits_is_finite():
    result, _ = evaluate(np.array([1.0, 0.0]), np.array([-500.0, 500.0], np.float32))
    assert result["log_loss"] == pytest.approx(500)


@pytest.mark.parametrize("weigh", [None, 1])
def test_results_do_not_depend_on_the_batches_nor_on_the_parts_that_are_merged(weigh):
    labels, logits = make(rows=3000)
    weights = weights_of(labels, weigh)
    whole, _ = evaluate(labels, logits, weights=weights)
    for sizes in ((256,), (3000,), (1, 99)):
        assert evaluate(labels, logits, sizes, weights)[0] == pytest.approx(whole, abs=1e-12)
    assert whole["examples"] == 3000
    left, right = (
        evaluate(labels[part], logits[part], weights=weights if weigh is None else weights[part])[1]
        for part in (slice(1234), slice(1234, None))
    )
    left.merge(*right.state())
    assert dict(zip(metrics.RESULTS, left.results())) == pytest.approx(whole, abs=1e-12)


def thinned(labels, logits, limit, monkeypatch):
    """The Evaluation of examples whose scores all differ, and the scores that it would keep."""
    monkeypatch.setattr(metrics, "LIMIT", limit)
    prob = np.sort(probabilities(logits))
    assert len(np.unique(prob)) == len(prob)
    return evaluate(labels, logits, sizes=(len(labels),))


@pytest.mark.parametrize("rows", [8, 9, 10, 17])
def test_beyond_the_limit_neighbouring_scores_are_merged_two_by_two(monkeypatch, rows):
    labels, logits = np.arange(rows) % 3 // 2, np.linspace(-2, 2, rows)
    _, evaluation = thinned(labels, logits, 8, monkeypatch)
    prob = probabilities(logits)
    scores, counts, _ = evaluation.state()
    wanted = []
    merged = 2 if rows > 8 else 1
    for i in range(0, rows, merged):
        pair = labels[i : i + merged].tolist()
        wanted.append((prob[i], [pair.count(0), pair.count(1)]))
    assert list(zip(scores, counts.tolist())) == wanted


def test_however_often_scores_are_merged_each_example_counts(monkeypatch):
    labels, logits = make(rows=3000)
    monkeypatch.setattr(metrics, "LIMIT", 64)
    _, evaluation = evaluate(labels, logits)
    scores, counts, _ = evaluation.state()
    assert counts.sum(axis=0).tolist() == [(labels == 0).sum(), (labels == 1).sum()]
    assert (np.diff(scores) > 0).all()
    assert 32 <= len(scores) <= 64  # a half of them are left at least


def test_merging_neighbours_costs_auc_no_more_than_half_of_the_pairs_within(monkeypatch):
    labels, logits = make(rows=1000)
    order = np.argsort(logits)
    labels, logits = labels[order], logits[order]
    exact = sklearn.metrics.roc_auc_score(labels, logits)
    found, evaluation = thinned(labels, logits, 999, monkeypatch)
    within = sum(labels[i] != labels[i + 1] for i in range(0, 1000, 2))
    bound = within / 2 / ((labels == 0).sum() * (labels == 1).sum())
    assert 0 < abs(found["auc"] - exact) <= bound


def test_auc_of_a_single_class_is_not_a_number():
    assert np.isnan(evaluate(np.ones(5), np.arange(5.0))[0]["auc"])


@pytest.mark.parametrize("weigh", [None, 1, 1e-12])
def test_the_curves_are_those_of_a_loop_over_the_thresholds(weigh):
    labels, logits = make(rows=3000)
    logits = logits.round(1)  # some are equal
    weights, prob = weights_of(labels, weigh), probabilities(logits)
    _, evaluation = evaluate(labels, logits, weights=weights)
    weights = np.ones(3000) if weights is None else weights.astype(np.float64)
    total = [weights[labels == label].sum() for label in (0, 1)]
    roc, precision_recall = [[0.0, 0.0]], []
    for threshold in sorted(set(prob[weights > 0]), reverse=True):
        false, true = (weights[(prob >= threshold) & (labels == label)].sum() for label in (0, 1))
        roc.append([false / total[0], true / total[1]])
        precision_recall.append([true / total[1], true / (true + false)])
    assert len(precision_recall) < 200
    np.testing.assert_allclose(evaluation.roc(), roc, atol=1e-6)
    np.testing.assert_allclose(evaluation.precision_recall(), precision_recall, atol=1e-6)
    few = evaluation.precision_recall(20)
    assert len(few) == 21
    assert set(map(tuple, few)) <= set(map(tuple, evaluation.precision_recall()))
    assert few[-1] == [1.0, round(total[1] / sum(total), 6)]


def test_without_positives_there_is_no_precision_recall_curve():
    assert evaluate(np.zeros(5), np.arange(5.0))[1].precision_recall() == []
    assert metrics.Evaluation().precision_recall() == []


def test_the_base_rate_loses_as_much_as_scikit_learn_says():
    labels, logits = make()
    found, _ = evaluate(labels, logits)
    assert found["positive_rate"] == labels.mean()
    expected = sklearn.metrics.log_loss(labels, np.full(len(labels), labels.mean()))
    assert metrics.entropy(found["positive_rate"]) == pytest.approx(expected, abs=1e-12)
    assert [f"{metrics.entropy(rate):.1f}" for rate in (0.0, 1.0)] == ["0.0", "0.0"]
