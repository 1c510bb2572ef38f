"""Tables of days, whose categories are born and die and whose weights drift.

The first day's rows are those of a planted model. From a day to the next, a share of each column's
categories, drawn evenly, makes room for categories that no day had before, of the same popularity
and with weights of their own; and each weight w becomes sqrt(1 - d^2) w + d times a fresh one, so
that it keeps its variance. A day depends on seed, shape, share, drift and its number alone.
"""

from typing import Iterator, NamedTuple

import numpy as np

from data_tools.common import planted_model
from data_tools.common.planted_model import SPLITS, VALUE_STEPS, PlantedModel, Shape

LABEL = "clicked"


class Day(NamedTuple):
    """A day: its PlantedModel, the text of each id, object [feature_size], and how many categories
    no day before has had."""

    model: PlantedModel
    texts: np.ndarray
    new: int


def columns(shape: Shape):
    """The names of the fields: n1, n2 ... of numbers, c1, c2 ... of categories."""
    numbers, fields = shape.numeric_fields, shape.field_size
    return [f"n{i + 1}" for i in range(numbers)] + [f"c{i + 1}" for i in range(fields - numbers)]


def table(shape: Shape):
    """What prepare --columns takes."""
    kinds = [{"kind": "number", "scale": "minmax"}] * shape.numeric_fields
    kinds += [{"kind": "category"}] * (shape.field_size - shape.numeric_fields)
    fields = [{"name": name, **kind} for name, kind in zip(columns(shape), kinds)]
    return {"columns": [{"name": LABEL, "kind": "label"}, *fields]}


def each_day(seed: int, shape: Shape, share: float, drift: float) -> Iterator[Day]:
    """Yields the days, without end."""
    model, day = planted_model.make_planted_model(seed, shape), 0
    names, texts = columns(shape)[shape.numeric_fields :], np.full(shape.feature_size, "", object)
    firsts = list(zip(names, model.first_ids, model.cardinalities))
    for name, first, size in firsts:
        texts[first : first + size] = [f"{name}-{i}" for i in range(size)]
    yield Day(model, texts.copy(), int(model.cardinalities.sum()))
    while True:
        day += 1
        rng = np.random.RandomState([seed, len(SPLITS) + 1, day])
        fresh, new = model.spread * rng.standard_normal(model.spread.shape), 0
        weights = np.sqrt(1 - drift**2) * model.table + drift * fresh
        for name, first, size in firsts:
            born = first + rng.permutation(size)[: int(round(share * size))]
            weights[born] = model.spread[born] * rng.standard_normal(model.spread[born].shape)
            texts[born] = [f"{name}-{day}-{i}" for i in range(len(born))]
            new += len(born)
        model = model._replace(table=weights.astype(np.float32))
        yield Day(model, texts.copy(), new)


def to_lines(shape: Shape, texts):
    """The function (ids, values, labels) of a block -> its lines of CSV."""
    numbers = np.array([f"{x / VALUE_STEPS:.2f}" for x in range(VALUE_STEPS + 1)], object)
    labels = np.array(["0", "1"], object)

    def lines(ids, values, label):
        steps = np.rint(values[:, : shape.numeric_fields] * VALUE_STEPS).astype(np.int64)
        cells = [labels[label.astype(np.int64)], *numbers[steps.T]]
        cells += list(texts[ids[:, shape.numeric_fields :].T])
        return "".join(f"{','.join(row)}\n" for row in zip(*cells)).encode()

    return lines
