"""The planted model: ids, their popularity and the true probability, against slow versions."""

import numpy as np
import pytest

from data_tools import make_synthetic
from data_tools.common import planted_model
from data_tools.common.planted_model import Shape

SEED = 7
SHAPE = Shape(field_size=9, numeric_fields=3, feature_size=500)


@pytest.fixture(scope="module")
def model():
    return planted_model.make_planted_model(SEED, SHAPE)


@pytest.fixture(scope="module")
def block(model):
    """ids, values, probability, label."""
    return planted_model.draw_block(model, SEED, "train", 0)


def probability_pair_by_pair(model, ids, values):
    """The planted probability of one row, in O(F^2), before it is put on its level."""
    weights = model.table[ids].astype(np.float64)  # [F, 1 + R]
    first = sum(weights[i, 0] * values[i] for i in range(len(ids)))
    second = 0.0
    for i in range(len(ids)):
        for j in range(i + 1, len(ids)):
            second += np.dot(weights[i, 1:], weights[j, 1:]) * values[i] * values[j]
    tanh_inputs = np.concatenate([weights[i, 1:] * values[i] for i in model.tanh_fields])
    tanh = np.dot(np.tanh(np.dot(tanh_inputs, model.hidden_kernel)), model.output_kernel)
    logit = model.bias + np.dot(model.part_scales, [first, second, tanh])
    return 1 / (1 + np.exp(-logit))


def test_true_probability_equals_the_sum_over_pairs(model, block):
    ids, values = block[0][:200], block[1][:200]
    got = planted_model.true_probability(model, ids, values)
    want = [probability_pair_by_pair(model, *row) for row in zip(ids, values)]
    # Half a level, and float32 against float64.
    np.testing.assert_allclose(got, want, rtol=0, atol=0.5 / planted_model.LEVELS + 1e-5)


def test_each_field_has_ids_of_its_own_below_feature_size(model, block):
    ids, values = block[:2]
    assert np.all(ids[:, :3] == [1, 2, 3])
    assert np.all((values[:, :3] >= 0) & (values[:, :3] <= 1))
    assert np.all(values[:, 3:] == 1)
    next_id = 4
    for column, cardinality in enumerate(model.cardinalities, start=3):
        assert np.all((ids[:, column] >= next_id) & (ids[:, column] < next_id + cardinality))
        next_id += cardinality
    assert next_id == SHAPE.feature_size


@pytest.mark.parametrize("rare", [False, True])
@pytest.mark.parametrize("feature_size", [66, 67, 1000, 1000000])
def test_cardinalities_add_up_to_feature_size(feature_size, rare):
    sizes = planted_model.field_cardinalities(Shape(feature_size=feature_size, rare=rare))
    assert sizes.sum() == feature_size - 1 - 13
    assert sizes.min() >= 2


def test_ids_are_as_popular_as_rank_probabilities_says(model, block):
    column = int(np.argmax(model.cardinalities))
    first, cardinality = model.first_ids[column], model.cardinalities[column]
    counts = np.bincount(block[0][:, 3 + column], minlength=SHAPE.feature_size)
    by_rank = counts[model.id_of_rank[first : first + cardinality]]
    share = planted_model.rank_probabilities(cardinality, planted_model.Shape().zipf)
    expected = planted_model.BLOCK_ROWS * share
    assert np.all(np.abs(by_rank - expected) < 5 * np.sqrt(expected) + 5)


def test_the_distinct_share_is_that_of_the_rows_drawn(model, block):
    ids, batch = block[0], 512
    parts = ids[: len(ids) // batch * batch].reshape(-1, batch * ids.shape[1])
    found = np.mean([len(np.unique(part)) for part in parts]) / parts.shape[1]
    assert planted_model.distinct_share(model.shape, batch) == pytest.approx(found, rel=0.02)
    zipf = planted_model.zipf_of_share(model.shape, batch, found)
    assert zipf == pytest.approx(model.shape.zipf, abs=0.05)


def test_labels_agree_with_their_probabilities(block):
    probability, label = block[2:]
    for rows in np.array_split(np.argsort(probability), 10):
        stddev = np.sqrt(np.sum(probability[rows] * (1 - probability[rows]))) / len(rows)
        assert abs(label[rows].mean() - probability[rows].mean()) < 4.5 * stddev


@pytest.mark.parametrize("rate", [0.05, 0.6])
def test_the_positive_rate_is_about_the_one_asked_for(rate):
    model = planted_model.make_planted_model(SEED, SHAPE._replace(positive_rate=rate))
    probability = planted_model.draw_block(model, SEED, "train", 0)[2]
    assert probability.mean() == pytest.approx(rate, abs=0.02)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_best_auc_is_about_080_at_the_default_shape(seed):
    model = planted_model.make_planted_model(seed, Shape())
    counts = np.zeros((2, planted_model.LEVELS), np.int64)
    for number in range(2):
        block = planted_model.draw_block(model, seed, "test", number)
        make_synthetic.count_labels(counts, *block[2:])
    best = make_synthetic.best_possible(counts)
    assert best["best_auc"] == pytest.approx(0.80, abs=0.03)


def test_rare_has_the_larger_share_of_rare_ids():
    shares = {}
    for rare in (False, True):
        model = planted_model.make_planted_model(SEED, Shape(rare=rare))
        blocks = [planted_model.draw_block(model, SEED, "train", n)[0][:, 13:] for n in range(3)]
        ids = np.concatenate(blocks).ravel()
        shares[rare] = np.mean(np.bincount(ids)[ids] < 10)
    assert shares[True] > 2 * shares[False]


def test_splits_and_blocks_and_seeds_differ(model, block):
    for arguments in [(SEED, "val", 0), (SEED, "train", 1), (SEED + 1, "train", 0)]:
        assert not np.array_equal(planted_model.draw_block(model, *arguments)[0], block[0])
