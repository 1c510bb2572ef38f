"""The model behind synthetic data: draws rows, and labels whose probabilities are known.

It resembles DeepFM: a factorisation machine (Rendle, ICDM 2010) plus a small tanh network. The
first N fields are numeric: one feature id each, and a value in 0, 0.01 ... 1. The others are
categorical: each has its own ids, whose popularity follows Zipf's law, and value 1.

B: rows. F: fields. N: numeric fields. C = F - N: categorical fields. R: rank of the factors.
"""

from typing import List, NamedTuple

import numpy as np

SPLITS = ("train", "val", "test")
BLOCK_ROWS = 8192
LEVELS = 1 << 16  # distinct probabilities: two counts for each give an exact AUC
VALUE_STEPS = 100  # numeric values are multiples of 1 / VALUE_STEPS

RARE_EXPONENT = 0.8  # with `rare`, P(rank) ~ rank^-exponent: much flatter than Shape.zipf
COMMON = 100  # unless `rare`, weights of an id in 1 of 100 rows shrink by 1 / sqrt(2)

RANK = 3
HIDDEN_UNITS = 8
TANH_FIELDS = 3
# Standard deviations, over rows, of the first-order, second-order and tanh parts of the logit;
# they make the best possible AUC about 0.80.
PART_STDDEVS = np.array([1.2, 0.5, 0.4])


class Shape(NamedTuple):
    """What the data looks like: everything except its size and its seed."""

    field_size: int = 39
    numeric_fields: int = 13
    feature_size: int = 117581
    positive_rate: float = 0.25
    rare: bool = False
    zipf: float = 1.4  # P(rank) ~ rank^-zipf


def least_feature_size(shape: Shape) -> int:
    """The feature ids that its fields need: padding, one of each numeric, two of each other."""
    return 1 + 2 * shape.field_size - shape.numeric_fields


class PlantedModel(NamedTuple):
    """How ids are drawn, and their weights.

    Attributes:
        shape: Shape.
        first_ids: int64 [C], the smallest id of each categorical field.
        cardinalities: int64 [C], the number of ids of each.
        id_of_rank: int32 [feature_size]; field c's id of popularity rank r (0: the most popular) is
            id_of_rank[first_ids[c] + r].
        table: float32 [feature_size, 1 + R], first-order weight and factors of each id.
        spread: their standard deviations.
        tanh_fields: the fields that the tanh network reads.
        hidden_kernel: float32 [len(tanh_fields) * R, HIDDEN_UNITS].
        output_kernel: float32 [HIDDEN_UNITS].
        part_scales: float64 [3], factors of the first-order, second-order and tanh parts.
        bias: added to the sum of the parts.
    """

    shape: Shape
    first_ids: np.ndarray
    cardinalities: np.ndarray
    id_of_rank: np.ndarray
    table: np.ndarray
    spread: np.ndarray
    tanh_fields: List[int]
    hidden_kernel: np.ndarray
    output_kernel: np.ndarray
    part_scales: np.ndarray = np.ones(3)
    bias: float = 0.0


def make_planted_model(seed: int, shape: Shape) -> PlantedModel:
    """Draws a model that depends on the arguments alone.

    All weights are normal. Unless `rare`, the weights of unpopular ids are shrunk, so that about
    100,000 rows teach a model nearly everything.
    """
    rng = np.random.RandomState([seed, len(SPLITS)])
    numeric, fields = shape.numeric_fields, shape.field_size
    cardinalities = rng.permutation(field_cardinalities(shape))
    first_ids = 1 + numeric + np.cumsum(cardinalities) - cardinalities

    # How much each field matters to the first and the second order.
    strengths = np.exp([0.5, 1.0] * rng.standard_normal((fields, 2)))
    strengths = np.repeat(strengths, [1, RANK], axis=1)  # [F, 1 + R]
    id_of_rank = np.arange(shape.feature_size, dtype=np.int32)
    table = np.zeros((shape.feature_size, 1 + RANK), np.float32)
    spread = np.zeros(table.shape)
    spread[1 : 1 + numeric] = strengths[:numeric]
    table[1 : 1 + numeric] = rng.standard_normal((numeric, 1 + RANK)) * strengths[:numeric]
    for first, cardinality, strength in zip(first_ids, cardinalities, strengths[numeric:]):
        ids = first + rng.permutation(cardinality)
        id_of_rank[first : first + cardinality] = ids
        weights = rng.standard_normal((cardinality, 1 + RANK)) * strength
        if not shape.rare:
            probability = rank_probabilities(cardinality, shape.zipf)[:, np.newaxis]
            shrink = np.sqrt(probability / (probability + 1 / COMMON))
            weights *= shrink
            strength = strength * shrink
        table[ids], spread[ids] = weights, strength

    tanh_fields = sorted(set(np.linspace(0, fields - 1, TANH_FIELDS).astype(int)))
    inputs = len(tanh_fields) * RANK
    hidden = (rng.standard_normal((inputs, HIDDEN_UNITS)) * 1.5 / np.sqrt(inputs)).astype("f4")
    output = rng.standard_normal(HIDDEN_UNITS).astype("f4")
    model = PlantedModel(
        shape, first_ids, cardinalities, id_of_rank, table, spread, tanh_fields, hidden, output
    )
    return _calibrate(model, rng)


def field_cardinalities(shape: Shape):
    """The number of ids of each categorical field, in a geometric series.

    The smallest is 2, or with `rare` a quarter of the average, so that every field has many.

    Returns:
        int64 [C], ascending; the sum is feature_size - 1 - N.
    """
    fields = shape.field_size - shape.numeric_fields
    total = shape.feature_size - 1 - shape.numeric_fields
    smallest = max(2, total // (4 * fields)) if shape.rare else 2
    sizes = lambda ratio: np.floor(smallest * ratio ** np.linspace(0, 1, fields)).astype(np.int64)
    cardinalities = sizes(_bisect(lambda ratio: sizes(ratio).sum() - total, 1.0, float(total)))
    cardinalities[-1] += total - cardinalities.sum()
    return cardinalities


def _bisect(function, low, high, steps=100):
    """The x in [low, high] above which the increasing `function` is positive."""
    for _ in range(steps):
        middle = (low + high) / 2
        if function(middle) > 0:
            high = middle
        else:
            low = middle
    return low


def draw_ranks(uniform, cardinalities, exponent):
    """Draws ranks by Zipf's law: floor(x) - 1 for x with density x^-exponent on [1, n + 1).

    Args:
        uniform: float64 [B, C] in [0, 1).
        cardinalities: int64 [C], the n of each column.
        exponent: any but 1.

    Returns:
        int64 [B, C], each below the n of its column.
    """
    power = 1 - exponent
    x = (1 + uniform * ((cardinalities + 1.0) ** power - 1)) ** (1 / power)
    return np.minimum(x.astype(np.int64) - 1, cardinalities - 1)


def rank_probabilities(cardinality, exponent):
    """The probability of each rank that `draw_ranks` draws: float64 [cardinality]."""
    edges = np.arange(1.0, cardinality + 2) ** (1 - exponent)
    return np.diff(edges) / (edges[-1] - edges[0])


def distinct_share(shape: Shape, batch_size: int) -> float:
    """The share of a batch's (field, id) pairs that are distinct, as expected by chance."""
    distinct = float(shape.numeric_fields)
    for cardinality in field_cardinalities(shape):
        drawn = np.minimum(rank_probabilities(cardinality, shape.zipf), 1 - 1e-12)
        distinct -= np.expm1(batch_size * np.log1p(-drawn)).sum()
    return distinct / (batch_size * shape.field_size)


def zipf_of_share(shape: Shape, batch_size: int, share: float) -> float:
    """The exponent with which a share of a batch's (field, id) pairs are distinct."""
    excess = lambda zipf: share - distinct_share(shape._replace(zipf=zipf), batch_size)
    return _bisect(excess, 0.0, 3.0, steps=16)


def _calibrate(model, rng):
    """Scales the parts to PART_STDDEVS and sets the bias for positive_rate, on fresh rows."""
    blocks = [logit_parts(model, *draw_features(model, rng)) for _ in range(8)]
    parts = np.concatenate(blocks, axis=1)  # [3, 8 B]
    scales = PART_STDDEVS / np.maximum(parts.std(axis=1), 1e-6)
    logits = scales.dot(parts)
    excess = lambda bias: np.mean(_sigmoid(logits + bias)) - model.shape.positive_rate
    return model._replace(part_scales=scales, bias=_bisect(excess, -100.0, 100.0))


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def draw_features(model: PlantedModel, rng):
    """Draws BLOCK_ROWS rows without their labels.

    Returns:
        ids int64 [B, F] and values float32 [B, F].
    """
    n = model.shape.numeric_fields
    ids = np.empty((BLOCK_ROWS, model.shape.field_size), np.int64)
    ids[:, :n] = np.arange(1, 1 + n)
    uniform = rng.random_sample((BLOCK_ROWS, len(model.cardinalities)))
    exponent = RARE_EXPONENT if model.shape.rare else model.shape.zipf
    ranks = draw_ranks(uniform, model.cardinalities, exponent)
    ids[:, n:] = model.id_of_rank[model.first_ids + ranks]

    values = np.ones(ids.shape, np.float32)
    uniform = rng.random_sample((BLOCK_ROWS, n))
    # The square makes small values common.
    values[:, :n] = np.floor(uniform**2 * (VALUE_STEPS + 1)) / VALUE_STEPS
    return ids, values


def logit_parts(model: PlantedModel, ids, values):
    """The first-order, second-order and tanh parts of the logit, before scaling.

    The second order uses Rendle's identity, 1/2 sum_k ((sum_i e_ik)^2 - sum_i e_ik^2).

    Args:
        ids: int64 [B, F].
        values: float32 [B, F].

    Returns:
        float32 [3, B].
    """
    total = np.zeros((len(ids), 1 + RANK), np.float32)
    squares = np.zeros((len(ids), 1 + RANK), np.float32)
    tanh_inputs = []
    for field in range(ids.shape[1]):
        scaled = model.table[ids[:, field]] * values[:, field, np.newaxis]  # [B, 1 + R]
        total += scaled
        squares += scaled * scaled
        if field in model.tanh_fields:
            tanh_inputs.append(scaled[:, 1:])
    hidden = np.tanh(np.concatenate(tanh_inputs, axis=1).dot(model.hidden_kernel))
    second = 0.5 * np.sum(total[:, 1:] ** 2 - squares[:, 1:], axis=1)
    return np.stack([total[:, 0], second, hidden.dot(model.output_kernel)])


def true_probability(model: PlantedModel, ids, values):
    """P(label = 1): sigmoid(bias + the scaled parts), rounded to the middle of its level.

    Returns:
        float64 [B], each (level + 1/2) / LEVELS.
    """
    logits = model.bias + model.part_scales.dot(logit_parts(model, ids, values))
    levels = np.minimum(np.floor(_sigmoid(logits) * LEVELS), LEVELS - 1)
    return (levels + 0.5) / LEVELS


def draw_block(model: PlantedModel, seed: int, split: str, block: int, day: int = 0):
    """Draws block number `block` of a split, or of a day; it depends on the arguments alone.

    Returns:
        ids int64 [B, F], values float32 [B, F], probability float64 [B], label bool [B].
    """
    of_day = (len(SPLITS) + 2, day) if day else ()
    rng = np.random.RandomState([seed, SPLITS.index(split), block, *of_day])
    ids, values = draw_features(model, rng)
    probability = true_probability(model, ids, values)
    return ids, values, probability, rng.random_sample(BLOCK_ROWS) < probability
