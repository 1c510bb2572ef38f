"""AUC, log loss and calibration against scikit-learn and plain numpy."""

import numpy as np
import pytest
import sklearn.metrics

from deepfm import metrics


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


def test_auc_of_a_single_class_is_not_a_number():
    assert np.isnan(evaluate(np.ones(5), np.arange(5.0))[0]["auc"])
