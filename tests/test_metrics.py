"""AUC, log loss and calibration against scikit-learn and plain numpy."""

import numpy as np
import pytest
import sklearn.metrics

from deepfm.model import metrics


def evaluate(labels, logits, sizes=(64,)):
    """Results by name of an Evaluation that is fed batches of the sizes given, in turn."""
    evaluation = metrics.Evaluation()
    start, turn = 0, 0
    while start < len(labels):
        end = start + sizes[turn % len(sizes)]
        x = logits[start:end].astype(np.float32)
        prob = (1 / (1 + np.exp(-x.astype(np.float64)))).astype(np.float32)
        evaluation.add(labels[start:end].astype(np.float32), x, prob, np.square(x))
        start, turn = end, turn + 1
    return dict(zip(metrics.RESULTS, evaluation.results())), evaluation


def make(rows=5000, shift=0.0, scale=1.0, seed=0):
    random = np.random.RandomState(seed)
    score = random.randn(rows)
    labels = (random.rand(rows) < 1 / (1 + np.exp(-score))) * 1.0
    logits = (score * scale + shift).astype(np.float32)
    return labels, logits


@pytest.mark.parametrize("shift, scale", [(0, 1), (-6, 1), (-18, 1), (-5, 1e-3), (3, 4)])
def test_auc_equals_scikit_learns_wherever_the_predictions_lie(shift, scale):
    labels, logits = make(shift=shift, scale=scale)
    prob = (1 / (1 + np.exp(-logits))).astype(np.float32)
    expected = sklearn.metrics.roc_auc_score(labels, prob)
    assert evaluate(labels, logits)[0]["auc"] == pytest.approx(expected, abs=1e-9)


def test_ties_count_half():
    labels, _ = make()
    assert evaluate(labels, np.zeros(len(labels), np.float32))[0]["auc"] == 0.5


def test_log_loss_equals_scikit_learns():
    labels, logits = make()
    prob = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = sklearn.metrics.log_loss(labels, prob)
    assert evaluate(labels, logits)[0]["log_loss"] == pytest.approx(expected, abs=1e-9)


def test_log_loss_of_extreme_logits_is_finite():
    result, _ = evaluate(np.array([1.0, 0.0]), np.array([-500.0, 500.0], np.float32))
    assert result["log_loss"] == pytest.approx(500)


def test_calibration_is_mean_prediction_over_mean_label():
    labels, logits = make()
    expected = np.mean(1 / (1 + np.exp(-logits))) / labels.mean()
    assert evaluate(labels, logits)[0]["calibration"] == pytest.approx(expected, rel=1e-6)


def test_results_do_not_depend_on_the_batches():
    labels, logits = make(rows=700)
    results = [evaluate(labels, logits, sizes)[0] for sizes in ((64,), (256,), (700,), (1, 99))]
    for other in results[1:]:
        assert other == pytest.approx(results[0], abs=1e-12)
    assert results[0]["examples"] == 700


def test_merged_parts_give_the_result_of_the_whole():
    labels, logits = make()
    whole, _ = evaluate(labels, logits)
    _, left = evaluate(labels[:1234], logits[:1234])
    _, right = evaluate(labels[1234:], logits[1234:])
    left.merge(*right.state())
    assert dict(zip(metrics.RESULTS, left.results())) == pytest.approx(whole, abs=1e-12)


def test_beyond_the_limit_of_distinct_scores_auc_stays_close(monkeypatch):
    monkeypatch.setattr(metrics, "LIMIT", 512)
    labels, logits = make()
    prob = (1 / (1 + np.exp(-logits))).astype(np.float32)
    expected = sklearn.metrics.roc_auc_score(labels, prob)
    assert evaluate(labels, logits)[0]["auc"] == pytest.approx(expected, abs=1e-3)


def thinned(labels, logits, limit, monkeypatch):
    """The Evaluation of examples whose scores all differ, and the scores that it would keep."""
    monkeypatch.setattr(metrics, "LIMIT", limit)
    prob = np.sort((1 / (1 + np.exp(-logits))).astype(np.float32))
    assert len(np.unique(prob)) == len(prob)
    return evaluate(labels, logits, sizes=(len(labels),))


@pytest.mark.parametrize("rows", [9, 10, 17])
def test_beyond_the_limit_neighbouring_scores_are_merged_two_by_two(monkeypatch, rows):
    labels, logits = np.arange(rows) % 3 // 2, np.linspace(-2, 2, rows)
    _, evaluation = thinned(labels, logits, 8, monkeypatch)
    prob = (1 / (1 + np.exp(-logits.astype(np.float32).astype(np.float64)))).astype(np.float32)
    scores, counts, _ = evaluation.state()
    wanted = []
    for i in range(0, rows, 2):
        pair = labels[i : i + 2].tolist()
        wanted.append((prob[i], [pair.count(0), pair.count(1)]))
    assert list(zip(scores, counts.tolist())) == wanted


def test_up_to_the_limit_no_scores_are_merged(monkeypatch):
    labels, logits = np.arange(8) % 2, np.linspace(-2, 2, 8)
    assert len(thinned(labels, logits, 8, monkeypatch)[1].state()[0]) == 8


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


def test_the_precision_recall_curve_is_that_of_a_loop_over_the_thresholds():
    labels, logits = make(rows=3000)
    logits = logits.round(1)  # some are equal
    _, evaluation = evaluate(labels, logits)
    prob = (1 / (1 + np.exp(-logits.astype(np.float64)))).astype(np.float32)
    wanted = []
    for threshold in sorted(set(prob), reverse=True):
        found = labels[prob >= threshold]
        wanted.append([found.sum() / labels.sum(), found.mean()])
    assert len(wanted) < 200
    np.testing.assert_allclose(evaluation.precision_recall(), wanted, atol=1e-6)
    few = evaluation.precision_recall(20)
    assert len(few) == 21
    assert set(map(tuple, few)) <= set(map(tuple, evaluation.precision_recall()))
    assert few[-1] == [1.0, round(labels.mean(), 6)]


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
